"""apply: signs in requests make a worker suspected, once; no request can downgrade it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import SCHEME, ReportingWorker, block, blocks, digest_of

from warmfleet.fleet import Flag, Fleet, Proof, Question, Renewal, new_reservation
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

ids = itertools.count(10)
PROVEN = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED


@pytest.fixture
async def worker(store: aioredis.Redis, fleet: Fleet) -> ReportingWorker:
    """A proven worker with blocks 1 to 3, whose index is not known to differ."""
    made = ReportingWorker(store, fleet)
    await made.join()
    await made.send("stored", blocks(1, 2, 3))
    await made.heartbeat(digest_of(1, 2, 3))
    await made.applied()
    await fleet.probes.prove("s.0", made.nonce, Proof("proven", ""))
    await flags(made, PROVEN)
    return made


async def flags(worker: ReportingWorker, wanted: int) -> None:
    packed = bytearray((await worker.row()).pack("s.0"))
    packed[20:22] = int(wanted).to_bytes(2, "big")
    await cast("Any", worker.store.hset(worker.keys.load, "s.0", bytes(packed)))


async def request(
    worker: ReportingWorker, *numbers: int, more: int = 0, exact: bool = True, prompts: int = 1, started: bool = False
) -> tuple[bool, dict[str, Any]]:
    """A request with these blocks, of which the engine reports ``more`` prompt tokens than were booked.

    Return whether the request leads to a suspicion, and the worker's record afterwards.
    """
    fleet, name = worker.fleet, new_reservation(prompts, exact=exact)
    tokens = 16 * len(numbers) + 5
    chains = (Chain(SCHEME.scheme_id, 16, blocks(*numbers)),) if numbers else ()
    await fleet.bookings.decide(Question(name, chains, tokens, 10))
    if started:
        await fleet.bookings.settle(name, "started")
    await worker.send("progress", wire.dumps([[name, 16 * len(numbers), tokens + more]]))
    fleet.upkeep.suspected.clear()
    await worker.applied()
    await fleet.bookings.settle(name, "finished")
    assert (await worker.row()).flags & Flag.PROVEN, "requests downgrade nobody"
    return fleet.upkeep.suspected.is_set(), await worker.record()


async def test_another_prompt_length_is_a_suspicion_and_told_once(worker: ReportingWorker, fleet: Fleet) -> None:
    told, record = await request(worker, 1, 2, more=1)
    assert (told, record["suspect"], record["proof"]) == (True, "prompt", "proven")
    told, record = await request(worker, 1, 2, more=1)
    assert (told, record["suspect"]) == (False, "prompt")
    assert (await fleet.index.counts())["suspect_prompt"] == 2
    await fleet.probes.prove("s.0", worker.nonce, Proof("proven", ""))
    assert "suspect" not in await worker.record()
    told, _ = await request(worker, more=-1, started=True)
    assert told, "a prompt without a full block, and whose first byte was told before"


async def test_a_prompt_whose_last_block_is_not_there_twice_running_is_a_suspicion(
    worker: ReportingWorker, fleet: Fleet
) -> None:
    """More was cached than the index knows, or the engine hashes the new blocks differently."""
    for numbers, suspect in (((1, 2, 9), ""), ((1, 2, 8), "blocks")):
        told, record = await request(worker, *numbers)
        assert (told, record.get("suspect", "")) == (bool(suspect), suspect)
    told, _ = await request(worker, 1, 7)
    assert not told
    assert (await fleet.index.counts())["suspect_blocks"] == 2


async def test_a_block_that_is_there_ends_the_row(worker: ReportingWorker) -> None:
    for numbers in ((1, 9), (1, 2), (1, 8), (), (1, 2, 3), (1, 7)):  # a prompt without a full block shows nothing
        told, record = await request(worker, *numbers)
        assert (told, record.get("suspect")) == (False, None)


async def test_blocks_that_come_before_the_prefill_in_the_stream_count(worker: ReportingWorker) -> None:
    for number in range(20, 23):
        await worker.send("stored", block(number))
        told, record = await request(worker, 1, 2, number)
        assert (told, record.get("strikes", 0)) == (False, 0)


async def test_what_nobody_foresaw_and_several_prompts_are_not_compared(worker: ReportingWorker, fleet: Fleet) -> None:
    for kind in ({"exact": False}, {"prompts": 2}):
        for _ in range(3):
            told, record = await request(worker, 1, 9, more=7, **cast("Any", kind))
            assert (told, record.get("suspect"), record.get("strikes", 0)) == (False, None, 0)
    assert not set(await fleet.index.counts()) & {
        "exact",
        "over",
        "short",
        "prompt",
        "suspect_prompt",
        "suspect_blocks",
    }


async def test_a_rebuilt_reservation_is_not_compared(worker: ReportingWorker, fleet: Fleet) -> None:
    name = new_reservation(1)
    await fleet.bookings.renew([Renewal(name, "s.0", 40, 10)])
    await worker.send("progress", wire.dumps([[name, 0, 99]]))
    await worker.applied()
    assert "suspect" not in await worker.record()
    assert await fleet.bookings.prefilled(name)


async def test_only_the_first_word_on_a_request_counts(worker: ReportingWorker, fleet: Fleet) -> None:
    """A beam search goes on with longer prompts under the same id."""
    for started in (False, True):
        name = new_reservation(1)
        await fleet.bookings.decide(Question(name, (Chain(SCHEME.scheme_id, 16, blocks(1, 2)),), 40, 10))
        if started:
            await fleet.bookings.settle(name, "started")
        for step in range(20):
            await worker.send("progress", wire.dumps([[name, 32, 40 + step]]))
        await worker.applied()
        held = await cast("Any", fleet.redis.hget(fleet.keys.lease, name))
        assert held
        assert "suspect" not in await worker.record()
        await fleet.bookings.settle(name, "finished")
    row = await worker.row()
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert (await fleet.index.counts())["exact"] == 2


@pytest.mark.parametrize("state", ["load only", "memory", "shadow", "divergence"])
async def test_nothing_is_concluded_while_the_index_is_known_to_lack_blocks(
    worker: ReportingWorker, state: str
) -> None:
    row = await worker.row()
    if state == "load only":
        await flags(worker, PROVEN & ~Flag.PROVEN)
    elif state == "memory":
        await flags(worker, PROVEN | Flag.PARTIAL)
    elif state == "shadow":
        await worker.send("begin", wire.dumps({"snapshot": "5ea50001", "command": None}))
    else:
        await worker.heartbeat(digest_of(1, 2))
    for _ in range(3):
        name = new_reservation(1)
        await worker.fleet.bookings.decide(Question(name, (Chain(SCHEME.scheme_id, 16, blocks(1, next(ids))),), 40, 10))
        await worker.send("progress", wire.dumps([[name, 0, 41]]))
        await worker.applied()
    record = await worker.record()
    assert (record.get("suspect"), record.get("strikes", 0)) == (None, 0)
    assert (await worker.row()).slot == row.slot


async def test_shortfalls_say_nothing(worker: ReportingWorker, fleet: Fleet) -> None:
    for _ in range(200):
        name = new_reservation(1)
        await fleet.bookings.decide(Question(name, (Chain(SCHEME.scheme_id, 16, blocks(1, 2, 3)),), 60, 10))
        await worker.send("progress", wire.dumps([[name, 0, 60]]))
        await fleet.upkeep.apply("s.0")
        await fleet.bookings.settle(name, "finished")
    record = await worker.record()
    assert (record.get("suspect"), record.get("strikes", 0), record["proof"]) == (None, 0, "proven")
    assert (await fleet.index.counts())["short"] == 200


async def test_a_join_begins_anew(worker: ReportingWorker) -> None:
    await request(worker, 1, 2, more=1)
    await worker.join("n2")
    await worker.applied()
    record = await worker.record()
    assert (record["proof"], record.get("suspect"), record.get("tries")) == ("pending", None, None)
    assert not (await worker.row()).flags & Flag.PROVEN
