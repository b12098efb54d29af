"""drain, through the public door: no new request goes to a drained worker, and what runs there is not touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.errors import BadArgument, NoWorker
from warmfleet.fleet import Flag, Proof, Renewal

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace
    from tests.support.fleet.reporting_worker import ReportingWorker


async def test_a_drained_worker_is_not_chosen_and_keeps_what_it_has(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    before = await keyspace.fleet.bookings.decide(keyspace.ask())
    drained = before.worker_id
    assert await keyspace.fleet.workers.drain(drained, draining=True)
    number = int(drained[1])
    row = await keyspace.row(number)
    assert (row.flags & Flag.DRAINING, row.in_flight) == (Flag.DRAINING, 1)
    assert {(await keyspace.fleet.bookings.decide(keyspace.ask())).worker_id for _ in range(20)} == {f"w{3 - number}.0"}
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(reservation=before.reservation))).worker_id == drained, (
        "it was booked"
    )
    renewal = Renewal(before.reservation, drained, before.prefill_tokens, before.decode_tokens)
    assert await keyspace.fleet.bookings.renew([renewal]) == (1, 0, 0), "its stream goes on"
    assert await keyspace.fleet.bookings.settle(before.reservation, "finished") == "SETTLED"
    assert (await keyspace.row(number)).in_flight == 0


async def test_it_is_taken_back(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    flags = (await keyspace.row(1)).flags
    for _ in range(2):
        assert await keyspace.fleet.workers.drain("w1.0", draining=True)
    with pytest.raises(NoWorker):
        await keyspace.fleet.bookings.decide(keyspace.ask())
    for _ in range(2):
        assert await keyspace.fleet.workers.drain("w1.0", draining=False)
    assert (await keyspace.row(1)).flags == flags
    assert (await keyspace.fleet.bookings.decide(keyspace.ask())).worker_id == "w1.0"


async def test_a_probe_takes_nothing_back(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    await keyspace.fleet.workers.drain("w1.0", draining=True)
    for proof in ("identity", "proven"):
        await keyspace.fleet.probes.prove("w1.0", "n1", Proof(proof, ""))
        assert (await keyspace.row(1)).flags & Flag.DRAINING


async def test_a_restart_of_the_engine_takes_nothing_back(reporter: ReportingWorker) -> None:
    await reporter.fleet.workers.drain(reporter.worker_id, draining=True)
    for nonce in ("n2", "n2", "n3"):
        await reporter.join(nonce)
        await reporter.heartbeat()
        await reporter.applied()
        assert (await reporter.row()).flags & Flag.DRAINING
    await reporter.fleet.workers.drain(reporter.worker_id, draining=False)
    await reporter.join("n4")
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.DRAINING


async def test_a_worker_that_was_forgotten_begins_anew(reporter: ReportingWorker) -> None:
    await reporter.fleet.workers.drain(reporter.worker_id, draining=True)
    await reporter.fleet.upkeep.forget(reporter.worker_id)
    await reporter.join("n2")
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.DRAINING


async def test_what_drain_refuses(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    assert not await keyspace.fleet.workers.drain("w2.0", draining=True), "nobody of that name"
    assert set(await cast("Any", keyspace.store.hkeys(keyspace.keys.load))) == {b"w1.0"}
    with pytest.raises(BadArgument):
        await keyspace.fleet.scripts.keep("drain", worker_id="w1.0", draining=2)
