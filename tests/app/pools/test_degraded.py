"""While Redis is gone or slow, requests go on: equal prefixes to the same worker, with bounded load."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.scripted import Engine, Seen, answer_well, engine
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.replicas.replica import Replica, replica

from warmfleet.cli import explain
from warmfleet.cli.terminal.output import plain
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Flag, Fleet, LoadRow, WorkerState, WorkerView
from warmfleet.fleet.queueing import Queue
from warmfleet.fleet.workers import Workers
from warmfleet.pools import degraded as fallback_module
from warmfleet.pools.degraded import LAST_KNOWN_S, DegradedMode, LastKnown
from warmfleet.pools.fleet_view import View
from warmfleet.pools.pool import Pool

if TYPE_CHECKING:
    from typing import Any, NoReturn


def worker(name: str, *, routable: bool = True) -> WorkerView:
    state = WorkerState.PROVEN if routable else WorkerState.PENDING
    return WorkerView(name, {}, None, LoadRow(), 0.0, state, "proven", f"http://{name}", [])


WORKERS = [worker(f"w{n}") for n in range(8)]


def test_the_same_prefix_stays_while_load_is_bounded() -> None:
    fallback = DegradedMode(1.0)
    first = fallback.choose(WORKERS, b"prefix")
    assert first is not None
    assert fallback.choose(WORKERS, b"prefix") is first
    counts: Counter[str] = Counter()
    for _ in range(80):
        chosen = fallback.choose(WORKERS, b"prefix")
        assert chosen is not None
        fallback.take(chosen.worker_id)
        counts[chosen.worker_id] += 1
    assert max(counts.values()) <= 13  # 1.25 times the mean, rounded up
    for name, count in counts.items():
        for _ in range(count):
            fallback.give(name)
    assert not fallback.in_flight
    assert fallback.choose(WORKERS, b"prefix") is first


def test_prefixes_spread_and_a_lost_worker_moves_only_its_own() -> None:
    fallback = DegradedMode(1.0)
    before = {n: fallback.choose(WORKERS, b"%d" % n) for n in range(400)}
    spread = Counter(chosen.worker_id for chosen in before.values() if chosen)
    assert min(spread.values()) > 25
    after = {n: fallback.choose(WORKERS, b"%d" % n, exclude=("w3",)) for n in range(400)}
    moved = {before[n].worker_id for n in range(400) if before[n] is not after[n]}  # type: ignore[union-attr]
    assert moved == {"w3"}


def test_without_a_routable_worker_there_is_no_choice() -> None:
    assert DegradedMode(1.0).choose([worker("a", routable=False)], b"x") is None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The time, which stands still for the module under test, so that a slow machine changes nothing."""
    stopped = 100_000.0
    monkeypatch.setattr(fallback_module, "time", SimpleNamespace(monotonic=lambda: stopped))
    return stopped


async def test_known_workers_do_not_age_while_redis_is_away(fleet: Fleet, now: float) -> None:
    """After Redis comes back empty or with an old dump, no worker is routable until its next heartbeat."""
    pool = Pool("m", fleet, DegradedMode(1.0))
    pool.show(View((worker("a"),), read_at=now - 600))
    assert pool.last_known.workers == (worker("a"),)
    for age, workers in ((3.0, ()), (0.0, (worker("a", routable=False),))):
        pool.show(View(workers, read_at=now - age))
        assert pool.last_known.workers == (worker("a"),)


async def test_a_worker_that_stays_unroutable_is_forgotten(fleet: Fleet, now: float) -> None:
    pool = Pool("m", fleet, DegradedMode(1.0))
    pool.show(View((worker("a"),), read_at=now - LAST_KNOWN_S - 2))
    for age in (LAST_KNOWN_S + 1, 1.0, 0.0):
        pool.show(View((), read_at=now - age))
    assert pool.last_known.workers == ()


async def test_a_worker_that_said_goodbye_is_not_remembered(fleet: Fleet, now: float) -> None:
    """The worker's server may still finish its requests; a new request would be refused or cut off."""
    known = LastKnown(fleet)
    known.show(View(tuple(replace(worker(name), server={}) for name in "abc"), read_at=now - 2))
    core_left = replace(worker("a"), state=WorkerState.SILENT, heartbeat_age_s=None)
    server_left = replace(worker("b"), state=WorkerState.JOINING, server={}, server_age_s=None)
    server_unheard = replace(server_left, worker_id="c", server_age_s=30.0)
    known.show(View((core_left, server_left, server_unheard), read_at=now - 1))
    assert [view.worker_id for view in known.workers] == ["c"]


async def test_a_paused_worker_is_not_remembered(fleet: Fleet, now: float) -> None:
    """The paused engine would accept the request, and let it wait until the pause ends."""
    known = LastKnown(fleet)
    known.show(View((worker("a"), worker("b")), read_at=now - 2))
    paused = replace(worker("a"), state=WorkerState.PAUSED, load=LoadRow(flags=Flag.PAUSED))
    known.show(View((paused,), read_at=now - 1))
    assert [view.worker_id for view in known.workers] == ["b"]
    known.show(View((worker("a"),), read_at=now))
    assert [view.worker_id for view in known.workers] == ["a"], "it goes on"


async def test_no_worker_is_forgotten_while_nothing_is_read(fleet: Fleet, now: float) -> None:
    """Redis comes back empty, and is away again before its workers have joined."""
    pool = Pool("m", fleet, DegradedMode(1.0))
    for age, workers in ((3 * LAST_KNOWN_S, (worker("a"),)), (2 * LAST_KNOWN_S, ()), (2 * LAST_KNOWN_S - 1, ())):
        pool.show(View(workers, read_at=now - age))
    assert pool.last_known.workers == (worker("a"),)


async def test_workers_that_redis_has_lost_stay_in_use_while_they_answer(fleet: Fleet, now: float) -> None:
    known = LastKnown(fleet)
    before = tuple(worker(name) for name in ("absent", "silent", "left", "new"))
    known.show(View(before, read_at=now - LAST_KNOWN_S - 2))
    assert not list(known.missing), "some are routable"
    silent = replace(worker("silent"), state=WorkerState.SILENT, heartbeat_age_s=30.0)
    left = replace(silent, worker_id="left", heartbeat_age_s=None)
    gone = (silent, left, worker("new", routable=False))
    for age in (LAST_KNOWN_S - 1, 3.0, 0.0):
        known.show(View(gone, read_at=now - age))
    assert [view.worker_id for view in known.missing] == ["absent", "silent"]
    known._none_since = now - 2 * LAST_KNOWN_S
    assert (list(known.workers), list(known.missing)) == (list(gone), []), "nobody has asked them"
    known.answered()
    assert [view.worker_id for view in known.workers] == ["absent", "silent"], "not one that has nothing proved now"
    assert all(view.routable for view in known.workers)


async def test_workers_that_joined_again_are_known_though_they_answered_while_they_were_missing(
    fleet: Fleet, now: float
) -> None:
    """Redis came back empty, its workers have joined again, and Redis is away once more."""
    known = LastKnown(fleet)
    for age, workers in ((LAST_KNOWN_S + 2, (worker("a"),)), (LAST_KNOWN_S + 1, ()), (0.0, (worker("a"),))):
        known.show(View(workers, read_at=now - age))
    known.answered()
    assert list(known.workers) == [worker("a")]


def test_redis_is_asked_again_after_a_while() -> None:
    fallback = DegradedMode(0.0)
    patient = DegradedMode(60.0)
    for mode in (fallback, patient):
        mode.failed("slow")
        assert mode.asks_redis
        mode.failed("slow")
    assert fallback.asks_redis
    assert not patient.asks_redis
    patient.succeeded()
    assert patient.asks_redis


def test_a_short_silence_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    fallback, now = DegradedMode(1.0), time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("warmfleet.pools.degraded.time", clock)
    for _ in range(20):
        fallback.failed("slow")
        assert (fallback.asks_redis, fallback.silent) in ((True, False), (False, False))
        now += 0.0499
    now += 0.1
    assert fallback.silent
    fallback.succeeded()
    assert not fallback.silent
    fallback.failed("slow")
    fallback.failed("slow")
    assert not fallback.silent, "it begins anew"


async def test_requests_go_on_without_redis(valkey_url: str, model: str) -> None:
    async with engine(model) as one, engine(model) as two, gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}"
        async with replica(url, model, one.url, two.url, look_url=valkey_url, redis_retry_s=0.2) as router:
            body = {"model": model, "prompt": "the same beginning " * 50}
            assert (await router.post(body))[1]["x-warmfleet-reservation"] == "booked"
            await router.unloaded()
            await door.shut()
            chosen = set()
            for _ in range(8):
                status, headers, _ = await router.post(body)
                assert (status, headers["x-warmfleet-reservation"]) == (200, "fallback")
                chosen.add(headers["x-warmfleet-worker"])
            assert len(chosen) == 1
            status, _, said = await router.post(body, "/explain")
            told = json.loads(said)
            assert (status, {told["chosen"]}, told["fresh"], told["why"]) == (200, chosen, False, "away")
            assert [row["worker_id"] for row in told["candidates"] if row["chosen"]] == [told["chosen"]]
            assert len(told["candidates"]) == 2
            assert f"It would go to {told['chosen']}." in plain(explain.parts_of(told))
            assert (await router.get("/readyz"))[0] == 200
            assert await router.metric("warmfleet_fallback_requests_total") >= 1
            await door.open()

            async def booked() -> bool:
                return (await router.post(body))[1]["x-warmfleet-reservation"] == "booked"

            await poll(booked, 10, "decisions are exact again")
            await router.unloaded()


async def test_explain_without_redis_says_what_a_request_would_meet(valkey_url: str, model: str) -> None:
    """/explain names the only engine, though it failed just before; without engines it answers as a request would."""
    async with engine(model) as one, gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}"
        async with (
            replica(url, model, one.url, look_url=valkey_url) as router,
            replica(url, f"{model}-b", look_url=valkey_url) as empty,
        ):
            body = {"prompt": "the same beginning " * 50}
            assert [(await each.post(body))[0] for each in (router, empty)] == [200, 503], "both have read the fleet"
            await door.shut()
            await one.die()
            assert (await router.post(body))[0] == 502
            status, _, said = await router.post(body, "/explain")
            (known,) = [row["worker_id"] for row in json.loads(said)["candidates"]]
            assert (status, json.loads(said)["chosen"]) == (200, known)
            status, _, said = await empty.post(body, "/explain")
            assert (status, json.loads(said)["error"]["message"].split(".")[0]) == (
                503,
                f"No engine of `{model}-b` has joined this fleet",
            )


async def test_a_slow_redis_costs_one_time_limit_not_many(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}"
        async with replica(url, model, upstream.url, decide_timeout_s=0.1, redis_retry_s=30.0) as router:
            door.swallow = True
            words = [
                (await router.post({"model": model, "prompt": "x" * 500}))[1]["x-warmfleet-reservation"]
                for _ in range(6)
            ]
            assert words == ["fallback"] * 6
            assert await router.metric('warmfleet_fallback_requests_total{reason="away"}') == 2
            assert await router.metric('warmfleet_fallback_requests_total{reason="open"}') == 4


async def test_a_worker_that_joined_since_the_last_reading_is_found_when_a_decision_fails(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: object, **__: object) -> NoReturn:
        raise FleetUnavailable("slow")

    body = {"model": model, "prompt": "x" * 500}
    async with replica(valkey_url, model, view_interval_s=60.0) as early, engine(model) as upstream:
        await poll(lambda: read_once(early), 10, "its only reading of this minute, of an empty fleet")
        async with replica(valkey_url, model, upstream.url):
            monkeypatch.setattr(Queue, "decide_in_turn", slow)
            answers = await asyncio.gather(*[early.post(body) for _ in range(6)])
            assert [(status, headers.get("x-warmfleet-reservation")) for status, headers, _ in answers] == [
                (200, "fallback")
            ] * 6
            assert await early.metric('warmfleet_fallback_requests_total{reason="away"}') >= 1


async def test_a_look_takes_nothing_newer_away_and_never_raises(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    known = LastKnown(fleet)
    answers: list[Any] = [[worker("old")], ValueError("a row that nobody can read")]

    async def slow(_: Workers) -> Any:
        known.show(View((worker("new"),), read_at=time.monotonic()))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Workers, "read", slow)
    await asyncio.gather(known.look(), known.look())
    assert [view.worker_id for view in known.workers] == ["new"]
    assert len(answers) == 1, "one reading for both"
    monkeypatch.setattr(fallback_module, "LOOK_S", 0.0)
    await known.look()
    assert not answers
    assert [view.worker_id for view in known.workers] == ["new"]


async def read_once(router: Replica) -> bool:
    return b"no contact" not in (await router.get("/readyz"))[1]


async def test_no_request_waits_long_for_a_reading_that_does_not_come(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback_module, "LOOK_S", 0.5)
    looks: list[Workers] = []

    async def never(workers: Workers) -> None:
        looks.append(workers)
        await asyncio.Event().wait()

    async with gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}"
        async with replica(url, model, decide_timeout_s=0.1, view_interval_s=60.0) as router:
            await poll(lambda: read_once(router), 30, "a reading")
            door.swallow = True
            monkeypatch.setattr(Workers, "read", never)
            begun = time.monotonic()
            status, _, answer = await router.post({"model": model, "prompt": "x" * 500})
            assert (status, json.loads(answer)["error"]["code"]) == (503, "no_worker")
            assert time.monotonic() - begun < 4
            monkeypatch.setattr(fallback_module, "LOOK_S", 60.0)
            assert (await router.post({"model": model, "prompt": "x" * 500}))[0] == 503
            assert len(looks) == 1, "nobody is waited for again so soon"


async def test_fallback_tries_another_worker_too(valkey_url: str, model: str) -> None:
    async def fails(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with engine(model, fails) as bad, engine(model, answer_well) as good, gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}"
        async with replica(url, model, bad.url, good.url, redis_retry_s=30.0) as router:
            await door.shut()
            for number in range(8):
                status, _, _ = await router.post({"model": model, "prompt": f"{number} " * 100})
                assert status == 200
            assert bad.seen
            assert len(good.seen) == 8
