"""vouch: a worker whose heartbeats are missing stays routable while replicas find that its engine answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import BLOCK
from tests.support.fleet.reporting_server import ReportingServer
from tests.support.fleet.ticking import EVERY, now_ms, slow_tick

from warmfleet.errors import NoWorker
from warmfleet.fleet import Flag, Fleet, Proof

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace
    from tests.support.fleet.reporting_worker import ReportingWorker

OLD_MS = 60_000


@pytest.fixture(autouse=True)
def _ticks_at_every_call(fleet: Fleet) -> None:
    fleet.upkeep.pace = EVERY


async def quiet(keyspace: Keyspace, number: int = 1, *, core_ms: int = OLD_MS, server_ms: int = OLD_MS) -> str:
    """A worker whose last heartbeats are ``core_ms`` and ``server_ms`` old."""
    name = await keyspace.worker(number, age_ms=core_ms)
    await keyspace.store.zadd(keyspace.keys.alive_servers, {f"w{number}": now_ms() - server_ms})
    return name


async def beats(keyspace: Keyspace, *, reporter: bool = True, server: bool = True) -> None:
    await keyspace.store.zadd(keyspace.keys.alive, {"w1.0": now_ms() + 5} if reporter else {"w9.0": 1})
    await keyspace.store.zadd(keyspace.keys.alive_servers, {"w1": now_ms() + 5} if server else {"w9": 1})


async def test_a_whole_fleet_without_heartbeats_is_served_on(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    names = {await quiet(keyspace, number) for number in (1, 2)}
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask())
    assert {await keyspace.fleet.workers.vouch(name, "n1") for name in names} == {"VOUCHED"}
    assert {(await keyspace.fleet.bookings.decide(keyspace.ask())).worker_id for _ in range(8)} == names
    assert {view.state.value for view in await keyspace.fleet.workers.read()} == {"unheard"}
    assert all(view.routable and view.heartbeat_age_s and view.heartbeat_age_s > 50 for view in await views(keyspace))


async def views(keyspace: Keyspace) -> list[Any]:
    return list(await keyspace.fleet.workers.read())


async def test_it_is_chosen_by_its_last_index_and_the_decision_is_flagged(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await quiet(keyspace, 1)
    await keyspace.worker(2)
    await keyspace.fleet.workers.vouch("w1.0", "n1")
    chain = keyspace.chain(40)
    await keyspace.hold(1, chain)
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    assert (decision.worker_id, decision.matched_tokens, decision.flagged) == ("w1.0", 40 * BLOCK, True)


async def test_who_is_left_out_stays_out(keyspace: Keyspace) -> None:
    await keyspace.ticked()
    await quiet(keyspace, 1)
    await quiet(keyspace, 2)
    for name in ("w1.0", "w2.0"):
        await keyspace.fleet.workers.vouch(name, "n1")
    found = {(await keyspace.fleet.bookings.decide(keyspace.ask(exclude=("w1.0",)))).worker_id for _ in range(5)}
    assert found == {"w2.0"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"flags": Flag.SERVER}, "its URL answered no probe"),
        ({"flags": Flag.SERVER | Flag.URL | Flag.HOSTILE}, "its stream broke the rules"),
    ],
)
async def test_nobody_vouches_for_who_proved_nothing(keyspace: Keyspace, changes: dict[str, int], why: str) -> None:
    await quiet(keyspace)
    await keyspace.change(1, **changes)
    assert await keyspace.fleet.workers.vouch("w1.0", "n1") == "REFUSED", why
    assert (await keyspace.row(1)).flags == changes["flags"]


@pytest.mark.parametrize("key", ["alive", "alive_servers"])
async def test_nobody_vouches_for_who_said_goodbye(keyspace: Keyspace, key: str) -> None:
    await quiet(keyspace)
    await keyspace.store.delete(getattr(keyspace.keys, key))
    assert await keyspace.fleet.workers.vouch("w1.0", "n1") == "REFUSED"


async def test_another_incarnation_is_not_vouched_for(keyspace: Keyspace) -> None:
    await quiet(keyspace)
    assert await keyspace.fleet.workers.vouch("w1.0", "n2") == "REFUSED"
    assert await keyspace.fleet.workers.vouch("w9.0", "n1") == "REFUSED"


async def test_a_core_that_stands_still_beside_its_server_is_dead(keyspace: Keyspace) -> None:
    await quiet(keyspace, core_ms=13_000, server_ms=4_000)
    assert await keyspace.fleet.workers.vouch("w1.0", "n1") == "REFUSED"
    await quiet(keyspace, core_ms=13_000, server_ms=8_000)
    assert await keyspace.fleet.workers.vouch("w1.0", "n1") == "VOUCHED", "their heartbeats come at different times"


async def test_it_lasts_one_ttl_after_the_last_answer(keyspace: Keyspace) -> None:
    await quiet(keyspace)
    await keyspace.fleet.workers.vouch("w1.0", "n1")
    await slow_tick(keyspace.fleet)
    assert (await keyspace.row(1)).flags & (Flag.UNHEARD | Flag.SERVER) == Flag.UNHEARD | Flag.SERVER
    await vouched_at(keyspace, now_ms() - 15_500)
    await slow_tick(keyspace.fleet, grace_ms=9_000)
    assert (await keyspace.row(1)).flags & Flag.UNHEARD, "in a time of grace the replicas were away, too"
    await slow_tick(keyspace.fleet)
    assert not (await keyspace.row(1)).flags & (Flag.UNHEARD | Flag.SERVER)
    assert [view.state.value for view in await views(keyspace)] == ["silent"]


async def test_a_clock_that_steps_back_does_not_keep_it(keyspace: Keyspace) -> None:
    await quiet(keyspace)
    await keyspace.fleet.workers.vouch("w1.0", "n1")
    await vouched_at(keyspace, now_ms() + 3_600_000)
    await slow_tick(keyspace.fleet)
    assert not (await keyspace.row(1)).flags & Flag.UNHEARD


async def vouched_at(keyspace: Keyspace, ms: int) -> None:
    record = json.loads(await cast("Any", keyspace.store.hget(keyspace.keys.workers, "w1.0")))
    await cast("Any", keyspace.store.hset(keyspace.keys.workers, "w1.0", json.dumps(record | {"vouched": ms})))


async def test_it_ends_when_both_halves_are_heard_again(keyspace: Keyspace) -> None:
    await quiet(keyspace)
    await keyspace.fleet.workers.vouch("w1.0", "n1")
    for reporter, server in ((True, False), (False, True)):
        await quiet_scores(keyspace)
        await beats(keyspace, reporter=reporter, server=server)
        await slow_tick(keyspace.fleet)
        assert (await keyspace.row(1)).flags & Flag.UNHEARD, "the other half is still missing"
    await beats(keyspace)
    await slow_tick(keyspace.fleet)
    assert [view.state.value for view in await views(keyspace)] == ["proven"]


async def quiet_scores(keyspace: Keyspace) -> None:
    await keyspace.store.zadd(keyspace.keys.alive, {"w1.0": now_ms() - OLD_MS})
    await keyspace.store.zadd(keyspace.keys.alive_servers, {"w1": now_ms() - OLD_MS})


async def test_it_is_not_forgotten(keyspace: Keyspace) -> None:
    await quiet(keyspace, core_ms=3_600_000, server_ms=3_600_000)
    assert (await slow_tick(keyspace.fleet)).forget == ("w1.0",)
    await keyspace.fleet.workers.vouch("w1.0", "n1")
    assert (await slow_tick(keyspace.fleet)).forget == ()


async def test_goodbye_and_a_new_process_end_it(reporter: ReportingWorker) -> None:
    fleet, server = reporter.fleet, ReportingServer(reporter.store, reporter.fleet)
    await server.join()
    await server.applied()
    await ready(fleet, reporter)
    await reporter.send("leave")
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.UNHEARD
    await reporter.join("n2")
    await reporter.applied()
    await ready(fleet, reporter)
    await server.join("m2")
    await server.applied()
    assert not (await reporter.row()).flags & Flag.UNHEARD, "another process at its URL has proved nothing"
    await ready(fleet, reporter)
    await reporter.join("n3")
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.UNHEARD


async def ready(fleet: Fleet, reporter: ReportingWorker) -> None:
    """The worker is proven, and vouched for."""
    assert await fleet.probes.prove(reporter.worker_id, reporter.nonce, Proof("proven", "")) == "OK"
    assert await fleet.workers.vouch(reporter.worker_id, reporter.nonce) == "VOUCHED"
    assert (await reporter.row()).flags & Flag.UNHEARD
