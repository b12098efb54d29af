"""vouch: a worker whose heartbeats are missing stays routable while replicas find that its engine answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.lua.test_apply_server import Server
from tests.lua.ticking import EVERY, now_ms, slow_tick
from tests.lua.world import BLOCK

from warmfleet.errors import NoWorker
from warmfleet.fleet import Flag, Fleet, Proof

if TYPE_CHECKING:
    from tests.lua.stream import Core
    from tests.lua.world import World

OLD_MS = 60_000


@pytest.fixture(autouse=True)
def _ticks_at_every_call(fleet: Fleet) -> None:
    fleet.pace = EVERY


async def quiet(world: World, number: int = 1, *, core_ms: int = OLD_MS, server_ms: int = OLD_MS) -> str:
    """A worker whose last heartbeats are so old."""
    name = await world.worker(number, age_ms=core_ms)
    await world.store.zadd(world.keys.alive_servers, {f"w{number}": now_ms() - server_ms})
    return name


async def beats(world: World, *, core: bool = True, server: bool = True) -> None:
    await world.store.zadd(world.keys.alive, {"w1.0": now_ms() + 5} if core else {"w9.0": 1})
    await world.store.zadd(world.keys.alive_servers, {"w1": now_ms() + 5} if server else {"w9": 1})


async def test_a_whole_fleet_without_heartbeats_is_served_on(world: World) -> None:
    await world.ticked()
    names = {await quiet(world, number) for number in (1, 2)}
    with pytest.raises(NoWorker):
        await world.fleet.decide(world.ask())
    assert {await world.fleet.vouch(name, "n1") for name in names} == {"VOUCHED"}
    assert {(await world.fleet.decide(world.ask())).worker_id for _ in range(8)} == names
    assert {view.state.value for view in await world.fleet.workers()} == {"unheard"}
    assert all(view.routable and view.heartbeat_age_s and view.heartbeat_age_s > 50 for view in await views(world))


async def views(world: World) -> list[Any]:
    return list(await world.fleet.workers())


async def test_it_is_chosen_by_its_last_index_and_the_decision_is_flagged(world: World) -> None:
    await world.ticked()
    await quiet(world, 1)
    await world.worker(2)
    await world.fleet.vouch("w1.0", "n1")
    chain = world.chain(40)
    await world.hold(1, chain)
    decision = await world.fleet.decide(world.ask(chain))
    assert (decision.worker_id, decision.matched_tokens, decision.flagged) == ("w1.0", 40 * BLOCK, True)


async def test_who_is_left_out_stays_out(world: World) -> None:
    await world.ticked()
    await quiet(world, 1)
    await quiet(world, 2)
    for name in ("w1.0", "w2.0"):
        await world.fleet.vouch(name, "n1")
    found = {(await world.fleet.decide(world.ask(exclude=("w1.0",)))).worker_id for _ in range(5)}
    assert found == {"w2.0"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"flags": Flag.SERVER}, "its URL answered no probe"),
        ({"flags": Flag.SERVER | Flag.URL | Flag.HOSTILE}, "its stream broke the rules"),
    ],
)
async def test_nobody_vouches_for_who_proved_nothing(world: World, changes: dict[str, int], why: str) -> None:
    await quiet(world)
    await world.change(1, **changes)
    assert await world.fleet.vouch("w1.0", "n1") == "REFUSED", why
    assert (await world.row(1)).flags == changes["flags"]


@pytest.mark.parametrize("key", ["alive", "alive_servers"])
async def test_nobody_vouches_for_who_said_goodbye(world: World, key: str) -> None:
    await quiet(world)
    await world.store.delete(getattr(world.keys, key))
    assert await world.fleet.vouch("w1.0", "n1") == "REFUSED"


async def test_another_incarnation_is_not_vouched_for(world: World) -> None:
    await quiet(world)
    assert await world.fleet.vouch("w1.0", "n2") == "REFUSED"
    assert await world.fleet.vouch("w9.0", "n1") == "REFUSED"


async def test_a_core_that_stands_still_beside_its_server_is_dead(world: World) -> None:
    await quiet(world, core_ms=13_000, server_ms=4_000)
    assert await world.fleet.vouch("w1.0", "n1") == "REFUSED"
    await quiet(world, core_ms=13_000, server_ms=8_000)
    assert await world.fleet.vouch("w1.0", "n1") == "VOUCHED", "their heartbeats come at different times"


async def test_it_lasts_one_ttl_after_the_last_answer(world: World) -> None:
    await quiet(world)
    await world.fleet.vouch("w1.0", "n1")
    await slow_tick(world.fleet)
    assert (await world.row(1)).flags & (Flag.UNHEARD | Flag.SERVER) == Flag.UNHEARD | Flag.SERVER
    await vouched_at(world, now_ms() - 15_500)
    await slow_tick(world.fleet, grace_ms=9_000)
    assert (await world.row(1)).flags & Flag.UNHEARD, "in a time of grace the replicas were away, too"
    await slow_tick(world.fleet)
    assert not (await world.row(1)).flags & (Flag.UNHEARD | Flag.SERVER)
    assert [view.state.value for view in await views(world)] == ["silent"]


async def test_a_clock_that_steps_back_does_not_keep_it(world: World) -> None:
    await quiet(world)
    await world.fleet.vouch("w1.0", "n1")
    await vouched_at(world, now_ms() + 3_600_000)
    await slow_tick(world.fleet)
    assert not (await world.row(1)).flags & Flag.UNHEARD


async def vouched_at(world: World, ms: int) -> None:
    record = json.loads(await cast("Any", world.store.hget(world.keys.workers, "w1.0")))
    await cast("Any", world.store.hset(world.keys.workers, "w1.0", json.dumps(record | {"vouched": ms})))


async def test_it_ends_when_both_halves_are_heard_again(world: World) -> None:
    await quiet(world)
    await world.fleet.vouch("w1.0", "n1")
    for core, server in ((True, False), (False, True)):
        await quiet_scores(world)
        await beats(world, core=core, server=server)
        await slow_tick(world.fleet)
        assert (await world.row(1)).flags & Flag.UNHEARD, "the other half is still missing"
    await beats(world)
    await slow_tick(world.fleet)
    assert [view.state.value for view in await views(world)] == ["proven"]


async def quiet_scores(world: World) -> None:
    await world.store.zadd(world.keys.alive, {"w1.0": now_ms() - OLD_MS})
    await world.store.zadd(world.keys.alive_servers, {"w1": now_ms() - OLD_MS})


async def test_it_is_not_forgotten(world: World) -> None:
    await quiet(world, core_ms=3_600_000, server_ms=3_600_000)
    assert (await slow_tick(world.fleet)).forget == ("w1.0",)
    await world.fleet.vouch("w1.0", "n1")
    assert (await slow_tick(world.fleet)).forget == ()


async def test_goodbye_and_a_new_process_end_it(core: Core) -> None:
    fleet, server = core.fleet, Server(core.store, core.fleet)
    await server.join()
    await server.applied()
    await ready(fleet, core)
    await core.send("leave")
    await core.applied()
    assert not (await core.row()).flags & Flag.UNHEARD
    await core.join("n2")
    await core.applied()
    await ready(fleet, core)
    await server.join("m2")
    await server.applied()
    assert not (await core.row()).flags & Flag.UNHEARD, "another process at its URL has proved nothing"
    await ready(fleet, core)
    await core.join("n3")
    await core.applied()
    assert not (await core.row()).flags & Flag.UNHEARD


async def ready(fleet: Fleet, core: Core) -> None:
    """The worker is proven, and vouched for."""
    assert await fleet.prove(core.worker_id, core.nonce, Proof("proven", "")) == "OK"
    assert await fleet.vouch(core.worker_id, core.nonce) == "VOUCHED"
    assert (await core.row()).flags & Flag.UNHEARD
