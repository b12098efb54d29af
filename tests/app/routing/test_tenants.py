"""Tenants never see each other's cache: not in the index, not in the engines, not in headers, not in logs."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import engine
from tests.support.engines.simulated import simulated
from tests.support.replicas.replica import replica

from warmfleet.__main__ import main
from warmfleet.errors import BadArgument
from warmfleet.prompt.request import parse
from warmfleet.routing.tenants import Tenancy
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.replicas.replica import Replica
KEY = "a secret of the operator"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
async def fleet_of_one(valkey_url: str, model: str) -> AsyncIterator[Replica]:
    async with simulated(valkey_url, model), replica(valkey_url, model) as router:
        await router.proven()
        yield router


async def cached(router: Replica, body: dict[str, Any], **headers: str) -> tuple[int, int]:
    """The tokens of the prompt that the router foresaw as cached, and those that the engine had cached."""
    status, told, answer = await router.post({"prompt": PROMPT, "max_tokens": 1} | body, **headers)
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    assert int(told["x-warmfleet-prompt-tokens"]) == usage["prompt_tokens"]
    return int(told["x-warmfleet-matched-tokens"]), usage["prompt_tokens_details"]["cached_tokens"]


async def test_salts_never_match_each_other(fleet_of_one: Replica, model: str) -> None:
    for salt in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}, {"cache_salt": "A"}):
        assert await cached(fleet_of_one, {"model": model} | salt) == (0, 0)
    for salt in ({"cache_salt": "a"}, {}, {"cache_salt": "b"}):
        foreseen, had = await cached(fleet_of_one, {"model": model} | salt)
        assert foreseen == had > 100


async def test_with_a_key_tenants_are_apart_without_asking(valkey_url: str, model: str) -> None:
    async with simulated(valkey_url, model), replica(valkey_url, model, tenant_key=KEY, admin_port=1) as router:
        await router.proven()
        body = {"model": model}
        assert await cached(router, body, authorization="Bearer one") == (0, 0)
        assert await cached(router, body, authorization="Bearer two") == (0, 0)
        assert await cached(router, body) == (0, 0)  # clients without a name are one more tenant
        foreseen, had = await cached(router, body, authorization="Bearer one")
        assert foreseen == had > 100
        # A tenant's own salts divide its cache further, and reach no other tenant's cache.
        assert await cached(router, body | {"cache_salt": "x"}, authorization="Bearer one") == (0, 0)
        stolen = Tenancy(KEY, "authorization").salt(b"Bearer one", None)
        assert await cached(router, body | {"cache_salt": stolen}, authorization="Bearer two") == (0, 0)
        asked = {"prompt": PROMPT, **body}
        for tenant, found in ({"tenant": "Bearer one"}, True), ({"tenant": "Bearer three"}, False), ({}, True):
            async with router.client.post(f"{router.operators}/explain", json=asked | tenant) as answer:
                rows = (await answer.json())["candidates"]
            assert any(row["matched_tokens"] for row in rows) == found


async def test_the_engine_gets_the_salt_and_every_byte_besides(valkey_url: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 1, "odd": [1.50, "\u00e9"]}, indent=1).encode()
    twice = body.replace(b"{", b'{"cache_salt": "mine", "cache_salt": "mine too", ', 1) + b"\r\n "
    tenancy = Tenancy(KEY, "x-tenant")
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, tenant_key=KEY, tenant_header="X-Tenant") as router,
    ):
        for sent, own in (body, None), (twice, "mine too"):
            await router.post(sent, **{"X-Tenant": "t", "Authorization": "Bearer other"})
            got = upstream.seen[-1].body
            assert got.startswith(sent.rstrip()[:-1])
            assert json.loads(got) == json.loads(sent) | {"cache_salt": tenancy.salt(b"t", own)}


PART = '{"type": "image_url", "image_url": null, "uuid": "pic"}'
MESSAGES = f'"messages": [{{"role": "user", "content": [{PART}]}}]'
#: Path and body of requests that name a picture in the engine's cache by its id.
NAMING = [
    ("/v1/chat/completions", f"{{{MESSAGES}}}"),
    ("/v1/chat/completions", f"{{{MESSAGES}}}".replace("uuid", "uu\\u0069d")),
    ("/v1/chat/completions", f"{{{MESSAGES}}}".replace("{", '{"uuid": "other", ')),
    ("/v1/chat/completions", '{"temperature": 1e0, ' + f'"messages": [{{"role": "tool", "content": [{PART}]}}]}}'),
    ("/v1/chat/completions/batch", f'{{"messages": [[{{"role": "user", "content": [{PART}, {PART}]}}]]}}'),
    ("/v1/chat/completions/render", f"{{{MESSAGES}}}"),
    ("/v1/responses", f'{{"input": [{{"role": "user", "content": [{PART}]}}]}}'),
    ("/v1/responses", f'{{"input": [{{"type": "function_call_output", "output": [{PART}]}}]}}'),
    ("/v1/responses/render", f'{{"input": [{{"role": "user", "content": [{PART}]}}]}}'),
    (
        "/v1/messages",
        f'{{"messages": [{{"role": "user", "content": [{{"type": "tool_result", "content": [{PART}]}}]}}]}}',
    ),
    ("/inference/v1/generate", f'{{"token_ids": [1], "content_parts": [{PART}]}}'),
    ("/inference/v1/generate", '{"token_ids": [1], "features": {"mm_hashes": {"image": ["pic"], "video": []}}}'),
    ("/tokenize", f"{{{MESSAGES}}}"),
    ("/invocations", f"{{{MESSAGES}}}"),
    ("/pooling", f"{{{MESSAGES}}}"),
    ("/classify", f"{{{MESSAGES}}}"),
    ("/v1/embeddings", f"{{{MESSAGES}}}"),
    ("/score", f'{{"data_1": "?", "data_2": [{{"content": [{PART}]}}]}}'),
    ("/v1/score", f'{{"queries": {{"content": [{PART}]}}, "items": ["x"]}}'),
    ("/rerank", f'{{"query": "?", "documents": [{{"content": [{PART}]}}]}}'),
    ("/v1/images/edits", f"{{{MESSAGES}}}"),
]
#: Path and body of requests that name no picture: engines read the apparent id as text, or ignore it.
NAMELESS = [
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "\\"uuid\\": \\"pic\\""}]}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "x"}], "documents": [{"uuid": "pic"}]}'),
    ("/v1/chat/completions", f"{{{MESSAGES}}}".replace('"pic"', "null")),
    (
        "/v1/messages",
        '{"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"uuid": "pic"}}]}]}',
    ),
    ("/v1/completions", '{"prompt": "x", "metadata": {"uuid": "pic"}}'),
    ("/tokenize", '{"messages": [], "tools": [{"uuid": "pic", "properties": {"uuid": {"type": "string"}}}]}'),
]


async def test_a_picture_has_another_name_for_each_tenant(valkey_url: str, model: str) -> None:
    tenancy, salted = Tenancy(KEY, "x-tenant"), re.compile(rb',"cache_salt":"[^"]+"}$')
    options: dict[str, Any] = {"tenant_header": "X-Tenant", "tenant_key": KEY}
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, **options) as router,
        replica(valkey_url, model, upstream.url, **options) as second,
    ):
        for path, text in NAMING + NAMELESS:
            for replica_, tenant in (router, "a"), (router, "b"), (second, "a"):
                status, _, answer = await replica_.post(text.encode(), path, **{"X-Tenant": tenant})
                assert status == 200, (path, text, answer)
                named = (path, text) in NAMING
                expected = text.replace("pic", tenancy.media_id(tenant.encode(), "pic")) if named else text
                assert salted.sub(b"}", upstream.seen[-1].sent).decode() == expected, (path, tenant)


async def test_a_picture_keeps_its_name_in_no_form_of_json(valkey_url: str, model: str) -> None:
    renamed, text = Tenancy(KEY, "x-tenant").media_id(b"a", "pic").encode(), NAMING[0][1]
    forms = [text.encode(coding) for coding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32")]
    forms += [(more + text[1:]).encode() for more in ('{"temperature": NaN, ', '{"user": "\\ud800", ')]
    options: dict[str, Any] = {"tenant_header": "X-Tenant", "tenant_key": KEY, "admin_port": 1}
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, **options) as router:
        for body in forms:
            status, _, answer = await router.post(body, NAMING[0][0], **{"X-Tenant": "a"})
            assert (status == 200 and renamed in upstream.seen[-1].body) or status == 400, (body, answer)
            async with router.client.post(f"{router.operators}/route", data=body) as placed:
                assert placed.status == 400, body
        assert not any(b"pic" in seen.body.replace(b"\0", b"") for seen in upstream.seen)


async def test_without_a_key_a_picture_keeps_its_name(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        for path, text in NAMING:
            assert (await router.post(text.encode(), path, authorization="Bearer one"))[0] == 200
            assert upstream.seen[-1].sent == text.encode()


def test_names_of_pictures_are_apart_from_each_other_and_from_salts() -> None:
    tenancy = Tenancy(KEY, "x-tenant")
    name = tenancy.media_id(b"a", "pic")
    others = [tenancy.media_id(b"b", "pic"), tenancy.media_id(b"a", name), tenancy.media_id(b"b", name)]
    others += [tenancy.media_id(b"ap", "ic"), tenancy.media_id(b"", "apic"), str(tenancy.salt(b"a", "pic"))]
    others += [str(tenancy.salt(b"a", "media:pic")), Tenancy(KEY + "!", "x-tenant").media_id(b"a", "pic")]
    assert len({name, *others}) == len(others) + 1


def test_a_picture_is_identified_by_the_name_that_the_engine_gets() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": [json.loads(PART)]}]}).encode()
    tenancy, request = Tenancy(KEY, "x-tenant"), parse("chat", body)
    (part,) = json.loads(tenancy.isolate(request, body, b"a"))["messages"][0]["content"]
    assert request.media_id is not None
    assert part["uuid"] == request.media_id("pic") != "pic"


async def test_a_gateway_is_refused_a_body_that_it_would_send_unchanged(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream:  # both replicas share the engine: a second engine would join beside it
        async with replica(valkey_url, model, upstream.url, tenant_key=KEY, admin_port=1) as one:
            for path, text in NAMING + NAMELESS:
                async with one.client.post(f"{one.operators}/route?endpoint={path}", data=text.encode()) as answer:
                    refused = {} if answer.status == 200 else (await answer.json())["error"]
                field = "mm_hashes" if "mm_hashes" in text else "uuid"
                assert refused.get("param") == (None if (path, text) in NAMELESS else field), (path, text, refused)
        async with replica(valkey_url, model, upstream.url) as router:
            assert (await router.post(NAMING[0][1].encode(), f"/route?endpoint={NAMING[0][0]}"))[0] == 200


#: Requests with fields by which an engine may load blocks or a computed picture from another engine.
TRANSFERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}),
    ("/v1/completions", {"prompt": "x", "ec_transfer_params": {"a": {}}}),
    ("/v1/completions", {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "ec_transfer_params": {"a": {}}}),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "vllm_xargs": {"ec_transfer_params": ["x"]}}),
    ("/v1/responses", {"input": "x", "vllm_xargs": {"kv_transfer_params": "x"}}),
    ("/v1/messages", {"messages": [], "ec_transfer_params": {"a": {}}}),
    ("/inference/v1/generate", {"token_ids": [1], "ec_transfer_params": {"a": {}}}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"extra_args": {"ec_transfer_params": {"a": 1}}}}),
]


async def test_no_client_says_where_an_engine_gets_blocks_from(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        for path, body in TRANSFERS:
            status, _, answer = await router.post(body, path)
            field = "kv_transfer_params" if "kv_transfer_params" in json.dumps(body) else "ec_transfer_params"
            error = json.loads(answer)["error"]
            assert (status, error.get("param", field)) == (400, field), (path, body)
            assert field in error["message"], "Anthropic's errors have no param"
        assert not upstream.seen
        for more in ({"vllm_xargs": {"a": 1}}, {"vllm_xargs": None}, {"sampling_params": {"extra_args": {"b": 1}}}):
            assert (await router.post({"prompt": "x"} | more))[0] == 200


def test_a_second_header_does_not_make_another_tenant() -> None:
    tenancy = Tenancy(KEY, "Authorization")
    one, both = [(b"authorization", b"one")], [(b"authorization", b"two"), (b"authorization", b"one")]
    names = [tenancy.of(one)[0], tenancy.of(both)[0], tenancy.of(both[::-1])[0], tenancy.of([])[0]]
    assert len(set(names)) == 4
    assert len({tenancy.salt(b"ab", "c"), tenancy.salt(b"a", "bc"), tenancy.salt(b"abc", None)}) == 3
    assert Tenancy(KEY + "!", "Authorization").salt(b"one", None) != tenancy.salt(b"one", None)


async def test_a_key_of_anthropics_clients_is_a_bearer_token(valkey_url: str, model: str) -> None:
    tenancy = Tenancy(KEY, "Authorization")
    assert tenancy.of([(b"x-api-key", b"one")])[0] == tenancy.of([(b"authorization", b"Bearer one")])[0] != b""
    assert tenancy.of([(b"x-api-key", b"two"), (b"authorization", b"Bearer one")])[0] == b"Bearer one"
    assert Tenancy(KEY, "X-Tenant").of([(b"x-api-key", b"one")])[0] == b""
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        for headers, expected in (
            ({"X-Api-Key": "one"}, "Bearer one"),
            ({"X-Api-Key": "one", "Authorization": "Bearer two"}, "Bearer two"),
        ):
            assert (await router.post({"model": model, "prompt": PROMPT}, **headers))[0] == 200
            seen = upstream.seen[-1].headers
            assert (seen["authorization"], "x-api-key" in seen) == (expected, False)


async def test_headers_can_be_kept_from_tenants(valkey_url: str, model: str) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, answer_headers="request_id") as router,
    ):
        _, headers, _ = await router.post({"model": model, "prompt": PROMPT})
        assert [name for name in headers if name.startswith("x-")] == ["x-request-id"]


async def test_paths_that_tell_of_other_tenants_take_the_operators_key(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        assert (await router.get("/workers"))[0] == (await router.get("/metrics"))[0] == 200
    async with replica(valkey_url, model, admin_key="op \u00e9") as router:
        for wrong in {}, {"authorization": "Bearer"}, {"authorization": "Bearer op"}, {"authorization": "op \u00e9"}:
            for method, path in ("GET", "/workers"), ("GET", "/metrics"), ("POST", "/explain"):
                async with router.client.request(method, router.url + path, data=b"{}", headers=wrong) as answer:
                    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                    assert (await answer.json())["error"]["code"] == "unauthorized"
        assert (await router.get("/livez"))[0] == (await router.get("/v1/models"))[0] == 200
        assert await asyncio.to_thread(main, ["workers", "--url", router.url]) == 2
        assert "WARMFLEET_ADMIN_KEY" in capsys.readouterr().err
        monkeypatch.setenv("WARMFLEET_ADMIN_KEY", "op \u00e9")
        assert await asyncio.to_thread(main, ["workers", "--url", router.url]) == 0
        assert model in capsys.readouterr().out


@pytest.mark.parametrize("values", [{"TENANT_KEY": "short"}, {"ANSWER_HEADERS": "some"}])
def test_settings_that_protect_nobody_are_refused(values: dict[str, str]) -> None:
    with pytest.raises(BadArgument, match=next(iter(values))):
        Settings.from_environment({f"WARMFLEET_{name}": value for name, value in values.items()})
