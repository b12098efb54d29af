"""apply_control: which process is the worker, and streams that break the rules."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import SCHEME, ReportingWorker, blocks, digest_of, held, with_load

from warmfleet.fleet import Flag, Fleet, connect
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

NAME = "5ea50001"


# ---------------------------------------------------------------- which process is the worker


async def test_join_makes_row_record_and_liveness(reporter: ReportingWorker) -> None:
    row, record = await reporter.row(), await reporter.record()
    assert (row.slot, row.scheme, row.capacity_blocks) == (record["slot"], SCHEME.scheme_id, 1000)
    assert row.flags == Flag.CLOSED
    assert row.slot > 0
    assert row.epoch > 0
    assert record["scheme"] == SCHEME.as_dict()
    assert (record["nonce"], record["proof"], record["server_id"], record["rank"]) == ("n1", "pending", "s", 0)
    command = await reporter.command()
    assert abs(wire.entry_id(command.pop("joined"))[0] - time.time() * 1000) < 10_000
    assert command == {"nonce": "n1", "applied": 1}
    assert abs(await reporter.alive_ms() - time.time() * 1000) < 10_000
    assert await reporter.store.xlen(reporter.stream) == 0


async def test_the_record_keeps_the_size_of_hashes(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter, scheme = ReportingWorker(store, fleet), replace(SCHEME, hash_block_tokens=4)
    await reporter.join(scheme=scheme.as_dict(), scheme_id=scheme.scheme_id)
    await reporter.applied()
    assert wire.Scheme.from_dict((await reporter.record())["scheme"]) == scheme


async def test_join_of_a_worker_whose_server_lives_sets_the_flag(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await store.zadd(fleet.keys.alive_servers, {"s": time.time() * 1000})
    await reporter.join(closed=False)
    await reporter.applied()
    assert (await reporter.row()).flags == Flag.SERVER


async def test_a_repeated_join_changes_nothing(reporter: ReportingWorker) -> None:
    await reporter.send("stored", blocks(1, 2))
    await reporter.applied()
    row = await reporter.row()
    await reporter.join()
    await reporter.applied()
    assert await reporter.row() == row
    assert await reporter.holds() == held(1, 2)


async def test_a_new_nonce_is_a_new_incarnation_with_the_old_load(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1, 2))
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(9))
    await reporter.applied()
    before = await reporter.row()
    shadow = (await reporter.record())["shadow"]
    await fleet.redis.hset(fleet.keys.load, "s.0", with_load(before, 100, 7, 2))
    reporter.number = 0
    await reporter.join("n2")
    await reporter.send("stored", blocks(3))
    await reporter.applied()
    after = await reporter.row()
    assert after.slot not in (before.slot, shadow)
    assert (after.epoch, after.prefill_tokens, after.decode_tokens, after.in_flight) == (before.epoch, 100, 7, 2)
    assert await reporter.holds() == held(3)
    assert await reporter.digest() == digest_of(3)
    assert await reporter.retired() == {before.slot, shadow}
    assert "shadow" not in await reporter.record()


async def test_another_nonce_is_dropped_and_counted(reporter: ReportingWorker, fleet: Fleet) -> None:
    stranger = ReportingWorker(reporter.store, fleet)
    stranger.nonce, stranger.number = "old", 40
    await stranger.send("stored", blocks(66))
    await stranger.send("leave")
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    assert await reporter.holds() == held(1)
    assert (await fleet.index.counts())["nonce"] == 2
    assert await reporter.store.zscore(reporter.keys.alive, "s.0")


async def test_a_predecessor_cannot_clear_or_say_goodbye(reporter: ReportingWorker, fleet: Fleet) -> None:
    """The entry comes right after its successor's join, before any entry of the successor is applied."""
    dead = ReportingWorker(reporter.store, fleet)
    dead.number = reporter.number
    reporter.number = 0
    await reporter.join("n2")
    for operation in ("cleared", "leave"):
        await dead.send(operation)
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    assert len(await reporter.retired()) == 1, "only the slot of the predecessor"
    assert await reporter.alive_ms()
    assert await reporter.holds() == held(1)
    assert await fleet.index.counts() == {"nonce": 2}


async def test_a_stream_without_a_join_is_dropped_whole(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.send("stored", blocks(1))
    await fleet.upkeep.apply("s.0")
    assert not await store.exists(reporter.stream)
    assert not await store.hexists(fleet.keys.cursor, "events:s.0")
    assert not await store.hexists(fleet.keys.load, "s.0")
    assert (await fleet.index.counts())["nonce"] == 1
    assert (await fleet.upkeep.apply("s.0")).entries == 0


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"worker_id": "t.0"},
        {"server_id": "t"},
        {"rank": 1},
        {"rank": -1},
        {"scheme": "sha256"},
        {"scheme": {}},
        {"scheme": SCHEME.as_dict() | {"block_tokens": 0}},
        {"scheme": SCHEME.as_dict() | {"hash_block_tokens": 0}},
        {"scheme": SCHEME.as_dict() | {"hash_block_tokens": "8"}},
        {"scheme": SCHEME.as_dict() | {"algorithm": 'x","slot":1'}},
        {"scheme_id": 2**31},
        {"scheme_id": "1"},
        {"capacity_blocks": -1},
        {"capacity_blocks": 1.5},
        {"max_model_len": None},
        {"version": 33},
        {"version": "x" * 5000},
    ],
    ids=str,
)
async def test_a_malformed_join_joins_nobody(store: aioredis.Redis, fleet: Fleet, change: dict[str, Any]) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(**change)
    await reporter.applied()
    assert await reporter.record() == {}
    assert (await fleet.index.counts())["malformed"] == 1


async def test_a_join_tells_the_most_tokens_of_a_step_and_a_malformed_number_is_left_out(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    reporter = ReportingWorker(store, fleet)
    for number, (told, kept) in enumerate(
        [(8_192, 8_192), (0, None), (-1, None), (1.5, None), ("9", None), (None, None), (2**31, None), (1, 1)]
    ):
        await reporter.join(f"n{number}", step_tokens=told)
        await reporter.applied()
        [view] = await fleet.workers.read()
        assert view.record.get("step_tokens") == kept


async def test_a_malformed_join_leaves_the_current_worker_alone(reporter: ReportingWorker, fleet: Fleet) -> None:
    row = await reporter.row()
    for data in (b"", b"{", b"[]", b"null", b'{"schema":1}', b"\xff", b"9" * 40):
        reporter.nonce = "n2"
        await reporter.send("join", data)
    await reporter.applied()
    assert await reporter.row() == row
    assert (await reporter.record())["nonce"] == "n1"
    assert (await fleet.index.counts())["malformed"] == 7


# ---------------------------------------------------------------- streams that break the rules


async def test_a_key_of_another_type_is_deleted_and_the_worker_is_hostile(
    reporter: ReportingWorker, fleet: Fleet
) -> None:
    await reporter.store.delete(reporter.stream)
    await reporter.store.set(reporter.stream, "no stream")
    applied = await fleet.upkeep.apply("s.0")
    assert (applied.entries, applied.more) == (0, False)
    assert not await reporter.store.exists(reporter.stream)
    assert (await reporter.row()).flags & Flag.HOSTILE
    assert (await reporter.command())["do"] == "rejoin"
    assert await fleet.index.counts() == {"hostile": 1}
    await reporter.join("n2")
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.HOSTILE
    assert "do" not in await reporter.command()


async def test_a_key_of_another_type_and_nobody_behind_it(store: aioredis.Redis, fleet: Fleet) -> None:
    await store.set(fleet.keys.events("s.0"), "no stream")
    await fleet.upkeep.apply("s.0")
    assert not await store.exists(fleet.keys.events("s.0"))


@pytest.mark.parametrize("at", ["18446744073709551615-1", "{future}-0", "{now}-18446744073709551614"])
async def test_an_id_that_would_outlive_all_others_is_hostile(reporter: ReportingWorker, fleet: Fleet, at: str) -> None:
    now = int(time.time() * 1000) + 1000
    await reporter.send("stored", blocks(1))
    await reporter.send("stored", blocks(2), at=at.format(now=now, future=now + 7_200_000))
    await reporter.applied()
    assert await reporter.holds() == held(1)
    assert (await reporter.row()).flags & Flag.HOSTILE
    assert not await reporter.store.exists(reporter.stream)
    await reporter.send("stored", blocks(3))
    await reporter.applied()
    assert await reporter.holds() == held(1), "what comes before the rejoin is not listened to"


async def test_the_same_process_rejoining_gets_an_empty_slot_and_is_due_for_a_snapshot(
    reporter: ReportingWorker,
) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.send("stored", blocks(2), at="18446744073709551615-1")
    await reporter.applied()
    assert await reporter.holds() == held(1)
    await reporter.join()
    await reporter.applied()
    assert await reporter.holds() == set()
    assert cast("float", await reporter.waiting()) < 0


async def test_a_stream_that_began_anew_must_join(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.applied()
    await reporter.store.delete(reporter.stream)
    await reporter.send("stored", blocks(2), at="5-1")
    await reporter.applied()
    assert await reporter.holds() == held(1)
    assert (await reporter.command())["do"] == "rejoin"
    assert (await fleet.index.counts())["regress"] == 1
    await reporter.join("n2", at="6-1")
    await reporter.send("stored", blocks(3), at="6-2")
    await reporter.applied()
    assert await reporter.holds() == held(3)
    assert "do" not in await reporter.command()


async def test_a_flood_of_strangers_and_junk_moves_on_in_bounded_calls(reporter: ReportingWorker, fleet: Fleet) -> None:
    for number in range(100):
        await reporter.store.xadd(reporter.stream, {"x": str(number)})
        await reporter.store.xadd(reporter.stream, cast("Any", wire.entry("other", 1, "stored", blocks(1))))
    await reporter.send("stored", blocks(1))
    most = 0
    while (applied := await fleet.upkeep.apply("s.0")).more:
        most = max(most, applied.entries)
    assert most <= 32 + 16
    assert await reporter.holds() == held(1)
    assert await fleet.index.counts() == {"malformed": 100, "nonce": 100}


async def test_two_appliers_apply_everything_once(
    reporter: ReportingWorker, redis_url: str, model: str, fleet: Fleet
) -> None:
    for number in range(200):
        await reporter.send("stored", blocks(number, number + 1))
        await reporter.send("removed", blocks(number))
    async with connect(redis_url, timeout_s=5) as second:
        fleets = [fleet, Fleet(second, model)]

        async def drain(one: Fleet) -> int:
            entries = 0
            while (applied := await one.upkeep.apply("s.0")).more or applied.entries:
                entries += applied.entries
            return entries

        assert sum(await asyncio.gather(*(drain(fleet) for fleet in fleets))) == 400
    assert await reporter.holds() == held(200)
    assert await fleet.index.counts() == {}
