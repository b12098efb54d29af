"""apply and apply_control: the snapshot, whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, digest_of, held

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

NAME = "5ea50001"


async def test_a_snapshot_flips_as_a_whole(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1, 2))
    await reporter.applied()
    old = (await reporter.row()).slot
    await reporter.snapshot(range(2, 302))
    seen = []
    while await reporter.store.xlen(reporter.stream):
        seen.append(await reporter.holds())
        await reporter.fleet.upkeep.apply("s.0")
    assert len(seen) > 3
    assert all(held_now == held(1, 2) for held_now in seen), "a reader saw a mixture"
    assert await reporter.holds() == held(*range(2, 302))
    assert await reporter.digest() == digest_of(*range(2, 302))
    assert await reporter.retired() == {old}
    assert await fleet.index.counts() == {"resync_join": 1}
    assert "shadow" not in await reporter.record()
    assert await reporter.waiting() is None
    assert not await reporter.store.hexists(reporter.keys.digest, "~s.0")


async def test_a_chunk_shows_that_its_worker_lives(reporter: ReportingWorker) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.applied()
    await reporter.store.zadd(reporter.keys.alive, {"s.0": 5})
    await reporter.send("chunk", NAME.encode() + blocks(1))
    await reporter.applied()
    assert await reporter.alive_ms() > 1e12


async def test_an_empty_snapshot(reporter: ReportingWorker) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.snapshot([])
    await reporter.applied()
    assert await reporter.holds() == set()
    assert await reporter.digest() == digest_of()


async def test_a_command_is_cleared_by_its_echo_only(reporter: ReportingWorker) -> None:
    command = {"nonce": "n1", "applied": 1, "id": "c0ffee00", "do": "resync"}
    await reporter.store.set(reporter.keys.command("s.0"), wire.dumps(command))
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": "other"}))
    await reporter.applied()
    assert (await reporter.command())["id"] == "c0ffee00"
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": "c0ffee00"}))
    await reporter.applied()
    assert await reporter.command() == {"nonce": "n1", "applied": 3}


async def test_a_new_begin_retires_the_old_shadow(reporter: ReportingWorker) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": "0000000a", "command": None}))
    await reporter.send("chunk", b"0000000a" + blocks(1))
    await reporter.applied()
    shadow = (await reporter.record())["shadow"]
    await reporter.snapshot([2])
    await reporter.send("chunk", b"0000000a" + blocks(3))
    await reporter.applied()
    assert await reporter.holds() == held(2)
    assert shadow in await reporter.retired()


async def test_a_snapshot_that_does_not_add_up_is_dropped(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(2, 3))
    await reporter.applied()
    shadow = (await reporter.record())["shadow"]
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == held(1)
    assert await reporter.digest() == digest_of(1)
    assert await reporter.retired() == {shadow}
    assert await fleet.index.counts() == {"spoilt": 1}
    assert cast("float", await reporter.waiting()) < 0


@pytest.mark.parametrize("change", [{"count": 1}, {"high": 1}, {"low": 1}], ids=str)
async def test_each_part_of_an_end_counts(reporter: ReportingWorker, fleet: Fleet, change: dict[str, int]) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(2, 3))
    await reporter.end(replace(digest_of(2, 3), **change))
    await reporter.applied()
    assert await reporter.holds() == set()
    assert await fleet.index.counts() == {"spoilt": 1}


async def test_the_end_of_another_snapshot_ends_nothing(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(2))
    await reporter.end(digest_of(2), "0000000a")
    await reporter.applied()
    assert await reporter.holds() == set()
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == held(2)
    assert await fleet.index.counts() == {"stale": 1, "resync_join": 1}


async def test_a_gap_before_the_end_drops_the_snapshot(reporter: ReportingWorker, fleet: Fleet) -> None:
    """The lost batch may hold events that came before the snapshot: the digest would agree, and the table would not."""
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(2))
    reporter.number += 1
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == set()
    assert len(await reporter.retired()) == 1
    assert await fleet.index.counts() == {"gap": 1, "stale": 1}
    assert cast("float", await reporter.waiting()) < 0


async def test_stored_within_a_snapshot_abandons_it(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(2))
    await reporter.send("stored", blocks(5))
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == held(5)
    assert await fleet.index.counts() == {"interleaved": 1, "stale": 1}


async def test_a_snapshot_after_an_abandoned_one_starts_from_nothing(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": "0000000a", "command": None}))
    await reporter.send("chunk", b"0000000a" + blocks(2))
    await reporter.applied()
    await reporter.send("stored", blocks(5))
    await reporter.snapshot([5, 6])
    await reporter.applied()
    assert await reporter.holds() == held(5, 6)
    assert await fleet.index.counts() == {"interleaved": 1, "resync_interleaved": 1}


async def test_chunks_of_another_snapshot_are_dropped(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", b"0000000a" + blocks(1))
    await reporter.send("chunk", NAME.encode() + blocks(2))
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == held(2)
    assert await fleet.index.counts() == {"stale": 1, "resync_join": 1}


async def test_a_snapshot_beyond_the_capacity_is_abandoned(reporter: ReportingWorker, fleet: Fleet) -> None:
    reporter.nonce, reporter.number = "n2", 0
    await reporter.join(capacity_blocks=10)
    await reporter.snapshot(range(1300))
    await reporter.applied()
    assert await reporter.holds() == set()
    assert (await fleet.index.counts())["overflow"] == 1
    assert cast("float", await reporter.waiting()) < 0


async def test_cleared_within_a_snapshot_drops_it_and_the_live_slot(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(2))
    await reporter.send("cleared")
    await reporter.send("chunk", NAME.encode() + blocks(3))
    await reporter.end(digest_of(2, 3))
    await reporter.applied()
    assert await reporter.holds() == set()
    assert len(await reporter.retired()) == 2
    assert await reporter.waiting() is None
    assert await fleet.index.counts() == {"stale": 2}


async def test_heartbeats_within_a_snapshot_compare_nothing(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.heartbeat(digest_of(9))
    await reporter.heartbeat()
    await reporter.send("chunk", NAME.encode() + blocks(2))
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == held(2)
    assert await fleet.index.counts() == {"resync_join": 1}
