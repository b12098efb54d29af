"""apply: block events, malformed data, batch numbers, through the public door: XADD, then Upkeep.apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks, digest_of, held

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

NAME = "5ea50001"


# ---------------------------------------------------------------- stored, removed, cleared


async def test_stored_and_removed_move_sets_and_digest(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1, 2, 3, 2))
    await reporter.send("stored", blocks(3, 4))
    await reporter.send("removed", blocks(2, 2, 77))
    await reporter.send("stored", b"")
    await reporter.applied()
    assert await reporter.holds() == held(1, 3, 4)
    assert await reporter.digest() == digest_of(1, 3, 4)
    assert not await fleet.redis.exists(fleet.keys.block(block(2)))


async def test_a_stream_touches_only_its_own_slot(
    reporter: ReportingWorker, store: aioredis.Redis, fleet: Fleet
) -> None:
    other = ReportingWorker(store, fleet, "t")
    await other.join()
    await other.send("stored", blocks(1, 2))
    await other.applied()
    await reporter.send("stored", blocks(1, 3))
    await reporter.send("removed", blocks(1, 2))
    await reporter.applied()
    assert await other.holds() == held(1, 2)
    assert await reporter.holds() == held(3)


async def test_what_a_probe_awaits_is_noted_though_it_is_evicted_next(reporter: ReportingWorker, fleet: Fleet) -> None:
    await fleet.probes.await_blocks("s.0", "wf-a", [block(9)])
    await fleet.probes.await_blocks("s.0", "wf-b", [block(1), block(2), block(3)])
    await reporter.send("removed", blocks(3))
    await reporter.send("stored", blocks(7, 9, 1, 2))
    await reporter.send("removed", blocks(9, 1, 2))
    await reporter.applied()
    assert await fleet.probes.awaited("s.0", "wf-b", [block(1), block(2), block(3)]) == [False, False, True]
    assert await reporter.holds() == held(7)
    assert await fleet.probes.awaited("s.0", "wf-a", [block(9)]) == [False], "two probes do not disturb each other"
    assert await fleet.probes.awaited("s.0", "wf-c", [block(9)]) is None, "Redis lost it"
    assert 0 < await fleet.redis.ttl(fleet.keys.probe("s.0")) <= 120
    for probe in ("wf-a", "wf-b"):
        await fleet.probes.await_no_blocks("s.0", probe, [block(1), block(2), block(3)])
    assert not await fleet.redis.exists(fleet.keys.probe("s.0"))


async def test_a_full_batch_and_no_more_blocks_than_asked_for(reporter: ReportingWorker) -> None:
    for start in range(0, 384, 128):
        await reporter.send("stored", blocks(*range(start, start + 128)))
    counted = [(await reporter.fleet.upkeep.apply("s.0")).blocks for _ in range(3)]
    assert counted == [128, 128, 128]
    assert len(await reporter.holds()) == 384


async def test_the_cursor_moves_only_past_entries_that_were_applied(reporter: ReportingWorker, fleet: Fleet) -> None:
    for start in (0, 100):
        await reporter.send("stored", blocks(*range(start, start + 100)))
    await reporter.fleet.upkeep.apply("s.0")
    left = await fleet.redis.xlen(fleet.keys.events("s.0"))
    assert left == 1, "the second batch did not fit into the call: it must not be trimmed"
    await reporter.applied()
    assert len(await reporter.holds()) == 200


async def test_small_entries_share_a_call(reporter: ReportingWorker) -> None:
    for number in range(20):
        await reporter.send("stored", blocks(number))
    applied = await reporter.fleet.upkeep.apply("s.0")
    assert (applied.entries, applied.blocks, applied.more) == (20, 20, False)


async def test_cleared_is_another_slot(reporter: ReportingWorker) -> None:
    await reporter.send("stored", blocks(1, 2))
    await reporter.applied()
    slot = (await reporter.row()).slot
    await reporter.send("cleared")
    await reporter.send("stored", blocks(2))
    await reporter.applied()
    assert await reporter.holds() == held(2)
    assert await reporter.digest() == digest_of(2)
    assert await reporter.retired() == {slot}


async def test_a_worker_cannot_fill_the_index_beyond_its_capacity(reporter: ReportingWorker, fleet: Fleet) -> None:
    reporter.nonce, reporter.number = "n2", 0
    await reporter.join(capacity_blocks=10)
    for start in range(0, 128 * 12, 128):
        await reporter.send("stored", blocks(*range(start, start + 128)))
    await reporter.applied()
    assert len(await reporter.holds()) == 1024  # 2 x capacity + 8 batches of slack, in whole batches
    assert (await fleet.index.counts())["overflow"] == 4
    assert await reporter.waiting()


@pytest.mark.parametrize(
    ("operation", "data"),
    [
        ("stored", b"1234567"),
        ("stored", b"x" * 8 * 129),
        ("removed", b"123456789"),
        ("chunk", b""),
        ("chunk", b"5ea50001xyz"),
        ("chunk", b"5ea50001" + b"x" * 8 * 129),
        ("begin", b"{}"),
        ("begin", b'{"snapshot":"5EA5000g"}'),
        ("begin", b'{"snapshot":5}'),
        ("end", b"{}"),
        ("end", b"junk"),
        ("heartbeat", b"{}"),
        ("heartbeat", b"[1,2,3]"),
        ("heartbeat", b"[1,2,3,4,5,6,-7]"),
        ("heartbeat", b"[1,2,3,4,5,6,4294967296]"),
        ("heartbeat", b"[1,2,3,4,5,6,nan]"),
        ("heartbeat", b"[1,2,3,4,5,6,7,2]"),
        ("heartbeat", b"[1,2,3,4,5,6,7,8,9,10,1,1,1]"),
        ("heartbeat", b'[1,2,3,4,5,6,"7"]'),
        ("heartbeat", b"[1,2,3,4,5,6,null]"),
        ("progress", b"7"),
        ("progress", b"[7]"),
        ("progress", b"[null]"),
        ("progress", b'[["wf-1",1]]'),
        ("progress", b'[["wf-1",1,-1]]'),
        ("progress", b"[[1,1,1]]"),
        ("progress", b"[" + b",".join([b'["a",1,1]'] * 65) + b"]"),
        ("explode", b""),
        ("", b""),
    ],
)
async def test_malformed_data_is_counted_and_skipped(
    reporter: ReportingWorker, fleet: Fleet, operation: str, data: bytes
) -> None:
    row = await reporter.row()
    await reporter.send(operation, data)
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    assert await fleet.index.counts() == {"malformed": 1}
    assert await reporter.row() == row
    assert await reporter.holds() == held(1)


@pytest.mark.parametrize(
    "fields",
    [
        {"x": "1"},
        {"n": "n1", "b": "2", "o": "stored"},
        {"b": "2", "n": "n1", "o": "stored", "d": block(5)},
        {"n": "n1", "b": "2", "o": "stored", "d": block(5), "e": "1"},
        {"n": "n1", "b": "-2", "o": "stored", "d": block(5)},
        {"n": "n1", "b": "2e3", "o": "stored", "d": block(5)},
        {"n": "n1", "b": "9" * 40, "o": "stored", "d": block(5)},
        {"n": "!", "b": "2", "o": "join", "d": "{}"},
        {"n": "x" * 65, "b": "2", "o": "join", "d": "{}"},
    ],
    ids=str,
)
async def test_an_entry_of_another_shape_is_counted_and_skipped(
    reporter: ReportingWorker, fleet: Fleet, fields: dict[Any, Any]
) -> None:
    await reporter.store.xadd(reporter.stream, fields)
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    assert await fleet.index.counts() == {"malformed": 1}
    assert await reporter.holds() == held(1)
    assert await reporter.store.xlen(reporter.stream) == 0


# ---------------------------------------------------------------- batch numbers


async def test_a_duplicate_is_dropped(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.send("removed", blocks(1))
    reporter.number -= 2
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    assert await reporter.holds() == set()
    assert await fleet.index.counts() == {"duplicate": 1}
    assert await reporter.waiting() is None


async def test_a_gap_is_applied_and_asks_for_a_snapshot(reporter: ReportingWorker, fleet: Fleet) -> None:
    reporter.number += 3
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    assert await reporter.holds() == held(1)
    assert await fleet.index.counts() == {"gap": 1}
    assert cast("float", await reporter.waiting()) < 0
    assert (await reporter.command())["applied"] == reporter.number


async def test_a_gap_that_lost_no_blocks_is_forgiven_by_the_digest(reporter: ReportingWorker) -> None:
    await reporter.send("stored", blocks(1))
    reporter.number += 1
    await reporter.heartbeat(digest_of(1))
    await reporter.applied()
    assert await reporter.waiting() is None


async def test_a_gap_within_a_snapshot_drops_it(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    reporter.number += 1
    await reporter.send("chunk", NAME.encode() + blocks(2))
    await reporter.end(digest_of(2))
    await reporter.applied()
    assert await reporter.holds() == held(1)
    assert await fleet.index.counts() == {"gap": 1, "stale": 2}
    assert len(await reporter.retired()) == 1
    assert cast("float", await reporter.waiting()) < 0


async def test_a_gap_before_a_control_entry_counts_too(reporter: ReportingWorker, fleet: Fleet) -> None:
    reporter.number += 1
    await reporter.send("cleared")
    reporter.number -= 1
    await reporter.send("cleared")
    await reporter.applied()
    assert await fleet.index.counts() == {"gap": 1, "duplicate": 1}
    assert await reporter.waiting()
