"""A replica accepts bodies as clients of vLLM write them, books load by their fields, and passes their bytes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import Engine, Seen, engine, reply
from tests.support.replicas.replica import replica

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from tests.support.replicas.replica import Replica

CHAT, TEXT, RESPONSE, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
EMBED, SPEECH = "/v1/embeddings", "/v1/audio/transcriptions"
MINIMAL = {
    CHAT: '"messages":[{"role":"user","content":"hi"}]',
    TEXT: '"prompt":"hi"',
    RESPONSE: '"input":"hi"',
    MESSAGE: '"messages":[{"role":"user","content":"hi"}]',
    EMBED: '"input":"hi"',
}
#: Fields as Gson, shells and low-code tools write them.
FORMS_OF_VALUES: dict[str, tuple[str, ...]] = {
    CHAT: (
        *('"max_tokens":100', '"max_tokens":100.0', '"max_tokens":1e2', '"max_tokens":"100"', '"n":"1"', '"n":1.0'),
        *('"max_completion_tokens":100.0', '"max_completion_tokens":" 1_00 "', '"n":300', '"n":true'),
        *('"stream":"false"', '"stream":0', '"stream":"no"', '"stream":0.0', '"echo":"off"', '"echo":0'),
        *('"add_generation_prompt":"true"', '"add_generation_prompt":1', '"continue_final_message":0'),
        *('"add_special_tokens":"n"', '"return_prompt_text":"false"', '"seed":1.0', '"temperature":"0.5"'),
        *('"priority":"1"', '"priority":1.0', '"max_tokens":-1', '"n":0', '"logprobs":"false"', '"max_tokens":1e30'),
    ),
    TEXT: (
        *('"max_tokens":100.0', '"n":"1"', '"add_special_tokens":1', '"echo":0', '"stream":"f"', '"max_tokens":true'),
        *('"prompt":[1.0,2.0]', '"prompt":[[1.0]]', '"prompt":[4294967296]', '"prompt":[true]', '"prompt":[]'),
    ),
    MESSAGE: ('"max_tokens":100.0', '"max_tokens":"100"', '"max_tokens":5,"stream":"false"'),
    RESPONSE: ('"max_output_tokens":100.0', '"max_output_tokens":"1e2x"', '"stream":0', '"priority":"2"'),
    EMBED: ('"dimensions":8.0', '"priority":"0"', '"stream":"maybe"', '"n":"x"', '"max_tokens":[]'),
}
#: Bodies with the same text in several JSON spellings and encodings.
SPELLINGS: dict[str, Any] = {
    "a mark before it": lambda text: b"\xef\xbb\xbf" + text.encode(),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32"),
    "UTF-32 without a mark": lambda text: text.encode("utf-32-be"),
}
ODD_TEXTS = {
    "NaN": '"top_p":NaN',
    "Infinity": '"logit_bias":{"5":-Infinity}',
    "a number beyond floats": '"seed":1e999',
    "a long number": f'"seed":{"9" * 400}',
    "half a surrogate pair": '"user":"\\ud83d"',
    "halves in the wrong order": '"user":"\\ude00\\ud83d"',
    "half a pair in a key": '"\\udc00":1',
    "a key twice": '"n":"x","n":1',
    "depth": f'"odd":{"[" * 500}{"]" * 500}',
}


async def answer_all(_engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, json.dumps({"path": seen.path, "object": "list", "choices": [], "content": []}).encode())


@pytest.fixture
async def pair(valkey_url: str, model: str) -> AsyncIterator[tuple[Replica, Engine]]:
    async with (
        engine(model, answer_all) as upstream,
        replica(valkey_url, model, upstream.url, queue_priority=True, passed_paths=("/v1/images/*",)) as router,
    ):
        yield router, upstream


async def failures(router: Replica, upstream: Engine, path: str, asked: dict[str, bytes]) -> list[str]:
    """The names of bodies that a replica refused or changed."""
    found = []
    for name, body in asked.items():
        status, _, answer = await router.post(body, path)
        if status != 200:
            found.append(f"{path} {name}: {status} {answer[:120]!r}")
        elif upstream.seen[-1].sent != body:
            found.append(f"{path} {name}: changed")
    return found


async def test_numbers_and_booleans_in_every_form_that_vllm_takes(pair: tuple[Replica, Engine], model: str) -> None:
    router, upstream = pair
    wrong = []
    for path, fields in FORMS_OF_VALUES.items():
        asked = {field: f'{{"model":"{model}",{MINIMAL[path]},{field}}}'.encode() for field in fields}
        wrong += await failures(router, upstream, path, asked)
    assert wrong == []


async def test_what_only_pythons_json_reads_passes(pair: tuple[Replica, Engine], model: str) -> None:
    router, upstream = pair
    wrong = []
    for path, rest in MINIMAL.items():
        asked = {name: f'{{"model":"{model}",{text},{rest}}}'.encode() for name, text in ODD_TEXTS.items()}
        asked["half a pair in bytes"] = b'{"odd":"\xed\xa0\x80",' + f'"model":"{model}",{rest}}}'.encode()
        wrong += await failures(router, upstream, path, asked)
    assert wrong == []


async def test_other_encodings_reach_the_engine_in_utf_8(pair: tuple[Replica, Engine], model: str) -> None:
    router, upstream = pair
    wrong = []
    for path, rest in MINIMAL.items():
        text = f'{{"model":"{model}",{rest},"user":"Grüße"}}'
        for name, spell in SPELLINGS.items():
            status, _, answer = await router.post(spell(text), path)
            if status != 200 or upstream.seen[-1].sent != text.encode():
                wrong.append((path, name, status, answer[:100]))
    assert wrong == []


async def test_a_tenants_salt_is_put_into_every_encoding(valkey_url: str, model: str) -> None:
    texts = {name: spell(f'{{"model":"{model}","prompt":"hi"}}') for name, spell in SPELLINGS.items()}
    texts["NaN"] = f'{{"top_p":NaN,"model":"{model}","prompt":"\\ud800"}}'.encode()
    async with (
        engine(model, answer_all) as upstream,
        replica(valkey_url, model, upstream.url, tenant_key="k" * 32) as router,
    ):
        salts = set()
        for body in texts.values():
            status, _, _ = await router.post(body, TEXT)
            assert status == 200
            salts.add(json.loads(upstream.seen[-1].body)["cache_salt"])
        assert len(salts) == 1


async def test_no_spelling_carries_a_clients_id_of_an_image_past_a_tenant(valkey_url: str, model: str) -> None:
    part = '{"type":"image_url","image_url":null,"uuid":"secret-id"}'
    text = f'{{"model":"{model}","messages":[{{"role":"user","content":[{part}]}}]}}'
    spelled = [spell(text) for spell in SPELLINGS.values()]
    spelled += [f"{{{odd},{text[1:]}".encode() for odd in ODD_TEXTS.values()]
    async with (
        engine(model, answer_all) as upstream,
        replica(valkey_url, model, upstream.url, tenant_key="k" * 32, admin_port=1) as router,
    ):
        for body in spelled:
            status, _, _ = await router.post(body, CHAT)
            assert (status, b"secret-id" in upstream.seen[-1].body) == (200, False)
            async with router.client.post(router.operators + "/route", data=body) as placed:
                assert placed.status == 400


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSE, MESSAGE, EMBED])
async def test_a_model_that_no_text_can_hold_is_not_found(pair: tuple[Replica, Engine], path: str) -> None:
    status, _, answer = await pair[0].post(f'{{"model":"x\\ud800",{MINIMAL[path]}}}'.encode(), path)
    error = json.loads(answer)["error"]
    assert (status, error.get("code", "model_not_found")) == (404, "model_not_found")  # Anthropic's errors have no code


async def test_bodies_of_any_type_pass_on_paths_that_an_operator_named(pair: tuple[Replica, Engine]) -> None:
    router, upstream = pair
    for body in (
        b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
        b"{broken",
        b"plain text",
        b"[1, 2]",
        b"--no form",
        b"\xff\xfe\x00",
    ):
        status, _, _ = await router.post(body, "/v1/images/edits", **{"Content-Type": "application/octet-stream"})
        assert (status, upstream.seen[-1].body) == (200, body)


LINE = b"--b0\r\n"
FILE = LINE + b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nRIFF\r\n'


def field(head: str, value: str) -> bytes:
    return LINE + f"{head}\r\n\r\n{value}\r\n".encode()


async def test_the_model_of_a_form_is_the_one_that_engines_read(pair: tuple[Replica, Engine], model: str) -> None:
    named = field('Content-Disposition: form-data; name="model"', model)
    other = field('Content-Disposition: form-data; name="model"', "no/such")
    end = b"--b0--\r\n"
    found = {
        "quotes left out": (field("content-disposition: form-data; name=model", model) + FILE + end, 200),
        "capitals": (field('CONTENT-DISPOSITION: form-data; NAME="model"', model) + FILE + end, 200),
        "the last of two": (other + FILE + named + end, 200),
        "the last of two, unknown": (named + FILE + other + end, 404),
        "line ends before the form": (b"\r\n" + other + FILE + end, 404),
        "padding behind a boundary": (FILE + other.replace(b"--b0\r\n", b"--b0 \r\n") + end, 404),
        "the name of a file": (
            field('Content-Disposition: form-data; name="file"; filename="name=model"', "x") + named + end,
            200,
        ),
        "many fields": (b"".join([field('Content-Disposition: form-data; name="x"', "")] * 200) + other + end, 404),
        "a long head": (
            field(f'X: {"y" * 3_000}\r\nContent-Disposition: form-data; name="model"', "no/such") + end,
            404,
        ),
        "behind the end": (named + FILE + end + other, 200),
    }
    router, _ = pair
    wrong = []
    for name, (body, wanted) in found.items():
        status, _, answer = await router.post(body, SPEECH, **{"Content-Type": 'multipart/form-data; boundary="b0"'})
        if status != wanted:
            wrong.append((name, status, answer[:100]))
    assert wrong == []


async def test_a_clients_own_request_id_reaches_the_engine(pair: tuple[Replica, Engine], model: str) -> None:
    router, upstream = pair
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    long = "___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_0123456789abcdef0123456789abcdef"
    asked: list[tuple[dict[str, str], dict[str, str], str]] = [
        ({"X-Request-Id": "plain-1"}, {}, "plain-1"),
        ({"X-Request-Id": "Root=1-67891233-abcdef012345678912345678"}, {}, "Root=1-67891233-abcdef012345678912345678"),
        ({"X-Request-Id": "|7f2e.4b:1/9+=@x"}, {}, "|7f2e.4b:1/9+=@x"),
        ({"X-Request-Id": long}, {}, long),
        ({"X-Request-Id": "~a b\tc"}, {}, "abc"),
        ({}, {"request_id": "from-the-body"}, "from-the-body"),
        ({}, {"request_id": "odd ~\ud800ü id"}, "oddid"),
        ({"X-Request-Id": "header"}, {"request_id": "body"}, "header"),
    ]
    for path in (CHAT, "/inference/v1/generate"):
        for headers, fields, wanted in asked:
            status, answered, _ = await router.post(body | fields, path, **headers)
            assert (status, answered["x-request-id"]) == (200, wanted)
            assert upstream.seen[-1].headers["x-request-id"].partition(".")[2] == wanted
    nameless: list[dict[str, Any]] = [{}, {"request_id": 5}, {"request_id": ""}]
    for odd in nameless:
        _, answered, _ = await router.post(body | odd, CHAT)
        assert upstream.seen[-1].headers["x-request-id"].endswith(f".{answered['x-request-id']}")
        assert len(answered["x-request-id"]) == 24
