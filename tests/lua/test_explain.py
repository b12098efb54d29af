"""explain names the worker that the next decision chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
