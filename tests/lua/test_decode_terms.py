"""The terms of the cost for answers under way, which a prompt slows down while it is computed, and by its context."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from warmfleet.fleet import Queued, QueueLimits, Standing, Weights

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

ANSWERS, CONTEXT = 20, 2_000  # answers under way at the first engine, and the tokens of each one's context
ON = Weights(decode_price=0.1, context_price=0.05)
OFF = Weights(decode_price=0.0, context_price=0.0)


async def two_workers(keyspace: Keyspace, **first: int) -> None:
    """Contexts need half of the second engine's cache, and of the first one's, unless told otherwise."""
    await keyspace.workers(2, capacity_blocks=ANSWERS * CONTEXT // 8)
    await keyspace.change(1, in_flight=ANSWERS, decode_tokens=ANSWERS * CONTEXT, **first)
    await keyspace.change(2, foreign_decode_tokens=ANSWERS * CONTEXT)


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
    """… beyond those at the engine where it slows the least."""
    await two_workers(keyspace)
    await keyspace.change(1, decode_tokens=ANSWERS * CONTEXT + 1_000)
    chain, prompt = keyspace.chain(100), 1_601
    await keyspace.hold(1, chain, 50)
    context = 1_000 + ANSWERS * prompt
    for weights, tokens in (
        (Weights(decode_price=0.2, context_price=0.0), 0.2 * ANSWERS * (prompt - 800)),
        (Weights(decode_price=0.0, context_price=0.1), 0.1 * context),
        (ON, 0.1 * ANSWERS * (prompt - 800) + 0.05 * context),
        (OFF, 0.0),
    ):
        keyspace.fleet.use(weights=weights)
        assert (await told(keyspace, chain))[1] == pytest.approx({"w1.0": tokens / 10_000, "w2.0": 0.0}, abs=2e-6)


@pytest.mark.parametrize(
    ("busy", "blocks", "part"),
    [(0.0, 1.0, 1.0), (0.0, 0.25, 1.0), (0.0, 2.0, 0.5), (0.5, 1.0, 0.5), (1.0, 1.0, 0.0)],
)
async def test_answers_count_where_engines_spend_their_time_on_long_contexts(
    keyspace: Keyspace, busy: float, blocks: float, part: float
) -> None:
    """blocks: size of the caches, where 1 is twice the contexts."""
    keyspace.fleet.use(weights=ON)
    since_ms = int(time.time() * 1_000) % 2**32
    await two_workers(keyspace)
    for number in (1, 2):
        cache = round(blocks * ANSWERS * CONTEXT / 8)
        await keyspace.change(number, busy_share=int(busy * 65_535), since_ms=since_ms, capacity_blocks=cache)
    full = (0.1 * ANSWERS * 1_601 + 0.05 * ANSWERS * 1_601) / 10_000
    found = (await told(keyspace, keyspace.chain(100)))[1]
    assert found["w1.0"] == pytest.approx(part * full, abs=0.02 * full)


async def test_a_prompt_that_an_engine_is_computing_is_computed_nowhere_else(keyspace: Keyspace) -> None:
    """Else the engines would all compute the common beginning of a burst."""
    keyspace.fleet.use(weights=Weights(decode_price=1.0, context_price=1.0))
    await two_workers(keyspace)
    ask = keyspace.ask(keyspace.chain(750))
    first = await keyspace.fleet.bookings.decide(ask)
    assert first.worker_id == "w2.0"
    await keyspace.change(2, in_flight=4 * ANSWERS, prefill_tokens=31_000)  # costs hardly less than the other
    again = replace(ask, reservation="wf-again")
    assert (await keyspace.fleet.queue.explain(again))[0] == "w2.0"
    assert {row.terms.decode_s for row in (await keyspace.fleet.queue.explain(again))[1]} == {0.0}


async def one_joins(keyspace: Keyspace, ahead: int) -> None:
    """Hundreds of answers are under way at the engines 1 and 3, none at the second. ahead: tokens to compute there."""
    keyspace.fleet.use(weights=Weights(wait_price=1.0, lambda_=1.0, decode_s_per_token=0.0))
    await keyspace.workers(3, capacity_blocks=100_000, in_flight=300, decode_tokens=1_000_000, prefill_tokens=200)
    await keyspace.change(2, in_flight=0, decode_tokens=0, prefill_tokens=200 + ahead)


@pytest.mark.parametrize(("ahead", "joined"), [(1_500, True), (1_700, False)])
async def test_no_first_token_waits_longer_for_answers_than_its_prompt_takes(
    keyspace: Keyspace, ahead: int, joined: bool
) -> None:
    """Else an engine that joins would draw all requests."""
    await one_joins(keyspace, ahead)
    chosen, terms = await told(keyspace, keyspace.chain(100))
    assert (chosen == "w2.0") is joined
    assert terms["w2.0"] == 0
    assert terms["w1.0"] == terms["w3.0"]
    assert (terms["w1.0"] > 10) is joined, "an engine that no request goes to makes the others no dearer"


async def test_with_other_policies_the_term_is_no_part_of_the_cost(keyspace: Keyspace) -> None:
    await two_workers(keyspace)
    ask = replace(keyspace.ask(keyspace.chain(100)), policy="least_loaded")
    assert {row.terms.decode_s for row in (await keyspace.fleet.queue.explain(ask))[1]} == {0.0}


async def test_an_objective_is_met_by_first_tokens_whatever_they_cost_answers(keyspace: Keyspace) -> None:
    await one_joins(keyspace, 1_000)
    ask = replace(keyspace.ask(keyspace.chain(100)), objective_s=1.0)
    assert (await keyspace.fleet.queue.explain(ask))[0] != "w2.0", "the others meet it, too, and are less loaded"


async def test_no_ticket_waits_longer_for_answers_than_its_prompt_takes(keyspace: Keyspace) -> None:
    await one_joins(keyspace, 0)
    keyspace.fleet.use(limits=QueueLimits(0.01, 200, 1.0))
    await keyspace.ticked(grace_ms=3_600_000)
    ask = keyspace.ask(keyspace.chain(100), tenant=b"tenant-1")
    assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    for ahead, joined in ((0, True), (1_500, True), (1_700, False)):
        await keyspace.change(2, prefill_tokens=200 + ahead)
        first = (await keyspace.fleet.queue.poll()).next
        assert first is not None
        assert (first.worker_id == "w2.0") is joined


@pytest.mark.parametrize(("weights", "worker"), [(ON, "w2.0"), (OFF, "w1.0")], ids=["on", "off"])
async def test_a_request_waits_where_it_slows_the_fewest_answers(
    keyspace: Keyspace, weights: Weights, worker: str
) -> None:
    """Both are full, the first for a moment less."""
    keyspace.fleet.use(weights=weights, limits=QueueLimits(0.1, 200, 1.0))
    await keyspace.ticked(grace_ms=3_600_000)
    await two_workers(keyspace, prefill_tokens=2_000)
    await keyspace.change(2, prefill_tokens=2_100, in_flight=1)
    ask = keyspace.ask(keyspace.chain(100), tenant=b"tenant-1")
    assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    first = (await keyspace.fleet.queue.poll()).next
    assert first is not None
    assert first.worker_id == worker
    assert first.to_compute_s == pytest.approx(0.1601), "what all engines have in common is no work"
    assert first.to_compute_there_s == pytest.approx(0.1601, abs=1e-4), "of its price there, what is computed"


async def test_a_ticket_takes_no_room_for_the_answers_under_way(keyspace: Keyspace) -> None:
    """A ticket's price at an engine may be twice the time to compute, with which other tickets would get no turn."""
    keyspace.fleet.use(weights=Weights(decode_price=0.0, context_price=1.0), limits=QueueLimits(1.0, 200, 1.0))
    await keyspace.ticked(grace_ms=3_600_000)
    await two_workers(keyspace, prefill_tokens=20_000)
    await keyspace.change(2, prefill_tokens=20_000, in_flight=1)
    asks = [keyspace.ask(keyspace.chain(100), tenant=b"tenant-1") for _ in range(5)]
    for ask in asks:
        assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    for number, ahead in ((1, 2_000), (2, 9_900)):
        await keyspace.change(number, prefill_tokens=ahead)
    polled = await keyspace.fleet.queue.poll([ask.reservation for ask in asks])
    assert [*polled.standings.values()] == [Standing.TURN] * 5


async def test_nor_where_a_ticket_does_not_name_the_engine(keyspace: Keyspace) -> None:
    """A ticket names eight of ten engines. The ninth slows answers least; the tenth counts like the eight full ones."""
    keyspace.fleet.use(weights=Weights(decode_price=0.0, context_price=1.0), limits=QueueLimits(1.0, 200, 1.0))
    await keyspace.ticked(grace_ms=3_600_000)
    await keyspace.workers(10, capacity_blocks=ANSWERS * CONTEXT // 8, prefill_tokens=50_000)
    for number in (9, 10):
        contexts = (number - 8) * ANSWERS * CONTEXT // 2
        await keyspace.change(number, in_flight=1, decode_tokens=contexts, prefill_tokens=20_000)
    asks = [keyspace.ask(keyspace.chain(100), tenant=b"tenant-1") for _ in range(5)]
    for ask in asks:
        assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    for number, ahead in ((9, 9_900), (10, 2_000)):
        await keyspace.change(number, prefill_tokens=ahead)
    polled = await keyspace.fleet.queue.poll([ask.reservation for ask in asks])
    assert [*polled.standings.values()] == [Standing.TURN] * 5


async def test_pools_compare_turns_without_the_term(keyspace: Keyspace) -> None:
    """Their engines have other answers under way; what counts is when the prompt is computed."""
    await keyspace.ticked(grace_ms=3_600_000)
    await two_workers(keyspace, prefill_tokens=2_000)
    await keyspace.change(2, prefill_tokens=2_500)
    prices = []
    for weights in (OFF, Weights(decode_price=0.0, context_price=0.01)):
        keyspace.fleet.use(weights=weights, limits=QueueLimits(0.1, 200, 1.0))
        ask = keyspace.ask(keyspace.chain(100), tenant=b"tenant-1")
        found = await keyspace.fleet.queue.decide_in_turn(ask)
        assert isinstance(found, Queued)
        prices.append(found.turn_s)
        await keyspace.fleet.queue.poll([], [ask.reservation])
    assert prices[0] == pytest.approx(prices[1], abs=0.005)
