"""apply: heartbeat, leave, progress."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import SCHEME, ReportingWorker, block, blocks, digest_of, with_load

from warmfleet.fleet import ClientLimits, Flag, Fleet, Lease, Question, Stage, new_reservation
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet.bookings import Told

NAME = "5ea50001"


# ---------------------------------------------------------------- heartbeat and leave


async def test_heartbeat_fills_the_row(reporter: ReportingWorker) -> None:
    await reporter.heartbeat(digest_of())
    await reporter.heartbeat(speed_tps=0, blocks=9)
    await reporter.applied()
    row = await reporter.row()
    assert (row.foreign_prefill_tokens, row.foreign_decode_tokens, row.evicted) == (4, 5, 7)
    assert (row.speed_tps, row.blocks) == (6000, 9)  # 0 = not measured: the old speed stays
    assert await reporter.waiting() is None


async def test_a_heartbeat_says_whether_the_engine_is_paused(reporter: ReportingWorker) -> None:
    """The last heartbeat counts, with a digest or without; a restarted engine runs."""
    flags = (await reporter.row()).flags
    for digest in (None, digest_of()):
        for paused in (True, True, False, False):
            await reporter.heartbeat(digest, paused=paused)
            await reporter.applied()
            assert (await reporter.row()).flags == flags | (Flag.PAUSED if paused else 0)
    await reporter.heartbeat(paused=True)
    await reporter.join("n2")
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.PAUSED


async def test_a_heartbeat_tells_how_long_a_step_takes_at_least(reporter: ReportingWorker) -> None:
    async def noted() -> object:
        return (await reporter.record()).get("step_us")

    await reporter.heartbeat()
    assert await noted() is None, "a plugin of before does not tell it"
    for digest in (None, digest_of()):
        for told, known in ((8_000, 8_000), (9_000, 8_000), (12_000, 12_000), (0, 0)):
            await reporter.heartbeat(digest, step_us=told, paused=told == 9_000)
            await reporter.applied()
            assert await noted() == known, "a small change is not worth another record"
            assert bool((await reporter.row()).flags & Flag.PAUSED) is (told == 9_000)


async def test_a_heartbeat_is_as_old_as_its_entry(
    reporter: ReportingWorker, store: aioredis.Redis, fleet: Fleet
) -> None:
    other, then = ReportingWorker(store, fleet, "t"), int(time.time() * 1000) - 60_000
    await other.join(at=f"{then}-0")
    await other.heartbeat(at=f"{then + 5000}-0")
    await other.applied()
    assert await store.zscore(fleet.keys.alive, "t.0") == then + 5000


async def test_a_heartbeat_from_the_future_was_seen_now(reporter: ReportingWorker) -> None:
    await reporter.heartbeat(at=f"{int(time.time() * 1000) + 600_000}-0")
    await reporter.applied()
    assert abs(await reporter.alive_ms() - time.time() * 1000) < 10_000


async def test_a_wrong_digest_asks_for_a_snapshot_once(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.heartbeat(digest_of(1, 2))
    await reporter.applied()
    first = await reporter.waiting()
    await reporter.heartbeat(digest_of(2))
    await reporter.applied()
    assert await fleet.index.counts() == {"mismatch": 2}
    assert first == await reporter.waiting()
    assert cast("float", first) < 0


@pytest.mark.parametrize("change", [{"count": 2}, {"high": 1}, {"low": 1}], ids=str)
async def test_each_part_of_a_digest_counts(reporter: ReportingWorker, fleet: Fleet, change: dict[str, int]) -> None:
    await reporter.send("stored", blocks(1))
    await reporter.heartbeat(replace(digest_of(1), **change))
    await reporter.applied()
    assert await fleet.index.counts() == {"mismatch": 1}
    assert cast("float", await reporter.waiting()) < 0


async def test_leave_takes_the_worker_out_of_alive_and_a_heartbeat_puts_it_back(reporter: ReportingWorker) -> None:
    await reporter.send("leave")
    await reporter.applied()
    assert await reporter.store.zscore(reporter.keys.alive, "s.0") is None
    await reporter.heartbeat()
    await reporter.applied()
    assert await reporter.store.zscore(reporter.keys.alive, "s.0")


# ---------------------------------------------------------------- progress


async def lease(reporter: ReportingWorker, name: str, **changes: Any) -> None:
    """An open reservation on the worker: 300 tokens to prefill, 50 to decode, 64 of 364 matched."""
    row = await reporter.row()
    values: dict[str, Any] = {
        "epoch": row.epoch,
        "slot": row.slot,
        "prefill_tokens": 300,
        "decode_tokens": 50,
        "matched_tokens": 64,
    }
    values |= {"prompt_tokens": 364, "stage": Stage.BOOKED, "worker_id": "s.0", "checkpoints": (block(1),)}
    packed = Lease(**values | changes).pack()
    await reporter.store.hset(reporter.keys.lease, name, packed)
    await reporter.store.hset(reporter.keys.load, "s.0", with_load(row, row.prefill_tokens + 300, 50, 1))


async def leased(reporter: ReportingWorker, name: str) -> Lease:
    return Lease.unpack(cast("bytes", await reporter.store.hget(reporter.keys.lease, name)))


async def test_progress_gives_the_prefill_back_once(reporter: ReportingWorker, fleet: Fleet) -> None:
    await lease(reporter, "wf-a")
    for _ in range(2):
        await reporter.send("progress", wire.dumps([["wf-a", 64, 364]]))
    await reporter.applied()
    row = await reporter.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 50, 1)
    started = await leased(reporter, "wf-a")
    assert (started.stage, started.prefill_tokens, started.decode_tokens) == (Stage.STARTED, 0, 50)
    assert started.checkpoints == (block(1),)
    assert await fleet.index.counts() == {"exact": 1}  # each prediction is compared once


async def test_progress_after_the_end_leaves_a_lease_as_it_is(reporter: ReportingWorker) -> None:
    """A lease that is kept only for its blocks has given its load back, and must not count as a request under way."""
    await lease(reporter, "wf-a", stage=Stage.LINGERING, prefill_tokens=0)
    before = await reporter.row()
    await reporter.send("progress", wire.dumps([["wf-a", 64, 364]]))
    await reporter.applied()
    row = await reporter.row()
    assert (row.prefill_tokens, row.since_ms) == (before.prefill_tokens, before.since_ms)
    assert (await leased(reporter, "wf-a")).stage == Stage.LINGERING


@pytest.mark.parametrize(("cached", "prompt", "counts"), [(0, 364, {"short": 1}), (80, 360, {"over": 1, "prompt": 1})])
async def test_progress_compares_prediction_and_outcome(
    reporter: ReportingWorker, fleet: Fleet, cached: int, prompt: int, counts: dict[str, int]
) -> None:
    await lease(reporter, "wf-a")
    await reporter.send("progress", wire.dumps([["wf-a", cached, prompt]]))
    await reporter.applied()
    assert await fleet.index.counts() == counts


async def test_of_several_prompts_each_gives_back_its_share(reporter: ReportingWorker, fleet: Fleet) -> None:
    await lease(reporter, "wf--a")  # 300 booked of a prompt of 364 tokens, in three parts
    for prompt, prefill in ((91, 225), (182, 75), (91, 0), (91, 0)):
        await reporter.send("progress", wire.dumps([["wf--a", 16, prompt]]))
        await reporter.applied()
        row, held = await reporter.row(), await leased(reporter, "wf--a")
        assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (prefill, 50, 1)
        assert (held.prefill_tokens, held.stage) == (prefill, Stage.BOOKED if prefill else Stage.STARTED)
    await fleet.bookings.settle("wf--a", "finished")
    row = await reporter.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert await fleet.index.counts() == {}  # predictions are of the whole, outcomes of the parts


@pytest.mark.parametrize("told", ["before", "after", "never"])
@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_failure_after_the_prefill_gives_the_prompt_back(
    reporter: ReportingWorker, fleet: Fleet, told: str, prompts: int
) -> None:
    """A gateway's ``failed`` tells no tokens: those of the prompt stay in the lease, also once they were compared."""
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    await routable(reporter)
    limits = ClientLimits("team-a", tokens_per_minute=1_000_000)
    ask = Question(new_reservation(prompts, client=limits.tag), (), 100_000, 100_000, limits=limits)
    await fleet.bookings.decide(ask)
    if told == "before":
        await fleet.bookings.settle(ask.reservation, "started")
    for _ in range(prompts):
        await reporter.send("progress", wire.dumps([[ask.reservation, 0, 100_000 // prompts]]))
    await reporter.applied()
    if told == "after":
        await fleet.bookings.settle(ask.reservation, "started")
    held = await leased(reporter, ask.reservation)
    assert (held.stage, held.judged, held.prompt_tokens) == (Stage.STARTED, prompts == 1, 100_000)
    known = await fleet.bookings.decide(ask)
    assert (known.outcome, known.matched_tokens, known.prompt_tokens) == ("known", 0, 100_000)
    await fleet.bookings.settle(ask.reservation, "failed")
    after = await fleet.bookings.decide(
        replace(ask, reservation=new_reservation(1, client=limits.tag), prompt_tokens=1)
    )
    assert after.use is not None
    assert after.use.tokens == 1


@pytest.mark.parametrize(("held", "reported", "told"), [(0, 0, 0), (2, 2, 32), (2, 0, 0), (1, 3, 48)])
async def test_settle_tells_what_the_engine_had_cached(
    reporter: ReportingWorker, fleet: Fleet, held: int, reported: int, told: int
) -> None:
    """The lease keeps the predicted cached tokens until the engine's progress tells the real number."""
    await reporter.heartbeat(digest_of())
    await reporter.send("stored", blocks(*range(1, held + 1)))
    await reporter.applied()
    await routable(reporter)
    chain = Chain(SCHEME.scheme_id, 16, blocks(1, 2, 3))
    await fleet.bookings.decide(Question("wf-real", (chain,), prompt_tokens=60, decode_tokens=10))
    await reporter.send("progress", wire.dumps([["wf-real", 16 * reported, 60]]))
    await reporter.applied()
    assert await settled(fleet, "wf-real", "started") in ([b"STARTED"], [b"SAME"])
    assert await settled(fleet, "wf-real", "finished") == [b"SETTLED", told]
    assert await settled(fleet, "wf-real", "finished") in ([b"SAME"], [b"UNKNOWN"])


@pytest.mark.parametrize("case", ["no progress", "several prompts", "an estimated prompt"])
async def test_settle_tells_nothing_that_was_not_compared(reporter: ReportingWorker, fleet: Fleet, case: str) -> None:
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    await routable(reporter)
    booked = new_reservation(2 if case == "several prompts" else 1, exact=case != "an estimated prompt")
    await fleet.bookings.decide(Question(booked, (), prompt_tokens=60, decode_tokens=10))
    if case != "no progress":
        await reporter.send("progress", wire.dumps([[booked, 16, 60]]))
    await reporter.applied()
    assert await settled(fleet, booked, "finished") == [b"SETTLED"]


async def settled(fleet: Fleet, reservation: str, outcome: Told) -> Any:
    """The whole answer of settle."""
    return await fleet.scripts.call("settle", fleet.bookings.settle_command(reservation, outcome), 1.0)


async def test_with_the_last_request_everything_booked_ends(reporter: ReportingWorker, fleet: Fleet) -> None:
    """Scripts of an older version booked, and scripts of this version give back: their sums may differ."""
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    await routable(reporter)
    for name in ("wf-one", "wf-two"):
        await fleet.bookings.decide(Question(name, (), 100, 200))
    skewed = replace(await reporter.row(), prefill_tokens=-70, decode_tokens=470).pack("s.0")
    await cast("Any", reporter.store.hset(reporter.keys.load, "s.0", skewed))
    await fleet.bookings.settle("wf-one", "started")
    await fleet.bookings.settle("wf-one", "finished")
    row = await reporter.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (-170, 270, 1)
    await fleet.bookings.settle("wf-two", "finished")
    row = await reporter.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)


async def test_progress_cannot_touch_what_is_not_the_workers(reporter: ReportingWorker, fleet: Fleet) -> None:
    await lease(reporter, "wf-other", worker_id="t.0")
    await lease(reporter, "wf-dead", stage=Stage.TOMBSTONE)
    await reporter.send("progress", wire.dumps([["wf-other", 64, 364], ["wf-dead", 0, 0], ["wf-none", 1, 1]]))
    await reporter.applied()
    assert (await reporter.row()).prefill_tokens == 600
    assert (await leased(reporter, "wf-other")).stage == Stage.BOOKED
    assert await fleet.index.counts() == {"foreign": 1, "late": 2}


async def test_progress_of_another_epoch_leaves_the_row_alone(reporter: ReportingWorker) -> None:
    await lease(reporter, "wf-a", epoch=(await reporter.row()).epoch - 1)
    await reporter.send("progress", wire.dumps([["wf-a", 64, 364]]))
    await reporter.applied()
    row = await reporter.row()
    assert (row.prefill_tokens, row.decode_tokens) == (300, 50)


async def routable(reporter: ReportingWorker) -> None:
    flags = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
    packed = bytearray((await reporter.row()).pack("s.0"))
    packed[20:22] = int(flags).to_bytes(2, "big")
    await reporter.store.hset(reporter.keys.load, "s.0", bytes(packed))


async def matched(fleet: Fleet, *numbers: int) -> int:
    """The blocks that a decision would find on the worker."""
    chain = Chain(SCHEME.scheme_id, 16, blocks(*numbers))
    _, (row,) = await fleet.queue.explain(
        Question("wf-asks", (chain,), prompt_tokens=16 * len(numbers) + 5, decode_tokens=10)
    )
    return row.matched_tokens // 16


async def credit(reporter: ReportingWorker) -> list[bytes]:
    """The keys that credit open reservations' future blocks."""
    return [
        key
        for name in "xc"
        async for key in reporter.store.scan_iter(f"{reporter.keys.prefix}{name}:*".replace("{", "\\{"))
    ]


@pytest.mark.parametrize("first_byte", ["before", "after"])
async def test_blocks_that_were_reported_are_credited_no_longer(
    reporter: ReportingWorker, fleet: Fleet, first_byte: str
) -> None:
    """The engine reports them and then the prefill, ends the request and evicts a block; settle comes late."""
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    await routable(reporter)
    chain = Chain(SCHEME.scheme_id, 16, blocks(1, 2, 3))
    await fleet.bookings.decide(Question("wf-real", (chain,), prompt_tokens=60, decode_tokens=10))
    assert (await matched(fleet, 1, 2, 3), bool(await credit(reporter))) == (3, True)
    if first_byte == "before":
        await fleet.bookings.settle("wf-real", "started")
    await reporter.send("stored", blocks(1, 2, 3))
    await reporter.send("progress", wire.dumps([["wf-real", 0, 60]]))
    await reporter.applied()
    told = await leased(reporter, "wf-real")
    assert (told.stage, told.judged, told.prompt_tokens) == (Stage.STARTED, True, 60)
    assert (told.checkpoints, await credit(reporter)) == ((), [])
    assert await matched(fleet, 1, 2, 3) == 3
    await reporter.send("removed", block(3))
    await reporter.applied()
    assert await matched(fleet, 1, 2, 3) == 2, "while the reservation is open"
    await fleet.bookings.settle("wf-real", "finished")
    assert await matched(fleet, 1, 2, 3) == 2, "nor does it linger"
    assert await reporter.store.hget(reporter.keys.lease, "wf-real") is None
    assert await fleet.index.counts() == {"exact": 1}


@pytest.mark.parametrize("complete", [True, False])
async def test_blocks_that_the_index_may_lack_stay_credited(
    reporter: ReportingWorker, fleet: Fleet, complete: bool
) -> None:
    """Block 3 was not reported. Or the index is known to lack some blocks: its snapshot is on the way."""
    if complete:
        await reporter.heartbeat(digest_of())
    await reporter.applied()
    await routable(reporter)
    chain = Chain(SCHEME.scheme_id, 16, blocks(1, 2, 3))
    await fleet.bookings.decide(Question("wf-real", (chain,), prompt_tokens=60, decode_tokens=10))
    await reporter.send("stored", blocks(1, 2) if complete else blocks(1, 3))
    await reporter.send("progress", wire.dumps([["wf-real", 0, 60]]))
    await reporter.applied()
    assert (await leased(reporter, "wf-real")).stage == Stage.STARTED
    assert await matched(fleet, 1, 2, 3) == 3


async def test_progress_after_a_real_decision_and_before_a_real_settle(reporter: ReportingWorker, fleet: Fleet) -> None:
    await routable(reporter)
    await reporter.send("stored", blocks(1, 2))
    await reporter.applied()
    chain = Chain(SCHEME.scheme_id, 16, blocks(1, 2, 3))
    decision = await fleet.bookings.decide(Question("wf-real", (chain,), prompt_tokens=60, decode_tokens=10))
    assert decision.matched_tokens == 32
    await reporter.send("progress", wire.dumps([["wf-real", 32, 60]]))
    await reporter.applied()
    assert (await reporter.row()).prefill_tokens == 0
    await fleet.bookings.settle("wf-real", "finished")
    row = await reporter.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert await fleet.index.counts() == {"exact": 1}
