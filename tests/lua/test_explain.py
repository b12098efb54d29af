"""explain names the worker that the next decision chooses, and the terms of every cost."""

from __future__ import annotations

import random
import time
from dataclasses import astuple
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.queue_model import CheckedQueue, Ticket, came_true

from warmfleet.fleet import Decision, Queued, QueueLimits

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet import Question

FULL = {"prefill_tokens": 1_000, "in_flight": 3}  # a tenth of a second at 10,000 tokens a second: the limit
OWN, OTHER = b"A" * 8, b"another."  # tenants


async def saturated(keyspace: Keyspace, workers: int = 1) -> CheckedQueue:
    await keyspace.workers(workers, **FULL)
    await keyspace.ticked(grace_ms=3_600_000)
    return CheckedQueue(keyspace, 8)


async def told_and_done(q: CheckedQueue, question: Question) -> Decision | Queued:
    """Return the decision, after checking that explain foretells it."""
    *told, price = await q.foretold(question)
    answer = await q.keyspace.fleet.queue.decide_in_turn(question)
    *done, priced = came_true(answer)
    assert told == done
    assert price == pytest.approx(priced, abs=1e-4)
    return answer


async def test_explain_foretells_decide_with_expired_leases_in_the_way(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    for _ in range(30):
        await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(30)))
    for name in await keyspace.leases():
        await keyspace.store.zadd(keyspace.keys.leases, {name: 1})
    for _ in range(6):
        ask = keyspace.ask(keyspace.chain(30))
        for _ in range(4):  # each call removes eight expired leases: the state must be the same for both
            await keyspace.fleet.queue.explain(ask)
        await keyspace.stop_time()
        foretold, _ = await keyspace.fleet.queue.explain(ask)
        assert (await keyspace.fleet.bookings.decide(ask)).worker_id == foretold


async def test_the_terms_of_a_cost_add_up_to_it(keyspace: Keyspace) -> None:
    """Operators add the terms up to see why a session moved. All terms but one belong to the second worker."""
    await keyspace.workers(3)
    session, weights = keyspace.chain(100), keyspace.fleet.constants.weights
    await keyspace.hold(1, session, 40)
    await keyspace.fleet.bookings.decide(
        keyspace.ask(session, exclude=("w2.0", "w3.0"))
    )  # the first worker is making the other blocks
    now_ms = int(time.time() * 1000) % 2**32
    await keyspace.change(2, blocks=9_000, busy_share=65_535, since_ms=now_ms, prefill_tokens=1_000)
    for policy in ("cost", "least_loaded"):
        _, rows = await keyspace.fleet.queue.explain(keyspace.ask(session, policy=policy))
        for row in rows:
            assert sum(astuple(row.terms)) == pytest.approx(row.cost_s, abs=4e-6)
        terms = {row.worker_id: row.terms for row in rows}["w2.0"]
        assert terms.compute_s == pytest.approx(1_601 / 10_000, abs=1e-4), "one worker has nothing to do"
        assert terms.again_s == pytest.approx(weights.kappa * 1_600 / 10_000, abs=1e-4)
        assert terms.leave_s == pytest.approx((weights.stay - 1) * 1_600 / 10_000, abs=1e-4)
        assert terms.evict_s == pytest.approx(weights.pressure_price * 0.6 * 1_601 / 10_000, abs=1e-3)
        assert terms.busy_s == pytest.approx(weights.place * 1_601 / 10_000, rel=0.02)
        assert terms.wait_s == pytest.approx(weights.wait_price * 1_000 / 10_000, abs=1e-3)


@pytest.mark.parametrize("tenant", [OWN, OTHER], ids=["of the same tenant", "of another"])
async def test_a_ticket_for_a_busy_worker_makes_nobody_wait_for_an_idle_one(keyspace: Keyspace, tenant: bytes) -> None:
    q = await saturated(keyspace)
    await keyspace.worker(2)
    assert isinstance(await q.decide(Ticket("wf-1", 0, (8, 0), 100, ("w2.0",))), Queued)
    answer = await told_and_done(q, keyspace.ask(extra_tokens=100, tenant=tenant))
    assert isinstance(answer, Decision)
    assert answer.worker_id == "w2.0"


@pytest.mark.parametrize(("tokens", "waits"), [(20, False), (500, True)])
async def test_a_request_waits_behind_a_ticket_of_its_tenant_unless_it_is_smaller(
    keyspace: Keyspace, tokens: int, waits: bool
) -> None:
    """The engine has room for one request: the first in order. With patience, small prompts overtake large ones."""
    q = await saturated(keyspace)
    keyspace.fleet.use(limits=QueueLimits(0.1, 8, 1_000.0))
    await q.decide(Ticket("wf-1", 0, (8, 0), 300))
    await keyspace.change(1, prefill_tokens=999)
    assert isinstance(await told_and_done(q, keyspace.ask(extra_tokens=tokens, tenant=OWN)), Queued) == waits


async def test_a_busy_choice_gives_way_to_a_worker_with_room_that_costs_the_same(keyspace: Keyspace) -> None:
    q = await saturated(keyspace, 2)
    chain = keyspace.chain(3)
    await keyspace.hold(1, chain)
    await keyspace.change(2, prefill_tokens=980)
    answer = await told_and_done(q, keyspace.ask(chain, tenant=OTHER))
    assert isinstance(answer, Decision)
    assert (answer.worker_id, answer.why) == ("w2.0", "room")


@pytest.mark.parametrize("policy", ["cost", "least_loaded"])
async def test_a_full_queue_leaves_what_those_who_wait_cannot_use(keyspace: Keyspace, policy: str) -> None:
    q = await saturated(keyspace)
    keyspace.fleet.use(limits=QueueLimits(0.1, 2))
    await keyspace.worker(2)
    for number in range(2):
        await q.decide(Ticket(f"wf-{number}", 0, (8, 0), 100, ("w2.0",)))
    assert isinstance(await told_and_done(q, keyspace.ask(extra_tokens=100, policy=policy, tenant=OWN)), Decision)
    await keyspace.change(2, **FULL, under_way_tokens=0)
    answer = await told_and_done(q, keyspace.ask(extra_tokens=100, policy=policy, tenant=OWN))
    assert isinstance(answer, Queued)
    assert answer.outcome == "full"
    answer = await told_and_done(q, keyspace.ask(extra_tokens=100, policy=policy, tenant=OTHER))
    assert isinstance(answer, Queued)
    assert answer.outcome == "queued", "the last of the long line gives way"


async def test_tickets_of_dead_replicas_are_in_nobodys_way(keyspace: Keyspace) -> None:
    q = await saturated(keyspace)
    for number in range(3):
        await q.decide(Ticket(f"wf-{number}", 0, (8, 0), 5_000))
        await keyspace.store.zadd(keyspace.keys.queue2 + ":leases", {f"wf-{number}": 1})
    await keyspace.change(1, prefill_tokens=999)
    assert isinstance(await told_and_done(q, keyspace.ask(extra_tokens=100, tenant=OWN)), Decision)


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_told_comes_true_whatever_is_cached_and_whoever_waits(keyspace: Keyspace, seed: int) -> None:
    rng, numbers = random.Random(seed), range(1, 4)
    q = await saturated(keyspace, len(numbers))
    # By arrival, or by size: a token counts as a second, so that the time between the two calls changes no order.
    keyspace.fleet.use(limits=QueueLimits(0.1, 30, rng.choice([0.0, 10_000.0])))
    chains = [keyspace.chain(rng.randint(1, 300)) for _ in range(4)]
    seen: set[tuple[bool, str]] = set()
    for _ in range(60):
        for number in numbers:
            if rng.random() < 0.3:
                busy = rng.choice([0, 0, 400, 950, 1_000, 20_000])
                await keyspace.change(number, prefill_tokens=busy, in_flight=min(busy, 2), under_way_tokens=0)
        await keyspace.hold(rng.choice(numbers), rng.choice(chains))
        barred = tuple(rng.sample([f"w{number}.0" for number in numbers], rng.choice([0, 0, 1, 2])))
        place = {"tenant": bytes([rng.randrange(3)]) * 8, "priority": rng.randrange(2), "barred": barred}
        question = keyspace.ask(rng.choice(chains), extra_tokens=rng.randint(1, 900), exclude=barred, **place)
        await q.workers()  # nothing goes on with time
        answer = await told_and_done(q, question)
        seen.add((isinstance(answer, Queued), answer.outcome))
        line = await keyspace.fleet.queue.poll()
        await keyspace.fleet.queue.poll((), rng.sample(sorted(line.turns), len(line.turns) // 2))
    assert {(False, "booked"), (True, "queued")} <= seen


@pytest.mark.parametrize("tenants", [700, 1], ids=["a tenant each", "one tenant"])
async def test_more_tickets_than_a_look_takes_are_told_as_decided(keyspace: Keyspace, tenants: int) -> None:
    """Only the busy worker can serve the other tickets, and w2 is idle."""
    q = await saturated(keyspace)
    keyspace.fleet.use(limits=QueueLimits(0.1, 800))
    await keyspace.worker(2, **FULL)
    for number in range(700):
        tenant, barred = (number % tenants).to_bytes(8, "big"), ("w2.0",)
        question = keyspace.ask(prompt_tokens=100, decode_tokens=0, exclude=barred, tenant=tenant, barred=barred)
        assert isinstance(await keyspace.fleet.queue.decide_in_turn(question), Queued)
    await keyspace.change(2, prefill_tokens=0, in_flight=0)
    own = bytes(8) if tenants == 1 else OTHER
    for _ in range(3):
        await q.workers()  # nothing goes on with time
        assert isinstance(await told_and_done(q, keyspace.ask(extra_tokens=100, tenant=own)), Decision)
    await keyspace.change(2, **FULL, under_way_tokens=0)
    assert isinstance(await told_and_done(q, keyspace.ask(extra_tokens=100, tenant=OTHER)), Queued)
