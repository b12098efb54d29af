"""All keys of a model are in one slot of a Cluster: routers and workers find its owner, also after a failover."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.fleet.busy_fleet import BusyFleet
from tests.support.polling import poll
from tests.support.redis.topology import cluster

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import pytest


async def test_a_failover_under_load(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with cluster(wire.model_tag(model)) as made:
        async with BusyFleet(made.url, model) as fleet:
            await fleet.hold()
            decided_s, indexed_s = await fleet.struck(made.owner.kill)
            print(f"decisions after {decided_s:.2f} s, index after {indexed_s:.2f} s")
            assert made.promoted()
            assert decided_s < 10
            assert indexed_s < 10
            assert fleet.core.state.stopped is None
            await fleet.consistent()


async def test_an_owner_that_gave_its_slot_away_is_left(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a planned failover the old owner answers MOVED, or does not answer when it is asked for the new owner."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with cluster(wire.model_tag(model)) as made:
        async with BusyFleet(made.url, model) as fleet:
            await fleet.hold()
            await asyncio.to_thread(made.hand_over)
            count = len(fleet.answered)
            await poll(lambda: len(fleet.answered) > count + 20, 10, "decisions go on")
            await fleet.consistent()
            assert made.replica.client().exists(fleet.fleet.keys.load)
