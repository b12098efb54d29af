"""The work of tick once a second: which servers live, the median speed, which workers are to be forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.lua.stream import Core
from tests.lua.ticking import EVERY, now_ms, slow_tick, ticking, worker

from warmfleet.fleet import Flag, Fleet

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    return await ticking(store, model)


# ---------------------------------------------------------------- servers and speed


async def test_a_silent_server_loses_its_flag_and_gets_it_back(store: aioredis.Redis, fleet: Fleet) -> None:
    core = await worker(store, fleet)
    await store.zadd(fleet.keys.alive_servers, {"s": now_ms()})
    await slow_tick(fleet)
    assert (await core.row()).flags == Flag.SERVER | Flag.CLOSED
    await store.zadd(fleet.keys.alive_servers, {"s": now_ms() - 60_000})
    await slow_tick(fleet, grace_ms=9000)
    assert (await core.row()).flags & Flag.SERVER, "in grace nobody expires"
    await slow_tick(fleet)
    assert (await core.row()).flags == Flag.CLOSED


async def test_median_speed_of_those_that_measured(store: aioredis.Redis, fleet: Fleet) -> None:
    for name, speed in (("a", 0), ("b", 9000), ("c", 500), ("d", 4000)):
        core = await worker(store, fleet, name)
        await core.heartbeat(speed_tps=speed)
        await core.applied()
    await slow_tick(fleet)
    assert cast("bytes", await store.get(fleet.keys.tick)).split()[2] == b"4000"


# ---------------------------------------------------------------- who is to be forgotten


async def silent_worker(store: aioredis.Redis, fleet: Fleet) -> Core:
    """Make the worker's last sign of life an hour old, in `alive` and in its stream."""
    core, then = Core(store, fleet), now_ms() - 3_600_000
    await core.join(at=f"{then}-0")
    await core.applied()
    return core


async def test_a_worker_silent_for_ten_minutes_is_due(store: aioredis.Redis, fleet: Fleet) -> None:
    await silent_worker(store, fleet)
    await worker(store, fleet, "young")
    assert (await slow_tick(fleet, grace_ms=9000)).forget == ()
    assert (await slow_tick(fleet)).forget == ("s.0",)


@pytest.mark.parametrize("age_ms", [0, 3_500_000])
async def test_unread_entries_keep_a_silent_worker(store: aioredis.Redis, fleet: Fleet, age_ms: int) -> None:
    core = await silent_worker(store, fleet)
    await core.heartbeat(at=f"{now_ms() - age_ms}-0")
    tick = await slow_tick(fleet)
    assert tick.forget == ()
    assert "events:s.0" in tick.backlog


async def test_one_that_said_goodbye_is_due_as_late_as_any_other(store: aioredis.Redis, fleet: Fleet) -> None:
    core = await silent_worker(store, fleet)
    await core.send("leave")
    await core.applied()
    assert (await slow_tick(fleet)).forget == ()
    fleet.pace = replace(EVERY, forget_ms=1)
    await asyncio.sleep(0.005)  # it is silent for longer than that
    assert (await slow_tick(fleet)).forget == ("s.0",)


async def test_a_stream_that_nobody_can_write_to_any_more_keeps_nobody(store: aioredis.Redis, fleet: Fleet) -> None:
    """Once its worker is forgotten the stream is gone; the writer notices, and joins."""
    core = await silent_worker(store, fleet)
    end = 2**64 - 1
    await cast("Any", store).execute_command("XADD", core.stream, "MAXLEN", 0, f"{end}-{end}", "a", "b")
    assert (await slow_tick(fleet)).forget == ("s.0",)
    assert await fleet.forget("s.0", 600_000)
    assert not await store.exists(core.stream)


async def test_an_approximate_worker_that_its_router_calls_unhealthy_stays(store: aioredis.Redis, fleet: Fleet) -> None:
    await fleet.register("ap", {"scheme_id": 1, "url": "http://x", "models": ["m"]}, 100, healthy=True)
    await store.zrem(fleet.keys.alive, "ap")
    assert (await slow_tick(fleet)).forget == ()
    await store.zadd(fleet.keys.alive, {"ap": now_ms() - 3_600_000})
    assert (await slow_tick(fleet)).forget == ("ap",)


async def test_a_server_without_workers_is_due(store: aioredis.Redis, fleet: Fleet) -> None:
    await store.hset(fleet.keys.servers, "lonely", '{"artifacts":{}}')
    await store.zadd(fleet.keys.alive_servers, {"lonely": now_ms() - 3_600_000})
    assert (await slow_tick(fleet)).forget == ("lonely.0",)
    assert await fleet.forget("lonely.0", 600_000)
    assert not await store.exists(fleet.keys.servers)
