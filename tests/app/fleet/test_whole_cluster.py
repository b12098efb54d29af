"""Six pools over the three masters of a real Cluster: trouble with one master touches its own pools only."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.busy_fleet import BusyFleet
from tests.support.fleet.publishing import equal
from tests.support.polling import poll
from tests.support.redis.topology import whole_cluster

from warmfleet.fleet import RedisConnections
from warmfleet.fleet.connection.pool_masters import next_tag
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.redis.topology import Node, WholeCluster

POOLS = 6

pytestmark = [
    pytest.mark.long(
        minutes=1,
        shows=(
            "six pools over three masters of a Cluster, of which one is killed, or gives the slot of a pool away: "
            "decisions of pools on other masters never fail, and index and load of all pools are right afterwards"
        ),
    ),
    pytest.mark.timeout(300),
]


@asynccontextmanager
async def pools(cluster: WholeCluster, model: str) -> AsyncIterator[dict[str, BusyFleet]]:
    """The pools of one replica, two on each master, under load; all pools share the replica's connections."""
    connections, tags = RedisConnections(cluster.url), list[str]()
    for _ in range(POOLS):
        tags.append(next_tag(model, tags, cluster.ranges))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(connections.aclose)
        fleets = {tag: BusyFleet(cluster.url, tag, connections=connections) for tag in tags}
        for fleet in fleets.values():
            await stack.enter_async_context(fleet)
            await fleet.hold()
        for fleet in fleets.values():
            await poll(lambda fleet=fleet: len(fleet.answered) > 20, 20, "decisions go on")  # type: ignore[misc]
            fleet.failures.clear()  # failures of the busy start do not count
        yield fleets


def slots_of(fleets: dict[str, BusyFleet], cluster: WholeCluster, number: int) -> set[str]:
    """The pools on the master with this number."""
    return {tag for tag in fleets if cluster.number_of(wire.model_tag(tag)) == number}


async def lines_of(node: Node) -> set[str]:
    """The connections on which scripts were called; of each, CLIENT LIST shows only the last command."""
    found: set[str] = set()
    for _ in range(50):
        found |= {client["id"] for client in node.client().client_list() if client["cmd"] == "evalsha"}
        await asyncio.sleep(0.01)
    return found


async def test_a_lost_master_touches_its_pools_only(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with whole_cluster() as cluster:
        async with pools(cluster, model) as fleets:
            hit = slots_of(fleets, cluster, 0)
            assert len(hit) == 2
            for node in cluster.masters:
                assert len(await lines_of(node)) == 1, "all pools on a master share one line"
            begun = time.monotonic()
            cluster.masters[0].kill()
            for tag in hit:
                fleet = fleets[tag]
                await poll(lambda fleet=fleet: fleet.failures, 10, "the failure is noticed")  # type: ignore[misc]
                first = fleet.failures[0][0]
                await poll(lambda fleet=fleet, first=first: fleet.answered[-1] > first, 20, "decisions work again")  # type: ignore[misc]
                again = next(when for when in fleet.answered if when > first)
                print(f"{tag}: decisions again after {again - begun:.2f} s, {len(fleet.failures)} failed")
            assert cluster.promoted(0)
            for tag, fleet in fleets.items():
                if tag not in hit:
                    assert fleet.failures == []
                    gaps = [after - before for before, after in zip(fleet.answered, fleet.answered[1:], strict=False)]
                    print(f"{tag}: {len(fleet.answered)} decisions, the longest gap {max(gaps):.2f} s")
            await asyncio.gather(*(settled(fleet) for fleet in fleets.values()))


async def test_a_slot_migrates_under_load(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slot's keys are at two masters its decisions fail with the reason; later they work at the new master."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    with whole_cluster() as cluster:
        async with pools(cluster, model) as fleets:
            tag = min(slots_of(fleets, cluster, 0))
            moved = fleets[tag]
            await asyncio.to_thread(cluster.move, wire.model_tag(tag), 1)
            count = len(moved.answered)
            await poll(lambda: len(moved.answered) > count + 20, 20, "decisions go on at the other master")
            print(f"{tag}: {len(moved.failures)} decisions failed: {sorted({why[:60] for _, why in moved.failures})}")
            for other, fleet in fleets.items():
                assert other == tag or fleet.failures == []
            assert cluster.masters[1].client().exists(moved.fleet.keys.load)
            await asyncio.gather(*(settled(fleet) for fleet in fleets.values()))


async def settled(fleet: BusyFleet) -> None:
    """Wait until the index equals the engine's table and the load equals the held leases; then end all leases."""
    fleet.churn.cancel()
    await equal(fleet.fleet, fleet.tracker, 30)
    await fleet.consistent()
