"""drain, through the public door: no new request goes to a drained worker, and what runs there is not touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.errors import BadArgument, NoWorker
from warmfleet.fleet import Flag, Proof, Renewal

if TYPE_CHECKING:
    from tests.lua.stream import Core
    from tests.lua.world import World


async def test_a_drained_worker_is_not_chosen_and_keeps_what_it_has(world: World) -> None:
    await world.workers(2)
    before = await world.fleet.decide(world.ask())
    drained = before.worker_id
    assert await world.fleet.drain(drained, draining=True)
    number = int(drained[1])
    row = await world.row(number)
    assert (row.flags & Flag.DRAINING, row.in_flight) == (Flag.DRAINING, 1)
    assert {(await world.fleet.decide(world.ask())).worker_id for _ in range(20)} == {f"w{3 - number}.0"}
    assert (await world.fleet.decide(world.ask(reservation=before.reservation))).worker_id == drained, "it was booked"
    renewal = Renewal(before.reservation, drained, before.prefill_tokens, before.decode_tokens)
    assert await world.fleet.renew([renewal]) == (1, 0, 0), "its stream goes on"
    assert await world.fleet.settle(before.reservation, "finished") == "SETTLED"
    assert (await world.row(number)).in_flight == 0


async def test_it_is_taken_back(world: World) -> None:
    await world.workers(1)
    flags = (await world.row(1)).flags
    for _ in range(2):
        assert await world.fleet.drain("w1.0", draining=True)
    with pytest.raises(NoWorker):
        await world.fleet.decide(world.ask())
    for _ in range(2):
        assert await world.fleet.drain("w1.0", draining=False)
    assert (await world.row(1)).flags == flags
    assert (await world.fleet.decide(world.ask())).worker_id == "w1.0"


async def test_a_probe_takes_nothing_back(world: World) -> None:
    await world.workers(1)
    await world.fleet.drain("w1.0", draining=True)
    for proof in ("identity", "proven"):
        await world.fleet.prove("w1.0", "n1", Proof(proof, ""))
        assert (await world.row(1)).flags & Flag.DRAINING


async def test_a_restart_of_the_engine_takes_nothing_back(core: Core) -> None:
    await core.fleet.drain(core.worker_id, draining=True)
    for nonce in ("n2", "n2", "n3"):
        await core.join(nonce)
        await core.heartbeat()
        await core.applied()
        assert (await core.row()).flags & Flag.DRAINING
    await core.fleet.drain(core.worker_id, draining=False)
    await core.join("n4")
    await core.applied()
    assert not (await core.row()).flags & Flag.DRAINING


async def test_a_worker_that_was_forgotten_begins_anew(core: Core) -> None:
    await core.fleet.drain(core.worker_id, draining=True)
    await core.fleet.forget(core.worker_id)
    await core.join("n2")
    await core.applied()
    assert not (await core.row()).flags & Flag.DRAINING


async def test_what_drain_refuses(world: World) -> None:
    await world.workers(1)
    assert not await world.fleet.drain("w2.0", draining=True), "nobody of that name"
    assert set(await cast("Any", world.store.hkeys(world.keys.load))) == {b"w1.0"}
    with pytest.raises(BadArgument):
        await world.fleet.keep("drain", worker_id="w1.0", draining=2)
