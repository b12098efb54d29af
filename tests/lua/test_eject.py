"""eject, and what tick makes of it: workers that fail what others serve are out for a while, and then tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_server import ReportingServer
from tests.support.fleet.reporting_worker import ReportingWorker
from tests.support.fleet.ticking import EVERY, now_ms, slow_tick

from warmfleet.errors import NoWorker
from warmfleet.fleet import Flag, Fleet, WorkerState
from warmfleet.fleet.workers import EJECTED_S

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

OUT = Flag.EJECTED | Flag.TRIAL


@pytest.fixture(autouse=True)
def _ticks_at_every_call(fleet: Fleet) -> None:
    fleet.upkeep.pace = EVERY


async def fleet_of(keyspace: Keyspace, count: int) -> None:
    await keyspace.workers(count)
    await keyspace.store.zadd(keyspace.keys.alive_servers, {f"w{number}": now_ms() for number in range(1, count + 1)})


async def chosen(keyspace: Keyspace, decisions: int = 8) -> set[str]:
    found = set()
    for _ in range(decisions):
        ask = keyspace.ask()
        found.add((await keyspace.fleet.bookings.decide(ask)).worker_id)
        await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    return found


async def until_ms(keyspace: Keyspace, name: str = "w1.0") -> tuple[int, int]:
    value = await cast("Any", keyspace.store.hget(keyspace.keys.ejections, name))
    ends, times = value.split()
    return int(ends), int(times)


async def over(keyspace: Keyspace, name: str = "w1.0", age_ms: int = 10) -> None:
    """Let the ejection have ended this long ago."""
    _, times = await until_ms(keyspace, name)
    await cast("Any", keyspace.store.hset(keyspace.keys.ejections, name, f"{now_ms() - age_ms} {times}"))
    await keyspace.ticked()
    await slow_tick(keyspace.fleet)


async def flags(keyspace: Keyspace, number: int = 1) -> int:
    return (await keyspace.row(number)).flags & OUT


async def test_an_ejected_worker_gets_no_request_from_any_replica(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 3)
    assert await keyspace.fleet.workers.eject("w1.0", good=False) == "EJECTED"
    assert await chosen(keyspace) == {"w2.0", "w3.0"}
    states = {view.worker_id: view.state for view in await keyspace.fleet.workers.read()}
    assert states["w1.0"] is WorkerState.EJECTED
    assert await keyspace.fleet.workers.eject("w1.0", good=False) == "SAME", "another replica has found the same"
    assert await keyspace.fleet.workers.eject("w1.0", good=True) == "SAME", (
        "a request that was under way acquits nobody"
    )
    assert await keyspace.fleet.workers.eject("nobody.0", good=False) == "SAME"


async def test_half_of_the_workers_stay_whatever_replicas_say(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 5)
    told = [await keyspace.fleet.workers.eject(f"w{number}.0", good=False) for number in range(1, 6)]
    assert told == ["EJECTED"] * 2 + ["REFUSED"] * 3
    await over(keyspace)
    assert await flags(keyspace) == Flag.TRIAL
    assert await keyspace.fleet.workers.eject("w3.0", good=False) == "REFUSED", "who is on trial is not back yet"


async def test_the_only_worker_is_never_ejected(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 1)
    assert await keyspace.fleet.workers.eject("w1.0", good=False) == "REFUSED"
    await keyspace.change(1, flags=0)
    assert await keyspace.fleet.workers.eject("w1.0", good=False) == "REFUSED"


async def test_a_trial_is_one_request_at_a_time(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 3)
    await keyspace.fleet.workers.eject("w1.0", good=False)
    await over(keyspace)
    for number in (2, 3):
        await keyspace.change(number, prefill_tokens=90_000, in_flight=1)
    first = await keyspace.fleet.bookings.decide(keyspace.ask())
    assert (first.worker_id, first.trial) == ("w1.0", True)
    assert await chosen(keyspace) == {"w2.0", "w3.0"}, "though it is the least loaded by far"
    await keyspace.fleet.bookings.settle(first.reservation, "finished")
    assert await keyspace.fleet.workers.eject("w1.0", good=True) == "READMITTED"
    both = [await keyspace.fleet.bookings.decide(keyspace.ask()) for _ in range(2)]
    assert [(decision.worker_id, decision.trial) for decision in both] == [("w1.0", False)] * 2


async def test_each_time_it_is_out_for_longer(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 2)
    first_ms, most_ms = (1000 * seconds for seconds in EJECTED_S)
    for times in range(1, 10):
        assert await keyspace.fleet.workers.eject("w1.0", good=False) == "EJECTED"
        ends, counted = await until_ms(keyspace)
        assert counted == times
        assert 0 <= now_ms() + min(first_ms * 2 ** (times - 1), most_ms) - ends < 1_000
        await over(keyspace)
    await over(keyspace, age_ms=601_000)
    assert await flags(keyspace) == 0
    assert await keyspace.store.exists(keyspace.keys.ejections) == 0, "nothing of it stays"
    await keyspace.fleet.workers.eject("w1.0", good=False)
    assert (await until_ms(keyspace))[1] == 1


async def test_a_trial_without_a_verdict_ends(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 2)
    await keyspace.fleet.workers.eject("w1.0", good=False)
    await over(keyspace)
    await over(keyspace, age_ms=50_000)
    assert await flags(keyspace) == Flag.TRIAL
    await over(keyspace, age_ms=61_000)
    assert await flags(keyspace) == 0


async def test_ejected_workers_come_back_when_the_others_die(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 4)
    for number in (1, 2):
        await keyspace.fleet.workers.eject(f"w{number}.0", good=False)
    await slow_tick(keyspace.fleet)
    assert [await flags(keyspace, number) for number in (1, 2)] == [Flag.EJECTED] * 2
    await keyspace.store.zadd(keyspace.keys.alive, {"w3.0": 1})
    await keyspace.ticked()
    await slow_tick(keyspace.fleet)
    assert [await flags(keyspace, number) for number in (1, 2)] == [0, Flag.EJECTED], "the first that is due"
    await keyspace.store.zadd(keyspace.keys.alive, {"w1.0": 1, "w4.0": 1})
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask())
    await keyspace.ticked()
    await slow_tick(keyspace.fleet)
    assert await chosen(keyspace) == {"w2.0"}


async def test_a_clock_that_steps_back_keeps_nobody_out(keyspace: Keyspace) -> None:
    await fleet_of(keyspace, 2)
    await keyspace.fleet.workers.eject("w1.0", good=False)
    await over(keyspace, age_ms=-4_000_000)
    assert await flags(keyspace) == 0


async def test_forgotten_and_restarted_workers_start_over(reporter: ReportingWorker) -> None:
    fleet, server = reporter.fleet, ReportingServer(reporter.store, reporter.fleet)
    await server.join()
    await server.applied()
    for name in ("a", "b"):
        other = ReportingWorker(reporter.store, fleet, name)
        await other.join()
        await other.applied()
        row = await other.row()
        packed = row.pack(other.worker_id)[:20] + (Flag.SERVER | Flag.URL).to_bytes(2, "big")
        await cast(
            "Any", reporter.store.hset(fleet.keys.load, other.worker_id, packed + row.pack(other.worker_id)[22:])
        )
    for restart in (reporter.join("n2"), server.join("m2")):
        assert await fleet.workers.eject(reporter.worker_id, good=False) == "EJECTED"
        await restart
        await reporter.applied()
        await server.applied()
        assert not (await reporter.row()).flags & OUT
    assert await fleet.workers.eject(reporter.worker_id, good=False) == "EJECTED"
    await fleet.upkeep.forget(reporter.worker_id)
    assert await reporter.store.exists(fleet.keys.ejections) == 0
