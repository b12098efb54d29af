"""A Cluster of three masters with six pools loses one master: only that master's pools degrade."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, cast

import pytest
from tests.drills.clients import Clients
from tests.drills.spread_fleet import spread, started
from tests.support.polling import poll

from warmfleet.fleet import Spans
from warmfleet_loadtest.stacks.processes import free_ports

if TYPE_CHECKING:
    from tests.drills.fleet import Fleet
    from tests.drills.spread_fleet import Spread

CLIENTS, PREFIXES, PAUSE_S = 12, 48, (0.0, 0.02)
BEFORE_S = AFTER_S = 4.0
DECISIONS = "warmfleet_decisions_total"
DEGRADED = ("warmfleet_fallback_requests_total", "warmfleet_passed_over_pools_total")
LATE_SHARE = 0.03  # of the requests: a pool that answers late on a busy machine is passed over, too

pytestmark = [
    pytest.mark.long(
        minutes=3,
        shows=(
            "a Cluster with three masters, six pools, 24 simulated engines and three replicas as processes: a master "
            "is killed under load; no request fails, only its pools degrade, and index and load are right afterwards; "
            "a replica that starts while a master is away serves the others"
        ),
    ),
    pytest.mark.timeout(900),
]


async def test_a_master_is_killed_under_load() -> None:
    async with spread() as fleet:
        await started(fleet)
        clients = Clients(cast("Fleet", fleet), pause=PAUSE_S, prefixes=PREFIXES)
        running = asyncio.create_task(clients.run(CLIENTS))
        await asyncio.sleep(BEFORE_S)
        before = [await fleet.counted(metric) for metric in DEGRADED]
        hit = fleet.on_master(0)
        recovered = await struck(fleet, hit)
        await asyncio.sleep(AFTER_S)
        clients.over = True
        await running
        after = [await fleet.counted(metric) for metric in DEGRADED]
        counts = [
            {tag: int(last.get(tag, 0.0) - first.get(tag, 0.0)) for tag in fleet.tags}
            for first, last in zip(before, after, strict=True)
        ]
        ended = time.monotonic()
        await unbooked(fleet)
        load_s = time.monotonic() - ended
        await right(fleet)
        slowest = max(request.first_s for request in clients.asked if request.first_s is not None)
        print(f"\nthe lost master had {', '.join(sorted(hit))}; {recovered}")
        print(f"{len(clients.asked)} requests, the slowest first byte {slowest:.2f} s, load 0 after {load_s:.1f} s")
        print(f"index right {time.monotonic() - ended:.1f} s after the last answer")
        for metric, counted in zip(DEGRADED, counts, strict=True):
            print(metric, counted)
        assert [request.failure for request in clients.asked if request.failure] == []
        others = [sum(count for tag, count in counted.items() if tag not in hit) for counted in counts]
        assert others[0] == 0, "no request of another pool is placed without Redis"
        assert others[1] <= LATE_SHARE * len(clients.asked), others


async def test_a_replica_starts_while_a_master_is_away() -> None:
    """No node replaces the lost master: the pools of the other two masters are served all the same."""
    async with spread() as fleet:
        await started(fleet)
        for node in (fleet.cluster.masters[0], fleet.cluster.replicas[0]):
            node.kill()
        fleet.replicas.clear()
        began = time.monotonic()
        fleet.start_replica("late", free_ports(1)[0], fleet.tags)
        await poll(lambda: fleet.replicas[0].ready, 120, "it is ready", every_s=0.1)
        print(f"\nready after {time.monotonic() - began:.1f} s")
        clients = Clients(cast("Fleet", fleet), pause=PAUSE_S, prefixes=PREFIXES)
        running = asyncio.create_task(clients.run(CLIENTS))
        await asyncio.sleep(BEFORE_S)
        clients.over = True
        await running
        decided = await fleet.counted(DECISIONS)
        print(f"{len(clients.asked)} requests, decided by pool: {decided}")
        assert [request.failure for request in clients.asked if request.failure] == []
        assert {tag for tag, count in decided.items() if count} == {*fleet.tags} - fleet.on_master(0)


async def struck(fleet: Spread, hit: set[str]) -> str:
    """Kill the first master; returns, in words, when its replica was promoted and when its pools decided again."""
    began = time.monotonic()
    fleet.cluster.masters[0].kill()
    await poll(lambda: fleet.cluster.promoted(0), 30, "its replica takes over")
    promoted_s = time.monotonic() - began
    decided, again_s = await fleet.counted(DECISIONS), dict[str, float]()

    async def again() -> bool:
        now = await fleet.counted(DECISIONS)
        for tag in hit - set(again_s):
            if now.get(tag, 0.0) > decided.get(tag, 0.0):
                again_s[tag] = time.monotonic() - began
        return set(again_s) == hit

    await poll(again, 60, "its pools decide again")
    told = ", ".join(f"{tag} {seconds:.1f} s" for tag, seconds in sorted(again_s.items()))
    return f"its replica promoted after {promoted_s:.1f} s, decisions again after: {told}"


async def unbooked(fleet: Spread) -> None:
    async def nothing() -> bool:
        return await fleet.load() == 0

    await poll(nothing, Spans().lease_ms / 1000 + 10, "nothing is booked", every_s=0.5)


async def right(fleet: Spread) -> None:
    async def equal() -> bool:
        return await fleet.differing() == []

    await poll(equal, 60, "the index is that of the engines' tables", every_s=0.5)
