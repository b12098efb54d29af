"""Token hand-off: an engine gets the client's body with one key changed, and only where the token ids are certain."""

from __future__ import annotations

import json
import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from tests.support.engines.plugin_worker import caching, proof, worker
from tests.support.engines.scripted import Engine, Seen, answer_well, engine, reply
from tests.support.replicas.replica import Replica, replica

from warmfleet.fleet import LoadRow, WorkerState, WorkerView
from warmfleet.metrics import Metrics
from warmfleet.pools.capabilities import TokenCapability, token_capability
from warmfleet.pools.fleet_view import View
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.prompt import json_splice as splice
from warmfleet.prompt import request as prompt
from warmfleet.prompt.prefix_trie import Prompt
from warmfleet.routing.token_handoff import CHECK_EVERY, Handoff
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from warmfleet.prompt.request import Endpoint, Request

FACTS: dict[str, Any] = {"token_handoff": ["completions", "chat"], "max_model_len": 4_096}

# ---------------------------------------------------------------- requests and workers that get ids


def view(proof_: str = "proven", age_s: float = 0.0, *, routable: bool = True, **facts: Any) -> View:
    proved = {"proven": WorkerState.PROVEN, "identity": WorkerState.LOAD_ONLY, "approximate": WorkerState.APPROXIMATE}
    state = proved.get(proof_, WorkerState.PENDING) if routable else WorkerState.SILENT
    one = WorkerView("a.0", {}, {"facts": FACTS | facts}, LoadRow(), 0.0, state, proof_, "http://a", ["m"])
    able = token_capability(one, "key")
    return View((one,), handoff={"a.0": able} if able else {}, read_at=time.monotonic() - age_s)


def made(*prompts: list[int]) -> tuple[Prompt, ...]:
    return tuple(Prompt((array("I", ids[:1]), array("I", ids[1:])), len(ids), ()) for ids in prompts)


def asked() -> tuple[Request, IdentifiedPrompt, bytes]:
    raw = b'{"prompt":"a"}'
    known = IdentifiedPrompt((), 2, 0, "exact", prompts=made([1, 2]), identity_key="key")
    return prompt.parse("completions", raw), known, raw


def handed(seen: View, request: dict[str, Any], endpoint: Endpoint = "completions", **more: Any) -> str:
    """The result that is counted for the second request of its kind; the first is a check."""
    raw, metrics = json.dumps(request).encode(), Metrics()
    parsed = prompt.parse(endpoint, raw, ("kv_transfer_params",))
    known = IdentifiedPrompt((), 3, 0, "exact", **({"prompts": made([5, 6, 7]), "identity_key": "key"} | more))
    desk = Handoff(metrics, enabled=True)
    results = []
    for _ in range(2):
        before = counts(metrics)
        body = desk.body(parsed, known, raw, seen, "a.0")
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
        ("worker", {"token_handoff": ["chat"]}, TEXT, {}),
        ("worker", {"token_handoff": []}, TEXT, {}),
        ("worker", {"token_handoff": None}, TEXT, {}),
        ("worker", {}, TEXT, {"identity_key": "another"}),
        ("stale", {"age_s": 6.0}, TEXT, {}),
        ("length", {"max_model_len": 3}, TEXT, {}),
        ("unknown", {}, TEXT, {"prompts": ()}),
        ("unknown", {}, TEXT, {"prompts": made([1], [])}),
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
    monkeypatch.setattr(splice, "MAX_MARKS", 200)
    assert handed(view(**seen), request_, **more) == expected


def test_a_prompt_that_cannot_be_foreseen_has_no_ids() -> None:
    """Requests with embeddings, prompt logprobs, truncation or own transfer parameters are never handed off."""
    for field, value in {
        "prompt_embeds": "x",
        "prompt_logprobs": 1,
        "truncate_prompt_tokens": 3,
        "suffix": "x",
        "kv_transfer_params": {"remote_port": 1},
    }.items():
        body = json.dumps({"prompt": "abc", field: value}).encode()
        assert prompt.parse("completions", body, ("kv_transfer_params",)).unforeseen


def test_one_request_of_twelve_goes_as_text() -> None:
    desk, seen, results = Handoff(Metrics(), enabled=True), view(), list[bool]()
    for _ in range(2 * CHECK_EVERY):
        body = desk.body(*asked(), seen, "a.0")
        results.append(body is None)
    assert results == ([True] + [False] * (CHECK_EVERY - 1)) * 2


def test_it_can_be_turned_off() -> None:
    metrics = Metrics()
    desk = Handoff(metrics, enabled=False)
    for _ in range(3):
        assert desk.body(*asked(), view(), "a.0") is None
    assert counts(metrics) == {}
    assert token_capability(view().workers[0], "key") == TokenCapability(
        "key", frozenset({"completions", "chat"}), 4_096
    )


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
    found = {name: int(await router.metric(f'warmfleet_handoff_requests_total{{result="{name}"}}')) for name in names}
    return {name: count for name, count in found.items() if count}


async def test_the_engine_gets_the_ids_and_can_refuse_them(
    valkey_url: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """First ids are handed off; then a request is bad with ids and with text; then the engine takes no ids any more."""
    tracker, refused = Tracker(), {"now": lambda body: body.get("n") == 2}
    refuses = strict(lambda body: refused["now"](body), tracker)
    async with (
        engine(model, refuses) as upstream,
        replica(valkey_url, model) as router,
        worker(valkey_url, model, upstream.url, tracker, **FACTS),
    ):
        await proof(router, "proven")
        await router.exact()
        await router.routable(1)
        chat = b'{"messages": [{"role": "user", "content": "h\\u0069"}], "model": "%b", "top_p": 1.0 }' % model.encode()
        text = b'{ "model":"%b",\n"prompt":"hi", "top_p": 1E0, "top_p": 1.0}' % model.encode()
        bad = json.dumps({"model": model, "prompt": "hi", "n": 2}).encode()
        upstream.seen.clear()
        assert (await router.post(text))[0] == 200  # a check: the body is sent as it came
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
        with caplog.at_level(logging.WARNING, "warmfleet.routing.token_handoff"):
            for _ in range(2):
                assert (await router.post(chat, "/v1/chat/completions"))[0] == 200
        assert [has_ids(seen.json) for seen in upstream.seen[5:]] == [True, False, False]
        assert await results(router) == {"check": 1, "used": 4, "refused": 1, "paused": 1}
        assert "eng.0 answered 400 to token ids" in caplog.text
        await router.unloaded()
