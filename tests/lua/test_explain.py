"""explain names the worker that the next decision chooses, and the terms of every cost."""

from __future__ import annotations

import time
from dataclasses import astuple
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.lua.world import World


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
