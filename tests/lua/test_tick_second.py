"""The work of tick once a second: which servers live, the median speed, which workers are to be forgotten."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, blocks
from tests.support.fleet.ticking import EVERY, now_ms, slow_tick, ticking, worker

from warmfleet.fleet import Check, Flag, Fleet, Proof

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    return await ticking(store, model)


# ---------------------------------------------------------------- servers and speed


async def test_a_silent_server_loses_its_flag_and_gets_it_back(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await store.zadd(fleet.keys.alive_servers, {"s": now_ms()})
    await slow_tick(fleet)
    assert (await reporter.row()).flags == Flag.SERVER | Flag.CLOSED
    await store.zadd(fleet.keys.alive_servers, {"s": now_ms() - 60_000})
    await slow_tick(fleet, grace_ms=9000)
    assert (await reporter.row()).flags & Flag.SERVER, "in grace nobody expires"
    await slow_tick(fleet)
    assert (await reporter.row()).flags == Flag.CLOSED


async def test_median_speed_of_those_that_measured(store: aioredis.Redis, fleet: Fleet) -> None:
    for name, speed in (("a", 0), ("b", 9000), ("c", 500), ("d", 4000)):
        reporter = await answering(store, fleet, name)
        await reporter.heartbeat(speed_tps=speed)
        await reporter.applied()
    await slow_tick(fleet)
    assert cast("bytes", await store.get(fleet.keys.tick)).split()[2] == b"4000"


async def answering(
    store: aioredis.Redis, fleet: Fleet, name: str, capacity_blocks: int | None = None
) -> ReportingWorker:
    """A worker whose URL has answered a probe."""
    reporter = await worker(store, fleet, name)
    if capacity_blocks is not None:
        await reporter.join(nonce="5ea50003", capacity_blocks=capacity_blocks)
        await reporter.applied()
    nonce = json.loads(cast("Any", await store.hget(fleet.keys.workers, f"{name}.0")))["nonce"]
    await fleet.probes.prove(f"{name}.0", nonce, Proof("proven", "a test"))
    return reporter


async def test_claims_of_workers_that_proved_nothing_move_no_median(store: aioredis.Redis, fleet: Fleet) -> None:
    honest = await answering(store, fleet, "a")
    await honest.heartbeat(speed_tps=4_000)
    await honest.applied()
    for name in "bcdefg":
        reporter = await worker(store, fleet, name)
        await reporter.heartbeat(speed_tps=4_000_000_000)
        await reporter.applied()
    await slow_tick(fleet)
    assert cast("bytes", await store.get(fleet.keys.tick)).split()[2::3] == [b"4000", b"1000"]


@pytest.mark.parametrize(("claimed", "believed"), [(2**31 - 1, 4_000), (0, 1_000), (1_500, 1_500)])
async def test_a_cache_is_believed_up_to_four_times_the_median(
    store: aioredis.Redis, fleet: Fleet, claimed: int, believed: int
) -> None:
    for name in "abc":
        await answering(store, fleet, name)
    liar = await answering(store, fleet, "d", capacity_blocks=claimed)
    await slow_tick(fleet)
    await liar.heartbeat()
    await liar.applied()
    assert (await liar.row()).capacity_blocks == believed


@pytest.mark.parametrize(("typical", "bound"), [(10, 2 * 524_288), (262_144, 16 * 262_144)])
async def test_the_index_of_a_worker_is_bounded_by_the_fleets_caches(
    store: aioredis.Redis, fleet: Fleet, typical: int, bound: int
) -> None:
    """The index is bounded by a million blocks where the fleet's caches are small."""
    for name in "abc":
        await answering(store, fleet, name, capacity_blocks=typical)
    liar = await answering(store, fleet, "d", capacity_blocks=2**31 - 1)
    await slow_tick(fleet)
    held = struct.pack(">3I", bound + 8 * 128 - 3 * 128, 0, 0)  # as if the worker had reported this many
    await cast("Any", store.hset(fleet.keys.digest, liar.worker_id, held))
    for at in range(20):
        await liar.send("stored", blocks(*range(128 * at, 128 * at + 128)))
    await liar.applied()
    assert await store.scard(fleet.keys.slot((await liar.row()).slot)) == 3 * 128


async def test_a_large_engine_among_small_ones_is_indexed_as_a_whole(store: aioredis.Redis, fleet: Fleet) -> None:
    for name in "abc":
        await answering(store, fleet, name, capacity_blocks=10)
    large = await answering(store, fleet, "d", capacity_blocks=3_000)
    await slow_tick(fleet)
    for at in range(20):
        await large.send("stored", blocks(*range(128 * at, 128 * at + 128)))
    await large.applied()
    assert len(await large.holds()) == 20 * 128
    assert (await large.row()).capacity_blocks == 40, "a decision believes no more"
    assert "overflow" not in await fleet.index.counts()


async def test_a_worker_holds_at_least_what_it_reported(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet, "a")
    await reporter.send("stored", blocks(1, 2, 3))
    await reporter.heartbeat(blocks=0)
    await reporter.applied()
    assert (await reporter.row()).blocks == 3


# ---------------------------------------------------------------- workers to be forgotten


async def silent_worker(store: aioredis.Redis, fleet: Fleet) -> ReportingWorker:
    """Make the worker's last sign of life an hour old, in `alive` and in its stream."""
    reporter, then = ReportingWorker(store, fleet), now_ms() - 3_600_000
    await reporter.join(at=f"{then}-0")
    await reporter.applied()
    return reporter


async def test_a_worker_silent_for_ten_minutes_is_due(store: aioredis.Redis, fleet: Fleet) -> None:
    await silent_worker(store, fleet)
    await worker(store, fleet, "young")
    assert (await slow_tick(fleet, grace_ms=9000)).forget == ()
    assert (await slow_tick(fleet)).forget == ("s.0",)


@pytest.mark.parametrize("age_ms", [0, 3_500_000])
async def test_unread_entries_keep_a_silent_worker(store: aioredis.Redis, fleet: Fleet, age_ms: int) -> None:
    reporter = await silent_worker(store, fleet)
    await reporter.heartbeat(at=f"{now_ms() - age_ms}-0")
    tick = await slow_tick(fleet)
    assert tick.forget == ()
    assert "events:s.0" in tick.backlog


async def test_one_that_said_goodbye_is_due_as_late_as_any_other(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await silent_worker(store, fleet)
    await reporter.send("leave")
    await reporter.applied()
    assert (await slow_tick(fleet)).forget == ()
    fleet.upkeep.pace = replace(EVERY, forget_ms=1)
    await asyncio.sleep(0.005)  # the worker is silent for longer than that
    assert (await slow_tick(fleet)).forget == ("s.0",)


async def test_a_stream_that_nobody_can_write_to_any_more_keeps_nobody(store: aioredis.Redis, fleet: Fleet) -> None:
    """Once its worker is forgotten the stream is gone; the writer notices, and joins."""
    reporter = await silent_worker(store, fleet)
    end = 2**64 - 1
    await cast("Any", store).execute_command("XADD", reporter.stream, "MAXLEN", 0, f"{end}-{end}", "a", "b")
    assert (await slow_tick(fleet)).forget == ("s.0",)
    assert await fleet.upkeep.forget("s.0", 600_000)
    assert not await store.exists(reporter.stream)


async def test_an_approximate_worker_stays_while_a_replica_checks_it(store: aioredis.Redis, fleet: Fleet) -> None:
    record = {"scheme_id": 1, "url": "http://x"}
    await fleet.workers.register("ap", record, 100)
    await fleet.workers.register("ap", record, 100, Check("FAILED"))
    assert (await slow_tick(fleet)).forget == (), "it is checked, and may come back"
    known = json.loads(await cast("Any", store.hget(fleet.keys.workers, "ap")))
    await store.hset(fleet.keys.workers, "ap", json.dumps(known | {"checked": now_ms() - 3_600_000}))
    assert (await slow_tick(fleet)).forget == ("ap",), "no replica lists it any more"
    del known["checked"]
    await store.hset(fleet.keys.workers, "ap", json.dumps(known))
    assert (await slow_tick(fleet)).forget == (), "a replica of before 2026-11-23 may check it"
    noted = json.loads(await cast("Any", store.hget(fleet.keys.workers, "ap")))
    assert noted.pop("checked") > now_ms() - 60_000, "from now on its time runs"
    assert noted == known
    await fleet.workers.register("ap", record, 100)
    await store.zadd(fleet.keys.alive, {"ap": now_ms() - 3_600_000})
    assert (await slow_tick(fleet)).forget == ("ap",)


async def test_a_server_without_workers_is_due(store: aioredis.Redis, fleet: Fleet) -> None:
    await store.hset(fleet.keys.servers, "lonely", '{"artifacts":{}}')
    await store.zadd(fleet.keys.alive_servers, {"lonely": now_ms() - 3_600_000})
    assert (await slow_tick(fleet)).forget == ("lonely.0",)
    assert await fleet.upkeep.forget("lonely.0", 600_000)
    assert not await store.exists(fleet.keys.servers)
