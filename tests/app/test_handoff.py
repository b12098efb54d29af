"""Token hand-off: what an engine gets is the client's body with one key changed, and only where that is certain."""

from __future__ import annotations

import json
import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.app.engine import Engine, Seen, answer_well, engine, reply
from tests.app.replica import Replica, replica
from tests.app.test_probe import caching, exact, proof, worker

from warmfleet import handoff, prompt
from warmfleet.fleet import LoadRow, WorkerView
from warmfleet.handoff import CHECK_EVERY, NOTHING, Ability, Handoff, Offer, ability, offer, spliced
from warmfleet.metrics import Metrics
from warmfleet.pool import Shape, View
from warmfleet.trie import Prompt
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Callable

    from warmfleet.prompt import Endpoint

FACTS: dict[str, Any] = {"token_handoff": ["completions", "chat"], "kv_connector": False, "max_model_len": 4_096}

# ---------------------------------------------------------------- the splice

NUMBERS = ["0", "-0", "1.50", "1e5", "-2E+3", "123456789012345678901234567890", "0.1"]
values = st.recursive(
    st.none() | st.booleans() | st.sampled_from([float(text) for text in NUMBERS]) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["prompt", "messages", "kv_transfer_params", "Prompt", "model", ""]
members = st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=6), values), max_size=6)
any_body = given(
    body=members, own=values, rng=st.randoms(use_true_random=False), ids=st.lists(st.integers(0, 2**31), min_size=1)
)


def written(value: Any, rng: random.Random) -> str:
    """JSON in any of the ways in which clients write it: white space, escapes, formats of numbers."""
    space = rng.choice(["", "", " ", "\n\t", "\r\n  "])
    if isinstance(value, str):
        return f'{space}"{"".join(letter(one, rng) for one in value)}"{space}'
    if isinstance(value, float):
        return space + rng.choice(NUMBERS) + space
    if isinstance(value, list):
        return f"{space}[{','.join(written(one, rng) for one in value) or space}]{space}"
    if isinstance(value, dict):
        return space + written_object(list(value.items()), rng) + space
    return space + json.dumps(value) + space


def written_object(pairs: list[tuple[str, Any]], rng: random.Random) -> str:
    return "{" + (",".join(f"{written(key, rng)}:{written(value, rng)}" for key, value in pairs) or " ") + "}"


def letter(one: str, rng: random.Random) -> str:
    plain = json.dumps(one)[1:-1]
    if rng.random() < 0.2 and ord(one) < 0x10000:
        return f"\\u{ord(one):04{rng.choice('xX')}}"
    return plain if one < " " or one in '"\\' or rng.random() < 0.2 else one


def place(text: str, key: str) -> tuple[int, int] | None:
    """Where the last value of ``key`` is, by the standard library's decoder."""
    decoder, found = json.JSONDecoder(), None

    def skip(at: int) -> int:
        while text[at] in " \t\r\n":
            at += 1
        return at

    at = skip(text.index("{") + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        start = skip(skip(at) + 1)
        _, end = decoder.raw_decode(text, start)
        found = (start, end) if name == key else found
        at = skip(end)
        at = skip(at + 1) if text[at] == "," else at
    return found


def pairs(text: bytes) -> Any:
    """Everything that is in it: duplicates, order, the numbers as they are written."""
    return json.loads(text, object_pairs_hook=tuple, parse_float=str, parse_int=str)


@pytest.mark.parametrize("looks", [handoff.MAX_LOOKS, 2, 0])
@settings(max_examples=150, deadline=None)
@any_body
def test_the_body_differs_in_one_key_only(
    looks: int, body: list[tuple[str, Any]], own: Any, rng: random.Random, ids: list[int]
) -> None:
    differs_in_one_key(looks, body, own, rng, ids)


@pytest.mark.long
@pytest.mark.parametrize("looks", [handoff.MAX_LOOKS, 2, 0])
@settings(max_examples=20_000, deadline=None)
@any_body
def test_many_bodies_differ_in_one_key_only(
    looks: int, body: list[tuple[str, Any]], own: Any, rng: random.Random, ids: list[int]
) -> None:
    differs_in_one_key(looks, body, own, rng, ids)


def differs_in_one_key(looks: int, body: list[tuple[str, Any]], own: Any, rng: random.Random, ids: list[int]) -> None:
    body.insert(rng.randrange(len(body) + 1), ("prompt", own if isinstance(own, list) else 'a \\" \\\\'))
    text = rng.choice(["", " \n"]) + written_object(body, rng) + rng.choice(["", "\r\n "])
    raw, numbers = text.encode("utf-8", "surrogatepass"), [str(one) for one in ids]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handoff, "MAX_LOOKS", looks)
        value = json.loads(raw)["prompt"]
        completion = spliced("completions", raw, [orjson.dumps(ids)], len(value) if isinstance(value, str) else 0)
        chat = spliced("chat", raw, [orjson.dumps(ids)])
    where = place(text, "prompt")
    assert where is not None
    start, end = where
    ours = orjson.dumps(ids if text[start] == '"' else [ids])
    assert completion == (text[:start]).encode() + ours + text[end:].encode()
    before, after = pairs(raw), pairs(completion)
    last = max(index for index, (key, _) in enumerate(before) if key == "prompt")
    assert after[last] == ("prompt", numbers if text[start] == '"' else [numbers])
    assert (*after[:last], *after[last + 1 :]) == (*before[:last], *before[last + 1 :])
    assert chat is not None
    assert pairs(chat) == (*before, ("kv_transfer_params", (("prompt_token_ids", numbers),)))
    added = len(chat) - len(raw)
    at = raw.rindex(b"}")
    assert chat[:at] + chat[at + added :] == raw


@pytest.mark.parametrize("prompt_text", ['\\"' * 2_000, "\\\\" * 2_000, '"' * 300 + "\\" * 65 + '"', "\\" * 64 + "é"])
def test_texts_full_of_escapes(prompt_text: str) -> None:
    raw = json.dumps({"a": prompt_text, "prompt": prompt_text, "b": prompt_text}).encode()
    done = spliced("completions", raw, [b"[1,2]"], len(prompt_text))
    assert done is not None
    assert json.loads(done) == {"a": prompt_text, "prompt": [1, 2], "b": prompt_text}


def test_of_two_prompts_the_last_is_replaced() -> None:
    short, long = b'"' + b'ab\\"' * 150 + b'"', b'"' + b"c" * 2_000 + b'"'
    for first, last in ((short, long), (long, short)):
        body = b'{"prompt":%b, "x":["a","b"],"prompt" : %b}'
        raw = body % (first, last)
        assert spliced("completions", raw, [b"[1]"], len(json.loads(raw)["prompt"])) == body % (first, b"[1]")


def test_a_body_that_would_take_long_is_left_alone() -> None:
    for odd in (b"[" * 5_000 + b"]" * 5_000, b"{" + b",".join([b'"x":1'] * 5_000) + b"}"):
        assert spliced("completions", b'{"x":' + odd + b',"prompt":"a"}', [b"[1]"]) is None
    many = b"{" + b",".join([b'"x":1'] * 5_000) + b',"prompt":"a"}'
    began = time.process_time()
    assert spliced("completions", many, [b"[1]"]) is None
    assert spliced("completions", b'{"prompt":"' + b'\\"' * 1_500_000 + b'"}', [b"[1]"]) == b'{"prompt":[1]}'
    assert time.process_time() - began < 0.5


# ---------------------------------------------------------------- who gets ids, and for what


def view(proof_: str = "proven", age_s: float = 0.0, *, routable: bool = True, **facts: Any) -> View:
    one = WorkerView("a.0", {}, {"facts": FACTS | facts}, LoadRow(), 0.0, routable, proof_, "http://a", ["m"])
    able = ability(one, "key")
    return View((one,), handoff={"a.0": able} if able else {}, read_at=time.monotonic() - age_s)


def made(*prompts: list[int]) -> tuple[Prompt, ...]:
    return tuple(Prompt((array("I", ids[:1]), array("I", ids[1:])), len(ids), ()) for ids in prompts)


def handed(seen: View, request: dict[str, Any], endpoint: Endpoint = "completions", **more: Any) -> str:
    """The result that is counted for the second request of its kind; the first is a check."""
    raw, metrics = json.dumps(request).encode(), Metrics()
    parsed = prompt.parse(endpoint, raw, ("kv_transfer_params",))
    shape = Shape((), 3, 0, "exact", **({"ids": made([5, 6, 7]), "identity_key": "key"} | more))
    desk = Handoff(metrics, enabled=True)
    results = []
    for _ in range(2):
        before = counts(metrics)
        body = desk.body(offer(parsed, shape), endpoint, raw, seen, "a.0")
        [result] = [name for name, count in counts(metrics).items() if count != before.get(name, 0)]
        assert (body is None) == (result != "used")
        results.append(result)
    assert results[0] in ("check", results[1])
    return results[1]


def counts(metrics: Metrics) -> dict[str, float]:
    samples = next(iter(metrics.handoff.collect())).samples
    return {sample.labels["result"]: sample.value for sample in samples if sample.name.endswith("_total")}


TEXT = {"prompt": "abc"}


@pytest.mark.parametrize(
    ("expected", "seen", "request_", "more"),
    [
        ("used", {}, TEXT, {}),
        ("used", {}, {"prompt": ["abc"], "echo": False, "n": 2, "logprobs": 1}, {}),
        ("worker", {"proof_": "identity"}, TEXT, {}),
        ("worker", {"proof_": "approximate"}, TEXT, {}),
        ("worker", {"routable": False}, TEXT, {}),
        ("worker", {"kv_connector": True}, TEXT, {}),
        ("worker", {"kv_connector": None}, TEXT, {}),
        ("worker", {"token_handoff": ["chat"]}, TEXT, {}),
        ("worker", {"token_handoff": []}, TEXT, {}),
        ("worker", {"token_handoff": None}, TEXT, {}),
        ("worker", {}, TEXT, {"identity_key": "another"}),
        ("stale", {"age_s": 6.0}, TEXT, {}),
        ("length", {"max_model_len": 3}, TEXT, {}),
        ("unknown", {}, TEXT, {"ids": ()}),
        ("unknown", {}, TEXT, {"ids": made([1], [])}),
        ("unknown", {}, TEXT, {"identity_key": ""}),
        ("text", {}, TEXT | {"echo": True}, {}),
        ("text", {}, TEXT | {"return_prompt_text": True}, {}),
        ("ids", {}, {"prompt": [5, 6, 7]}, {}),
        ("ids", {}, {"prompt": [[5, 6, 7], [8]]}, {}),
        ("ids", {}, {"prompt": ["abc", [8]]}, {}),
        ("body", {}, TEXT | {"x": json.loads("[" * 300 + "]" * 300)}, {}),
    ],
)
def test_ids_go_where_they_are_certain(
    expected: str, seen: dict[str, Any], request_: dict[str, Any], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "MAX_MARKS", 200)
    assert handed(view(**seen), request_, **more) == expected


def test_what_cannot_be_foreseen_has_no_ids() -> None:
    """So embeddings, prompt logprobs, truncation, a client's own transfer parameters are never handed off."""
    for field, value in {
        "prompt_embeds": "x",
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 3,
        "suffix": "x",
        "kv_transfer_params": {"do_remote_decode": True},
    }.items():
        body = json.dumps({"prompt": "abc", field: value}).encode()
        assert prompt.parse("completions", body, ("kv_transfer_params",)).unforeseen


def test_one_request_of_twelve_goes_as_text() -> None:
    desk, seen, results = Handoff(Metrics(), enabled=True), view(), list[bool]()
    for _ in range(2 * CHECK_EVERY):
        body = desk.body(Offer(made([1, 2]), "key"), "completions", b'{"prompt":"a"}', seen, "a.0")
        results.append(body is None)
    assert results == ([True] + [False] * (CHECK_EVERY - 1)) * 2


def test_it_can_be_turned_off() -> None:
    metrics = Metrics()
    desk = Handoff(metrics, enabled=False)
    for _ in range(3):
        assert desk.body(Offer(made([1, 2]), "key"), "completions", b'{"prompt":"a"}', view(), "a.0") is None
    assert counts(metrics) == {}
    assert NOTHING.prompts == ()
    assert ability(view().workers[0], "key") == Ability("key", frozenset({"completions", "chat"}), 4_096)


# ---------------------------------------------------------------- through a replica


def strict(refuses: Callable[[dict[str, Any]], bool], tracker: Tracker) -> Any:
    """An engine that keeps the blocks of probes and answers 400 to some requests."""
    keeps = caching(tracker, [])

    async def answer(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        body = seen.json
        if body.get("temperature") == 0:
            await keeps(one, seen, writer)
        elif refuses(body):
            reply(writer, json.dumps({"error": {"message": "no", "saw": sorted(body)}}).encode(), "400 Bad Request")
        else:
            await answer_well(one, seen, writer)

    return answer


def has_ids(body: dict[str, Any]) -> bool:
    return isinstance(body.get("prompt"), list) or "kv_transfer_params" in body


async def results(router: Replica) -> dict[str, int]:
    names = ("used", "check", "refused", "paused")
    found = {name: int(await router.metric(f'warmfleet_handoff_total{{result="{name}"}}')) for name in names}
    return {name: count for name, count in found.items() if count}


async def test_the_engine_gets_the_ids_and_can_refuse_them(
    valkey_url: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Handed off; then a request that is bad either way; then an engine that takes no ids any more."""
    tracker, refused = Tracker(), {"now": lambda body: body.get("n") == 2}
    refuses = strict(lambda body: refused["now"](body), tracker)
    async with (
        engine(model, refuses) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, tracker, **FACTS),
    ):
        await proof(router, "proven")
        await exact(router)
        await router.routable(1)
        chat = b'{"messages": [{"role": "user", "content": "h\\u0069"}], "model": "%b", "top_p": 1.0 }' % model.encode()
        text = b'{ "model":"%b",\n"prompt":"hi", "top_p": 1E0, "top_p": 1.0}' % model.encode()
        bad = json.dumps({"model": model, "prompt": "hi", "n": 2}).encode()
        upstream.seen.clear()
        assert (await router.post(text))[0] == 200  # a check: as it came
        assert (await router.post(text))[0] == 200
        assert (await router.post(chat, "/v1/chat/completions"))[0] == 200
        bodies = [seen.body for seen in upstream.seen]
        assert bodies[0] == text
        ids = orjson.dumps(json.loads(bodies[1])["prompt"])
        assert bodies[1] == text.replace(b'"hi"', ids)
        chat_ids = json.loads(bodies[2])["kv_transfer_params"]["prompt_token_ids"]
        assert bodies[2] == chat[:-1] + b',"kv_transfer_params":{"prompt_token_ids":%b}}' % orjson.dumps(chat_ids)
        assert await results(router) == {"check": 1, "used": 2}

        status, _, answer = await router.post(bad)
        assert (status, json.loads(answer)["error"]["message"]) == (400, "no")
        assert [has_ids(seen.json) for seen in upstream.seen[3:]] == [True, False]
        assert await results(router) == {"check": 1, "used": 3}

        refused["now"] = has_ids
        with caplog.at_level(logging.WARNING, "warmfleet.handoff"):
            for _ in range(2):
                assert (await router.post(chat, "/v1/chat/completions"))[0] == 200
        assert [has_ids(seen.json) for seen in upstream.seen[5:]] == [True, False, False]
        assert await results(router) == {"check": 1, "used": 4, "refused": 1, "paused": 1}
        assert "eng.0 answered 400 to token ids" in caplog.text
        await router.unloaded()
