"""A tier that several workers read (a store) is one set of blocks, which any of them changes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks, digest_of, held

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

STORE, OTHER = "0123456789abcdef", "fedcba9876543210"


def reads(store: str = STORE, **more: Any) -> dict[str, Any]:
    return {"disk": {"bytes_per_token": 1_000_000, "store": store} | more}


async def slot_of(reporter: ReportingWorker) -> int:
    return cast("int", (await reporter.record())["sets"]["disk"]["slot"])


async def joined(store: aioredis.Redis, fleet: Fleet, name: str, sets: dict[str, Any]) -> ReportingWorker:
    reporter = ReportingWorker(store, fleet, name)
    await reporter.join(sets=sets)
    await reporter.applied()
    return reporter


async def report(reporter: ReportingWorker, operation: str, data: bytes | str) -> None:
    await reporter.send(operation, data)
    await reporter.applied()


async def collected(fleet: Fleet) -> None:
    while (await fleet.upkeep.collect(100))[1]:
        pass


@pytest.fixture
async def readers(store: aioredis.Redis, fleet: Fleet) -> list[ReportingWorker]:
    return [await joined(store, fleet, name, reads()) for name in ("a", "b")]


async def test_each_reader_reads_what_any_of_them_reports(readers: list[ReportingWorker], fleet: Fleet) -> None:
    first, second = readers
    slot = await slot_of(first)
    assert slot == await slot_of(second)
    await report(first, "stored.disk", blocks(1, 2))
    await report(second, "stored.disk", blocks(2, 3))
    assert await first.slot_holds(slot) == held(1, 2, 3)
    await report(second, "removed.disk", blocks(1, 4))
    assert await first.slot_holds(slot) == held(2, 3)
    assert not await first.holds()
    published = await cast("Any", first.store.hgetall(first.keys.sets))
    assert {name: struct.unpack(">IIdB", packed)[:2] for name, packed in published.items()} == {
        b"a.0:disk": (slot, (await first.row()).slot),
        b"b.0:disk": (slot, (await second.row()).slot),
    }
    assert not await fleet.index.counts()


async def test_another_store_is_another_set(
    readers: list[ReportingWorker], store: aioredis.Redis, fleet: Fleet
) -> None:
    other = await joined(store, fleet, "c", reads(OTHER))
    await report(other, "stored.disk", blocks(1))
    assert await slot_of(other) != await slot_of(readers[0])
    assert not await readers[0].slot_holds(await slot_of(readers[0]))


async def test_a_store_ends_with_its_last_reader(readers: list[ReportingWorker], fleet: Fleet) -> None:
    first, second = readers
    slot = await slot_of(first)
    await report(first, "stored.disk", blocks(1, 2))
    assert await fleet.upkeep.forget("a.0")
    await collected(fleet)
    assert await second.slot_holds(slot) == held(1, 2), "another worker reads it"
    await second.join("n2", sets=reads(OTHER))
    await second.applied()
    await collected(fleet)
    assert not await second.slot_holds(slot)
    assert await cast("Any", second.store.hkeys(second.keys.stores)) == [OTHER.encode()]
    assert await fleet.upkeep.forget("b.0")
    await collected(fleet)
    left = [key async for key in fleet.redis.scan_iter(fleet.keys.prefix + "*")]
    assert {key.decode().removeprefix(fleet.keys.prefix) for key in left} == {"next_slot", "hello"}


async def test_a_restart_keeps_the_store(readers: list[ReportingWorker], fleet: Fleet) -> None:
    first = readers[0]
    assert await fleet.upkeep.forget("b.0")
    slot = await slot_of(first)
    await report(first, "stored.disk", blocks(1, 2))
    await report(first, "leave", b"")
    await first.join("n2", sets=reads())
    await first.applied()
    await collected(fleet)
    assert await slot_of(first) == slot
    assert await first.slot_holds(slot) == held(1, 2), "no engine was there to delete the files"


async def test_a_store_is_compared_with_nothing(readers: list[ReportingWorker], fleet: Fleet) -> None:
    first, second = readers
    await report(second, "stored.disk", blocks(1, 2))
    await first.send("digests", wire.dumps({"disk": [0, 0, 0, 300]}))
    await first.heartbeat(digest_of())
    await first.applied()
    assert not await fleet.index.counts()
    assert not (await first.record())["truth"].get("found")
    assert (await first.record())["sets"]["disk"]["ps_per_byte"] == 300, "each engine measures its own way there"
    fleet.upkeep.pace = type(fleet.upkeep.pace)(min_gap_ms=0, audit_gap_ms=0)
    await fleet.upkeep.audit(3600)
    for name in ("a.0:disk", "b.0:disk"):
        await cast("Any", first.store.zadd(first.keys.audit, {name: 1}))
    for _ in range(6):
        assert not (await fleet.upkeep.audit(3600)).differs
    assert not await fleet.index.counts()


async def test_a_full_store_makes_room(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = await joined(store, fleet, "a", reads(capacity_blocks=500))
    for start in range(0, 2_000, 128):
        await reporter.send("stored.disk", blocks(*range(start, start + 128)))
    await reporter.applied()
    found = await reporter.slot_holds(await slot_of(reporter))
    assert 500 <= len(found) <= 500 + 128
    assert held(*range(1_930, 2_000)) <= found, "the last are there"
    assert not await fleet.index.counts(), "no snapshot could mend that"


async def test_nobody_empties_a_store(readers: list[ReportingWorker], fleet: Fleet) -> None:
    first, second = readers
    await report(first, "stored.disk", blocks(1))
    await report(second, "cleared.disk", b"")
    await report(second, "cleared", b"")
    assert await first.slot_holds(await slot_of(second)) == held(1)
    assert await fleet.index.counts() == {"malformed": 1}


@pytest.mark.parametrize("store_name", [5, "", "0123", STORE + "0", STORE[:-1] + "*", None], ids=str)
async def test_a_malformed_name_makes_a_set_of_its_own(store: aioredis.Redis, fleet: Fleet, store_name: object) -> None:
    reporter = await joined(store, fleet, "a", {"disk": {"store": store_name}, "ends": {"store": STORE}})
    assert not await store.exists(reporter.keys.stores)
    sets = (await reporter.record())["sets"]
    assert all("store" not in told for told in sets.values())
    await report(reporter, "stored.disk", block(1))
    assert await reporter.slot_holds(await slot_of(reporter)) == held(1)


async def test_while_memory_is_short_a_store_gets_no_blocks(readers: list[ReportingWorker]) -> None:
    first = readers[0]
    await first.store.set(first.keys.tick, "1 0 0 0 5 0")
    await report(first, "stored.disk", blocks(1))
    assert not await first.slot_holds(await slot_of(first))
    assert (await first.row()).flags == (await readers[1].row()).flags, "no snapshot brings them, so none is waited for"
