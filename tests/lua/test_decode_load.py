"""Booked answers push away: a worker that holds a prompt does not get every request for many samples of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

CACHE_BLOCKS = 4_096  # 65,536 tokens
PROMPT_BLOCKS = 187  # 2,992 tokens


async def burst(keyspace: Keyspace, decode_tokens: int, *, computed: bool) -> Counter[str]:
    """Sixteen requests for one prompt come at once; ``computed``: each is computed before the next one comes."""
    chain, homes = keyspace.chain(PROMPT_BLOCKS), Counter[str]()
    for _ in range(16):
        ask = keyspace.ask(chain, extra_tokens=8, decode_tokens=decode_tokens)
        decision = await keyspace.fleet.bookings.decide(ask)
        homes[decision.worker_id] += 1
        if computed:
            await keyspace.fleet.bookings.settle(ask.reservation, "started")
            await keyspace.hold(int(decision.worker_id[1:].partition(".")[0]), chain)
    return homes


@pytest.mark.parametrize("computed", [False, True])
async def test_twenty_samples_of_one_prompt_are_shared_by_the_fleet(keyspace: Keyspace, computed: bool) -> None:
    await keyspace.workers(4, capacity_blocks=CACHE_BLOCKS)
    homes = await burst(keyspace, 20 * (3_000 + 200), computed=computed)
    assert len(homes) == 4
    assert max(homes.values()) <= 6, homes


@pytest.mark.parametrize("computed", [False, True])
async def test_answers_that_fit_beside_the_prompt_stay_where_it_is(keyspace: Keyspace, computed: bool) -> None:
    """Sixteen short answers to one prompt need its blocks once, so the booked context of one worker has room."""
    await keyspace.workers(4, capacity_blocks=600)  # 9,600 tokens: the prompt and sixteen answers, not sixteen prompts
    assert len(await burst(keyspace, 3_000 + 200, computed=computed)) == 1
