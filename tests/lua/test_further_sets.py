"""Sets of blocks that a worker reports beside its main one: tiers (``cpu``), and ``ends`` of hybrid models."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks, digest_of, held

from warmfleet.fleet import Flag, Fleet, Question
from warmfleet.prompt.block_hashes import Hasher
from warmfleet.protocol.wire import Scheme, default_none_hash
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

SETS = {"ends": {}, "cpu": {"capacity_blocks": 1000, "bytes_per_token": 1_000_000}}


@pytest.fixture
async def reporter(store: aioredis.Redis, fleet: Fleet) -> ReportingWorker:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(sets=SETS)
    await reporter.applied()
    return reporter


async def slot_of(reporter: ReportingWorker, kind: str) -> int:
    return cast("int", (await reporter.record())["sets"][kind]["slot"])


async def further(reporter: ReportingWorker, kind: str) -> set[bytes]:
    """The blocks of a further set, read both ways."""
    slot, ends = await slot_of(reporter, kind), kind == "ends"
    found: set[bytes] = await cast("Any", reporter.store.smembers(reporter.keys.slot(slot) + ":e" * ends))
    for one in found:
        key = reporter.keys.end(one) if ends else reporter.keys.block(one)
        assert await cast("Any", reporter.store.sismember(key, str(slot)))
    return found


async def digests(reporter: ReportingWorker, **told: list[int]) -> None:
    await reporter.send("digests", wire.dumps({"ends": [0, 0, 0], "cpu": [0, 0, 0]} | told))


async def test_each_set_has_a_slot_of_its_own(reporter: ReportingWorker) -> None:
    await reporter.send("stored", blocks(1, 2))
    await reporter.send("stored.cpu", blocks(1, 2, 3))
    await reporter.send("stored.ends", blocks(2))
    await reporter.send("removed.cpu", blocks(3, 4))
    await reporter.applied()
    assert await reporter.holds() == held(1, 2)
    assert (await further(reporter, "cpu"), await further(reporter, "ends")) == (held(1, 2), held(2))
    row, slots = await reporter.row(), [await slot_of(reporter, kind) for kind in SETS]
    assert len({row.slot, *slots}) == 3
    assert row.flags & Flag.SETS
    members = await cast("Any", reporter.store.smembers(reporter.keys.block(block(1))))
    assert members == {b"%d" % slot for slot in (row.slot, await slot_of(reporter, "cpu"))}


async def tiers(reporter: ReportingWorker) -> dict[int, tuple[Any, ...]]:
    """Return slot of the main set, price, kind and blocks of each tier, by its slot."""
    found = await cast("Any", reporter.store.hgetall(reporter.keys.tiers))
    return {int(slot): struct.unpack(">IdBI", packed) for slot, packed in found.items()}


async def test_decide_reads_slots_and_prices_in_one_key(reporter: ReportingWorker) -> None:
    async def published(kind: str) -> tuple[Any, ...]:
        packed = await cast("Any", reporter.store.hget(reporter.keys.sets, f"s.0:{kind}"))
        return struct.unpack(">IIdB", packed)

    main = (await reporter.row()).slot
    assert await published("cpu") == (await slot_of(reporter, "cpu"), main, pytest.approx(40e-6), 1)
    assert await published("ends") == (await slot_of(reporter, "ends"), main, 0.0, 0)
    assert await tiers(reporter) == {await slot_of(reporter, "cpu"): (main, pytest.approx(40e-6), 1, 1000)}
    await reporter.join("n2", sets=SETS | {"ends": {"promises_all": 1}})
    await reporter.applied()
    main = (await reporter.row()).slot
    assert (await published("ends"))[1:] == (main, 1.0, 0)
    await digests(reporter, cpu=[0, 0, 0, 200])
    await reporter.applied()
    assert (await published("cpu"))[2] == pytest.approx(200e-6)
    await digests(reporter, cpu=[0, 0, 0, 220])
    await reporter.send("cleared")
    await reporter.applied()
    slot, main_now, seconds, _ = await published("cpu")
    assert (slot, main_now, seconds) == (
        await slot_of(reporter, "cpu"),
        (await reporter.row()).slot,
        pytest.approx(200e-6),  # a small change of the measured rate leaves the record as it is
    )
    assert main_now != main
    assert await tiers(reporter) == {slot: (main_now, seconds, 1, 1000)}, "as decide finds it by the tier's slot"


@pytest.mark.parametrize("loads_last", [1, 0, None, 2, "1"])
async def test_a_tier_that_loads_the_last_block_of_a_prompt_is_asked_for_it(
    store: aioredis.Redis, fleet: Fleet, loads_last: object
) -> None:
    """From the announcement and a prompt's token ids to the match."""
    hasher = Hasher(Scheme("sha256_cbor", default_none_hash("sha256_cbor"), 16))
    reporter, ids = ReportingWorker(store, fleet), list(range(16 * 5))
    told = {} if loads_last is None else {"loads_last": loads_last}
    cpu, packed = {"capacity_blocks": 1000, "bytes_per_token": 1_000_000} | told, hasher.chain([*ids, 0]).hashes
    await reporter.join(sets={"cpu": cpu}, scheme=hasher.scheme.as_dict(), scheme_id=hasher.scheme.scheme_id)
    await reporter.send("stored", packed)
    await reporter.send("stored.cpu", packed)
    await reporter.applied()
    row, routable = await reporter.row(), Flag.SERVER | Flag.URL | Flag.PROVEN
    await cast("Any", store.hset(reporter.keys.load, "s.0", replace(row, flags=row.flags | routable).pack("s.0")))
    question = Question("wf-0aaaaaaaaaaaaaaaaaaaaa", (hasher.chain(ids),), len(ids), len(ids))
    decision = await fleet.bookings.decide(question)
    last = 16 if loads_last == 1 else 0
    assert (decision.matched_tokens, decision.tier_tokens) == (64 + last, last)


@pytest.mark.parametrize(("loads", "kind"), [({}, 1), ({"loads_last": 1}, 129), ({"loads_dropped": 1}, 65)])
async def test_what_a_tier_loads_besides_stands_with_its_kind(
    store: aioredis.Redis, fleet: Fleet, loads: dict[str, int], kind: int
) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(sets={"cpu": SETS["cpu"] | loads, "ends": loads})
    await reporter.applied()
    [tier] = (await tiers(reporter)).values()
    assert tier[2] == kind
    [view] = await fleet.workers.read()
    assert not set(loads) & set(view.record["sets"]["ends"])
    assert all(view.record["sets"]["cpu"][name] == 1 for name in loads)


@pytest.mark.parametrize("kind", ["cpu", "ends"])
async def test_cleared_gives_the_set_another_slot_and_leaves_the_others(reporter: ReportingWorker, kind: str) -> None:
    other = "cpu" if kind == "ends" else "ends"
    for operation in ("stored", "stored.cpu", "stored.ends"):
        await reporter.send(operation, blocks(1, 2))
    await reporter.applied()
    before = await slot_of(reporter, kind)
    await reporter.send(f"cleared.{kind}")
    await reporter.send(f"stored.{kind}", blocks(5))
    await reporter.applied()
    assert await slot_of(reporter, kind) != before
    assert set(await tiers(reporter)) == {await slot_of(reporter, "cpu")}
    assert await further(reporter, kind) == held(5)
    assert await further(reporter, other) == await reporter.holds() == held(1, 2)
    while (await reporter.fleet.upkeep.collect(2))[1]:
        pass
    assert not await reporter.store.exists(reporter.keys.slot(before), reporter.keys.slot(before) + ":e")
    key = reporter.keys.end(block(1)) if kind == "ends" else reporter.keys.block(block(1))
    assert b"%d" % before not in await cast("Any", reporter.store.smembers(key))
    assert await further(reporter, other) == await reporter.holds() == held(1, 2)


async def test_a_set_that_differs_is_sent_anew(reporter: ReportingWorker, fleet: Fleet) -> None:
    digest = digest_of(1)
    await reporter.send("stored.cpu", blocks(1, 2))
    await digests(reporter, cpu=digest.as_list())
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    assert cast("float", await reporter.waiting()) < 0, "the main set's digest alone says that all is well"
    assert await fleet.index.counts() == {"mismatch": 1}
    await reporter.snapshot([])
    await reporter.send("cleared.cpu")
    await reporter.send("stored.cpu", blocks(1))
    await digests(reporter, cpu=digest.as_list())
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    assert await further(reporter, "cpu") == held(1)
    assert await reporter.waiting() is None
    record = await reporter.record()
    assert "differs" not in record
    assert record["truth"]["healed"] == record["truth"]["found"] == 1


async def test_a_restart_leaves_nothing_of_the_sets(reporter: ReportingWorker, store: aioredis.Redis) -> None:
    await reporter.send("stored.cpu", blocks(1, 2))
    await reporter.send("stored.ends", blocks(1))
    await reporter.join("n2")
    await reporter.applied()
    while (await reporter.fleet.upkeep.collect(2))[1]:
        pass
    assert "sets" not in await reporter.record()
    assert not (await reporter.row()).flags & Flag.SETS
    assert not await store.exists(
        reporter.keys.sets, reporter.keys.tiers, reporter.keys.block(block(1)), reporter.keys.end(block(1))
    )
    assert await cast("Any", store.hkeys(reporter.keys.digest)) == []


async def test_nothing_of_a_forgotten_worker_stays(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored.cpu", blocks(1, 2))
    await reporter.send("stored.ends", blocks(1))
    await reporter.applied()
    await fleet.upkeep.audit(3600)
    assert await fleet.upkeep.forget("s.0")
    await fleet.upkeep.audit(3600)
    while (await fleet.upkeep.collect(2))[1]:
        pass
    left = [key async for key in fleet.redis.scan_iter(fleet.keys.prefix + "*")]
    assert {key.decode().removeprefix(fleet.keys.prefix) for key in left} == {"next_slot", "hello"}


async def test_a_worker_has_only_the_sets_of_its_join(reporter: ReportingWorker, fleet: Fleet) -> None:
    for operation in ("stored.disk", "removed.disk", "cleared.disk", "stored.", "stored.tape"):
        await reporter.send(operation, blocks(1))
    await reporter.applied()
    assert await fleet.index.counts() == {"malformed": 5}


@pytest.mark.parametrize(
    "sets",
    [None, 5, "cpu", [], [{}], {"cpu": 5}, {"tape": {}}, {"cpu": None}],
    ids=str,
)
async def test_malformed_sets_are_left_out(store: aioredis.Redis, fleet: Fleet, sets: object) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(sets=sets)
    await reporter.applied()
    assert "sets" not in await reporter.record()


@pytest.mark.parametrize(
    ("operation", "data"),
    [
        ("stored.cpu", b"1234567"),
        ("stored.cpu", blocks(*range(129))),
        ("removed.ends", b"123"),
        ("digests", b"[]"),
        ("digests", b"{"),
        ("digests", b'{"cpu":[0,0,0]}'),
        ("digests", b'{"cpu":[0,0,0],"ends":[0,0]}'),
        ("digests", b'{"cpu":[0,0,-1],"ends":[0,0,0]}'),
    ],
)
async def test_malformed_entries_change_nothing(
    reporter: ReportingWorker, fleet: Fleet, operation: str, data: bytes
) -> None:
    await reporter.send(operation, data)
    await reporter.send("stored.cpu", blocks(7))
    await reporter.applied()
    assert await fleet.index.counts() == {"malformed": 1}
    assert await further(reporter, "cpu") == held(7)


async def test_a_set_cannot_grow_beyond_what_was_announced(reporter: ReportingWorker, fleet: Fleet) -> None:
    for start in range(0, 4_000, 128):
        await reporter.send("stored.cpu", blocks(*range(start, start + 128)))
    await reporter.applied()
    assert len(await further(reporter, "cpu")) <= 2 * 1000 + 8 * 128
    assert (await fleet.index.counts())["overflow"] > 0


@pytest.mark.parametrize("kind", ["cpu", "ends"])
async def test_an_audit_finds_what_is_wrong_in_a_set(reporter: ReportingWorker, fleet: Fleet, kind: str) -> None:
    async def audited() -> bool:
        await fleet.upkeep.audit(3600)
        await reporter.store.zadd(reporter.keys.audit, {f"s.0:{kind}": 1})
        for _ in range(50):
            step = await fleet.upkeep.audit(3600)
            if step.differs or not step.walking:
                return step.differs
        raise AssertionError("the walk never ends")

    fleet.upkeep.pace = type(fleet.upkeep.pace)(min_gap_ms=0, audit_gap_ms=0)
    await reporter.send("stored", blocks(1))
    await reporter.send(f"stored.{kind}", blocks(1, 2, 3))
    await reporter.applied()
    assert not await audited()
    key = reporter.keys.end(block(2)) if kind == "ends" else reporter.keys.block(block(2))
    await cast("Any", reporter.store.srem(key, await slot_of(reporter, kind)))
    assert await audited()
    assert cast("float", await reporter.waiting()) < 0
