"""eject, and what tick makes of it: workers that fail what others serve are out for a while, and then tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.lua.stream import Core
from tests.lua.test_apply_server import Server
from tests.lua.ticking import EVERY, now_ms, slow_tick

from warmfleet.errors import NoWorker
from warmfleet.fleet import Flag, Fleet, WorkerState
from warmfleet.fleet.views import EJECTED_S

if TYPE_CHECKING:
    from tests.lua.world import World

OUT = Flag.EJECTED | Flag.TRIAL


@pytest.fixture(autouse=True)
def _ticks_at_every_call(fleet: Fleet) -> None:
    fleet.pace = EVERY


async def fleet_of(world: World, count: int) -> None:
    await world.workers(count)
    await world.store.zadd(world.keys.alive_servers, {f"w{number}": now_ms() for number in range(1, count + 1)})


async def chosen(world: World, decisions: int = 8) -> set[str]:
    found = set()
    for _ in range(decisions):
        ask = world.ask()
        found.add((await world.fleet.decide(ask)).worker_id)
        await world.fleet.settle(ask.reservation, "finished")
    return found


async def until_ms(world: World, name: str = "w1.0") -> tuple[int, int]:
    value = await cast("Any", world.store.hget(world.keys.ejections, name))
    ends, times = value.split()
    return int(ends), int(times)


async def over(world: World, name: str = "w1.0", age_ms: int = 10) -> None:
    """Let its time have been over for so long."""
    _, times = await until_ms(world, name)
    await cast("Any", world.store.hset(world.keys.ejections, name, f"{now_ms() - age_ms} {times}"))
    await world.ticked()
    await slow_tick(world.fleet)


async def flags(world: World, number: int = 1) -> int:
    return (await world.row(number)).flags & OUT


async def test_an_ejected_worker_gets_no_request_from_any_replica(world: World) -> None:
    await fleet_of(world, 3)
    assert await world.fleet.eject("w1.0", good=False) == "EJECTED"
    assert await chosen(world) == {"w2.0", "w3.0"}
    states = {view.worker_id: view.state for view in await world.fleet.workers()}
    assert states["w1.0"] is WorkerState.EJECTED
    assert await world.fleet.eject("w1.0", good=False) == "SAME", "another replica has found the same"
    assert await world.fleet.eject("w1.0", good=True) == "SAME", "a request that was under way acquits nobody"
    assert await world.fleet.eject("nobody.0", good=False) == "SAME"


async def test_half_of_the_workers_stay_whatever_replicas_say(world: World) -> None:
    await fleet_of(world, 5)
    told = [await world.fleet.eject(f"w{number}.0", good=False) for number in range(1, 6)]
    assert told == ["EJECTED"] * 2 + ["REFUSED"] * 3
    await over(world)
    assert await flags(world) == Flag.TRIAL
    assert await world.fleet.eject("w3.0", good=False) == "REFUSED", "who is on trial is not back yet"


async def test_the_only_worker_is_never_ejected(world: World) -> None:
    await fleet_of(world, 1)
    assert await world.fleet.eject("w1.0", good=False) == "REFUSED"
    await world.change(1, flags=0)
    assert await world.fleet.eject("w1.0", good=False) == "REFUSED"


async def test_a_trial_is_one_request_at_a_time(world: World) -> None:
    await fleet_of(world, 3)
    await world.fleet.eject("w1.0", good=False)
    await over(world)
    for number in (2, 3):
        await world.change(number, prefill_tokens=90_000, in_flight=1)
    first = await world.fleet.decide(world.ask())
    assert (first.worker_id, first.trial) == ("w1.0", True)
    assert await chosen(world) == {"w2.0", "w3.0"}, "though it is the least loaded by far"
    await world.fleet.settle(first.reservation, "finished")
    assert await world.fleet.eject("w1.0", good=True) == "READMITTED"
    both = [await world.fleet.decide(world.ask()) for _ in range(2)]
    assert [(one.worker_id, one.trial) for one in both] == [("w1.0", False)] * 2


async def test_each_time_it_is_out_for_longer(world: World) -> None:
    await fleet_of(world, 2)
    first_ms, most_ms = (1000 * seconds for seconds in EJECTED_S)
    for times in range(1, 10):
        assert await world.fleet.eject("w1.0", good=False) == "EJECTED"
        ends, counted = await until_ms(world)
        assert counted == times
        assert 0 <= now_ms() + min(first_ms * 2 ** (times - 1), most_ms) - ends < 1_000
        await over(world)
    await over(world, age_ms=601_000)
    assert await flags(world) == 0
    assert await world.store.exists(world.keys.ejections) == 0, "nothing of it stays"
    await world.fleet.eject("w1.0", good=False)
    assert (await until_ms(world))[1] == 1


async def test_a_trial_without_a_verdict_ends(world: World) -> None:
    await fleet_of(world, 2)
    await world.fleet.eject("w1.0", good=False)
    await over(world)
    await over(world, age_ms=59_000)
    assert await flags(world) == Flag.TRIAL
    await over(world, age_ms=61_000)
    assert await flags(world) == 0


async def test_ejected_workers_come_back_when_the_others_die(world: World) -> None:
    await fleet_of(world, 4)
    for number in (1, 2):
        await world.fleet.eject(f"w{number}.0", good=False)
    await slow_tick(world.fleet)
    assert [await flags(world, number) for number in (1, 2)] == [Flag.EJECTED] * 2
    await world.store.zadd(world.keys.alive, {"w3.0": 1})
    await world.ticked()
    await slow_tick(world.fleet)
    assert [await flags(world, number) for number in (1, 2)] == [0, Flag.EJECTED], "the first that is due"
    await world.store.zadd(world.keys.alive, {"w1.0": 1, "w4.0": 1})
    with pytest.raises(NoWorker):
        await world.fleet.decide(world.ask())
    await world.ticked()
    await slow_tick(world.fleet)
    assert await chosen(world) == {"w2.0"}


async def test_a_clock_that_steps_back_keeps_nobody_out(world: World) -> None:
    await fleet_of(world, 2)
    await world.fleet.eject("w1.0", good=False)
    await over(world, age_ms=-4_000_000)
    assert await flags(world) == 0


async def test_forgotten_and_restarted_workers_start_over(core: Core) -> None:
    fleet, server = core.fleet, Server(core.store, core.fleet)
    await server.join()
    await server.applied()
    for name in ("a", "b"):
        other = Core(core.store, fleet, name)
        await other.join()
        await other.applied()
        row = await other.row()
        packed = row.pack(other.worker_id)[:20] + (Flag.SERVER | Flag.URL).to_bytes(2, "big")
        await cast("Any", core.store.hset(fleet.keys.load, other.worker_id, packed + row.pack(other.worker_id)[22:]))
    for restart in (core.join("n2"), server.join("m2")):
        assert await fleet.eject(core.worker_id, good=False) == "EJECTED"
        await restart
        await core.applied()
        await server.applied()
        assert not (await core.row()).flags & OUT
    assert await fleet.eject(core.worker_id, good=False) == "EJECTED"
    await fleet.forget(core.worker_id)
    assert await core.store.exists(fleet.keys.ejections) == 0
