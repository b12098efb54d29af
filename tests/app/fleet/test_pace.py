"""Replicas together apply entries in a share of Redis' time, live entries first, with decisions in between."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import Keyspace
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks, held
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT

from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

    import redis.asyncio as aioredis

NAME = "5ea50001"


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    """A fleet that ticks at every call."""
    fleet = Fleet(store, model, timeouts=PATIENT)
    fleet.upkeep.pace = Pace(min_gap_ms=0)
    return fleet


async def ticked_ago(fleet: Fleet, ms: int) -> None:
    await fleet.redis.set(fleet.keys.tick, f"{int(time.time() * 1000) - ms} 0 0 0 0")


async def write(reporter: ReportingWorker, batches: int, each: int = 128) -> None:
    """Write a join and ``batches`` full entries in one round trip."""
    await reporter.join()
    pipe = reporter.store.pipeline(transaction=False)
    for number in range(batches):
        reporter.number += 1
        data = blocks(*range(number * each, number * each + each))
        pipe.xadd(reporter.stream, cast("dict[Any, Any]", wire.entry(reporter.nonce, reporter.number, "stored", data)))
    await pipe.execute()


# ---------------------------------------------------------------- the time that a tick grants


async def test_a_tick_grants_a_share_of_the_time_since_the_last_one(fleet: Fleet) -> None:
    """A tick grants three tenths of the time since the last tick, at least 16 ms and at most 200 ms."""
    for ago_ms in (100, 0, 5_000):
        began = time.time()
        await ticked_ago(fleet, ago_ms)
        granted_us = (await fleet.upkeep.tick()).granted_us
        most_ms = ago_ms + 1_000 * (time.time() - began) + 2  # both clocks are read in whole milliseconds
        assert 300 * min(max(ago_ms, 16), 200) <= granted_us <= 300 * min(max(most_ms, 16), 200)
    fleet.upkeep.pace = replace(fleet.upkeep.pace, min_gap_ms=60_000)
    assert (await fleet.upkeep.tick()).granted_us == 0


async def test_many_replicas_are_granted_no_more_than_one(fleet: Fleet) -> None:
    fleet.upkeep.pace = replace(fleet.upkeep.pace, min_gap_ms=20)
    granted, ran, start = 0, 0, time.time()
    await ticked_ago(fleet, 0)
    while time.time() - start < 0.5:
        ticks = await asyncio.gather(*(fleet.upkeep.tick() for _ in range(8)))
        granted += sum(tick.granted_us for tick in ticks)
        ran += sum(tick.ran for tick in ticks)
    assert ran > 1
    assert granted / 1e6 / (time.time() - start) < 0.33


async def test_a_backlog_that_would_keep_heartbeats_waiting_gets_twice_as_much(fleet: Fleet) -> None:
    reporter = ReportingWorker(fleet.redis, fleet)
    for batches, granted_us in ((4_000, 60_000), (200, 120_000)):
        await write(reporter, batches, each=1)
        await ticked_ago(fleet, 5_000)
        assert (await fleet.upkeep.tick()).granted_us == granted_us


# ---------------------------------------------------------------- a step's use of the granted time


async def test_a_step_ends_when_the_grant_is_spent(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await write(reporter, 100)
    await fleet.upkeep.tick()
    fleet.upkeep.pace = replace(fleet.upkeep.pace, block_us=50.0)
    await ticked_ago(fleet, 100)
    applied = (await fleet.upkeep.step()).blocks
    assert 5 * 128 <= applied <= 10 * 128  # 30 ms at 6.5 ms each; 60 ms on a slow machine
    fleet.upkeep.pace = replace(fleet.upkeep.pace, block_us=1_000.0)
    assert (await fleet.upkeep.step()).blocks == 128, "there is always something done"


async def test_the_living_go_before_snapshots_that_fill(store: aioredis.Redis, fleet: Fleet) -> None:
    filling, live = ReportingWorker(store, fleet, "a"), ReportingWorker(store, fleet, "b")
    await filling.join()
    await filling.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await filling.applied()
    for number in range(120):
        await filling.send("chunk", NAME.encode() + block(number))
    await write(live, 40)
    await fleet.upkeep.tick()
    tick = await fleet.upkeep.tick()
    assert (tick.backlog, tick.snapshots) == (("events:b.0",), ("events:a.0",))
    fleet.upkeep.pace = replace(fleet.upkeep.pace, max_blocks=4, call_us=1_000, entry_us=0, block_us=0.0)
    await live.applied()
    await write(live, 40, each=4)
    await ticked_ago(fleet, 100)
    before = await store.xlen(live.stream), await store.xlen(filling.stream)
    await fleet.upkeep.step()
    done = before[0] - await store.xlen(live.stream), before[1] - await store.xlen(filling.stream)
    assert done[0] >= 2 * done[1] > 0, "three quarters and one"
    await live.applied()
    await ticked_ago(fleet, 100)
    await fleet.upkeep.step()
    assert before[1] - done[1] - await store.xlen(filling.stream) >= 25, "alone it gets everything"


# ---------------------------------------------------------------- requests in between


def decide_all_the_time(url: str, model: str, done: Event, taken: Queue[tuple[float, float]]) -> None:
    """Make a router's decisions until ``done``, in a separate process, because threads would share the test's GIL.

    taken: the start of each decision by the monotonic clock, and its duration in seconds.
    """

    async def run() -> None:
        async with connect(url, timeout_s=5) as client:
            fleet = Fleet(client, model, timeouts=PATIENT)
            keyspace = Keyspace(client, fleet, seed=2)
            for number in count():
                if done.is_set():
                    return
                ask = replace(keyspace.ask(keyspace.chain(100)), reservation=f"wf-{number}")
                start = time.monotonic()
                await fleet.bookings.decide(ask)
                taken.put((start, time.monotonic() - start))
                await fleet.bookings.settle(ask.reservation, "cancelled")
                await asyncio.sleep(0.002)

    asyncio.run(run())


async def test_decisions_are_prompt_while_a_backlog_is_worked_off(
    store: aioredis.Redis, redis_url: str, fleet: Fleet, model: str
) -> None:
    keyspace = Keyspace(store, fleet)
    await keyspace.workers(8)
    await keyspace.ticked(grace_ms=60_000)  # the workers have no API servers
    cores = [ReportingWorker(store, fleet, f"c{number}") for number in range(64)]
    for reporter in cores:
        await write(reporter, 16)
    fleet.upkeep.pace, processes = Pace(), multiprocessing.get_context("spawn")
    done, taken = processes.Event(), processes.Queue()
    requests = processes.Process(target=decide_all_the_time, args=(redis_url, model, done, taken))
    requests.start()
    decisions: list[tuple[float, float]] = []

    def seen() -> int:
        while not taken.empty():
            decisions.append(taken.get())
        return len(decisions)

    await poll(lambda: seen() >= 50, 60, "decisions without a backlog")
    started, applied = time.monotonic(), 0

    async def empty() -> bool:
        nonlocal applied
        applied += (await fleet.upkeep.step()).blocks
        seen()
        await asyncio.sleep(0.02)
        return applied == 64 * 16 * 128

    try:
        await poll(empty, 60, "the backlog is worked off")
    finally:
        ended = time.monotonic()
        done.set()
        while requests.is_alive() or not taken.empty():  # a process does not end before its queue is read
            seen()
            requests.join(0.01)
    spent_us = fleet.upkeep._cost_us(64 * 16, 64 * 16, applied)
    assert spent_us / 1e6 / (ended - started) < 0.4, "no more than its share, by estimate"
    before = [seconds for began, seconds in decisions if began < started]
    meanwhile = [seconds for began, seconds in decisions if started <= began < ended]
    assert len(meanwhile) > 50
    assert statistics.median(meanwhile) < 5 * statistics.median(before), "no call of upkeep is long"
    assert await cores[63].holds() == held(*range(16 * 128))
