"""audit, through Fleet.audit: each seeded corruption is found whatever else happens, and there is no false alarm."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.lua.stream import Core, block, blocks, digest_of, held

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
    fleet.pace = Pace(min_gap_ms=0, audit_blocks=32, audit_gap_ms=0)
    return fleet


async def store_blocks(core: Core, numbers: list[int]) -> None:
    for start in range(0, len(numbers), 100):
        await core.send("stored", blocks(*numbers[start : start + 100]))
    await core.applied()


async def make_due(core: Core) -> None:
    await core.fleet.audit(3600)  # takes note of who there is
    await core.store.zadd(core.keys.audit, {core.worker_id: 1})


async def due_ms(core: Core, worker_id: str) -> float:
    return await core.store.zscore(core.keys.audit, worker_id) or 0.0


async def walk(core: Core) -> tuple[int, bool]:
    """One whole audit of the worker: blocks compared, and whether a difference was found."""
    await make_due(core)
    total = 0
    for _ in range(500):
        step = await core.fleet.audit(3600)
        total += step.blocks
        if step.differs or not step.walking:
            return total, step.differs
    raise AssertionError("the walk never ends")


async def swap_for_another_workers(core: Core) -> None:
    """s: has another block instead, and b: agrees with it, so that only the sums can tell."""
    for change, number in (("srem", 7), ("sadd", 10_000)):
        await getattr(core.store, change)(core.keys.slot((await core.row()).slot), block(number))
        await getattr(core.store, change)(core.keys.block(block(number)), (await core.row()).slot)


async def corrupt(core: Core, kind: str) -> None:
    slot = (await core.row()).slot
    if kind == "forward":
        await cast("Any", core.store.srem(core.keys.block(block(7)), slot))
    elif kind == "reverse":
        await cast("Any", core.store.srem(core.keys.slot(slot), block(7)))
    elif kind == "extra":
        await cast("Any", core.store.sadd(core.keys.slot(slot), block(10_000)))
    elif kind == "no hash":
        await cast("Any", core.store.sadd(core.keys.slot(slot), b"x"))
    elif kind == "swapped":
        await swap_for_another_workers(core)
    else:
        digest = await core.digest()
        packed = replace(digest, low=(digest.low + 1) % 2**32)
        raw = b"".join(number.to_bytes(4, "big") for number in packed.as_list())
        await cast("Any", core.store.hset(core.keys.digest, core.worker_id, raw))


# ---------------------------------------------------------------- a slot at rest


async def test_a_right_index_is_walked_whole_and_left_alone(core: Core, fleet: Fleet) -> None:
    await store_blocks(core, list(range(HELD)))
    assert await walk(core) == (HELD, False)
    assert await fleet.counts() == {}
    assert await core.waiting() is None
    assert not await core.store.exists(core.keys.audit_walk)
    assert await due_ms(core, "s.0") > 1e12  # next time in an hour
    assert not (await fleet.audit(3600)).walking


async def test_an_empty_index(core: Core, fleet: Fleet) -> None:
    assert await walk(core) == (0, False)
    assert await fleet.counts() == {}


@pytest.mark.parametrize("kind", ["forward", "reverse", "extra", "no hash", "swapped", "sums"])
async def test_every_corruption_is_found_and_healed_by_a_snapshot(core: Core, fleet: Fleet, kind: str) -> None:
    await store_blocks(core, list(range(HELD)))
    await corrupt(core, kind)
    assert (await walk(core))[1]
    assert (await fleet.counts())["audit_mismatch"] == 1
    await core.heartbeat(digest_of(*range(HELD)))  # agrees with the digest as it was: must not cancel the snapshot
    await core.applied()
    assert cast("float", await core.waiting()) < 0
    await core.snapshot(range(HELD))
    await core.heartbeat(digest_of(*range(HELD)))
    await core.applied()
    assert await core.waiting() is None
    assert await walk(core) == (HELD, False)
    members = await cast("Any", core.store.smembers(core.keys.slot((await core.row()).slot)))
    assert members == held(*range(HELD))


async def test_whoever_waits_for_a_snapshot_is_not_walked(core: Core, fleet: Fleet) -> None:
    await store_blocks(core, list(range(HELD)))
    await corrupt(core, "forward")
    await core.store.zadd(core.keys.resync, {"s.0": -5})
    assert await walk(core) == (0, False)
    assert await fleet.counts() == {}


async def test_a_worker_that_is_forgotten_is_struck_off(core: Core, fleet: Fleet) -> None:
    await store_blocks(core, list(range(HELD)))
    await make_due(core)
    assert (await fleet.audit(3600)).walking
    await fleet.forget("s.0")
    assert not (await fleet.audit(3600)).walking
    await fleet.audit(3600)
    assert not await core.store.exists(core.keys.audit, core.keys.audit_walk)


async def test_approximate_workers_have_nothing_to_audit(core: Core, fleet: Fleet) -> None:
    await fleet.register("plain", {"scheme_id": 1, "url": "http://h:1"}, 10)
    await make_due(core)
    await core.store.zadd(core.keys.audit, {"plain": 1, "s.0": 5e12})
    assert not (await fleet.audit(3600)).walking
    assert await due_ms(core, "plain") > 1e12


async def test_one_piece_in_a_gap_and_one_worker_after_another(core: Core, fleet: Fleet) -> None:
    other = Core(core.store, fleet, "t")
    await other.join()
    for one in (core, other):
        await store_blocks(one, list(range(HELD)))
    await make_due(core)
    await make_due(other)
    assert (await fleet.audit(3600)).blocks > 0
    fleet.pace = replace(fleet.pace, audit_gap_ms=60_000)
    step = await fleet.audit(3600)
    assert (step.blocks, step.walking) == (0, True)
    fleet.pace = replace(fleet.pace, audit_gap_ms=0)
    total = 0
    for _ in range(100):
        total += (await fleet.audit(3600)).blocks
    assert HELD < total < 2 * HELD
    assert await core.store.zcount(core.keys.audit, "-inf", 1e12) == 0


async def test_pieces_are_bounded(core: Core, fleet: Fleet) -> None:
    await store_blocks(core, list(range(HELD)))
    await make_due(core)
    for _ in range(10):
        assert 0 < (await fleet.audit(3600)).blocks < 3 * 32
    fleet.pace = replace(fleet.pace, audit_blocks=0)
    with pytest.raises(BadArgument):
        await fleet.audit(3600)


# ---------------------------------------------------------------- a slot under change


class Life:
    """Random stored, removed, cleared and snapshots between the pieces of an audit."""

    def __init__(self, core: Core, seed: int) -> None:
        self.core, self.rng = core, random.Random(seed)
        self.table: set[int] = set()
        self.walked, self.differs, self.walking = 0, False, True

    async def audit(self) -> None:
        step = await self.core.fleet.audit(3600)
        self.walked, self.differs, self.walking = self.walked + step.blocks, self.differs or step.differs, step.walking

    async def begin(self) -> None:
        await self.core.join(f"life{self.rng.randrange(2**32)}")
        self.table = set(range(self.rng.choice((20, 200, HELD))))
        await store_blocks(self.core, sorted(self.table))
        await make_due(self.core)

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
            await self.core.applied()
            if self.rng.random() < 0.5:
                await self.audit()
            await self.stored(most)
        await self.core.applied()

    async def stored(self, some: set[int]) -> None:
        self.table |= some
        for start in range(0, len(some), 100):
            await self.core.send("stored", blocks(*sorted(some)[start : start + 100]))

    async def removed(self, some: set[int]) -> None:
        self.table -= some
        for start in range(0, len(some), 100):
            await self.core.send("removed", blocks(*sorted(some)[start : start + 100]))

    async def replace_table(self) -> None:
        if self.rng.random() < 0.5:
            self.table.clear()
            await self.core.send("cleared")
        else:
            await self.core.snapshot(sorted(self.table), f"{self.rng.randrange(2**32):08x}")
        await self.core.applied()


@pytest.mark.parametrize("part", range(6))
async def test_changes_during_a_walk_are_no_difference(core: Core, fleet: Fleet, part: int) -> None:
    """300 random interleavings on both servers together."""
    walked = 0
    for seed in range(50 * part, 50 * part + 50):
        life = Life(core, seed)
        await life.begin()
        for turn in range(life.rng.randrange(10, 40)):
            for _ in range(life.rng.randrange(3)):
                await life.audit()
            await (life.replace_table() if life.rng.random() < 0.03 else life.change())
            assert not life.differs, f"seed {seed}, turn {turn}"
        walked += life.walked
    assert walked > 2_500
    assert set(await fleet.counts()) <= {"audit_moved", "resync_join", "resync_worker"}


@pytest.mark.parametrize("kind", ["forward", "reverse", "extra"])
async def test_a_corruption_is_found_though_blocks_keep_changing(core: Core, fleet: Fleet, kind: str) -> None:
    for seed in range(10):
        life = Life(core, seed)
        await life.begin()
        await life.stored({7})
        await core.applied()
        await corrupt(core, kind)
        for _ in range(400):
            await life.audit()
            if life.differs:
                break
            assert life.walking, f"seed {seed}: the walk ended and found nothing"
            await life.change(least=8)
        assert life.differs, f"seed {seed}"
        await cast("Any", core.store.zrem(core.keys.resync, core.worker_id))


async def test_swapped_blocks_are_found_once_there_is_rest(core: Core, fleet: Fleet) -> None:
    await store_blocks(core, list(range(HELD)))
    await corrupt(core, "swapped")
    await make_due(core)
    for number in range(1, 200):
        await core.send("stored", blocks(1_000 + number))
        await core.applied()
        if not (await fleet.audit(3600)).walking:
            break
    assert await fleet.counts() == {"audit_moved": 1}
    assert (await walk(core))[1]
