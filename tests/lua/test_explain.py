"""explain names the worker that the next decision chooses, and the terms of every cost."""

from __future__ import annotations

import random
import time
from dataclasses import astuple
from typing import TYPE_CHECKING

import pytest
from tests.lua.line import Queueing, Ticket, came_true

from warmfleet.fleet import Decision, Place, Queued, QueueLimits

if TYPE_CHECKING:
    from tests.lua.world import World

    from warmfleet.fleet import Ask

FULL = {"prefill_tokens": 1_000, "in_flight": 3}  # a tenth of a second at 10,000 tokens a second: the limit
OTHER = Place(b"another.")


async def saturated(world: World, workers: int = 1) -> Queueing:
    await world.workers(workers, **FULL)
    await world.ticked(grace_ms=3_600_000)
    return Queueing(world, 8)


async def told_and_done(q: Queueing, ask: Ask, place: Place) -> Decision | Queued:
    """The decision, after what explain tells about it is found to be the same."""
    *told, price = await q.foretold(ask, place)
    answer = await q.world.fleet.decide_in_turn(ask, place)
    *done, priced = came_true(answer)
    assert told == done
    assert price == pytest.approx(priced, abs=1e-4)
    return answer


async def test_explain_foretells_decide_with_expired_leases_in_the_way(world: World) -> None:
    await world.workers(4)
    for _ in range(30):
        await world.fleet.decide(world.ask(world.chain(30)))
    for name in await world.leases():
        await world.store.zadd(world.keys.leases, {name: 1})
    for _ in range(6):
        ask, foretold = world.ask(world.chain(30)), ""
        for _ in range(4):  # what is expired goes eight a call: the state must be the same for both
            foretold, _ = await world.fleet.explain(ask)
        assert (await world.fleet.decide(ask)).worker_id == foretold


async def test_the_terms_of_a_cost_add_up_to_it(world: World) -> None:
    """Somebody who asks why a session moved can add the columns up. All terms but one are of the second worker."""
    await world.workers(3)
    session, weights = world.chain(100), world.fleet.weights
    await world.hold(1, session, 40)
    await world.fleet.decide(world.ask(session, exclude=("w2.0", "w3.0")))  # the first is making the rest
    now_ms = int(time.time() * 1000) % 2**32
    await world.change(2, blocks=9_000, busy_share=65_535, since_ms=now_ms, prefill_tokens=1_000)
    for policy in ("cost", "least_loaded"):
        _, rows = await world.fleet.explain(world.ask(session, policy=policy))
        for row in rows:
            assert sum(astuple(row.terms)) == pytest.approx(row.cost_s, abs=4e-6)
        terms = {row.worker_id: row.terms for row in rows}["w2.0"]
        assert terms.compute_s == pytest.approx(1_601 / 10_000, abs=1e-4), "one worker has nothing to do"
        assert terms.again_s == pytest.approx(weights.kappa * 1_600 / 10_000, abs=1e-4)
        assert terms.leave_s == pytest.approx((weights.stay - 1) * 1_600 / 10_000, abs=1e-4)
        assert terms.evict_s == pytest.approx(weights.pressure_price * 0.6 * 1_601 / 10_000, abs=1e-3)
        assert terms.busy_s == pytest.approx(weights.place * 1_601 / 10_000, rel=0.02)
        assert terms.wait_s == pytest.approx(weights.wait_price * 1_000 / 10_000, abs=1e-3)


@pytest.mark.parametrize("place", [Place(), OTHER], ids=["of the same tenant", "of another"])
async def test_a_ticket_for_a_busy_worker_makes_nobody_wait_for_an_idle_one(world: World, place: Place) -> None:
    q = await saturated(world)
    await world.worker(2)
    assert isinstance(await q.decide(Ticket("wf-1", 0, (8, 0), 100, ("w2.0",))), Queued)
    answer = await told_and_done(q, world.ask(extra_tokens=100), place)
    assert isinstance(answer, Decision)
    assert answer.worker_id == "w2.0"


@pytest.mark.parametrize(("tokens", "waits"), [(20, False), (500, True)])
async def test_a_request_waits_behind_a_ticket_of_its_tenant_unless_it_is_smaller(
    world: World, tokens: int, waits: bool
) -> None:
    """There is room for one: the first in order. With patience, small prompts overtake large ones."""
    q = await saturated(world)
    world.fleet.limits = QueueLimits(0.1, 8, 1_000.0)
    await q.decide(Ticket("wf-1", 0, (8, 0), 300))
    await world.change(1, prefill_tokens=999)
    own = Place(b"A" * 8)
    assert isinstance(await told_and_done(q, world.ask(extra_tokens=tokens), own), Queued) == waits


async def test_a_busy_choice_gives_way_to_a_worker_with_room_that_costs_the_same(world: World) -> None:
    q = await saturated(world, 2)
    chain = world.chain(3)
    await world.hold(1, chain)
    await world.change(2, prefill_tokens=980)
    answer = await told_and_done(q, world.ask(chain), OTHER)
    assert isinstance(answer, Decision)
    assert (answer.worker_id, answer.why) == ("w2.0", "room")


@pytest.mark.parametrize("policy", ["cost", "least_loaded"])
async def test_a_full_queue_leaves_what_those_who_wait_cannot_use(world: World, policy: str) -> None:
    q = await saturated(world)
    world.fleet.limits = QueueLimits(0.1, 2)
    await world.worker(2)
    for number in range(2):
        await q.decide(Ticket(f"wf-{number}", 0, (8, 0), 100, ("w2.0",)))
    ask, own = world.ask(extra_tokens=100, policy=policy), Place(b"A" * 8)
    assert isinstance(await told_and_done(q, ask, own), Decision)
    await world.change(2, **FULL, under_way_tokens=0)
    answer = await told_and_done(q, world.ask(extra_tokens=100, policy=policy), own)
    assert isinstance(answer, Queued)
    assert answer.outcome == "full"
    answer = await told_and_done(q, world.ask(extra_tokens=100, policy=policy), OTHER)
    assert isinstance(answer, Queued)
    assert answer.outcome == "queued", "the last of the long line gives way"


async def test_tickets_of_dead_replicas_are_in_nobodys_way(world: World) -> None:
    q = await saturated(world)
    for number in range(3):
        await q.decide(Ticket(f"wf-{number}", 0, (8, 0), 5_000))
        await world.store.zadd(world.keys.queue2 + ":leases", {f"wf-{number}": 1})
    await world.change(1, prefill_tokens=999)
    assert isinstance(await told_and_done(q, world.ask(extra_tokens=100), Place(b"A" * 8)), Decision)


@pytest.mark.parametrize("seed", range(4))
async def test_what_is_told_comes_true_whatever_is_cached_and_whoever_waits(world: World, seed: int) -> None:
    rng, numbers = random.Random(seed), range(1, 4)
    q = await saturated(world, len(numbers))
    # By arrival, or by size: a token counts as a second, so that the time between the two calls changes no order.
    world.fleet.limits = QueueLimits(0.1, 30, rng.choice([0.0, 10_000.0]))
    chains = [world.chain(rng.randint(1, 300)) for _ in range(4)]
    seen: set[tuple[bool, str]] = set()
    for _ in range(60):
        for number in numbers:
            if rng.random() < 0.3:
                busy = rng.choice([0, 0, 400, 950, 1_000, 20_000])
                await world.change(number, prefill_tokens=busy, in_flight=min(busy, 2), under_way_tokens=0)
        await world.hold(rng.choice(numbers), rng.choice(chains))
        barred = tuple(rng.sample([f"w{number}.0" for number in numbers], rng.choice([0, 0, 1, 2])))
        ask = world.ask(rng.choice(chains), extra_tokens=rng.randint(1, 900), exclude=barred)
        await q.workers()  # nothing goes on with time
        answer = await told_and_done(q, ask, Place(bytes([rng.randrange(3)]) * 8, rng.randrange(2), 0, barred))
        seen.add((isinstance(answer, Queued), answer.outcome))
        line = await world.fleet.poll()
        await world.fleet.poll((), rng.sample(sorted(line.turns), len(line.turns) // 2))
    assert {(False, "booked"), (True, "queued")} <= seen


@pytest.mark.parametrize("tenants", [700, 1], ids=["a tenant each", "one tenant"])
async def test_more_tickets_than_a_look_takes_are_told_as_decided(world: World, tenants: int) -> None:
    """All but those asked about can be served by the busy worker only; w2 is idle."""
    q = await saturated(world)
    world.fleet.limits = QueueLimits(0.1, 800)
    await world.worker(2, **FULL)
    for number in range(700):
        ask = world.ask(prompt_tokens=100, decode_tokens=0, exclude=("w2.0",))
        place = Place((number % tenants).to_bytes(8, "big"), 0, 0, ("w2.0",))
        assert isinstance(await world.fleet.decide_in_turn(ask, place), Queued)
    await world.change(2, prefill_tokens=0, in_flight=0)
    own = Place(bytes(8)) if tenants == 1 else OTHER
    for _ in range(3):
        await q.workers()  # nothing goes on with time
        assert isinstance(await told_and_done(q, world.ask(extra_tokens=100), own), Decision)
    await world.change(2, **FULL, under_way_tokens=0)
    assert isinstance(await told_and_done(q, world.ask(extra_tokens=100), OTHER), Queued)
