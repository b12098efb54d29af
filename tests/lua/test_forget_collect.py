"""forget and collect: a worker that is gone, and the removal of its entries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from tests.support.fleet.reporting_worker import SHA, ReportingWorker, block, blocks, held

from warmfleet.fleet import Flag, Fleet, Question
from warmfleet.fleet.pool_registry import clear
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from tests.support.fleet.keyspace import Keyspace


async def worker(store: aioredis.Redis, fleet: Fleet, server_id: str = "s", rank: int = 0) -> ReportingWorker:
    reporter = ReportingWorker(store, fleet, server_id, rank)
    await reporter.join()
    await reporter.send("stored", blocks(1, 2, 3))
    await reporter.applied()
    return reporter


async def collected(fleet: Fleet) -> None:
    for _ in range(100):
        if not (await fleet.upkeep.collect(2))[1]:
            return
    raise AssertionError("collection never ends")


async def keys_of(fleet: Fleet) -> set[str]:
    prefix = fleet.keys.prefix
    found = [key async for key in fleet.redis.scan_iter(match=f"{prefix}*", count=1000)]
    return {key.decode(errors="replace").removeprefix(prefix) for key in found}


async def test_nothing_of_a_forgotten_worker_stays(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    await reporter.send("begin", wire.dumps({"snapshot": "0000000a", "command": None}))
    await reporter.send("chunk", b"0000000a" + blocks(8, 9))
    await reporter.applied()
    await store.hset(fleet.keys.servers, "s", wire.dumps({"artifacts": {"t": {"chunks": [SHA]}}}))
    await store.zadd(fleet.keys.alive_servers, {"s": 1})
    await store.set(fleet.keys.artifact("s", SHA), b"x")
    assert await fleet.upkeep.forget("s.0")
    assert not await fleet.upkeep.forget("s.0")
    await collected(fleet)
    assert await keys_of(fleet) == {"next_slot", "hello"}


async def test_the_server_stays_while_another_worker_of_it_does(store: aioredis.Redis, fleet: Fleet) -> None:
    await worker(store, fleet, "s", 0)
    other = await worker(store, fleet, "s", 1)
    await store.hset(fleet.keys.servers, "s", wire.dumps({"artifacts": {"t": {"chunks": [SHA]}}}))
    await store.set(fleet.keys.artifact("s", SHA), b"x")
    assert await fleet.upkeep.forget("s.0")
    await collected(fleet)
    assert await other.holds() == held(1, 2, 3)
    assert await store.exists(fleet.keys.artifact("s", SHA))
    assert await fleet.upkeep.forget("s.1")
    assert not await store.exists(fleet.keys.artifact("s", SHA))


async def test_one_that_came_back_is_not_forgotten(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await worker(store, fleet)
    assert not await fleet.upkeep.forget("s.0", 600_000)
    await store.zadd(fleet.keys.alive, {"s.0": time.time() * 1000 - 700_000})
    await reporter.heartbeat()
    assert not await fleet.upkeep.forget("s.0", 600_000), "a heartbeat is still unread"
    await reporter.applied()
    await store.zadd(fleet.keys.alive, {"s.0": time.time() * 1000 - 700_000})
    assert await fleet.upkeep.forget("s.0", 600_000)


async def test_nobody_is_forgotten_for_an_unknown_name(fleet: Fleet) -> None:
    for name in ("nobody.0", "nobody", "", "a b"):
        assert not await fleet.upkeep.forget(name)


async def test_a_lease_of_a_forgotten_worker_takes_nothing_from_its_successor(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    reporter = await worker(store, fleet)
    await route(reporter, "wf-old")
    await fleet.upkeep.forget("s.0")
    reporter.number = 0
    await reporter.join("n2")
    await reporter.applied()
    await route(reporter, "wf-new")
    before = await reporter.row()
    assert before.in_flight == 1
    await fleet.bookings.settle("wf-old", "finished")
    assert await reporter.row() == before


async def route(reporter: ReportingWorker, reservation: str) -> None:
    """Book a request on the only worker there is."""
    packed = bytearray((await reporter.row()).pack(reporter.worker_id))
    packed[20:22] = int(Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED).to_bytes(2, "big")
    await reporter.store.hset(reporter.keys.load, reporter.worker_id, bytes(packed))
    chain = Chain((await reporter.row()).scheme, 16, blocks(1))
    await reporter.fleet.bookings.decide(Question(reservation, (chain,), prompt_tokens=40, decode_tokens=5))


async def test_collect_is_bounded_and_leaves_live_slots_alone(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter, other = await worker(store, fleet), await worker(store, fleet, "t")
    await reporter.send("cleared")
    await reporter.send("stored", blocks(2))
    await reporter.applied()
    assert await fleet.upkeep.collect(2) == (2, 1)
    assert await fleet.upkeep.collect(2) == (1, 0)
    assert await fleet.upkeep.collect(2) == (0, 0)
    assert await reporter.holds() == held(2)
    assert await other.holds() == held(1, 2, 3)
    members = await store.smembers(fleet.keys.block(block(1)))
    assert len(members) == 1


async def test_small_slots_go_many_at_a_time(store: aioredis.Redis, fleet: Fleet) -> None:
    """Each snapshot that is begun retires a slot: a worker that begins them without end must not outrun collect."""
    for slot in range(1, 101):
        await cast("Any", store.sadd(fleet.keys.retired, slot))
        await cast("Any", store.sadd(fleet.keys.slot(slot), block(slot)))
        await cast("Any", store.sadd(fleet.keys.block(block(slot)), slot))
    removed, left = await fleet.upkeep.collect(128)
    assert (removed, left) == (15, 85)  # 15 x (1 + 8) blocks' worth
    await fleet.upkeep.step()
    assert await cast("Any", store.scard(fleet.keys.retired)) == 0
    assert not [key async for key in store.scan_iter(fleet.keys.prefix + "[bs]:*")]


async def test_the_mirror_of_an_approximate_worker_is_collected(store: aioredis.Redis, fleet: Fleet) -> None:
    keys = fleet.keys
    await store.sadd(keys.retired, 7)
    await store.zadd(f"{keys.prefix}lru:7", {block(1): 1, block(2): 2, b"outdated up to here": 2.5, block(3): 3})
    await store.hset(keys.speculative(block(1)), mapping={"7": 1, "8": 1})
    await store.hset(keys.speculative(block(2)), "7", "2")
    await collected(fleet)
    assert await store.hgetall(keys.speculative(block(1))) == {b"8": b"1"}
    assert await store.hgetall(keys.speculative(block(2))) == {b"7": b"1"}
    assert not await store.exists(keys.speculative(block(3)), f"{keys.prefix}x:outdated up to here")
    assert not await store.exists(f"{keys.prefix}lru:7")


async def test_nothing_of_a_removed_pools_requests_stays(keyspace: Keyspace) -> None:
    """A request that decided a moment ago, and those whose blocks the engine has yet to report when it leaves."""
    await keyspace.workers(2)
    for ended in [False, True] * 10:
        ask = keyspace.ask(keyspace.chain(20))
        await keyspace.fleet.bookings.decide(ask)
        if ended:
            await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    assert await clear(keyspace.fleet, shared=False)
    assert await keyspace.store.keys(keyspace.keys.prefix + "*") == []
    assert not await clear(keyspace.fleet, shared=False)
