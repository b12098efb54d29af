"""A model is idle after some time with heartbeats only; any request ends the idleness at once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

from tests.support.fleet.keyspace import Keyspace
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, digest_of, held
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT
from tests.support.replicas.lossy import LossyReplica

from warmfleet.background import upkeep
from warmfleet.fleet import Fleet, Question, Step, connect
from warmfleet.fleet.client import argv
from warmfleet.fleet.upkeep import Pace
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import View
from warmfleet.pools.idle import AFTER_S, Idle
from warmfleet.pools.pool import Pool
from warmfleet.timing import Timing

if TYPE_CHECKING:
    import pytest
    import redis.asyncio as aioredis

LONG_S = 40.0  # longer than any test
CORES = 11  # more than a replica at rest applies in one write


def test_rest_begins_after_a_while_without_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    found = Idle()
    assert not found.lasts, "a start is no rest: workers are about to join"
    now[0] += AFTER_S - 0.1
    assert not found.lasts
    now[0] += 0.1
    assert found.lasts
    found.wake()
    assert not found.lasts
    now[0] += AFTER_S
    assert found.lasts


async def test_a_request_ends_a_wait() -> None:
    found = Idle()
    waiting = asyncio.create_task(found.wait(LONG_S))
    await asyncio.sleep(0)
    found.wake()
    async with asyncio.timeout(LONG_S / 2):
        await waiting
    began = time.monotonic()
    async with asyncio.timeout(LONG_S / 2):
        await found.wait(0.02)
    assert time.monotonic() - began > 0.015, "it did wait"


async def test_heartbeats_are_applied_together_and_blocks_end_the_rest(store: aioredis.Redis, model: str) -> None:
    fleet = Fleet(store, model, timeouts=PATIENT)
    fleet.upkeep.pace = Pace(min_gap_ms=0, rest_gap_ms=0)
    cores = [ReportingWorker(store, fleet, f"w{number}") for number in range(CORES)]
    for reporter in cores:
        await reporter.join()
    while (await fleet.upkeep.step()).stirred:
        pass
    seen = await _heard(store, fleet)
    for reporter in cores:
        await reporter.heartbeat(digest_of(), at=str(await _later(store)))
    assert await fleet.upkeep.step(rest=True) == Step(0, busy=False, stirred=False), "heartbeats: no reason to hurry"
    now = await _heard(store, fleet)
    assert len(now) == CORES
    assert all(now[name] > before for name, before in seen.items()), "each worker is heard again"
    await cores[3].send("stored", blocks(1, 2))
    assert await fleet.upkeep.step(rest=True) == Step(2, busy=True, stirred=True)
    assert await cores[3].holds() == held(1, 2)
    await cores[5].send("cleared")
    assert (await fleet.upkeep.step(rest=True)).stirred, "the stream of one worker decides over its slot"


async def test_calls_that_go_out_together_are_the_calls_by_name(store: aioredis.Redis, model: str) -> None:
    fleet = Fleet(store, model)
    prefix, pace = fleet.keys.prefix.encode(), fleet.upkeep.pace
    reporter = argv("apply", prefix=prefix, worker_id="w.0", max_blocks=pace.max_blocks)
    limits = {"max_entries": pace.max_entries, "ttl_ms": pace.ttl_ms}
    server = argv("apply_server", prefix=prefix, server_id="w", **limits)
    assert fleet.upkeep._apply_call("events:w.0") == ("apply", fleet.scripts.packed["apply"].call(reporter))
    assert fleet.upkeep._apply_call("server:w") == ("apply_server", fleet.scripts.packed["apply_server"].call(server))


async def test_a_replica_at_rest_leaves_a_fleet_to_the_one_that_ticked(store: aioredis.Redis, model: str) -> None:
    fleet = Fleet(store, model, timeouts=PATIENT)
    fleet.upkeep.pace = Pace(min_gap_ms=0, rest_gap_ms=3_600_000)
    assert (await fleet.upkeep.tick()).ran
    assert not (await fleet.upkeep.tick(rest=True)).ran
    assert (await fleet.upkeep.tick()).ran, "one that serves requests does not wait for others"


async def test_a_tick_at_rest_looks_at_more_streams_because_it_comes_less_often(
    store: aioredis.Redis, model: str
) -> None:
    fleet = Fleet(store, model, timeouts=PATIENT)
    fleet.upkeep.pace = Pace(min_gap_ms=0, rest_gap_ms=0, max_streams=2, rest_streams=2 * CORES)
    cores = [ReportingWorker(store, fleet, f"w{number}") for number in range(CORES)]
    for reporter in cores:
        await reporter.join()
    while (await fleet.upkeep.step()).stirred:
        pass
    for reporter in cores:
        await reporter.heartbeat(digest_of())
    assert len((await fleet.upkeep.tick()).backlog) <= 2
    assert len((await fleet.upkeep.tick(rest=True)).backlog) == CORES


async def test_a_round_at_rest_waits_for_its_beat_or_a_request(
    store: aioredis.Redis, redis_url: str, model: str
) -> None:
    async with connect(redis_url) as client:
        router = LossyReplica(client, model, "cost", [])
        pool, fleet = router.pool, router.fleet
        pool.idle = Idle(0.0)
        fleet.upkeep.pace = Pace(rest_gap_ms=0)
        await Keyspace(store, fleet).workers(1)
        rounds = asyncio.create_task(_rounds(pool))
        try:
            await poll(lambda: pool.idle._waiting is not None, LONG_S / 2, "a round waits")
            before = await store.get(fleet.keys.tick)
            await router.decide(Question("wf-1", (), 1, 1))
            await poll(lambda: _ticked_since(store, fleet, before), LONG_S / 2, "the request ended the wait")
        finally:
            rounds.cancel()
            await asyncio.wait([rounds])


async def test_a_pool_of_very_many_engines_does_not_rest(fleet: Fleet) -> None:
    pool = Pool(fleet.keys.tag, fleet, DegradedMode(1.0))
    pool.idle = Idle(0.0)
    pool.show(View(streams=tuple(f"events:w{number}.0" for number in range(upkeep.REST_STREAMS + 1))))
    async with asyncio.timeout(LONG_S / 2):
        await upkeep.apply(pool, Metrics(), lambda: LONG_S, Timing(tick_within_s=0.01))


async def _heard(store: aioredis.Redis, fleet: Fleet) -> dict[bytes, float]:
    """The time in ms at which each worker was last heard."""
    return dict(cast("Any", await store.zrange(fleet.keys.alive, 0, -1, withscores=True)))


async def _ticked_since(store: aioredis.Redis, fleet: Fleet, before: bytes | str | None) -> bool:
    return await store.get(fleet.keys.tick) != before


async def _later(store: aioredis.Redis) -> int:
    """A time in ms after all events so far."""
    seconds, micros = await store.time()
    return int(seconds) * 1000 + int(micros) // 1000 + 50


async def _rounds(pool: Pool) -> None:
    metrics = Metrics()
    while True:
        await upkeep.apply(pool, metrics, lambda: LONG_S, Timing())
