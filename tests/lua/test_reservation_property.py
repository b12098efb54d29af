"""Whatever happens in whatever order: the sum of load is the sum of open leases, and a decision can be foretold."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import PATIENT
from tests.lua.world import World

from warmfleet.errors import CancelledReservation
from warmfleet.fleet import Fleet, Renewal, Stage, connect

IDS = [f"wf-{number}" for number in range(12)]
STEPS = st.one_of(
    st.tuples(st.just("decide"), st.sampled_from(IDS), st.integers(0, 3)),
    st.tuples(st.just("settle"), st.sampled_from(IDS), st.sampled_from(["started", "finished", "failed", "cancelled"])),
    st.tuples(st.just("renew"), st.sampled_from(IDS), st.booleans()),
    st.tuples(st.just("expire"), st.sampled_from(IDS), st.none()),
    st.tuples(st.just("rejoin"), st.sampled_from(["w1.0", "w2.0", "w3.0"]), st.none()),
    st.tuples(st.just("hold"), st.integers(1, 3), st.integers(0, 3)),
)


async def check(world: World, chains: list[bytes]) -> None:
    """Invariant 3, and that speculation is what the leases say."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in await world.rows()}
    made: Counter[tuple[bytes, int]] = Counter()
    rows = await world.rows()
    for lease in (await world.leases()).values():
        made.update((one, lease.slot) for one in lease.checkpoints)
        if lease.stage in (Stage.BOOKED, Stage.STARTED) and lease.epoch == rows[lease.worker_id].epoch:
            decode = lease.decode_tokens if lease.stage == Stage.STARTED else 0
            sums[lease.worker_id].update(prefill=lease.prefill_tokens, decode=decode, count=1)
    for name, row in rows.items():
        held = (row.prefill_tokens, row.decode_tokens, row.in_flight)
        assert held == (sums[name]["prefill"], sums[name]["decode"], sums[name]["count"]), name
    blocks = sorted({chain[at : at + 8] for chain in chains for at in range(0, len(chain), 8)})
    pipe = world.store.pipeline(transaction=False)
    for one in blocks:
        pipe.hgetall(world.keys.speculative(one))
    found = zip(blocks, await pipe.execute(), strict=True)
    assert {(one, int(slot)): int(n) for one, counts in found for slot, n in counts.items() if slot.isdigit()} == dict(
        made
    )


async def step(world: World, chains: list[bytes], action: str, what: Any, how: Any) -> None:
    fleet, store, keys = world.fleet, world.store, world.keys
    if action == "decide":
        ask = world.ask(chains[how], reservation=what)
        known = what in await world.leases()
        foretold, _ = await fleet.explain(ask)
        try:
            decision = await fleet.decide(ask)
        except CancelledReservation:
            return
        assert known or decision.outcome == "booked"
        if decision.outcome == "booked":
            assert decision.worker_id == foretold, "the same state and the same request: the same decision"
    elif action == "settle":
        await fleet.settle(what, how)
    elif action == "renew":
        await fleet.renew([Renewal(what, "w1.0", 30, 40, started=how)])
    elif action == "expire" and await store.zscore(keys.leases, what):
        await store.zadd(keys.leases, {what: 1})
    elif action == "rejoin":
        number = int(what[1])
        row = await world.row(number)
        await world.change(number, epoch=row.epoch + 1, prefill_tokens=0, decode_tokens=0, in_flight=0)
    elif action == "hold":
        await world.hold(what, chains[how])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=1, max_size=30))
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
async def test_the_sum_of_load_is_the_sum_of_open_leases(request: Any, which: str, steps: list[Any]) -> None:
    client = connect(request.getfixturevalue(which), timeout_s=10)
    try:
        world = World(client, Fleet(client, f"sum/{uuid.uuid4().hex}", timeouts=PATIENT))
        await world.workers(3)
        await world.ticked(grace_ms=3_600_000)
        head = world.chain(20)
        chains = [head, world.chain(40, head=head), world.chain(70, head=head), world.chain(3)]
        for action, what, how in steps:
            await step(world, chains, action, what, how)
            await check(world, chains)
        for name in await world.leases():
            await client.zadd(world.keys.leases, {name: 1})
        for _ in range(3):
            await world.fleet.settle("wf-nobody", "finished")
        assert all(
            (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0) for row in (await world.rows()).values()
        )
        assert await cast("Any", client.hlen(world.keys.lease)) == 0
        assert await world.speculation() == {}
    finally:
        await client.aclose()


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
