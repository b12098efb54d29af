"""decide on hybrid workers: a match ends where all KV cache groups support it (a worker's further set ``ends``)."""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import BLOCK, READY

from warmfleet.fleet import Flag

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.fleet.keyspace import Keyspace

HYBRID = (READY | Flag.SETS) & ~Flag.CLOSED
ENDS = 0  # the number of this kind
SLOT = 500  # what the slots of ends have more than those of their workers


async def announce(keyspace: Keyspace, number: int, *, dense: bool = False) -> None:
    packed = struct.pack(">IIdB", SLOT + number, number, float(dense), ENDS)
    await cast("Any", keyspace.store.hset(keyspace.keys.sets, f"w{number}.0:ends", packed))


async def end_at(keyspace: Keyspace, number: int, hashes: bytes, blocks: Iterable[int]) -> None:
    """Let this worker have ends at these blocks of a chain, counted from 1."""
    slot = SLOT + number
    for block in blocks:
        one = hashes[8 * block - 8 : 8 * block]
        await cast("Any", keyspace.store.sadd(keyspace.keys.end(one), slot))
        await cast("Any", keyspace.store.sadd(f"{keyspace.keys.slot(slot)}:e", one))


async def matched(keyspace: Keyspace, hashes: bytes, **fields: Any) -> dict[str, int]:
    _, rows = await keyspace.fleet.queue.explain(keyspace.ask(hashes, **fields))
    return {row.worker_id: row.matched_tokens // BLOCK for row in rows}


async def test_a_match_ends_at_the_deepest_end_that_is_held(keyspace: Keyspace) -> None:
    await keyspace.workers(4, flags=HYBRID)
    hashes = keyspace.chain(1_000)
    for number, held, ends in ((1, 900, [40, 80, 901]), (2, 900, [900]), (3, 30, [40])):
        await announce(keyspace, number)
        await keyspace.hold(number, hashes, held)
        await end_at(keyspace, number, hashes, ends)
    await keyspace.hold(4, hashes, 70)  # an engine without further groups
    assert await matched(keyspace, hashes) == {"w1.0": 80, "w2.0": 900, "w3.0": 0, "w4.0": 70}


async def test_random_ends_give_what_a_walk_over_all_blocks_finds(keyspace: Keyspace) -> None:
    rng = random.Random(1)
    for _ in range(25):
        await cast("Any", keyspace.store.flushdb())
        count = rng.randrange(1, 9)
        await keyspace.workers(count, flags=HYBRID)
        hashes, expected = keyspace.chain(rng.choice([3, 40, 400, 2_000])), {}
        most = len(hashes) // 8
        depths = [rng.randrange(most + 1) for _ in range(2)]  # so that some workers hold equally much
        for number in range(1, count + 1):
            held = rng.choice([*depths, rng.randrange(most + 1)])
            ends = {rng.randrange(1, most + 1) for _ in range(rng.choice([0, 1, 5, 50]))} | set(rng.sample(depths, 1))
            ends.discard(0)
            await keyspace.hold(number, hashes, held)
            hybrid = rng.random() < 0.8
            if hybrid:
                await announce(keyspace, number)
                await end_at(keyspace, number, hashes, ends)
            expected[f"w{number}.0"] = max((end for end in ends if end <= held), default=0) if hybrid else held
        assert await matched(keyspace, hashes) == expected


async def test_a_gap_in_the_chosen_workers_blocks_leads_to_the_end_before_it(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=HYBRID)
    hashes = keyspace.chain(100)
    await announce(keyspace, 1)
    await keyspace.hold(1, hashes)
    await end_at(keyspace, 1, hashes, [20, 40, 90])
    await keyspace.drop(1, hashes[8 * 59 : 8 * 60])
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    assert decision.matched_tokens == 40 * BLOCK


async def test_beyond_the_blocks_that_a_decision_looks_at_a_match_is_a_lower_bound(keyspace: Keyspace) -> None:
    await keyspace.workers(3, flags=HYBRID)
    hashes = keyspace.chain(8_000)
    for number in (1, 2, 3):
        await announce(keyspace, number)
        await keyspace.hold(number, hashes, 8_000 - number)
        await end_at(keyspace, number, hashes, [1])
    assert sorted((await matched(keyspace, hashes)).values()) == [0, 1, 1]
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(hashes))
    assert (decision.matched_tokens, decision.flagged) == (BLOCK, True)


async def promised(keyspace: Keyspace, hashes: bytes, **fields: Any) -> int:
    return (await matched(keyspace, hashes, **fields))["w1.0"]


@pytest.mark.parametrize("dense", [False, True])
async def test_a_prompt_that_is_being_computed_promises_its_end_only(keyspace: Keyspace, dense: bool) -> None:
    await keyspace.workers(1, flags=HYBRID)
    await announce(keyspace, 1, dense=dense)
    hashes = keyspace.chain(100)
    await keyspace.fleet.bookings.decide(keyspace.ask(hashes[: 8 * 60], extra_tokens=5))
    assert await promised(keyspace, hashes) == 60
    assert await promised(keyspace, hashes[: 8 * 60]) == 60
    assert await promised(keyspace, hashes[: 8 * 30]) == (30 if dense else 0)
    other = keyspace.chain(90, head=hashes[: 8 * 33])
    assert await promised(keyspace, other) == (33 if dense else 0)


async def test_a_prompt_of_whole_blocks_promises_nothing_where_ends_are_sparse(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=HYBRID)
    await announce(keyspace, 1)
    hashes = keyspace.chain(100)
    await keyspace.fleet.bookings.decide(keyspace.ask(hashes[: 8 * 59], extra_tokens=BLOCK))
    assert await promised(keyspace, hashes) == 0


async def test_a_promise_does_not_hide_an_end(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=HYBRID)
    await announce(keyspace, 1)
    hashes = keyspace.chain(100)
    await keyspace.hold(1, hashes, 50)
    await end_at(keyspace, 1, hashes, [20, 45])
    await keyspace.fleet.bookings.decide(keyspace.ask(hashes[: 8 * 60], extra_tokens=5))
    assert await promised(keyspace, hashes[: 8 * 55]) == 45
    assert await promised(keyspace, hashes) == 60
