"""apply and apply_control: the snapshot, whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.lua.stream import Core, blocks, digest_of, held

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

NAME = "5ea50001"


async def test_a_snapshot_flips_as_a_whole(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1, 2))
    await core.applied()
    old = (await core.row()).slot
    await core.snapshot(range(2, 302))
    seen = []
    while await core.store.xlen(core.stream):
        seen.append(await core.holds())
        await core.fleet.apply("s.0")
    assert len(seen) > 3
    assert all(held_now == held(1, 2) for held_now in seen), "a reader saw a mixture"
    assert await core.holds() == held(*range(2, 302))
    assert await core.digest() == digest_of(*range(2, 302))
    assert await core.retired() == {old}
    assert await fleet.counts() == {"resync_join": 1}
    assert "shadow" not in await core.record()
    assert await core.waiting() is None
    assert not await core.store.hexists(core.keys.digest, "~s.0")


async def test_a_chunk_shows_that_its_worker_lives(core: Core) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.applied()
    await core.store.zadd(core.keys.alive, {"s.0": 5})
    await core.send("chunk", NAME.encode() + blocks(1))
    await core.applied()
    assert await core.alive_ms() > 1e12


async def test_an_empty_snapshot(core: Core) -> None:
    await core.send("stored", blocks(1))
    await core.snapshot([])
    await core.applied()
    assert await core.holds() == set()
    assert await core.digest() == digest_of()


async def test_a_command_is_cleared_by_its_echo_only(core: Core) -> None:
    command = {"nonce": "n1", "applied": 1, "id": "c0ffee00", "do": "resync"}
    await core.store.set(core.keys.command("s.0"), wire.dumps(command))
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": "other"}))
    await core.applied()
    assert (await core.command())["id"] == "c0ffee00"
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": "c0ffee00"}))
    await core.applied()
    assert await core.command() == {"nonce": "n1", "applied": 3}


async def test_a_new_begin_retires_the_old_shadow(core: Core) -> None:
    await core.send("begin", wire.dumps({"snapshot": "0000000a", "command": None}))
    await core.send("chunk", b"0000000a" + blocks(1))
    await core.applied()
    shadow = (await core.record())["shadow"]
    await core.snapshot([2])
    await core.send("chunk", b"0000000a" + blocks(3))
    await core.applied()
    assert await core.holds() == held(2)
    assert shadow in await core.retired()


async def test_a_snapshot_that_does_not_add_up_is_dropped(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1))
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(2, 3))
    await core.applied()
    shadow = (await core.record())["shadow"]
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(1)
    assert await core.digest() == digest_of(1)
    assert await core.retired() == {shadow}
    assert await fleet.counts() == {"spoilt": 1}
    assert cast("float", await core.waiting()) < 0


@pytest.mark.parametrize("change", [{"count": 1}, {"high": 1}, {"low": 1}], ids=str)
async def test_each_part_of_an_end_counts(core: Core, fleet: Fleet, change: dict[str, int]) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(2, 3))
    await core.end(replace(digest_of(2, 3), **change))
    await core.applied()
    assert await core.holds() == set()
    assert await fleet.counts() == {"spoilt": 1}


async def test_the_end_of_another_snapshot_ends_nothing(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.end(digest_of(2), "0000000a")
    await core.applied()
    assert await core.holds() == set()
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(2)
    assert await fleet.counts() == {"stale": 1, "resync_join": 1}


async def test_a_gap_before_the_end_drops_the_snapshot(core: Core, fleet: Fleet) -> None:
    """The lost batch may hold events that came before the snapshot: the digest would agree, and the table would not."""
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(2))
    core.number += 1
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == set()
    assert len(await core.retired()) == 1
    assert await fleet.counts() == {"gap": 1, "stale": 1}
    assert cast("float", await core.waiting()) < 0


async def test_stored_within_a_snapshot_abandons_it(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.send("stored", blocks(5))
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(5)
    assert await fleet.counts() == {"interleaved": 1, "stale": 1}


async def test_a_snapshot_after_an_abandoned_one_starts_from_nothing(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": "0000000a", "command": None}))
    await core.send("chunk", b"0000000a" + blocks(2))
    await core.applied()
    await core.send("stored", blocks(5))
    await core.snapshot([5, 6])
    await core.applied()
    assert await core.holds() == held(5, 6)
    assert await fleet.counts() == {"interleaved": 1, "resync_interleaved": 1}


async def test_chunks_of_another_snapshot_are_dropped(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", b"0000000a" + blocks(1))
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(2)
    assert await fleet.counts() == {"stale": 1, "resync_join": 1}


async def test_a_snapshot_beyond_the_capacity_is_abandoned(core: Core, fleet: Fleet) -> None:
    core.nonce, core.number = "n2", 0
    await core.join(capacity_blocks=10)
    await core.snapshot(range(1300))
    await core.applied()
    assert await core.holds() == set()
    assert (await fleet.counts())["overflow"] == 1
    assert cast("float", await core.waiting()) < 0


async def test_cleared_within_a_snapshot_drops_it_and_the_live_slot(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1))
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.send("cleared")
    await core.send("chunk", NAME.encode() + blocks(3))
    await core.end(digest_of(2, 3))
    await core.applied()
    assert await core.holds() == set()
    assert len(await core.retired()) == 2
    assert await core.waiting() is None
    assert await fleet.counts() == {"stale": 2}


async def test_heartbeats_within_a_snapshot_compare_nothing(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.heartbeat(digest_of(9))
    await core.heartbeat()
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(2)
    assert await fleet.counts() == {"resync_join": 1}
