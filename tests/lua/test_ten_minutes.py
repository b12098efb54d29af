"""Trouble that lasts: no router for ten minutes, memory at 95 % for ten minutes. The default run takes seconds, with
shorter periods; the long run takes ten minutes each: ``python -m pytest -m long tests/lua/test_ten_minutes.py``.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.busy_fleet import BusyFleet
from tests.support.fleet.publishing import WORKER, equal
from tests.support.fleet.reporting_worker import SCHEME, ReportingWorker
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary

from warmfleet.background.supervisor import stop
from warmfleet.fleet import Flag, Fleet, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    import redis.asyncio as aioredis

MB = 2**20


@dataclass(frozen=True, slots=True)
class Span:
    """The length of the trouble, and the pace of the test's other parts."""

    seconds: float
    heartbeat_s: float
    step_s: float  # between two rounds of upkeep
    pace: Pace


SECONDS = Span(3.0, 0.1, 0.005, Pace(min_gap_ms=0, ttl_ms=2_000, forget_ms=3_000, short_ms=300))
MINUTES = Span(600.0, wire.HEARTBEAT_SECONDS, 0.1, Pace())
LONG = pytest.mark.long(
    minutes=40,
    shows="ten minutes without a router, and ten minutes at 95 % of maxmemory, on both servers",
)
SPANS = [
    pytest.param(SECONDS, id="seconds"),
    pytest.param(MINUTES, id="minutes", marks=[LONG, pytest.mark.timeout(1200)]),
]


@pytest.fixture(params=["valkey", "redis7"])
def own_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of this test's own, without a memory limit to begin with."""
    with server(valkey_binary() if request.param == "valkey" else redis7_binary()) as url:
        yield url


@pytest.fixture
async def own_store(own_url: str) -> AsyncIterator[aioredis.Redis]:
    async with connect(own_url, timeout_s=5) as client:
        yield client


# ---------------------------------------------------------------- no router


async def ages_s(fleet: Fleet, *names: str) -> list[float]:
    """The seconds for which each worker has been silent."""
    now = time.time() * 1000
    return [(now - (await fleet.redis.zscore(fleet.keys.alive, name) or now)) / 1000 for name in names]


@pytest.mark.in_turn
@pytest.mark.parametrize("span", SPANS)
async def test_no_router_for_ten_minutes(
    own_url: str, own_store: aioredis.Redis, model: str, monkeypatch: pytest.MonkeyPatch, span: Span
) -> None:
    """Engines go on, nobody reads. Afterwards the first request finds them, nobody is forgotten, the index is right;
    only who died before that is gone, a grace later."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", span.heartbeat_s)
    async with BusyFleet(own_url, model) as busy:
        fleet = busy.fleet
        fleet.upkeep.pace = span.pace
        fleet.use(spans=replace(fleet.constants.spans, worker_ttl_ms=span.pace.ttl_ms))
        await own_store.set(fleet.keys.tick, f"{int(time.time() * 1000)} 0 0")  # the grace of a first tick is over
        dead = ReportingWorker(own_store, fleet, "dead")
        await dead.join()
        await poll(lambda: dead.record(), 10, "it has joined")
        routers = [task for task in busy.tasks if task is not busy.churn]
        await stop(routers)
        await asyncio.sleep(span.seconds + 0.5)
        assert min(await ages_s(fleet, WORKER, "dead.0")) > span.pace.forget_ms / 1000

        decision = await fleet.bookings.decide(busy.ask("wf-first"))
        assert decision.worker_id == WORKER, "before any tick"
        tick = await fleet.upkeep.tick()
        assert (tick.ran, tick.grace, tick.forget) == (True, True, ())
        busy.tasks += [asyncio.create_task(busy._for_ever(busy._upkeep, span.step_s))]
        await poll(lambda: heard_of(fleet), 20, "its heartbeats are read")
        assert (await fleet.bookings.decide(busy.ask("wf-second"))).worker_id == WORKER
        await stop([busy.churn])
        await equal(busy.fleet, busy.tracker, 30)
        assert (busy.core.state.joins, busy.core.state.stopped) == (1, None)
        await poll(lambda: gone(dead), 40, "who was dead all the time is forgotten")
        assert busy.core.state.joins == 1, "and nobody else"


async def heard_of(fleet: Fleet) -> bool:
    return (await ages_s(fleet, WORKER))[0] < 1 + wire.HEARTBEAT_SECONDS


async def gone(reporter: ReportingWorker) -> bool:
    return not await reporter.record()


# ---------------------------------------------------------------- a server with a memory limit


@contextmanager
def publishing(url: str, model: str, tracker: Tracker) -> Iterator[WorkerPublisher]:
    config = PublisherConfig(url, model, "w1.0", "w1", 0, SCHEME, 200_000, 32_768, "test-1")
    publisher = WorkerPublisher(config, tracker)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.stop(5)


class Drive:
    """Upkeep that reads the memory before each step and records when it was short."""

    def __init__(self, fleet: Fleet, pause_s: float) -> None:
        self.fleet, self.pause_s = fleet, pause_s
        self.spells: list[bool] = [False]
        self.used_permille = -1

    async def step(self) -> None:
        self.used_permille = (await self.fleet.index.memory()).used_permille
        await self.fleet.upkeep.step(used_permille=self.used_permille)
        if self.fleet.upkeep.last_tick.short != self.spells[-1]:
            self.spells.append(self.fleet.upkeep.last_tick.short)
        await asyncio.sleep(self.pause_s)

    async def until(self, check: Callable[[], Awaitable[bool]], what: str, deadline_s: float = 30) -> None:
        async def stepped() -> bool:
            await self.step()
            return await check()

        await poll(stepped, deadline_s, what)


async def size_of(reporter: ReportingWorker) -> tuple[int, int]:
    slot = (await reporter.row()).slot
    return slot, await cast("Any", reporter.store.scard(reporter.keys.slot(slot)))


async def is_whole(reporter: ReportingWorker, tracker: Tracker) -> bool:
    row = await reporter.row()
    held_now = await cast("Any", reporter.store.smembers(reporter.keys.slot(row.slot)))
    return not row.flags & Flag.PARTIAL and held_now == set(tracker.table)


async def test_over_the_limit_and_back(
    own_url: str, own_store: aioredis.Redis, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.1)
    own_fleet = Fleet(own_store, model, timeouts=PATIENT)
    own_fleet.upkeep.pace = SECONDS.pace
    tracker, drive, reporter = Tracker(), Drive(own_fleet, SECONDS.step_s), ReportingWorker(own_store, own_fleet, "w1")
    await own_store.setrange("ballast", 12 * MB, b"x")  # a share of this limit holds a hash table that doubles
    limit = (await own_fleet.index.memory()).used + 12 * MB
    await own_store.config_set("maxmemory", limit)

    async def flagged() -> bool:
        tracker.stored([os.urandom(8) for _ in range(1_000)])
        found = await cast("Any", own_store.hget(own_fleet.keys.load, "w1.0"))
        return bool(found and (await reporter.row()).flags & Flag.PARTIAL)

    with publishing(own_url, model, tracker) as publisher:
        await drive.until(flagged, "memory is short")
        size = await size_of(reporter)
        tracker.stored([os.urandom(8) for _ in range(5_000)])
        for _ in range(40):
            await drive.step()
        assert await size_of(reporter) == size, "nothing is inserted, and no snapshot takes its place"
        assert (await own_fleet.index.memory()).used_permille < 950
        tracker.removed(list(tracker.table)[: len(tracker.table) * 2 // 3])
        await drive.until(lambda: is_whole(reporter, tracker), "the index equals the table")
        assert publisher.state.dropped == 0
    assert drive.spells == [False, True, False], "one spell, no swinging"
    assert (await own_fleet.index.counts())["resync_partial"] >= 1
    await reporter.holds()  # both directions agree


@pytest.mark.in_turn
@pytest.mark.parametrize("span", SPANS)
async def test_at_95_percent_for_ten_minutes(
    own_url: str, own_store: aioredis.Redis, model: str, monkeypatch: pytest.MonkeyPatch, span: Span
) -> None:
    """Blocks come and go meanwhile: the worker lives, its removals are applied, nothing is inserted, nothing swings."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", span.heartbeat_s)
    fleet = Fleet(own_store, model, timeouts=PATIENT)
    fleet.upkeep.pace = span.pace
    tracker, drive, reporter = Tracker(), Drive(fleet, span.step_s), ReportingWorker(own_store, fleet, "w1")
    tracker.stored([os.urandom(8) for _ in range(20_000)])
    with publishing(own_url, model, tracker) as publisher:
        await drive.until(lambda: there_and_whole(reporter, tracker), "the index equals the table")
        await own_store.setrange("ballast", 100 * MB, b"x")  # made by the server: no buffer of it comes and goes
        await own_store.config_set("maxmemory", (await fleet.index.memory()).used * 100 // 95)
        size, until, highest, snapshots = await size_of(reporter), time.monotonic() + span.seconds, 0, -1
        while time.monotonic() < until:
            tracker.removed(list(tracker.table)[:5])
            tracker.stored([os.urandom(8) for _ in range(5)])
            await drive.step()
            highest = max(highest, drive.used_permille)
            assert (await ages_s(fleet, "w1.0"))[0] < span.pace.ttl_ms / 1000, "it lives"
            snapshots = publisher.state.snapshots if snapshots < 0 else snapshots
        now = await size_of(reporter)
        assert now[0] == size[0], "no snapshot takes its place"
        assert now[1] < size[1], "what is removed is removed, and nothing is inserted"
        assert 940 < highest < 960
        assert (publisher.state.snapshots, publisher.state.errors) == (snapshots, 0)
        assert (await reporter.row()).flags & Flag.PARTIAL
        assert drive.spells == [False, True]
        await own_store.delete("ballast")
        await drive.until(lambda: is_whole(reporter, tracker), "the index equals the table", 90)
    assert drive.spells == [False, True, False], "one spell, no swinging"
    await reporter.holds()  # both directions agree


async def there_and_whole(reporter: ReportingWorker, tracker: Tracker) -> bool:
    return bool(await reporter.record()) and await is_whole(reporter, tracker)
