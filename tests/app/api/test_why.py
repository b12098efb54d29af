"""``/why`` tells where the time of a request went, however the request ended, and nothing of its content."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.routing.test_admission_queue import body, crowded, no_room, some_wait
from tests.support.engines.scripted import STREAM_HEAD, answer_well, chunk, engine, event, reset
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.api.access_log import AccessLog, line_of
from warmfleet.api.request_facts import facts
from warmfleet.api.request_reasons import told
from warmfleet.errors import BadRequest, QueueTimeout, UpstreamGone
from warmfleet.fleet import Decision, PrefillLeg
from warmfleet.logs.lines import JsonLines
from warmfleet.logs.output import LogOutput
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.tracing.last_requests import FAILED, KEPT, MINUTES, SLOWEST, LastRequests
from warmfleet.tracing.request_record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.engines.scripted import Engine, Seen
    from tests.support.replicas.replica import Replica

    from warmfleet.tracing.request_record import TryRecord

SECRET = "the word that nobody may keep"
PROMPT = SECRET + " and many more words of a client" * 20
STREAM = {"prompt": PROMPT, "stream": True, "max_tokens": 3}
CHAT = KNOWN["/v1/chat/completions"]


async def why(router: Replica, asked: str = "", **query: str) -> list[dict[str, Any]]:
    """The requests in the answer of ``/why``."""
    query |= {"id": asked} if asked else {}
    async with router.client.get(router.operators + "/why", params=query) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert SECRET not in text
        return list(json.loads(text)["requests"])


async def one(router: Replica, asked: str) -> dict[str, Any]:
    (found,) = await why(router, asked)
    return found


# ---------------------------------------------------------------- real requests


async def test_a_slow_engine_is_told_by_every_id_of_the_request(valkey_url: str, model: str) -> None:
    async def slowly(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        await answer_well(one, seen, writer)

    async with engine(model, slowly) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, headers, _ = await router.post(STREAM | {"model": model}, **{"X-Request-Id": "mine; 1"})
        assert (status, headers["x-request-id"]) == (200, "mine;1")
        at_engine = upstream.seen[0].headers["x-request-id"]
        found = await one(router, "mine;1")
        for asked in ("mine; 1", at_engine, f"cmpl-{at_engine}-0-ab12cd34", at_engine.partition(".")[0]):
            assert await one(router, asked) == found, asked
        assert await why(router, "mine") == await why(router, "mine12") == []
    worker = headers["x-warmfleet-worker"]
    assert re.match(r"[\d.]+ m?s to the first token: [\d.]+ m?s at ", found["because"])
    assert found["first_ms"] >= found["engine_ms"] > 490
    assert f"at {worker} to its first byte" in found["because"]
    assert worker in found["remedy"]
    assert found["attempts"][0]["outcome"] == "finished"


async def test_an_engine_that_stands_still_is_told_while_its_request_waits(valkey_url: str, model: str) -> None:
    async def never(_engine: Engine, _seen: Seen, _writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    async with engine(model, never) as upstream, replica(valkey_url, model, upstream.url) as router:
        asking = asyncio.create_task(router.post(STREAM | {"model": model}, **{"X-Request-Id": "mine"}))
        await poll(lambda: upstream.seen, 30, "the engine has it")
        await asyncio.sleep(0.4)
        found = await one(router, "mine")
        assert (found["running"], found["status"], found["first_ms"]) == (True, None, None)
        assert "without a byte so far" in found["because"]
        assert "may be stopped or asleep" in found["remedy"]
        assert [row["request_id"] for row in await why(router)] == ["mine"], "it is the slowest"
        asking.cancel()
        await poll(lambda: not router.server.server_state.tasks, 30, "the client is given up")
        ended = await one(router, "mine")
        assert (ended["running"], ended["status"], ended["error"]) == (False, 499, "client_hung_up")
        assert ended["because"].startswith("The client hung up after ")
        assert [row["request_id"] for row in await why(router, order="failed")] == ["mine"]


async def test_a_request_that_waited_in_the_queue(valkey_url: str, model: str) -> None:
    async with crowded(valkey_url, model) as router:
        async with no_room(router):
            sent = asyncio.create_task(router.post(body(1, max_tokens=40), **{"X-Request-Id": "waits"}))
            late = asyncio.create_task(router.post(body(2), **{"X-Request-Id": "late", "X-Request-Timeout-Ms": "1500"}))
            await some_wait(router, 2)
            found = await one(router, "waits")
            assert "in the queue so far: the engines that suit it were busy" in found["because"]
            assert (await late)[0] == 503
        assert (await sent)[0] == 200
        refused = await one(router, "late")

        async def settled() -> dict[str, Any] | None:
            found = await one(router, "waits")
            return found if found["cached_tokens"] is not None else None

        served: Any = await poll(settled, 30, "the core reports what it had cached, and settle tells this replica")
    assert served["queue_ms"] > 300
    assert re.match(r"[\d.]+ m?s to the first token: [\d.]+ m?s in the queue: ", served["because"])
    assert "more engines" in served["remedy"]
    assert refused["because"].startswith("Refused with 503 (queue_timeout")
    assert refused["queue_ms"] > 300
    assert (served["cached_tokens"], served["matched_tokens"]) == (0, 0)


async def test_a_worker_that_died_is_told_with_the_one_that_served(valkey_url: str, model: str) -> None:
    asked: list[str] = []

    async def first_dies(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        asked.append(one.url)
        if len(asked) == 1:
            await asyncio.sleep(0.3)
            reset(writer)
            return
        await answer_well(one, seen, writer)

    async with (
        engine(model, first_dies) as a,
        engine(model, first_dies) as b,
        replica(valkey_url, model, a.url, b.url) as router,
    ):
        status, headers, _ = await router.post(STREAM | {"model": model})
        found = await one(router, headers["x-request-id"])
    assert (status, found["tries"], found["worker"]) == (200, 2, headers["x-warmfleet-worker"])
    first, second = found["attempts"]
    assert (first["outcome"], second["outcome"]) == ("failed", "finished")
    because = found["because"].partition(": ")[2]
    assert f" at {first['worker']}, which failed: {first['error'].rstrip('.')}" in because.split("; ")[0]
    assert "warmfleet doctor" in found["remedy"]


async def test_a_hedged_stream_is_told_with_both_workers(valkey_url: str, model: str) -> None:
    asked: list[str] = []

    async def first_is_late(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        asked.append(one.url)
        if len(asked) == 1:
            await asyncio.sleep(30)
        await answer_well(one, seen, writer)

    async with (
        engine(model, first_is_late) as a,
        engine(model, first_is_late) as b,
        replica(valkey_url, model, a.url, b.url, hedge_after_s=0.2) as router,
    ):
        _, headers, _ = await router.post(STREAM | {"model": model})
        found = await one(router, headers["x-request-id"])
    assert (found["tries"], found["worker"]) == (2, headers["x-warmfleet-worker"])
    assert [row["outcome"] for row in found["attempts"]] == ["cancelled", "finished"]
    assert found["first_ms"] > 190


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [PROMPT, "another"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "x": PROMPT}]}]}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}),
    ],
    ids=["a list of prompts", "an image", "embeddings", "responses", "messages"],
)
async def test_requests_of_every_kind_are_told(valkey_url: str, model: str, path: str, asked: dict[str, Any]) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, headers, _ = await router.post(asked | {"model": model}, path)
        found = await one(router, headers["x-request-id"])
    assert (status, found["status"], found["path"], found["error"]) == (200, 200, path, None)
    assert found["because"].partition(":")[0].endswith("to the answer"), found["because"]
    assert found["prompt_tokens"] > 0


async def test_without_redis_the_reason_is_told(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from warmfleet.errors import FleetUnavailable
    from warmfleet.fleet.queueing import Queue

    async def away(*_: object, **__: object) -> None:
        await asyncio.sleep(0.05)
        raise FleetUnavailable("Redis does not answer.")

    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        monkeypatch.setattr(Queue, "decide_in_turn", away)
        _, headers, _ = await router.post(STREAM | {"model": model})
        monkeypatch.undo()
        found = await one(router, headers["x-request-id"])
        at_engine = upstream.seen[0].headers["x-request-id"]
        assert at_engine.startswith("unbooked.")
        assert await one(router, f"cmpl-{at_engine}-0-ab12") == found
    assert found["policy"] == "away"
    assert "Redis did not answer in time: by a hash of the prompt" in found["because"]


async def test_refusals_and_placements_are_told(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        await router.post(b'{"prompt": {"x": "%b"}}' % SECRET.encode(), **{"X-Request-Id": "bad"})
        await router.post({"model": "no/" + SECRET, "prompt": "x"}, **{"X-Request-Id": "unknown"})
        status, _, answer = await router.post({"model": model, "prompt": PROMPT}, "/route?endpoint=/v1/completions")
        assert status == 200
        placed = json.loads(answer)
        bad, unknown = await one(router, "bad"), await one(router, "unknown")
        found = await one(router, placed["headers"]["X-Request-Id"])
        assert await one(router, placed["reservation"]) == found
        plain = (await router.post({"model": model, "prompt": PROMPT}))[1]["x-request-id"]
        assert "to the answer" in (await one(router, plain))["because"]
    assert (bad["status"], unknown["status"]) == (400, 404)
    assert bad["because"].startswith("Refused with 400 (bad_request) after ")
    assert unknown["because"].startswith("Refused with 404 (model_not_found) after ")
    assert "until a worker was booked for a gateway" in found["because"]
    assert (found["worker"], found["status"], found["error"]) == (placed["worker"], None, None)


async def test_a_stream_with_a_silence_in_its_middle(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet.api.request_reasons.SILENCE_S", 0.2)

    async def falters(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for pause_s in (0.0, 0.02, 0.3, 0.02):
            await asyncio.sleep(pause_s)
            chunk(writer, event(SECRET))
            await writer.drain()
        reset(writer)

    async with engine(model, falters) as upstream, replica(valkey_url, model, upstream.url) as router:
        _, headers, _ = await router.post(STREAM | {"model": model})
        found = await one(router, headers["x-request-id"])
    assert 280 < found["gap_ms"] < 2_000
    assert f"In its middle {found['worker']} sent nothing for " in found["because"]
    assert f"The answer of {found['worker']} broke off (" in found["because"]
    assert "nobody went on" in found["because"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_that_breaks_off_has_failed(valkey_url: str, model: str, path: str) -> None:
    async def breaks_off(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        chunk(writer, event(SECRET))
        await writer.drain()
        await asyncio.sleep(0.1)
        reset(writer)

    asked = STREAM | {"model": model, "messages": [{"role": "user", "content": PROMPT}], "input": PROMPT}
    async with engine(model, breaks_off) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, headers, _ = await router.post(asked, path)
        (found,) = await why(router, order="failed")
    assert (status, found["status"], found["request_id"]) == (200, 200, headers["x-request-id"])
    assert (found["complete"], found["error"]) == (False, "upstream_gone")
    assert found["because"].endswith("nobody went on. The answer ended with an error: upstream_gone.")


async def test_a_client_that_hangs_up_in_the_middle_of_a_stream(valkey_url: str, model: str) -> None:
    async def goes_on(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(200):
            chunk(writer, event(SECRET))
            await writer.drain()
            await asyncio.sleep(0.05)

    async with engine(model, goes_on) as upstream, replica(valkey_url, model, upstream.url) as router:
        reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
        sent = json.dumps(STREAM | {"model": model}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
        writer.write(head.encode() + sent)
        await reader.readuntil(SECRET.encode())
        writer.transport.abort()
        await poll(lambda: not router.server.server_state.tasks, 30, "the client is given up")
        (found,) = await why(router, order="failed")
    assert (found["status"], found["complete"], found["error"]) == (200, False, "client_hung_up")


@pytest.mark.parametrize(
    "query", [{"order": "no"}, {"count": "0"}, {"count": "101"}, {"count": "²"}, {"id": "x" * 513}]
)
async def test_a_wrong_question_is_refused(valkey_url: str, model: str, query: dict[str, str]) -> None:
    async with replica(valkey_url, model) as router:
        async with router.client.get(router.operators + "/why", params=query) as answer:
            assert answer.status == 400
        assert await why(router) == []


async def test_why_is_for_operators(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model, admin_port=1, admin_key="boss") as router:
        assert (await router.post({"model": model, "prompt": "x"}))[0] == 503, "there is no worker"
        assert (await router.get("/why"))[0] == 401
        async with router.client.get(router.operators + "/why", headers={"Authorization": "Bearer boss"}) as answer:
            assert len((await answer.json())["requests"]) == 1
        async with router.client.get(router.url + "/why") as answer:
            assert answer.status == 404, "the clients' port has no such path"


async def test_strangers_without_a_key_displace_no_request(valkey_url: str, model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.write_text(json.dumps({"name": "a", "sha256": "0" * 64}) + "\n")
    async with replica(valkey_url, model, client_keys_file=str(keys), admin_key="boss", admin_port=1) as router:
        assert (await router.post({"model": model, "prompt": "x"}))[0] == 401
        async with router.client.get(router.operators + "/why", headers={"Authorization": "Bearer boss"}) as answer:
            assert (await answer.json())["kept"] == 0


async def test_the_log_at_debug_level_tells_the_steps(
    valkey_url: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "warmfleet.steps")
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        caplog.clear()
        await router.post(STREAM | {"model": model}, **{"X-Request-Id": "mine"})
        await poll(lambda: "settled" in caplog.text, 30, "the end")
    steps = [record for record in caplog.records if record.name == "warmfleet.steps"]
    words = [record.getMessage().partition(" ")[0].rstrip(":") for record in steps]
    assert words == ["POST", "identified", "try", "decided", "sent", "first", "settled"]
    assert {vars(record)["request_id"] for record in steps} == {"mine"}
    assert SECRET not in caplog.text


async def test_the_status_page_has_the_slow_requests(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, snapshot_s=0.0) as router:
        for number in range(12):
            await router.post(STREAM | {"model": model}, **{"X-Request-Id": f"mine-{number}"})
        page = json.loads((await router.get("/status.json"))[1])
        slowest = [row["request_id"] for row in await why(router)]
    assert [row["request_id"] for row in page["slow"]] == slowest
    assert len(slowest) == 10
    assert all(row["request_id"].startswith("mine-") and row["because"] for row in page["slow"])
    assert SECRET not in json.dumps(page)


# ---------------------------------------------------------------- the sentences


def decision(worker: str = "w", matched: int = 0, prompt: int = 4_100, wait: int = 0) -> Decision:
    prefill = prompt - matched
    return Decision("r", "booked", worker, "w", "u", matched, prompt, False, False, 0.3, wait, False, prefill, prompt)


def served(*, stream: bool = True, first_s: float = 1.0, **of_try: Any) -> tuple[RequestRecord, TryRecord]:
    """The record of a request that got its first byte after so many seconds, at 10,000 tokens a second."""
    record = RequestRecord("id", CHAT, "POST", 100.0)
    record.identified("m", "exact", "", 4_100, streams=stream)
    one = record.begin_try("wf-0")
    one.decided(of_try.pop("decision", decision()), "cost", 100.0, 1e-4)
    record.identified_at = one.began_at = 100.0
    one.decided_at = one.sent_at = 100.001
    one.first_byte_at, one.ended_at, record.ended_at = 100.0 + first_s, 101.0 + first_s, 101.0 + first_s
    for name, value in of_try.items():
        setattr(one, name, value)
    one.outcome, record.status, record.complete = "finished", 200, True
    return record, one


def test_a_part_that_was_loaded_from_a_tier_is_told_and_predicted() -> None:
    held = replace(decision(matched=3_072), tier_tokens=2_048, tier_s=0.038, tier="cpu", prefill_tokens=1_028 + 380)
    found = facts(served(decision=held)[0])
    assert found["where_held"] == "1,024 on the GPU, 2,048 in CPU memory (38 ms)"
    assert found["predicted_ms"] == pytest.approx(0.1 * (4_100 - 3_072) + 38, abs=0.2)
    assert "where_held" not in facts(served()[0])


def _queued() -> RequestRecord:
    record, one = served(first_s=3.3)
    one.queued_at, one.waiting, one.work_s = 100.0, 5, 6.25
    one.asked_at = one.decided_at = one.sent_at = 102.9
    return record


def _failed_before(prefill: str = "") -> RequestRecord:
    record, one = served(first_s=1.5)
    one.first_byte_at, one.ended_at, one.outcome = 0.0, 100.9, "failed"
    one.failed(UpstreamGone("The worker closed the connection (ConnectionResetError)."), prefill)
    again = record.begin_try("wf-1")
    again.decided(decision("b"), "cost", 100.9, 1e-4)
    again.began_at = again.decided_at = again.sent_at = 100.9
    again.first_byte_at = 101.5
    return record


def _hedged() -> RequestRecord:
    record, one = served(first_s=1.0)
    one.first_byte_at, one.outcome = 0.0, "cancelled"
    other = record.begin_try("wf-1")
    other.decided(decision("b"), "cost", 100.5, 1e-4)
    other.began_at = other.decided_at = other.sent_at = 100.5
    other.first_byte_at = 101.0
    return record


def _continued() -> RequestRecord:
    record, one = served(first_s=0.4)
    one.ended_at, one.outcome, one.chunks = 102.0, "failed", 20
    one.failed(UpstreamGone("The worker closed the connection (without an error)."))
    other = record.begin_try("wf-1")
    other.decided(decision("b"), "cost", 102.0, 1e-4)
    other.began_at = other.decided_at = other.sent_at = 102.0
    other.first_byte_at, other.chunks, record.ended_at = 102.2, 30, 104.0
    return record


def _refused(error: Exception) -> RequestRecord:
    record = RequestRecord("id", CHAT, "POST", 100.0)
    record.refused(error)  # type: ignore[arg-type]
    record.ended_at, record.status = 100.002, error.status  # type: ignore[attr-defined]
    return record


def _identified_late() -> RequestRecord:
    record, one = served(first_s=1.2)
    record.kind, record.identified_at = "engine", 100.8
    one.began_at = one.asked_at = one.decided_at = one.sent_at = 100.8
    return record


def _split() -> RequestRecord:
    prefill = PrefillLeg("wf-p", "p", "p", "u", 100, False, 0, 4_000, 4_000, False, False, True, 0, 0.0, "")
    record, one = served(first_s=0.6, decision=replace(decision(matched=64), prefill=prefill), cached_tokens=100)
    one.sent_at = 100.501
    return record


def _in_pool() -> RequestRecord:
    record, one = served(first_s=0.5)
    one.pool = "m#2"
    return record


SENTENCES: dict[str, tuple[Callable[[], RequestRecord], str, str]] = {
    "queued, then served": (
        _queued,
        (
            "3.3 s to the first token: 2.9 s in the queue: the engines that suit it were busy (5 waited then, with "
            "6.2 s of work for the fleet); 400 ms at w to its first byte, predicted 410 ms to the first token (0.0 ms "
            "for 0 tokens ahead of it, 410 ms for 4,100 of its own). Then 1.0 s for the answer."
        ),
        "more engines shorten the queue",
    ),
    "evicted while it was on its way": (
        lambda: served(decision=decision(matched=3_200), cached_tokens=0)[0],
        "3,200 of 4,100 tokens were expected in its cache, it had 0: it computed 3,200 more, evicted meanwhile",
        "the cache of w lost",
    ),
    "evicted, as the answer's usage tells": (
        lambda: served(decision=decision(matched=3_200), usage=b'"usage":{"cached_tokens":64}')[0],
        "it had 64: it computed 3,136 more",
        "the cache of w lost",
    ),
    "slower than its speed": (
        lambda: served(decision=decision(matched=4_000))[0],
        "999 ms at w to its first byte, predicted 10 ms to the first token: it was slower than its measured speed",
        "`warmfleet workers` tells the state of w",
    ),
    "behind the prompts of others": (
        lambda: served(decision=decision(matched=3_100, wait=9_000))[0],
        "(900 ms for 9,000 tokens ahead of it, 100 ms for 1,000 of its own)",
        "other prompts were ahead of it at w",
    ),
    "a long prompt that nobody held": (
        lambda: served(decision=decision(prompt=9_000))[0],
        "predicted 900 ms to the first token (0.0 ms for 0 tokens ahead of it, 900 ms for 9,000 of its own)",
        "no engine held more of this prompt",
    ),
    "no speed is known": (lambda: served(token_s=0.0)[0], "(nothing was predicted: its speed is not known yet)", ""),
    "a plain answer": (
        lambda: served(stream=False)[0],
        "1.0 s to the answer: 999 ms at w to its whole answer, predicted 410 ms to the first token.",
        "",
    ),
    "tried again after a death": (
        _failed_before,
        (
            "1.5 s to the first token: 899 ms at w, which failed: The worker closed the connection "
            "(ConnectionResetError); 600 ms at b to its first byte"
        ),
        "`warmfleet doctor` says what is wrong with w",
    ),
    "tried again because the prefill engine hung": (
        lambda: _failed_before("p"),
        "899 ms at w, whose prefill engine p failed: The worker closed the connection (ConnectionResetError); 600 ms",
        "`warmfleet doctor` says what is wrong with p",
    ),
    "hedged": (_hedged, "500 ms at b to its first byte", ""),
    "continued elsewhere": (
        _continued,
        (
            "Then 3.6 s for 50 chunks. The answer of w broke off (The worker closed the connection (without an error)"
            "); another worker was asked to go on."
        ),
        "",
    ),
    "split over two engines": (
        _split,
        (
            "600 ms to the first token: 500 ms at p, which computes the prompt for w; 99 ms at w to its first byte, "
            "the blocks of the prompt included"
        ),
        "",
    ),
    "identified by an engine": (
        _identified_late,
        "1.2 s to the first token: 800 ms to identify the prompt, for whose token ids an engine was asked; 400 ms at w",
        "app/docs/identity.md",
    ),
    "several pools": (_in_pool, "500 ms to the first token: 499 ms at w", ""),
    "a bad body": (lambda: _refused(BadRequest(SECRET)), "Refused with 400 (bad_request) after 2.0 ms.", ""),
    "the queue's deadline": (
        lambda: _refused(QueueTimeout("The engines that suit this request are busy.")),
        "Refused with 503 (queue_timeout: The engines that suit this request are busy) after 2.0 ms.",
        "",
    ),
    "a slow client": (
        lambda: served(client_s=4.0)[0],
        "For 4.0 s the client read nothing: the fleet was not slow: the client was slow to read.",
        "",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_largest_part_of_the_time_comes_first(case: str) -> None:
    make, sentence, remedy = SENTENCES[case]
    found = told(make(), 200.0)
    assert sentence in found["because"], found["because"]
    assert remedy in found["remedy"], found["remedy"]
    assert SECRET not in json.dumps(found)
    assert bool(found["remedy"]) == bool(remedy) or not remedy


# ---------------------------------------------------------------- which requests are kept


def ended(number: int, waited_s: float = 0.0, *, at: float = 0.0, complete: bool = True) -> RequestRecord:
    record = RequestRecord(f"id-{number}", CHAT, "POST", at)
    record.end(200, complete=complete)
    record.ended_at = at + waited_s
    return record


def test_the_slow_and_the_failed_outlive_the_others_and_all_are_bounded() -> None:
    last = LastRequests()
    for minute in range(2 * MINUTES):
        for number in range(300):
            record = ended(number, 5.0 if number == 7 else 0.01, at=60.0 * minute + 0.1, complete=number % 50 != 3)
            last.begun(record)
            last.ended(record)
    kept = last.all()
    assert len(kept) <= KEPT + FAILED + SLOWEST * MINUTES
    slow = [request for request in last.slowest() if request.request_id == "id-7"]
    assert len(slow) == MINUTES
    assert last.slowest()[: len(slow)] == slow
    assert len(last.failed()) == FAILED
    assert len(last.found("id-9", "id-9")) <= KEPT / 300 + 1 + MINUTES


def test_a_record_holds_no_fleet_and_no_answer() -> None:
    from types import SimpleNamespace

    from warmfleet.fleet import Seen

    _, one = served()
    one.decision = replace(decision(), seen=Seen((1, 1, 0, 0), [], waits=False, tie_s=0.0))
    tail = b'data: {"text":"%b","usage":{"prompt_tokens":1,"x":{"cached_tokens":2},"output_tokens":3},"more":"%b"}\n\n'
    secret = SECRET.encode()
    for text, kept in (
        (tail % (secret, secret), b'"usage":{"prompt_tokens":1,"x":{"cached_tokens":2},"output_tokens":3}'),
        (
            b'{"usage":{"completion_tokens":3,"d":null},"ids":[%b]}' % secret,
            b'"usage":{"completion_tokens":3,"d":null}',
        ),
        (b'{"usage":{"completion_tokens":3,"d":{"cached_tokens":2}},"ids":"{}%b"}' % secret, None),
        (b'{"text":"say \\"usage\\" %b"}' % secret, b""),
        (b'{"usage":null,"text":"%b"}' % secret, None),
    ):
        one.usage = b""
        one.came(SimpleNamespace(chunks=1, gap_s=0.0, client_s=0.0, tail=text))
        assert kept is None or one.usage == kept
        assert secret not in one.usage, text
    one.end("finished")
    assert one.decision.seen is None


@pytest.mark.parametrize(
    ("asked", "request_id", "found"),
    [
        ("id-1", "id-1", ["id-1"]),
        ("id-12", "id-12", ["id-12"]),
        ("id-123", "id-123", []),
        ("chatcmpl-unbooked.id-12-0-abcd", "x", ["id-12"]),
        ("chatcmpl-unbooked.~id-1", "x", ["id-1"]),
        ("unbooked.", "x", []),
        ("wf-0" + "a" * 21, "x", ["id-12"]),
        ("chatcmpl-wf-0" + "a" * 21 + "TAGOFCLIENT.~id-12-0", "x", ["id-12"]),
        ("wf-0" + "b" * 21, "x", []),
    ],
)
def test_every_id_that_somebody_may_have_is_found(asked: str, request_id: str, found: list[str]) -> None:
    last = LastRequests()
    for number in (1, 12):
        last.begun(record := ended(number))
        record.begin_try("wf-0" + "a" * 21 + "TAGOFCLIENT" if number == 12 else "wf-0" + "c" * 21)
    assert [request.request_id for request in last.found(asked, request_id)] == found


def test_a_request_pays_less_than_its_log_line(capsys: pytest.CaptureFixture[str]) -> None:
    """On the loop a request pays for the ring and the hand-over of its log line, not for the line's text."""

    class Answer:
        chunks, gap_s, client_s = 240, 0.02, 0.0
        tail = b'{"usage":{"prompt_tokens":41,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":32}}}\n\n'

    chosen, answer, count = decision(), Answer(), 2_000

    def request(last: LastRequests, log: AccessLog) -> RequestRecord:
        record = RequestRecord("e702cd891111650c24341ac9", CHAT, "POST", time.perf_counter())
        last.begun(record)
        record.identified("m", "exact", "", 4_100, streams=True)
        one = record.begin_try("wf-0")
        one.decided(chosen, "cost", record.began_at, 1e-4)
        one.sent_at, one.engine_request_id = time.perf_counter(), "wf-0.e702cd891111650c24341ac9"
        one.first_byte(200, time.perf_counter())
        one.came(answer)
        one.end("finished")
        record.end(200, complete=True)
        last.ended(record)
        log.engines(record)
        return record

    def us(work: Callable[[], object]) -> float:
        began = time.thread_time()
        for _ in range(count):
            work()
        return 1e6 * (time.thread_time() - began) / count

    lines, paid, written = JsonLines(""), [], []
    with open("/dev/null", "w") as nowhere, LogOutput("info", "json", stream=nowhere) as output:  # noqa: PTH123
        last, log = LastRequests(), AccessLog(output)
        record = request(last, log)
        for _ in range(10):
            paid.append(us(lambda: request(last, log)))
            written.append(us(lambda: lines.line(line_of(record))))
    with capsys.disabled():
        print(f" [{min(paid):.2f} us a request, its line {min(written):.2f} us] ", end="")
    assert min(paid) < min(written)
