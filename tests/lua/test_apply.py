"""apply and apply_control, through the public door: XADD, then Fleet.apply."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.lua.stream import SCHEME, Core, block, blocks, digest_of, held

from warmfleet.fleet import Ask, Chain, Flag, Fleet, Lease, Stage, connect
from warmfleet_worker import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

NAME = "5ea50001"


@pytest.fixture
async def core(store: aioredis.Redis, fleet: Fleet) -> Core:
    """A worker that has joined."""
    core = Core(store, fleet)
    await core.join()
    await core.applied()
    return core


# ---------------------------------------------------------------- who is who


async def test_join_makes_row_record_and_liveness(core: Core) -> None:
    row, record = await core.row(), await core.record()
    assert (row.slot, row.scheme, row.capacity_blocks) == (record["slot"], SCHEME.scheme_id, 1000)
    assert row.flags == Flag.CLOSED
    assert row.slot > 0
    assert row.epoch > 0
    assert record["scheme"] == SCHEME.as_dict()
    assert (record["nonce"], record["proof"], record["server_id"], record["rank"]) == ("n1", "pending", "s", 0)
    assert await core.command() == {"nonce": "n1", "applied": 1}
    assert abs(await core.alive_ms() - time.time() * 1000) < 10_000
    assert await core.store.xlen(core.stream) == 0


async def test_join_of_a_worker_whose_server_lives_sets_the_flag(store: aioredis.Redis, fleet: Fleet) -> None:
    core = Core(store, fleet)
    await store.zadd(fleet.keys.alive_servers, {"s": time.time() * 1000})
    await core.join(closed=False)
    await core.applied()
    assert (await core.row()).flags == Flag.SERVER


async def test_a_repeated_join_changes_nothing(core: Core) -> None:
    await core.send("stored", blocks(1, 2))
    await core.applied()
    row = await core.row()
    await core.join()
    await core.applied()
    assert await core.row() == row
    assert await core.holds() == held(1, 2)


async def test_a_new_nonce_is_a_new_incarnation_with_the_old_load(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1, 2))
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(9))
    await core.applied()
    before = await core.row()
    shadow = (await core.record())["shadow"]
    await fleet.redis.hset(fleet.keys.load, "s.0", with_load(before, 100, 7, 2))
    core.number = 0
    await core.join("n2")
    await core.send("stored", blocks(3))
    await core.applied()
    after = await core.row()
    assert after.slot not in (before.slot, shadow)
    assert (after.epoch, after.prefill_tokens, after.decode_tokens, after.in_flight) == (before.epoch, 100, 7, 2)
    assert await core.holds() == held(3)
    assert await core.digest() == digest_of(3)
    assert await core.retired() == {before.slot, shadow}
    assert "shadow" not in await core.record()


def with_load(row: Any, prefill: int, decode: int, in_flight: int) -> bytes:
    values = {name: getattr(row, name) for name in row.__slots__}
    load = {"prefill_tokens": prefill, "decode_tokens": decode, "in_flight": in_flight}
    return cast("bytes", type(row)(**values | load).pack())


async def test_another_nonce_is_dropped_and_counted(core: Core, fleet: Fleet) -> None:
    stranger = Core(core.store, fleet)
    stranger.nonce, stranger.number = "old", 40
    await stranger.send("stored", blocks(66))
    await stranger.send("leave")
    await core.send("stored", blocks(1))
    await core.applied()
    assert await core.holds() == held(1)
    assert (await fleet.counts())["nonce"] == 2
    assert await core.store.zscore(core.keys.alive, "s.0")


async def test_a_stream_without_a_join_is_dropped_whole(store: aioredis.Redis, fleet: Fleet) -> None:
    core = Core(store, fleet)
    await core.send("stored", blocks(1))
    await fleet.apply("s.0")
    assert not await store.exists(core.stream)
    assert not await store.hexists(fleet.keys.cursor, "events:s.0")
    assert not await store.hexists(fleet.keys.load, "s.0")
    assert (await fleet.counts())["nonce"] == 1
    assert (await fleet.apply("s.0")).entries == 0


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
    core = Core(store, fleet)
    await core.join(**change)
    await core.applied()
    assert await core.record() == {}
    assert (await fleet.counts())["malformed"] == 1


async def test_a_malformed_join_leaves_the_current_worker_alone(core: Core, fleet: Fleet) -> None:
    row = await core.row()
    for data in (b"", b"{", b"[]", b"null", b'{"schema":1}', b"\xff", b"9" * 40):
        core.nonce = "n2"
        await core.send("join", data)
    await core.applied()
    assert await core.row() == row
    assert (await core.record())["nonce"] == "n1"
    assert (await fleet.counts())["malformed"] == 7


# ---------------------------------------------------------------- stored, removed, cleared


async def test_stored_and_removed_move_sets_and_digest(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1, 2, 3, 2))
    await core.send("stored", blocks(3, 4))
    await core.send("removed", blocks(2, 2, 77))
    await core.send("stored", b"")
    await core.applied()
    assert await core.holds() == held(1, 3, 4)
    assert await core.digest() == digest_of(1, 3, 4)
    assert not await fleet.redis.exists(fleet.keys.block(block(2)))


async def test_a_stream_touches_only_its_own_slot(core: Core, store: aioredis.Redis, fleet: Fleet) -> None:
    other = Core(store, fleet, "t")
    await other.join()
    await other.send("stored", blocks(1, 2))
    await other.applied()
    await core.send("stored", blocks(1, 3))
    await core.send("removed", blocks(1, 2))
    await core.applied()
    assert await other.holds() == held(1, 2)
    assert await core.holds() == held(3)


async def test_a_full_batch_and_no_more_blocks_than_asked_for(core: Core) -> None:
    for start in range(0, 384, 128):
        await core.send("stored", blocks(*range(start, start + 128)))
    counted = [(await core.fleet.apply("s.0")).blocks for _ in range(3)]
    assert counted == [128, 128, 128]
    assert len(await core.holds()) == 384


async def test_small_entries_share_a_call(core: Core) -> None:
    for number in range(20):
        await core.send("stored", blocks(number))
    applied = await core.fleet.apply("s.0")
    assert (applied.entries, applied.blocks, applied.more) == (20, 20, False)


async def test_cleared_is_another_slot(core: Core) -> None:
    await core.send("stored", blocks(1, 2))
    await core.applied()
    slot = (await core.row()).slot
    await core.send("cleared")
    await core.send("stored", blocks(2))
    await core.applied()
    assert await core.holds() == held(2)
    assert await core.digest() == digest_of(2)
    assert await core.retired() == {slot}


async def test_a_worker_cannot_fill_the_index_beyond_its_capacity(core: Core, fleet: Fleet) -> None:
    core.nonce, core.number = "n2", 0
    await core.join(capacity_blocks=10)
    for start in range(0, 128 * 12, 128):
        await core.send("stored", blocks(*range(start, start + 128)))
    await core.applied()
    assert len(await core.holds()) == 1024  # 2 x capacity + 8 batches of slack, in whole batches
    assert (await fleet.counts())["overflow"] == 4
    assert await core.waiting()


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
async def test_malformed_data_is_counted_and_skipped(core: Core, fleet: Fleet, operation: str, data: bytes) -> None:
    row = await core.row()
    await core.send(operation, data)
    await core.send("stored", blocks(1))
    await core.applied()
    assert await fleet.counts() == {"malformed": 1}
    assert await core.row() == row
    assert await core.holds() == held(1)


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
    core: Core, fleet: Fleet, fields: dict[Any, Any]
) -> None:
    await core.store.xadd(core.stream, fields)
    await core.send("stored", blocks(1))
    await core.applied()
    assert await fleet.counts() == {"malformed": 1}
    assert await core.holds() == held(1)
    assert await core.store.xlen(core.stream) == 0


# ---------------------------------------------------------------- batch numbers


async def test_a_duplicate_is_dropped(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1))
    await core.send("removed", blocks(1))
    core.number -= 2
    await core.send("stored", blocks(1))
    await core.applied()
    assert await core.holds() == set()
    assert await fleet.counts() == {"duplicate": 1}
    assert await core.waiting() is None


async def test_a_gap_is_applied_and_asks_for_a_snapshot(core: Core, fleet: Fleet) -> None:
    core.number += 3
    await core.send("stored", blocks(1))
    await core.applied()
    assert await core.holds() == held(1)
    assert await fleet.counts() == {"gap": 1}
    assert cast("float", await core.waiting()) < 0
    assert (await core.command())["applied"] == core.number


async def test_a_gap_that_lost_no_blocks_is_forgiven_by_the_digest(core: Core) -> None:
    await core.send("stored", blocks(1))
    core.number += 1
    await core.heartbeat(digest_of(1))
    await core.applied()
    assert await core.waiting() is None


async def test_a_gap_within_a_snapshot_drops_it(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1))
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    core.number += 1
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(1)
    assert await fleet.counts() == {"gap": 1, "stale": 2}
    assert cast("float", await core.waiting()) < 0


async def test_a_gap_before_a_control_entry_counts_too(core: Core, fleet: Fleet) -> None:
    core.number += 1
    await core.send("cleared")
    core.number -= 1
    await core.send("cleared")
    await core.applied()
    assert await fleet.counts() == {"gap": 1, "duplicate": 1}
    assert await core.waiting()


# ---------------------------------------------------------------- heartbeat and leave


async def test_heartbeat_fills_the_row(core: Core) -> None:
    await core.heartbeat(digest_of())
    await core.heartbeat(speed_tps=0, blocks=9)
    await core.applied()
    row = await core.row()
    assert (row.foreign_prefill_tokens, row.foreign_decode_tokens, row.evicted) == (4, 5, 7)
    assert (row.speed_tps, row.blocks) == (6000, 9)  # 0 = not measured: the old speed stays
    assert await core.waiting() is None


async def test_a_heartbeat_is_as_old_as_its_entry(core: Core, store: aioredis.Redis, fleet: Fleet) -> None:
    other, then = Core(store, fleet, "t"), int(time.time() * 1000) - 60_000
    await other.join(at=f"{then}-0")
    await other.heartbeat(at=f"{then + 5000}-0")
    await other.applied()
    assert await store.zscore(fleet.keys.alive, "t.0") == then + 5000


async def test_a_heartbeat_from_the_future_was_seen_now(core: Core) -> None:
    await core.heartbeat(at=f"{int(time.time() * 1000) + 600_000}-0")
    await core.applied()
    assert abs(await core.alive_ms() - time.time() * 1000) < 10_000


async def test_a_wrong_digest_asks_for_a_snapshot_once(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1))
    await core.heartbeat(digest_of(1, 2))
    await core.applied()
    first = await core.waiting()
    await core.heartbeat(digest_of(2))
    await core.applied()
    assert await fleet.counts() == {"mismatch": 2}
    assert first == await core.waiting()
    assert cast("float", first) < 0


async def test_leave_takes_the_worker_out_of_alive_and_a_heartbeat_puts_it_back(core: Core) -> None:
    await core.send("leave")
    await core.applied()
    assert await core.store.zscore(core.keys.alive, "s.0") is None
    await core.heartbeat()
    await core.applied()
    assert await core.store.zscore(core.keys.alive, "s.0")


# ---------------------------------------------------------------- progress


async def lease(core: Core, name: str, **changes: Any) -> None:
    """An open reservation on the worker: 300 tokens to prefill, 50 to decode, 64 of 364 matched."""
    row = await core.row()
    values: dict[str, Any] = {
        "epoch": row.epoch,
        "slot": row.slot,
        "prefill_tokens": 300,
        "decode_tokens": 50,
        "matched_tokens": 64,
    }
    values |= {"prompt_tokens": 364, "stage": Stage.BOOKED, "worker_id": "s.0", "checkpoints": (block(1),)}
    packed = Lease(**values | changes).pack()
    await core.store.hset(core.keys.lease, name, packed)
    await core.store.hset(core.keys.load, "s.0", with_load(row, row.prefill_tokens + 300, 0, 1))


async def leased(core: Core, name: str) -> Lease:
    return Lease.unpack(cast("bytes", await core.store.hget(core.keys.lease, name)))


async def test_progress_gives_the_prefill_back_once(core: Core, fleet: Fleet) -> None:
    await lease(core, "wf-a")
    for _ in range(2):
        await core.send("progress", wire.dumps([["wf-a", 64, 364]]))
    await core.applied()
    row = await core.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 50, 1)
    started = await leased(core, "wf-a")
    assert (started.stage, started.prefill_tokens, started.decode_tokens) == (Stage.STARTED, 0, 50)
    assert started.checkpoints == (block(1),)
    assert await fleet.counts() == {"exact": 2}


@pytest.mark.parametrize(("cached", "prompt", "counts"), [(0, 364, {"short": 1}), (80, 360, {"over": 1, "prompt": 1})])
async def test_progress_compares_prediction_and_outcome(
    core: Core, fleet: Fleet, cached: int, prompt: int, counts: dict[str, int]
) -> None:
    await lease(core, "wf-a")
    await core.send("progress", wire.dumps([["wf-a", cached, prompt]]))
    await core.applied()
    assert await fleet.counts() == counts


async def test_progress_cannot_touch_what_is_not_the_workers(core: Core, fleet: Fleet) -> None:
    await lease(core, "wf-other", worker_id="t.0")
    await lease(core, "wf-dead", stage=Stage.TOMBSTONE)
    await core.send("progress", wire.dumps([["wf-other", 64, 364], ["wf-dead", 0, 0], ["wf-none", 1, 1]]))
    await core.applied()
    assert (await core.row()).prefill_tokens == 600
    assert (await leased(core, "wf-other")).stage == Stage.BOOKED
    assert await fleet.counts() == {"foreign": 1, "late": 2}


async def test_progress_of_another_epoch_leaves_the_row_alone(core: Core) -> None:
    await lease(core, "wf-a", epoch=(await core.row()).epoch - 1)
    await core.send("progress", wire.dumps([["wf-a", 64, 364]]))
    await core.applied()
    row = await core.row()
    assert (row.prefill_tokens, row.decode_tokens) == (300, 0)


async def test_progress_after_a_real_decision_and_before_a_real_settle(core: Core, fleet: Fleet) -> None:
    flags = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
    packed = bytearray((await core.row()).pack())
    packed[20:22] = int(flags).to_bytes(2, "big")
    await core.store.hset(core.keys.load, "s.0", bytes(packed))
    await core.send("stored", blocks(1, 2))
    await core.applied()
    chain = Chain(SCHEME.scheme_id, 16, blocks(1, 2, 3))
    decision = await fleet.decide(Ask("wf-real", (chain,), prompt_tokens=60, decode_tokens=10))
    assert decision.matched_tokens == 32
    await core.send("progress", wire.dumps([["wf-real", 32, 60]]))
    await core.applied()
    assert (await core.row()).prefill_tokens == 0
    await fleet.settle("wf-real", "finished")
    row = await core.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert await fleet.counts() == {"exact": 1}


# ---------------------------------------------------------------- snapshot


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
    assert await fleet.counts() == {"resync": 1}
    assert "shadow" not in await core.record()
    assert await core.waiting() is None
    assert not await core.store.hexists(core.keys.digest, "~s.0")


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
    assert await fleet.counts() == {"interleaved": 1, "resync": 1}


async def test_chunks_of_another_snapshot_are_dropped(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", b"0000000a" + blocks(1))
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(2)
    assert await fleet.counts() == {"stale": 1, "resync": 1}


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
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == set()
    assert len(await core.retired()) == 2
    assert await core.waiting() is None
    assert await fleet.counts() == {"stale": 1}


async def test_heartbeats_within_a_snapshot_compare_nothing(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.heartbeat(digest_of(9))
    await core.heartbeat()
    await core.send("chunk", NAME.encode() + blocks(2))
    await core.end(digest_of(2))
    await core.applied()
    assert await core.holds() == held(2)
    assert await fleet.counts() == {"resync": 1}


# ---------------------------------------------------------------- streams that break the rules


async def test_a_key_of_another_type_is_deleted_and_the_worker_is_hostile(core: Core, fleet: Fleet) -> None:
    await core.store.delete(core.stream)
    await core.store.set(core.stream, "no stream")
    applied = await fleet.apply("s.0")
    assert (applied.entries, applied.more) == (0, False)
    assert not await core.store.exists(core.stream)
    assert (await core.row()).flags & Flag.HOSTILE
    assert (await core.command())["do"] == "rejoin"
    assert await fleet.counts() == {"hostile": 1}
    await core.join("n2")
    await core.applied()
    assert not (await core.row()).flags & Flag.HOSTILE
    assert "do" not in await core.command()


async def test_a_key_of_another_type_and_nobody_behind_it(store: aioredis.Redis, fleet: Fleet) -> None:
    await store.set(fleet.keys.events("s.0"), "no stream")
    await fleet.apply("s.0")
    assert not await store.exists(fleet.keys.events("s.0"))


@pytest.mark.parametrize("at", ["18446744073709551615-1", "{future}-0", "{now}-18446744073709551614"])
async def test_an_id_that_would_outlive_all_others_is_hostile(core: Core, fleet: Fleet, at: str) -> None:
    now = int(time.time() * 1000) + 1000
    await core.send("stored", blocks(1))
    await core.send("stored", blocks(2), at=at.format(now=now, future=now + 7_200_000))
    await core.applied()
    assert await core.holds() == held(1)
    assert (await core.row()).flags & Flag.HOSTILE
    assert not await core.store.exists(core.stream)
    await core.send("stored", blocks(3))
    await core.applied()
    assert await core.holds() == held(1), "what comes before the rejoin is not listened to"


async def test_the_same_process_rejoining_gets_an_empty_slot_and_is_due_for_a_snapshot(core: Core) -> None:
    await core.send("stored", blocks(1), at="18446744073709551615-1")
    await core.applied()
    await core.join()
    await core.applied()
    assert await core.holds() == set()
    assert cast("float", await core.waiting()) < 0


async def test_a_stream_that_began_anew_must_join(core: Core, fleet: Fleet) -> None:
    await core.send("stored", blocks(1))
    await core.applied()
    await core.store.delete(core.stream)
    await core.send("stored", blocks(2), at="5-1")
    await core.applied()
    assert await core.holds() == held(1)
    assert (await core.command())["do"] == "rejoin"
    assert (await fleet.counts())["regress"] == 1
    await core.join("n2", at="6-1")
    await core.send("stored", blocks(3), at="6-2")
    await core.applied()
    assert await core.holds() == held(3)
    assert "do" not in await core.command()


async def test_a_flood_of_strangers_and_junk_moves_on_in_bounded_calls(core: Core, fleet: Fleet) -> None:
    for number in range(100):
        await core.store.xadd(core.stream, {"x": str(number)})
        await core.store.xadd(core.stream, cast("Any", wire.entry("other", 1, "stored", blocks(1))))
    await core.send("stored", blocks(1))
    most = 0
    while (applied := await fleet.apply("s.0")).more:
        most = max(most, applied.entries)
    assert most <= 32 + 16
    assert await core.holds() == held(1)
    assert await fleet.counts() == {"malformed": 100, "nonce": 100}


async def test_two_appliers_apply_everything_once(core: Core, redis_url: str, model: str, fleet: Fleet) -> None:
    for number in range(200):
        await core.send("stored", blocks(number, number + 1))
        await core.send("removed", blocks(number))
    async with connect(redis_url, timeout_s=5) as second:
        fleets = [fleet, Fleet(second, model)]

        async def drain(one: Fleet) -> int:
            entries = 0
            while (applied := await one.apply("s.0")).more or applied.entries:
                entries += applied.entries
            return entries

        assert sum(await asyncio.gather(*(drain(one) for one in fleets))) == 400
    assert await core.holds() == held(200)
    assert await fleet.counts() == {}
