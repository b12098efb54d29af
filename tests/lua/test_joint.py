"""A fleet whose engines hand prompts over: the choice among engines alone and pairs, and the bookings of both legs."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.fleet import (
    ClientLimits,
    Decision,
    Moved,
    Queued,
    QueueLimits,
    Role,
    Split,
    Standing,
    Weights,
    prefill_leg,
    roles_of,
)

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet import Question

PREFILL, DECODE, BOTH = Role(1, 0, alone=False), Role(0, 1, alone=True), Role(1, 1, alone=True)
LONG = 750  # blocks


def ask(keyspace: Keyspace, chain: bytes, split: Split = Split.ALLOWED, **fields: Any) -> Question:
    reservation = f"wf-0{next(keyspace._ids):021d}"
    told: dict[str, Any] = {"reservation": reservation, "split": split, **fields}
    return keyspace.ask(chain, **told)


def now_ms() -> int:
    return int(time.time() * 1_000) % 2**32


async def pair(keyspace: Keyspace, answers: int = 40, context: int = 60_000) -> None:
    """A prefill engine and a decode engine with answers under way, so that a long prompt is split."""
    await keyspace.workers(2)
    await keyspace.change(2, in_flight=answers, decode_tokens=context)
    keyspace.fleet.use(roles={1: PREFILL, 2: DECODE})


async def test_a_long_prompt_is_split_and_both_legs_are_booked(keyspace: Keyspace) -> None:
    await pair(keyspace)
    chain = keyspace.chain(LONG)
    await keyspace.hold(1, chain, 100)
    await keyspace.hold(2, chain, 300)
    question = ask(keyspace, chain)
    decision = await keyspace.fleet.bookings.decide(question)
    leg = decision.prefill
    assert leg is not None
    assert (decision.worker_id, leg.worker_id) == ("w2.0", "w1.0")
    assert (decision.url, leg.url) == ("http://10.0.0.2:8000", "http://10.0.0.1:8000")
    prompt = question.prompt_tokens
    assert (decision.matched_tokens, leg.matched_tokens) == (4_800, 1_600)
    assert (decision.prefill_tokens, decision.decode_tokens) == (0, prompt + 100 - 4_800)
    assert (leg.prefill_tokens, leg.decode_tokens) == (prompt - 1_600, prompt - 1_600)
    first, second = await keyspace.row(1), await keyspace.row(2)
    assert (first.prefill_tokens, first.decode_tokens, first.in_flight) == (prompt - 1_600, prompt - 1_600, 1)
    assert (second.prefill_tokens, second.decode_tokens, second.in_flight) == (0, 60_000 + prompt + 100 - 4_800, 41)
    assert leg.reservation == prefill_leg(question.reservation) != question.reservation
    leases = await keyspace.leases()
    assert (leases[leg.reservation].judged, leases[question.reservation].judged) == (False, True)
    again = await keyspace.fleet.bookings.decide(question)
    assert again.outcome == "known"
    assert again.prefill is not None
    assert (again.worker_id, again.prefill.worker_id, again.prefill.url) == ("w2.0", "w1.0", leg.url)
    assert (await keyspace.row(1)).in_flight == 1


@pytest.mark.parametrize(
    ("split", "chosen", "blocks"),
    [
        (Split.ALLOWED, "w2.0", 20),  # a short prompt gains nothing
        (Split.FORBIDDEN, "w2.0", LONG),
        (Split.ROLES_IGNORED, "w1.0", LONG),
    ],
)
async def test_one_engine_serves(keyspace: Keyspace, split: Split, chosen: str, blocks: int) -> None:
    await pair(keyspace, answers=2 if blocks < LONG else 40)
    decision = await keyspace.fleet.bookings.decide(ask(keyspace, keyspace.chain(blocks), split))
    assert (decision.worker_id, decision.prefill) == (chosen, None)


@pytest.mark.parametrize("split", [Split.ALLOWED, Split.FORBIDDEN])
async def test_an_engine_of_the_wrong_role_is_better_than_none(keyspace: Keyspace, split: Split) -> None:
    await pair(keyspace)
    chain = keyspace.chain(LONG)
    decision = await keyspace.fleet.bookings.decide(ask(keyspace, chain, split, exclude=("w2.0",)))
    assert (decision.worker_id, decision.prefill) == ("w1.0", None)
    decision = await keyspace.fleet.bookings.decide(ask(keyspace, chain, split, exclude=("w1.0",)))
    assert (decision.worker_id, decision.prefill) == ("w2.0", None)


async def test_a_policy_without_costs_splits_nothing(keyspace: Keyspace) -> None:
    await pair(keyspace)
    for policy in ("least_loaded", "random", "round_robin"):
        decision = await keyspace.fleet.bookings.decide(ask(keyspace, keyspace.chain(LONG), policy=policy))
        assert (decision.worker_id, decision.prefill) == ("w2.0", None)


async def test_only_partners_pair(keyspace: Keyspace) -> None:
    """Two prefill engines with a partner each: the idle one has the busy partner's blocks nowhere to go."""
    await keyspace.workers(4)
    names = {f"w{number}.0": number for number in range(1, 5)}
    roles = {"w1.0": "prefill", "w2.0": "prefill", "w3.0": "decode", "w4.0": "decode"}
    keyspace.fleet.use(roles=roles_of(names, roles, [("w1.0", "w3.0"), ("w2.0", "w4.0")]))
    for number in (3, 4):
        await keyspace.change(number, in_flight=40, decode_tokens=60_000)
    await keyspace.change(1, prefill_tokens=4_000, in_flight=1)
    seen = set()
    for _ in range(4):
        decision = await keyspace.fleet.bookings.decide(ask(keyspace, keyspace.chain(LONG)))
        assert decision.prefill is not None
        seen.add((decision.prefill.worker_id, decision.worker_id))
    assert seen == {("w1.0", "w3.0"), ("w2.0", "w4.0")}


async def test_a_partner_without_room_is_not_chosen(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    keyspace.fleet.use(roles={1: PREFILL, 2: DECODE, 3: DECODE})
    await keyspace.change(2, in_flight=40, decode_tokens=250_000)  # of 160,000
    await keyspace.change(3, in_flight=60, decode_tokens=100_000)
    decision = await keyspace.fleet.bookings.decide(ask(keyspace, keyspace.chain(LONG)))
    assert (decision.prefill is not None, decision.worker_id) == (True, "w3.0")


async def test_links_are_learned_and_slow_ones_avoided(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    keyspace.fleet.use(roles={1: PREFILL, 2: DECODE, 3: DECODE})
    for number in (2, 3):
        await keyspace.change(number, in_flight=40, decode_tokens=60_000)
    bookings = keyspace.fleet.bookings
    for slot in (2, 3) * 75:
        decision = await bookings.decide(ask(keyspace, keyspace.chain(LONG), exclude=(f"w{5 - slot}.0",)))
        assert decision.prefill is not None
        seconds = 12_000 * (1e-5 if slot == 2 else 1e-3)
        await bookings.settle(decision.prefill.reservation, "started")
        await bookings.settle(decision.prefill.reservation, "finished", moved=Moved(slot, 12_000, seconds))
        await bookings.settle(decision.reservation, "finished")
    links = await cast("Any", keyspace.store.hgetall(f"{keyspace.keys.prefix}links"))
    told = {field.decode(): float(seconds) for field, seconds in links.items()}
    assert told == {"1:2": pytest.approx(1e-5, rel=0.2), "1:3": pytest.approx(1e-3, rel=0.2)}
    assert 0 < await keyspace.store.ttl(f"{keyspace.keys.prefix}links") <= 3_600
    decision = await bookings.decide(ask(keyspace, keyspace.chain(LONG)))
    assert decision.worker_id == "w2.0"


async def test_answers_go_to_engines_that_compute_few_prompts(keyspace: Keyspace) -> None:
    """Both engines may serve alone and cost the same but for an answer, which takes longer beside prompts."""
    await keyspace.workers(2)
    roles = {number: Role(1, 0, alone=True) for number in (1, 2)}
    keyspace.fleet.use(roles=roles, weights=replace(Weights(), place=0.0))
    await keyspace.change(1, busy_share=40_000)
    question = replace(ask(keyspace, keyspace.chain(20)), decode_tokens=2_000)
    worker_id, _, seen = await keyspace.fleet.queue.consider(question)
    costs = {row.worker_id: row.cost_s for row in seen.candidates}
    assert worker_id == "w2.0"
    assert costs["w1.0"] > 1.5 * costs["w2.0"]


async def test_a_link_is_not_blamed_for_waits(keyspace: Keyspace) -> None:
    """Two of three samples hold a wait for room, nine times as long as the blocks take; few tokens tell nothing."""
    await pair(keyspace)
    bookings = keyspace.fleet.bookings
    for tokens, seconds in [(12_000, 0.12), (12_000, 1.2), (12_000, 1.2)] * 10 + [(2_000, 2.0)] * 10:
        decision = await bookings.decide(ask(keyspace, keyspace.chain(LONG)))
        assert decision.prefill is not None
        moved = Moved(2, tokens, seconds)
        await bookings.settle(decision.prefill.reservation, "finished", moved=moved)
        await bookings.settle(decision.reservation, "finished")
    link = await cast("Any", keyspace.store.hget(f"{keyspace.keys.prefix}links", "1:2"))
    assert float(link) == pytest.approx(1e-5, rel=0.2)


async def test_the_first_handshake_of_a_pair_is_not_its_link(keyspace: Keyspace) -> None:
    await pair(keyspace)
    bookings = keyspace.fleet.bookings
    for seconds in (9.0, 9.0, 0.12, 0.12):
        decision = await bookings.decide(ask(keyspace, keyspace.chain(LONG)))
        assert decision.prefill is not None, "the pair goes on"
        await bookings.settle(decision.prefill.reservation, "finished", moved=Moved(2, 12_000, seconds))
        await bookings.settle(decision.reservation, "finished")
    link = await cast("Any", keyspace.store.hget(f"{keyspace.keys.prefix}links", "1:2"))
    assert float(link) == pytest.approx(5e-5 * 1.05 * 0.864**2, rel=0.01)


async def test_the_context_of_a_prefill_leg_outlives_its_prefill(keyspace: Keyspace) -> None:
    await pair(keyspace)
    question = ask(keyspace, keyspace.chain(LONG))
    decision = await keyspace.fleet.bookings.decide(question)
    leg = decision.prefill
    assert leg is not None
    await keyspace.fleet.bookings.settle(leg.reservation, "started")
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, question.prompt_tokens, 1)
    await keyspace.fleet.bookings.settle(leg.reservation, "finished")
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)
    assert (await keyspace.row(2)).in_flight == 41


async def test_explain_tells_the_best_of_each_kind(keyspace: Keyspace) -> None:
    await pair(keyspace)
    worker_id, _, seen = await keyspace.fleet.queue.consider(ask(keyspace, keyspace.chain(LONG)))
    assert worker_id == "w2.0"
    alone, both = seen.ways
    assert (alone.worker_id, alone.partner_id) == ("w2.0", "")
    assert (both.worker_id, both.partner_id) == ("w1.0", "w2.0")
    assert both.cost_s < alone.cost_s
    assert both.transfer_s == pytest.approx(12_001 * 0.5 / 10_000 + 0.005)
    row = next(row for row in seen.candidates if row.worker_id == "w1.0")
    terms = row.terms
    told = sum(getattr(terms, name) for name in terms.__dataclass_fields__)
    assert row.cost_s == pytest.approx(told, abs=1e-5) == pytest.approx(both.cost_s, abs=1e-5)


async def test_a_leg_that_is_booked_anew_is_booked_once(keyspace: Keyspace) -> None:
    await pair(keyspace)
    question = ask(keyspace, keyspace.chain(LONG))
    for _ in range(2):  # the second decision comes after the end of the other leg, for the same id
        assert (await keyspace.fleet.bookings.decide(question)).prefill is not None
        row, lease = await keyspace.row(1), (await keyspace.leases())[prefill_leg(question.reservation)]
        assert (row.prefill_tokens, row.decode_tokens) == (lease.prefill_tokens, lease.decode_tokens)
        assert row.in_flight == 1
        await keyspace.fleet.bookings.settle(question.reservation, "finished")
    await keyspace.expire(prefill_leg(question.reservation))
    assert (await keyspace.row(1)).in_flight == 0
    assert not await keyspace.speculation()


async def test_a_leg_does_not_count_for_the_client(keyspace: Keyspace) -> None:
    await pair(keyspace)
    limits = ClientLimits("one", concurrency=10, tokens_per_minute=1_000_000)
    reservation = f"wf-0{'x' * 21}{limits.tag}"
    question = ask(keyspace, keyspace.chain(LONG), reservation=reservation, limits=limits)
    decision = await keyspace.fleet.queue.decide_in_turn(question)
    assert isinstance(decision, Decision)
    assert decision.prefill is not None
    assert decision.use is not None
    assert (decision.use.in_flight, decision.use.tokens) == (1, 12_001)
    used = f"{keyspace.keys.prefix}tokens:{limits.tag}"
    before = await keyspace.store.get(used)
    assert (await keyspace.row(1)).in_flight == 1
    await keyspace.fleet.bookings.settle(decision.prefill.reservation, "failed")
    assert await keyspace.store.get(used) == before
    assert (await keyspace.row(1)).in_flight == 0


async def test_a_request_waits_for_an_engine_that_can_serve_it(keyspace: Keyspace) -> None:
    """The engine that has room only computes prompts, and the other one is no partner of it."""
    await keyspace.workers(2)
    await keyspace.change(2, prefill_tokens=50_000, in_flight=1, under_way_tokens=50_000, since_ms=now_ms())
    keyspace.fleet.use(roles={1: PREFILL, 2: Role(0, 2, alone=True)}, limits=QueueLimits(0.5))
    question = ask(keyspace, keyspace.chain(20), may_wait=False)
    answer = await keyspace.fleet.queue.decide_in_turn(question)
    assert (isinstance(answer, Queued), getattr(answer, "outcome", "")) == (True, "full")
    question = ask(keyspace, keyspace.chain(20))
    answer = await keyspace.fleet.queue.decide_in_turn(question)
    assert isinstance(answer, Queued)
    line = await keyspace.fleet.queue.poll([question.reservation])
    assert line.standings[question.reservation] == Standing.WAITS
    await keyspace.change(2, prefill_tokens=0, in_flight=0)
    line = await keyspace.fleet.queue.poll([question.reservation])
    assert line.standings[question.reservation] == Standing.TURN
    served = await keyspace.fleet.queue.decide_in_turn(question)
    assert isinstance(served, Decision)
    assert (served.worker_id, served.prefill) == ("w2.0", None)


async def test_a_request_waits_for_room_at_the_first_of_its_pair(keyspace: Keyspace) -> None:
    await pair(keyspace)
    await keyspace.change(1, prefill_tokens=20_000, in_flight=1, under_way_tokens=20_000, since_ms=now_ms())
    await keyspace.change(2, prefill_tokens=60_000, under_way_tokens=60_000, since_ms=now_ms())
    keyspace.fleet.use(limits=QueueLimits(0.5))
    question = ask(keyspace, keyspace.chain(LONG))
    assert isinstance(await keyspace.fleet.queue.decide_in_turn(question), Queued)
    await keyspace.change(1, prefill_tokens=0, in_flight=0)
    line = await keyspace.fleet.queue.poll([question.reservation])
    assert line.standings[question.reservation] == Standing.TURN
    served = await keyspace.fleet.queue.decide_in_turn(question)
    assert isinstance(served, Decision)
    assert served.prefill is not None
    assert (served.worker_id, served.prefill.worker_id) == ("w2.0", "w1.0")
    assert (await keyspace.fleet.queue.poll()).waiting == 0


async def test_the_number_of_links_is_bounded(keyspace: Keyspace) -> None:
    await pair(keyspace)
    links = f"{keyspace.keys.prefix}links"
    await cast("Any", keyspace.store.hset(links, mapping={f"{old}:9": "1e-5" for old in range(100, 1_124)}))
    decision = await keyspace.fleet.bookings.decide(ask(keyspace, keyspace.chain(LONG)))
    assert decision.prefill is not None
    await keyspace.fleet.bookings.settle(decision.prefill.reservation, "finished", moved=Moved(2, 12_000, 0.12))
    assert await cast("Any", keyspace.store.hgetall(links)) == {b"1:2": b"1e-05"}


async def test_a_decode_engine_counts_as_no_faster_than_those_that_compute_prompts(keyspace: Keyspace) -> None:
    """It was measured on short prompts, which are computed faster token by token."""
    await pair(keyspace)
    chain, costs = keyspace.chain(LONG), []
    for speed in (10_000, 40_000):
        await keyspace.change(2, speed_tps=speed)
        costs.append((await keyspace.fleet.queue.consider(ask(keyspace, chain)))[2].ways[0].cost_s)
    assert costs[0] == costs[1]
    keyspace.fleet.use(roles={})
    costs = []
    for speed in (10_000, 40_000):
        await keyspace.change(2, speed_tps=speed)
        costs.append((await keyspace.fleet.queue.consider(ask(keyspace, chain)))[2].candidates[1].cost_s)
    assert costs[0] > costs[1]


async def test_engines_that_compute_for_others_are_busier_and_get_prompts_nevertheless(keyspace: Keyspace) -> None:
    await pair(keyspace)
    await keyspace.change(1, busy_share=65_535)
    _, _, seen = await keyspace.fleet.queue.consider(ask(keyspace, keyspace.chain(LONG)))
    busy = seen.ways
    await keyspace.change(1, busy_share=0)
    _, _, seen = await keyspace.fleet.queue.consider(ask(keyspace, keyspace.chain(LONG)))
    assert busy == seen.ways


async def test_an_engine_that_takes_over_notes_no_checkpoint(keyspace: Keyspace) -> None:
    """Not even if it is computing the same chain for another request."""
    await pair(keyspace)
    chain = keyspace.chain(LONG)
    other = ask(keyspace, chain[: 8 * 400] + keyspace.chain(100), Split.FORBIDDEN)
    assert (await keyspace.fleet.bookings.decide(other)).worker_id == "w2.0"
    before = {hash_: slots[2] for hash_, slots in (await keyspace.speculation()).items()}
    decision = await keyspace.fleet.bookings.decide(ask(keyspace, chain))
    assert decision.prefill is not None
    after = {hash_: slots[2] for hash_, slots in (await keyspace.speculation()).items() if 2 in slots}
    assert after == before
