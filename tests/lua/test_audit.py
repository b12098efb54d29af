"""audit, through Upkeep.audit: each seeded corruption is found whatever else happens, and there is no false alarm."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks, digest_of, held

from warmfleet.errors import BadArgument
from warmfleet.fleet import Fleet
from warmfleet.fleet.upkeep import Pace

if TYPE_CHECKING:
    import redis.asyncio as aioredis

pytestmark = pytest.mark.in_turn

HELD = 600  # more than any server keeps in one piece: SSCAN has a cursor to return


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    """A fleet that audits small pieces, at every call."""
    fleet = Fleet(store, model)
    fleet.upkeep.pace = Pace(min_gap_ms=0, audit_blocks=32, audit_gap_ms=0)
    return fleet


async def store_blocks(reporter: ReportingWorker, numbers: list[int]) -> None:
    for start in range(0, len(numbers), 100):
        await reporter.send("stored", blocks(*numbers[start : start + 100]))
    await reporter.applied()


async def make_due(reporter: ReportingWorker) -> None:
    await reporter.fleet.upkeep.audit(3600)  # notes which workers exist
    await reporter.store.zadd(reporter.keys.audit, {reporter.worker_id: 1})


async def due_ms(reporter: ReportingWorker, worker_id: str) -> float:
    return await reporter.store.zscore(reporter.keys.audit, worker_id) or 0.0


async def walk(reporter: ReportingWorker) -> tuple[int, bool]:
    """Audit the worker once. Return the number of compared blocks, and whether a difference was found."""
    await make_due(reporter)
    total = 0
    for _ in range(500):
        step = await reporter.fleet.upkeep.audit(3600)
        total += step.blocks
        if step.differs or not step.walking:
            return total, step.differs
    raise AssertionError("the walk never ends")


async def swap_for_another_workers(reporter: ReportingWorker) -> None:
    """The sets s: and b: both hold another block instead, so only the sums show the difference."""
    for change, number in (("srem", 7), ("sadd", 10_000)):
        await getattr(reporter.store, change)(reporter.keys.slot((await reporter.row()).slot), block(number))
        await getattr(reporter.store, change)(reporter.keys.block(block(number)), (await reporter.row()).slot)


async def corrupt(reporter: ReportingWorker, kind: str) -> None:
    slot = (await reporter.row()).slot
    if kind == "forward":
        await cast("Any", reporter.store.srem(reporter.keys.block(block(7)), slot))
    elif kind == "reverse":
        await cast("Any", reporter.store.srem(reporter.keys.slot(slot), block(7)))
    elif kind == "extra":
        await cast("Any", reporter.store.sadd(reporter.keys.slot(slot), block(10_000)))
    elif kind == "no hash":
        await cast("Any", reporter.store.sadd(reporter.keys.slot(slot), b"x"))
    elif kind == "swapped":
        await swap_for_another_workers(reporter)
    else:
        digest = await reporter.digest()
        packed = replace(digest, low=(digest.low + 1) % 2**32)
        raw = b"".join(number.to_bytes(4, "big") for number in packed.as_list())
        await cast("Any", reporter.store.hset(reporter.keys.digest, reporter.worker_id, raw))


# ---------------------------------------------------------------- a slot at rest


async def test_a_right_index_is_walked_whole_and_left_alone(reporter: ReportingWorker, fleet: Fleet) -> None:
    await store_blocks(reporter, list(range(HELD)))
    assert await walk(reporter) == (HELD, False)
    assert await fleet.index.counts() == {}
    assert await reporter.waiting() is None
    assert not await reporter.store.exists(reporter.keys.audit_walk)
    assert await due_ms(reporter, "s.0") > 1e12  # next time in an hour
    assert not (await fleet.upkeep.audit(3600)).walking


async def test_an_empty_index(reporter: ReportingWorker, fleet: Fleet) -> None:
    assert await walk(reporter) == (0, False)
    assert await fleet.index.counts() == {}


@pytest.mark.parametrize("kind", ["forward", "reverse", "extra", "no hash", "swapped", "sums"])
async def test_every_corruption_is_found_and_healed_by_a_snapshot(
    reporter: ReportingWorker, fleet: Fleet, kind: str
) -> None:
    await store_blocks(reporter, list(range(HELD)))
    await corrupt(reporter, kind)
    assert (await walk(reporter))[1]
    assert (await fleet.index.counts())["audit_mismatch"] == 1
    await reporter.heartbeat(digest_of(*range(HELD)))  # agrees with the digest as it was: must not cancel the snapshot
    await reporter.applied()
    assert cast("float", await reporter.waiting()) < 0
    await reporter.snapshot(range(HELD))
    await reporter.heartbeat(digest_of(*range(HELD)))
    await reporter.applied()
    assert await reporter.waiting() is None
    assert await walk(reporter) == (HELD, False)
    members = await cast("Any", reporter.store.smembers(reporter.keys.slot((await reporter.row()).slot)))
    assert members == held(*range(HELD))


async def test_whoever_waits_for_a_snapshot_is_not_walked(reporter: ReportingWorker, fleet: Fleet) -> None:
    await store_blocks(reporter, list(range(HELD)))
    await corrupt(reporter, "forward")
    await reporter.store.zadd(reporter.keys.resync, {"s.0": -5})
    assert await walk(reporter) == (0, False)
    assert await fleet.index.counts() == {}


async def test_a_worker_that_is_forgotten_is_struck_off(reporter: ReportingWorker, fleet: Fleet) -> None:
    await store_blocks(reporter, list(range(HELD)))
    await make_due(reporter)
    assert (await fleet.upkeep.audit(3600)).walking
    await fleet.upkeep.forget("s.0")
    assert not (await fleet.upkeep.audit(3600)).walking
    await fleet.upkeep.audit(3600)
    assert not await reporter.store.exists(reporter.keys.audit, reporter.keys.audit_walk)


async def test_approximate_workers_have_nothing_to_audit(reporter: ReportingWorker, fleet: Fleet) -> None:
    await fleet.workers.register("plain", {"scheme_id": 1, "url": "http://h:1"}, 10)
    await make_due(reporter)
    await reporter.store.zadd(reporter.keys.audit, {"plain": 1, "s.0": 5e12})
    assert not (await fleet.upkeep.audit(3600)).walking
    assert await due_ms(reporter, "plain") > 1e12


async def test_one_piece_in_a_gap_and_one_worker_after_another(reporter: ReportingWorker, fleet: Fleet) -> None:
    other = ReportingWorker(reporter.store, fleet, "t")
    await other.join()
    for reporting in (reporter, other):
        await store_blocks(reporting, list(range(HELD)))
    await make_due(reporter)
    await make_due(other)
    assert (await fleet.upkeep.audit(3600)).blocks > 0
    fleet.upkeep.pace = replace(fleet.upkeep.pace, audit_gap_ms=60_000)
    step = await fleet.upkeep.audit(3600)
    assert (step.blocks, step.walking) == (0, True)
    fleet.upkeep.pace = replace(fleet.upkeep.pace, audit_gap_ms=0)
    total = 0
    for _ in range(100):
        total += (await fleet.upkeep.audit(3600)).blocks
    assert HELD < total < 2 * HELD
    assert await reporter.store.zcount(reporter.keys.audit, "-inf", 1e12) == 0


async def test_pieces_are_bounded(reporter: ReportingWorker, fleet: Fleet) -> None:
    await store_blocks(reporter, list(range(HELD)))
    await make_due(reporter)
    for _ in range(10):
        assert 0 < (await fleet.upkeep.audit(3600)).blocks < 3 * 32
    fleet.upkeep.pace = replace(fleet.upkeep.pace, audit_blocks=0)
    with pytest.raises(BadArgument):
        await fleet.upkeep.audit(3600)


# ---------------------------------------------------------------- a slot under change


class Life:
    """Random stored, removed, cleared and snapshots between the pieces of an audit."""

    def __init__(self, reporter: ReportingWorker, seed: int) -> None:
        self.reporter, self.rng = reporter, random.Random(seed)
        self.table: set[int] = set()
        self.walked, self.differs, self.walking = 0, False, True

    async def audit(self) -> None:
        step = await self.reporter.fleet.upkeep.audit(3600)
        self.walked, self.differs, self.walking = self.walked + step.blocks, self.differs or step.differs, step.walking

    async def begin(self) -> None:
        await self.reporter.join(f"life{self.rng.randrange(2**32)}")
        self.table = set(range(self.rng.choice((20, 200, HELD))))
        await store_blocks(self.reporter, sorted(self.table))
        await make_due(self.reporter)

    async def change(self, least: int = 0) -> None:
        kind = self.rng.choice(("stored", "removed", "swing", "bulk", "rest", "rest", "rest", "rest"))
        some = set(self.rng.sample(range(least, 900), self.rng.randrange(1, 60)))
        if kind in ("stored", "swing"):
            await self.stored(some)
        if kind in ("removed", "swing"):
            await self.removed(some)
        if kind == "bulk":  # the set is shrunk, so that SSCAN may tell blocks twice; then they come back
            most = {number for number in self.table if number >= least and self.rng.random() < 0.97}
            await self.removed(most)
            await self.reporter.applied()
            if self.rng.random() < 0.5:
                await self.audit()
            await self.stored(most)
        await self.reporter.applied()

    async def stored(self, some: set[int]) -> None:
        self.table |= some
        for start in range(0, len(some), 100):
            await self.reporter.send("stored", blocks(*sorted(some)[start : start + 100]))

    async def removed(self, some: set[int]) -> None:
        self.table -= some
        for start in range(0, len(some), 100):
            await self.reporter.send("removed", blocks(*sorted(some)[start : start + 100]))

    async def replace_table(self) -> None:
        if self.rng.random() < 0.5:
            self.table.clear()
            await self.reporter.send("cleared")
        else:
            await self.reporter.snapshot(sorted(self.table), f"{self.rng.randrange(2**32):08x}")
        await self.reporter.applied()


@pytest.mark.parametrize("part", range(6))
async def test_changes_during_a_walk_are_no_difference(reporter: ReportingWorker, fleet: Fleet, part: int) -> None:
    """300 random interleavings on both servers together."""
    walked = 0
    for seed in range(50 * part, 50 * part + 50):
        life = Life(reporter, seed)
        await life.begin()
        for turn in range(life.rng.randrange(10, 40)):
            for _ in range(life.rng.randrange(3)):
                await life.audit()
            await (life.replace_table() if life.rng.random() < 0.03 else life.change())
            assert not life.differs, f"seed {seed}, turn {turn}"
        walked += life.walked
    assert walked > 2_500
    assert set(await fleet.index.counts()) <= {"audit_moved", "resync_join", "resync_worker"}


@pytest.mark.parametrize("kind", ["forward", "reverse", "extra"])
async def test_a_corruption_is_found_though_blocks_keep_changing(
    reporter: ReportingWorker, fleet: Fleet, kind: str
) -> None:
    for seed in range(10):
        life = Life(reporter, seed)
        await life.begin()
        await life.stored({7})
        await reporter.applied()
        await corrupt(reporter, kind)
        for _ in range(400):
            await life.audit()
            if life.differs:
                break
            assert life.walking, f"seed {seed}: the walk ended and found nothing"
            await life.change(least=8)
        assert life.differs, f"seed {seed}"
        await cast("Any", reporter.store.zrem(reporter.keys.resync, reporter.worker_id))


async def test_swapped_blocks_are_found_once_there_is_rest(reporter: ReportingWorker, fleet: Fleet) -> None:
    await store_blocks(reporter, list(range(HELD)))
    await corrupt(reporter, "swapped")
    await make_due(reporter)
    for number in range(1, 200):
        await reporter.send("stored", blocks(1_000 + number))
        await reporter.applied()
        if not (await fleet.upkeep.audit(3600)).walking:
            break
    assert await fleet.index.counts() == {"audit_moved": 1}
    assert (await walk(reporter))[1]
