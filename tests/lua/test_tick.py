"""tick, through Upkeep.tick: backlog, hello, grace, servers, snapshots, workers to be forgotten."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, digest_of
from tests.support.fleet.ticking import EVERY, now_ms, ticking, worker

from warmfleet.fleet import Fleet
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    return await ticking(store, model)


# ---------------------------------------------------------------- gate and grace


async def test_only_one_of_many_runs(fleet: Fleet) -> None:
    await asyncio.sleep(0.1)
    fleet.upkeep.pace = Pace(min_gap_ms=90)
    ticks = await asyncio.gather(*(fleet.upkeep.tick() for _ in range(20)))
    assert sum(tick.ran for tick in ticks) == 1


async def test_a_first_tick_begins_a_grace_of_one_ttl(store: aioredis.Redis, model: str) -> None:
    fleet = Fleet(store, model)
    fleet.upkeep.pace = replace(EVERY, ttl_ms=60_000)
    assert (await fleet.upkeep.tick()).grace
    last, until, *_ = map(int, cast("bytes", await store.get(fleet.keys.tick)).split())
    assert until - last == 60_000
    assert (await fleet.upkeep.tick()).grace
    fleet.upkeep.pace = Pace(min_gap_ms=60_000)
    skipped = await fleet.upkeep.tick()
    assert not skipped.ran
    assert skipped.grace


@pytest.mark.parametrize(("ago_ms", "grace"), [(2_000, False), (3_000, True), (-5_000, True)])
async def test_grace_after_a_pause_and_after_a_clock_that_went_back(fleet: Fleet, ago_ms: int, grace: bool) -> None:
    await fleet.redis.set(fleet.keys.tick, f"{now_ms() - ago_ms} 0 0")
    tick = await fleet.upkeep.tick()
    assert tick.ran
    assert tick.grace is grace


# ---------------------------------------------------------------- hello and backlog


async def test_hello_names_streams_that_exist(store: aioredis.Redis, fleet: Fleet) -> None:
    await ReportingWorker(store, fleet).join()
    await store.xadd(fleet.keys.server("s"), cast("dict[Any, Any]", wire.entry("n", 1, "join")))
    await store.xadd(fleet.keys.hello, {"s": "server:s"})
    tick = await fleet.upkeep.tick()
    assert set(tick.backlog) == {"events:s.0", "server:s"}
    assert await store.xlen(fleet.keys.hello) == 0
    await fleet.upkeep.apply("s.0")
    assert (await fleet.upkeep.tick()).backlog == ("server:s",)


@pytest.mark.parametrize("name", ["events:a b", "events:", "events:" + "x" * 65, "load:s.0", "x:events:s.0"])
async def test_a_forged_hello_changes_nothing(store: aioredis.Redis, fleet: Fleet, name: str) -> None:
    for stream in (name, "events:x"):
        await store.xadd(fleet.keys.prefix + stream, {"a": "stream"})
    for stream in (name, "events:nobody", "tick"):
        await store.xadd(fleet.keys.hello, {"s": stream})
    await store.xadd(fleet.keys.hello, {"t": "events:x"})
    assert (await fleet.upkeep.tick()).backlog == ()
    assert not await store.exists(fleet.keys.cursor)


async def test_hello_is_read_in_pieces_and_survives_misuse(store: aioredis.Redis, fleet: Fleet) -> None:
    for _ in range(300):
        await store.xadd(fleet.keys.hello, {"s": "events:nobody"})
    await fleet.upkeep.tick()
    assert await store.xlen(fleet.keys.hello) == 44
    await store.xadd(fleet.keys.hello, {"s": "events:s.0"}, id="18446744073709551615-18446744073709551614")
    await fleet.upkeep.tick()
    assert not await store.exists(fleet.keys.hello)
    await store.set(fleet.keys.hello, "no stream")
    await fleet.upkeep.tick()
    await ReportingWorker(store, fleet).join()
    assert (await fleet.upkeep.tick()).backlog == ("events:s.0",)


async def test_a_flood_of_hints_delays_a_join_by_seconds_and_takes_no_memory(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    pipe = store.pipeline(transaction=False)
    for number in range(20_000):
        pipe.xadd(fleet.keys.hello, {"s": f"events:fake{number}.0"})
    await pipe.execute()
    await ReportingWorker(store, fleet).join()
    await store.xadd(fleet.keys.server("s"), cast("dict[Any, Any]", wire.entry("n", 1, "join")))  # its hint is lost
    ticks, backlog = 0, set[str]()
    while not backlog:
        backlog, ticks = set((await fleet.upkeep.tick()).backlog), ticks + 1
        assert await store.xlen(fleet.keys.hello) < 4_096
    assert backlog == {"events:s.0", "server:s"}
    assert ticks <= 16, "40 ticks a second are allowed"


async def test_a_hello_whose_ids_are_used_up_is_deleted_though_it_is_empty(store: aioredis.Redis, fleet: Fleet) -> None:
    last = "18446744073709551615-18446744073709551615"
    await cast("Any", store).execute_command("XADD", fleet.keys.hello, "MAXLEN", "=", "0", last, "s", "x")
    assert await store.xlen(fleet.keys.hello) == 0
    await fleet.upkeep.tick()
    await ReportingWorker(store, fleet).join()
    assert (await fleet.upkeep.tick()).backlog == ("events:s.0",)


async def test_a_clock_that_stepped_back_leaves_nothing_in_the_future(store: aioredis.Redis, fleet: Fleet) -> None:
    """Times in the future would keep dead workers alive until the clock catches up, and snapshots under way."""
    await worker(store, fleet)
    now = (await store.time())[0] * 1000
    later, keys = now + 3_600_000, (fleet.keys.alive, fleet.keys.alive_servers, fleet.keys.resync)
    for key in keys:
        await store.zadd(key, {"s.0": later})
    await store.set(fleet.keys.tick, f"{later} 0 0 0 {later}")
    await fleet.upkeep.tick(used_permille=100)
    for key in keys:
        assert now <= cast("float", await store.zscore(key, "s.0")) <= now + 60_000
    assert int(cast("bytes", await store.get(fleet.keys.tick)).split()[4]) <= now + 60_000


async def test_the_dead_do_not_stand_in_the_way_of_a_resync(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    now = now_ms()
    await store.set(fleet.keys.tick, f"{now - 100} 0 0")  # no grace
    await store.zadd(fleet.keys.resync, {f"dead-{number}.0": -now + 100_000 for number in range(64)})
    await store.zadd(fleet.keys.resync, {reporter.worker_id: -now})
    await fleet.upkeep.tick()
    await fleet.upkeep.tick()
    assert await store.zcard(fleet.keys.resync) == 1
    assert json.loads(cast("bytes", await store.get(fleet.keys.command(reporter.worker_id))))["do"] == "resync"


async def test_a_known_cursor_is_not_reset_by_hello(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    cursor = await store.hget(fleet.keys.cursor, "events:s.0")
    await store.xadd(fleet.keys.hello, {"s": "events:s.0"})
    await fleet.upkeep.tick()
    assert cursor == await store.hget(fleet.keys.cursor, "events:s.0")
    assert await reporter.store.xlen(reporter.stream) == 0


async def test_every_stream_gets_its_turn(store: aioredis.Redis, fleet: Fleet) -> None:
    fleet.upkeep.pace = replace(EVERY, max_streams=3)
    for number in range(8):
        await ReportingWorker(store, fleet, f"w{number}").join()
    seen: set[str] = set()
    for _ in range(3):
        backlog = (await fleet.upkeep.tick()).backlog
        assert len(backlog) == 3
        seen |= set(backlog)
    assert seen == {f"events:w{number}.0" for number in range(8)}


async def test_a_stream_that_became_another_type_is_reported(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await store.delete(reporter.stream)
    await store.set(reporter.stream, "no stream")
    assert (await fleet.upkeep.tick()).backlog == ("events:s.0",)


# ---------------------------------------------------------------- snapshots


async def test_two_snapshots_at_once_and_the_longest_waiting_first(store: aioredis.Redis, fleet: Fleet) -> None:
    cores = [await worker(store, fleet, name) for name in "dcba"]
    for reporter in cores:
        await reporter.heartbeat(digest_of(1))
        await reporter.applied()
        await asyncio.sleep(0.002)
    for _ in range(3):
        await fleet.upkeep.tick()
    commands = [await reporter.command() for reporter in cores]
    assert [command.get("do") for command in commands] == ["resync", "resync", None, None]
    assert commands[0]["id"] != commands[1]["id"]
    assert commands[0]["nonce"] == "n1"
    await cores[1].snapshot([1], command=commands[1]["id"])
    await cores[1].applied()
    await fleet.upkeep.tick()
    assert [(await reporter.command()).get("do") for reporter in cores] == ["resync", None, "resync", None]


async def test_a_command_is_issued_again_after_30_s_without_progress(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await store.zadd(fleet.keys.resync, {"s.0": -1})
    await fleet.upkeep.tick()
    first = (await reporter.command())["id"]
    await fleet.upkeep.tick()
    assert (await reporter.command())["id"] == first
    await store.zadd(fleet.keys.resync, {"s.0": now_ms() - 31_000})
    await fleet.upkeep.tick()
    assert (await reporter.command())["id"] != first


async def test_a_chunk_is_progress(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await reporter.send("begin", wire.dumps({"snapshot": "0000000a", "command": None}))
    await reporter.applied()
    await store.zadd(fleet.keys.resync, {"s.0": now_ms() - 31_000})
    await reporter.send("chunk", b"0000000a" + blocks(1))
    await reporter.applied()
    await fleet.upkeep.tick()
    assert "do" not in await reporter.command()


async def test_a_dead_worker_keeps_nobody_waiting(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await store.zadd(fleet.keys.resync, {"gone.0": now_ms(), "lost.0": now_ms(), "s.0": -1})
    await fleet.upkeep.tick()
    assert (await reporter.command())["do"] == "resync"
    assert not await store.exists(fleet.keys.command("gone.0"))


async def test_a_rejoin_is_not_overwritten_by_a_resync(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await store.set(reporter.stream, "no stream")
    await reporter.applied()
    await store.zadd(fleet.keys.resync, {"s.0": -1})
    await fleet.upkeep.tick()
    assert (await reporter.command())["do"] == "rejoin"
