"""Random histories of the queue: no request is overtaken when it is its turn, bounds hold, and nothing is left."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.keyspace import Keyspace
from tests.support.fleet.queue_model import CheckedQueue, Ticket, came_true
from tests.support.redis.servers import PATIENT

from warmfleet.fleet import Decision, Fleet, Queued, connect

MOST = 8  # tickets
WORKERS = ["w1.0", "w2.0", "w3.0"]
ARRIVE = st.tuples(
    st.just("arrive"),
    st.integers(0, 2),  # replica
    st.tuples(st.integers(7, 9), st.integers(0, 3)),  # class, tenant
    st.integers(1, 1_500),  # tokens
    st.sampled_from([(), (), (), ("w1.0",), ("w2.0", "w3.0")]),  # workers that cannot serve it
)
PATIENCE = st.sampled_from([0.0, 0.02, 1.0])  # a prompt of 1,000 tokens counts as 0, 2 or 100 ms later
STEPS = st.one_of(
    ARRIVE,
    ARRIVE,
    st.tuples(st.just("poll"), st.integers(0, 2), st.randoms(use_true_random=False)),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("hang up"), st.integers(0, 99)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
    st.tuples(st.just("lose"), st.none()),
)


async def ask(q: CheckedQueue, ticket: Ticket, *, new: bool) -> None:
    """A decision for ``ticket``, compared with the decision of the model."""
    model, workers = q.model, await q.workers()
    crowded = new and len(model.tickets) >= q.keyspace.fleet.constants.limits.tickets
    victim = model.displaced_by(ticket.flow) if crowded else None
    room = workers.free(ticket.barred)
    alone = new and not model.tickets and bool(room)
    foretold = await q.foretold(q.question(ticket)) if new else None
    answer = await q.decide(ticket)
    if foretold is not None:
        *told, price = foretold
        *done, priced = came_true(answer)
        assert told == done, "explain tells what decide does"
        assert price == pytest.approx(priced, abs=1e-4)
    if crowded and victim is None:
        model.turns(workers)
        left = workers.free(ticket.barred)
        assert isinstance(answer, Decision) == bool(left), "who cannot wait gets what nobody who waits could use"
        assert isinstance(answer, Decision) or answer.outcome == "full"
        return
    if alone:
        assert isinstance(answer, Decision), "nobody waits and somebody has room: it waits for nothing"
        return
    if victim is not None:
        model.leave(victim)
        q.displaced.add(victim.reservation)
    if new:
        model.enter(ticket)
    turn = ticket in model.turns(workers)
    assert isinstance(answer, Decision) == turn, f"{ticket} of {model.tickets}"
    if isinstance(answer, Queued):
        assert answer.outcome == "queued"
        assert answer.waiting == len(model.tickets)
        return
    model.leave(ticket, max(1, answer.prefill_tokens))


async def step(q: CheckedQueue, action: str, *what: Any) -> None:
    model, fleet = q.model, q.keyspace.fleet
    if action == "arrive":
        replica, flow, tokens, barred = what
        await ask(q, Ticket(f"wf-{uuid.uuid4().hex[:8]}", replica, flow, tokens, barred), new=True)
    elif action == "poll":
        replica, rng = what
        workers = await q.workers()
        turns = await q.turns()
        assert turns == {ticket.reservation for ticket in model.turns(workers)}
        mine = [ticket for ticket in model.tickets if ticket.replica == replica and ticket.reservation in turns]
        rng.shuffle(mine)  # a replica's requests come in any order
        for ticket in mine:
            await ask(q, ticket, new=False)
    elif action == "end":
        leases = sorted(await q.keyspace.leases())
        if leases:
            await fleet.bookings.settle(leases[what[0] % len(leases)], "finished")
    elif action == "hang up" and model.tickets:
        ticket = model.tickets[what[0] % len(model.tickets)]
        await fleet.queue.poll((), [ticket.reservation])
        model.leave(ticket)
    elif action == "kill":
        for ticket in [ticket for ticket in model.tickets if ticket.replica == what[0]]:
            await q.keyspace.store.zadd(q.keyspace.keys.queue2 + ":leases", {ticket.reservation: 1})
            await fleet.queue.poll()
            model.leave(ticket)
    elif action == "lose":
        await lost(q)


async def lost(q: CheckedQueue) -> None:
    """Redis comes back without the queue: requests that waited ask again, in the order in which they came."""
    keys = [
        key
        async for key in q.keyspace.store.scan_iter(match=q.keyspace.keys.queue2.replace("{", "\\{") + "*", count=1_000)
    ]
    if keys:
        await q.keyspace.store.delete(*keys)
    waiting, q.model = q.model.tickets, type(q.model)(q.model.patience)
    for ticket in waiting:
        ticket.arrival_us = 0
        await ask(q, ticket, new=True)


async def run(url: str, steps: list[Any], patience: float) -> None:
    client = connect(url, timeout_s=10)
    try:
        keyspace = Keyspace(client, Fleet(client, f"queue/{uuid.uuid4().hex}", timeouts=PATIENT))
        await keyspace.workers(len(WORKERS))
        await keyspace.ticked(grace_ms=3_600_000)
        q = CheckedQueue(keyspace, MOST, patience)
        for action in steps:
            await step(q, *action)
            await q.check()
        for name in q.displaced | {other.reservation for other in q.model.tickets}:
            await client.zadd(keyspace.keys.queue2 + ":leases", {name: 1}, xx=True)
        await keyspace.fleet.queue.poll()
        await q.gone()
        for name in await keyspace.leases():
            await keyspace.fleet.bookings.settle(name, "cancelled")
        assert all(row.prefill_tokens == row.in_flight == 0 for row in (await keyspace.rows()).values())
    finally:
        await client.aclose()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=10, max_size=40), patience=PATIENCE)
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
@pytest.mark.in_turn
async def test_the_queue_keeps_its_order_and_its_bounds(
    request: Any, which: str, steps: list[Any], patience: float
) -> None:
    await run(request.getfixturevalue(which), steps, patience)


@pytest.mark.long(
    minutes=9,
    shows="the order of the queue equals that of a second implementation, over 3,000 random histories",
)
@settings(max_examples=1_500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=20, max_size=80), patience=PATIENCE)
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
async def test_the_queue_keeps_its_order_and_its_bounds_for_long(
    request: Any, which: str, steps: list[Any], patience: float
) -> None:
    await run(request.getfixturevalue(which), steps, patience)


@pytest.mark.in_turn
@pytest.mark.parametrize("weights", [(10, 1), (1, 1, 6)], ids=str)
async def test_tenants_get_the_same_work_done_whatever_they_ask_for(
    keyspace: Keyspace, weights: tuple[int, ...]
) -> None:
    """Tenants get equal work done, even if one tenant sends many times as much, in prompts of any size."""
    await keyspace.workers(2)
    await keyspace.ticked(grace_ms=3_600_000)
    q, rng, done, names = (
        CheckedQueue(keyspace, 24),
        random.Random(7),
        dict.fromkeys(range(len(weights)), 0),
        iter(range(9_999)),
    )
    for _ in range(120):
        for tenant, weight in enumerate(weights):
            for _ in range(weight if rng.random() < 0.5 else 1):
                ticket = Ticket(f"wf-{next(names)}", 0, (8, tenant), rng.randint(50, 800))
                if sum(other.flow == ticket.flow for other in q.model.tickets) < 10:
                    await ask(q, ticket, new=True)
        leases = await keyspace.leases()
        if leases:
            await keyspace.fleet.bookings.settle(rng.choice(sorted(leases)), "finished")
        turns = await q.turns()
        for ticket in [ticket for ticket in q.model.turns(await q.workers()) if ticket.reservation in turns]:
            await ask(q, ticket, new=False)
            if ticket not in q.model.tickets:
                done[ticket.flow[1]] += ticket.tokens
    assert max(done.values()) - min(done.values()) <= 2 * 800, done
    assert min(done.values()) > 5_000
