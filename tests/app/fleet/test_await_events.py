"""A replica at rest waits until a worker writes, instead of looking again and again."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, digest_of, held
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT
from tests.support.replicas.replica import replica

from warmfleet.background import upkeep
from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.upkeep import AWAITED_STREAMS, Pace
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import View
from warmfleet.pools.pool import Pool
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    import redis.asyncio as aioredis

LONG_S = 40.0  # longer than any test, so only an event ends a wait
STREAMS = ("events:s.0", "server:s")
WORKERS = 8
COMMANDS_A_SECOND = 20  # bound for a replica whose workers write nothing: about 14 by waiting, 37 by polling
LOOKS_S = 2.5


@pytest.fixture
async def fleet(redis_url: str, model: str) -> AsyncIterator[Fleet]:
    """A fleet that ticks at every call, and whose connections wait for as long as a test says."""
    async with connect(redis_url, timeout_s=2 * LONG_S) as client:
        fleet = Fleet(client, model, timeouts=PATIENT)
        fleet.upkeep.pace = Pace(min_gap_ms=0)
        yield fleet


async def test_an_event_ends_the_wait(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await fleet.upkeep.step()
    waiting = asyncio.create_task(fleet.upkeep.await_events(STREAMS, LONG_S))
    await poll(lambda: _blocked(store), what="the call waits")
    await reporter.send("stored", blocks(1))
    async with asyncio.timeout(LONG_S / 2):
        await waiting
    assert (await fleet.upkeep.step()).blocks == 1


async def test_a_new_worker_ends_the_wait(store: aioredis.Redis, fleet: Fleet) -> None:
    waiting = asyncio.create_task(fleet.upkeep.await_events(STREAMS, LONG_S))
    await poll(lambda: _blocked(store), what="the call waits")
    await ReportingWorker(store, fleet, "another").join()
    async with asyncio.timeout(LONG_S / 2):
        await waiting


async def test_an_event_that_came_before_the_wait_ends_it(store: aioredis.Redis, fleet: Fleet) -> None:
    """A worker may write between the step and the wait."""
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await fleet.upkeep.step()
    await reporter.send("stored", blocks(1))
    async with asyncio.timeout(LONG_S / 2):
        await fleet.upkeep.await_events(STREAMS, LONG_S)


async def test_a_key_of_another_type_ends_the_wait(store: aioredis.Redis, fleet: Fleet) -> None:
    await store.set(fleet.keys.events("s.0"), "not a stream")
    async with asyncio.timeout(LONG_S / 2):
        await fleet.upkeep.await_events(STREAMS, LONG_S)


async def test_a_large_fleet_is_polled(fleet: Fleet) -> None:
    """Many heartbeats leave no time to wait, and a wait for many keys would be a long call."""
    names = [f"events:w{number}.0" for number in range(AWAITED_STREAMS + 1)]
    async with asyncio.timeout(LONG_S / 2):
        await fleet.upkeep.await_events(names, LONG_S)


async def test_a_wait_ends_after_its_time(fleet: Fleet) -> None:
    """The fleet's clock must tick once a second although the workers write nothing."""
    began = time.monotonic()
    async with asyncio.timeout(LONG_S / 2):
        await fleet.upkeep.await_events(STREAMS, 0.05)
    assert time.monotonic() - began > 0.04, "it did wait"


async def test_a_heartbeat_leaves_nothing_to_do_but_blocks_announce_more(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await fleet.upkeep.step()
    await reporter.heartbeat(digest_of())
    assert not (await fleet.upkeep.step()).busy
    await reporter.send("stored", blocks(1, 2))
    assert (await fleet.upkeep.step()).busy
    await reporter.send("cleared")
    fleet.upkeep.pace = Pace(min_gap_ms=0, collects=1, max_blocks=1)
    await fleet.upkeep.step()
    assert (await fleet.upkeep.step()).busy, "a slot is left to collect"


async def test_a_round_applies_waits_and_applies(store: aioredis.Redis, fleet: Fleet) -> None:
    pool, reporter = Pool(fleet.keys.tag, fleet, DegradedMode(1.0)), ReportingWorker(store, fleet)
    pool.show(View(streams=STREAMS))
    await reporter.join()
    await fleet.upkeep.step()
    rounds = asyncio.create_task(_rounds(pool))
    try:
        await poll(lambda: _blocked(store), what="a round waits")
        await reporter.send("stored", blocks(3))
        await poll(lambda: _empty(reporter), LONG_S / 2, "the event is applied")
        assert await reporter.holds() == held(3)
    finally:
        rounds.cancel()
        await asyncio.wait([rounds])


async def test_a_replica_at_rest_asks_redis_little(store: aioredis.Redis, redis_url: str, model: str) -> None:
    """The test counts commands instead of time, because a call's time differs between machines."""
    fleet = Fleet(store, model, timeouts=PATIENT)
    cores = [ReportingWorker(store, fleet, f"w{number}") for number in range(WORKERS)]
    for reporter in cores:
        await reporter.join()
    async with replica(redis_url, model, view_interval_s=1.0, clear_interval_s=Timing.clear_interval_s) as router:
        await poll(lambda: _workers(router), what="the replica knows the workers")
        async with store.monitor() as monitor:
            count = 0
            try:
                async with asyncio.timeout(LOOKS_S):
                    while True:
                        command = await monitor.next_command()
                        count += command["client_type"] != "lua"
            except TimeoutError:
                pass
    assert LOOKS_S < count <= COMMANDS_A_SECOND * LOOKS_S


async def _rounds(pool: Pool) -> None:
    metrics = Metrics()
    while True:
        await upkeep.apply(pool, metrics, lambda: LONG_S, Timing(tick_within_s=LONG_S))


async def _blocked(store: aioredis.Redis) -> bool:
    return bool((await store.info("clients"))["blocked_clients"])


async def _empty(reporter: ReportingWorker) -> bool:
    return await reporter.store.xlen(reporter.stream) == 0


async def _workers(router: Any) -> bool:
    return cast("float", await router.metric('warmfleet_workers{state="unroutable"}')) == WORKERS
