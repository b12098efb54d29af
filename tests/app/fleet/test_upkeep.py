"""Replicas, alone or together, run upkeep step by step, as a router does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, digest_of, held
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, Proof, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    """A fleet that ticks at every call."""
    fleet = Fleet(store, model)
    fleet.upkeep.pace = Pace(min_gap_ms=0)
    return fleet


async def test_a_step_finds_a_worker_and_applies_what_it_wrote(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await reporter.send("stored", blocks(1, 2, 3))
    assert (await fleet.upkeep.step()).blocks == 3
    assert (await fleet.upkeep.step()).blocks == 0
    assert await reporter.holds() == held(1, 2, 3)


async def test_a_step_is_bounded_and_fair(store: aioredis.Redis, fleet: Fleet) -> None:
    fleet.upkeep.pace = Pace(min_gap_ms=0, applies=6, max_blocks=10)
    busy, quiet = ReportingWorker(store, fleet, "busy"), ReportingWorker(store, fleet, "quiet")
    for reporter, batches in ((busy, 40), (quiet, 1)):
        await reporter.join()
        await reporter.applied()
        for number in range(batches):
            await reporter.send("stored", blocks(*range(10 * number, 10 * number + 10)))
    assert (await fleet.upkeep.step()).blocks == 60
    assert len(await quiet.holds()) == 10
    assert len(await busy.holds()) == 50
    total = 60
    for _ in range(20):
        total += (await fleet.upkeep.step()).blocks
    assert total == 410


async def test_several_replicas_share_the_work_and_apply_it_once(
    store: aioredis.Redis, redis_url: str, model: str
) -> None:
    clients = [connect(redis_url, timeout_s=5) for _ in range(4)]
    replicas = [Fleet(client, model) for client in clients]
    cores = [ReportingWorker(store, replicas[0], f"w{number}") for number in range(6)]
    for reporter in cores:
        await reporter.join()
        for number in range(30):
            await reporter.send("stored", blocks(*range(20 * number, 20 * number + 20)))

    async def work(replica: Fleet) -> int:
        replica.upkeep.pace, blocks_applied = Pace(min_gap_ms=1, applies=8), 0

        async def empty() -> bool:
            nonlocal blocks_applied
            blocks_applied += (await replica.upkeep.step()).blocks
            return not any([await store.xlen(reporter.stream) for reporter in cores])

        await poll(empty, what="all streams applied")
        return blocks_applied

    assert sum(await asyncio.gather(*(work(replica) for replica in replicas))) == 6 * 600
    for reporter in cores:
        assert await reporter.holds() == held(*range(600))
    assert await replicas[0].index.counts() == {}
    for client in clients:
        await client.aclose()


async def test_steps_collect_what_was_retired(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await reporter.send("stored", blocks(*range(100)))
    await reporter.send("cleared")
    await reporter.send("stored", blocks(7))
    fleet.upkeep.pace = Pace(min_gap_ms=0, max_blocks=16)

    async def clean() -> bool:
        await fleet.upkeep.step()
        return not await reporter.retired()

    await poll(clean, what="collection")
    keys = [key async for key in store.scan_iter(match=f"{fleet.keys.prefix}b:*", count=1000)]
    assert len(keys) == 1
    assert await reporter.holds() == held(7)


async def test_steps_heal_a_worker_that_lost_events(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await reporter.send("stored", blocks(1))
    await reporter.heartbeat(digest_of(1, 2))
    await fleet.upkeep.step()
    await fleet.upkeep.step()
    command = await reporter.command()
    assert command["do"] == "resync"
    await reporter.snapshot([1, 2], command=command["id"])
    await reporter.heartbeat(digest_of(1, 2))
    await fleet.upkeep.step()
    await fleet.upkeep.step()
    assert await reporter.holds() == held(1, 2)
    assert await reporter.waiting() is None
    assert await fleet.index.counts() == {"mismatch": 1, "resync_digest": 1}


async def test_a_step_forgets_who_is_long_gone(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(at=f"{int(time.time() * 1000) - 3_600_000}-0")
    await reporter.send("stored", blocks(1))
    fleet.upkeep.pace = replace(fleet.upkeep.pace, ttl_ms=0, forget_ms=100)  # grace is over

    async def gone() -> bool:
        await fleet.upkeep.step()
        return not await store.exists(fleet.keys.workers, fleet.keys.load, fleet.keys.block(blocks(1)))

    await poll(gone, what="forgetting and collection")
    assert not await store.exists(fleet.keys.retired)


async def test_a_server_and_its_workers_come_up_by_steps(store: aioredis.Redis, fleet: Fleet, model: str) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    announced = {"schema": 1, "server_id": "s", "url": "http://h:1", "models": [model]}
    announced |= {"artifacts": {}, "facts": {}}
    entry = wire.entry("m1", 1, "join", wire.dumps(announced | {"version": "1"}))
    await store.xadd(fleet.keys.server("s"), entry)  # type: ignore[arg-type]
    await store.xadd(fleet.keys.hello, {"s": "server:s"})
    await fleet.upkeep.step()
    assert await fleet.probes.prove("s.0", reporter.nonce, Proof("proven", "")) == "OK"
    (view,) = await fleet.workers.read()
    assert view.routable
    assert view.url == "http://h:1"


async def test_a_full_store_is_still_collected(model: str) -> None:
    with server(valkey_binary()) as url:
        async with connect(url, timeout_s=5) as store:
            fleet = Fleet(store, model)
            fleet.upkeep.pace = Pace(min_gap_ms=0)
            reporter = ReportingWorker(store, fleet)
            await reporter.join()
            await reporter.send("stored", blocks(*range(120)))
            await reporter.send("cleared")
            await reporter.applied()
            await reporter.send("stored", blocks(1))
            await store.config_set("maxmemory", 1)
            await fleet.upkeep.step()
            assert await store.dbsize() < 30
            assert await reporter.holds() == set()
            await store.config_set("maxmemory", 0)
            await reporter.send("stored", blocks(2))
            fleet.upkeep.pace = replace(fleet.upkeep.pace, short_ms=0)
            await fleet.upkeep.step()
            assert await reporter.holds() == held(2)


async def test_without_redis_every_call_says_so(model: str) -> None:
    async with connect("unix:///nowhere/s") as client:
        fleet = Fleet(client, model)
        upkeep = fleet.upkeep
        calls = (upkeep.step(), upkeep.tick(), upkeep.apply("s.0"), upkeep.apply_server("s"), upkeep.collect())
        for call in calls:
            with pytest.raises(FleetUnavailable):
                await call
        with pytest.raises(FleetUnavailable):
            await fleet.upkeep.forget("s.0")
