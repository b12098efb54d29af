"""The terms of the cost for answers under way, which a prompt slows down while it is computed, and by its context."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from warmfleet.fleet import Weights

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

ALWAYS = 65_535  # busy_share of an engine that computes prompts all the time
ANSWERS, CONTEXT = 20, 2_000  # answers under way at the first engine, and the tokens of each one's context
ON = Weights(decode_price=0.1, context_price=0.05)
OFF = Weights(decode_price=0.0, context_price=0.0)


async def two_workers(keyspace: Keyspace, **first: int) -> None:
    await keyspace.workers(2, capacity_blocks=30_000)
    await keyspace.change(1, in_flight=ANSWERS, decode_tokens=ANSWERS * CONTEXT, **first)


async def told(keyspace: Keyspace, chain: bytes) -> tuple[str, dict[str, float]]:
    """Return the worker that explain foretells, and the term for answers by worker."""
    chosen, rows = await keyspace.fleet.queue.explain(keyspace.ask(chain))
    return chosen, {row.worker_id: row.terms.decode_s for row in rows}


async def test_a_long_prompt_goes_where_nothing_decodes_and_a_short_step_stays(keyspace: Keyspace) -> None:
    keyspace.fleet.use(weights=ON)
    await two_workers(keyspace)
    for _ in range(5):
        assert (await told(keyspace, keyspace.chain(750)))[0] == "w2.0"
    session = keyspace.chain(756)
    await keyspace.hold(1, session, 750)
    assert (await told(keyspace, session))[0] == "w1.0"


async def test_the_term_is_the_work_and_the_context_for_each_answer(keyspace: Keyspace) -> None:
    await two_workers(keyspace)
    chain, prompt = keyspace.chain(100), 1_601
    await keyspace.hold(1, chain, 50)
    context = ANSWERS * (CONTEXT + prompt)
    for weights, tokens in (
        (Weights(decode_price=0.2, context_price=0.0), 0.2 * ANSWERS * (prompt - 800)),
        (Weights(decode_price=0.0, context_price=0.1), 0.1 * context),
        (ON, 0.1 * ANSWERS * (prompt - 800) + 0.05 * context),
        (OFF, 0.0),
    ):
        keyspace.fleet.use(weights=weights)
        assert (await told(keyspace, chain))[1] == pytest.approx({"w1.0": tokens / 10_000, "w2.0": 0.0}, abs=2e-6)


@pytest.mark.parametrize(("busy", "part"), [(0.5, 1.0), (0.825, 0.5), (0.95, 0.0)])
async def test_a_fleet_near_its_limit_places_prompts_for_their_first_token_alone(
    keyspace: Keyspace, busy: float, part: float
) -> None:
    keyspace.fleet.use(weights=ON)
    now_ms = int(time.time() * 1_000) % 2**32
    await two_workers(keyspace, busy_share=int(busy * ALWAYS), since_ms=now_ms)
    await keyspace.change(2, busy_share=int(busy * ALWAYS), since_ms=now_ms)
    full = (0.1 * ANSWERS * 1_601 + 0.05 * ANSWERS * (CONTEXT + 1_601)) / 10_000
    found = (await told(keyspace, keyspace.chain(100)))[1]
    assert found["w1.0"] == pytest.approx(part * full, abs=0.02 * full)
    cache = round(ANSWERS * CONTEXT / busy / 16)
    await keyspace.change(1, busy_share=0, capacity_blocks=cache)
    found = (await told(keyspace, keyspace.chain(100)))[1]
    assert found["w1.0"] == pytest.approx(part * full, abs=0.02 * full), "the cache is as full of contexts"
