"""A pool is added under load, and one is drained and removed: no request fails, and few prefixes find new homes."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import pytest
from tests.drills.clients import WORDS, Clients
from tests.drills.fleet import MODEL
from tests.drills.spread_fleet import ENGINES, START_S, Spread, spread
from tests.drills.test_masters import right, unbooked
from tests.support.polling import poll

from warmfleet.routing.pool_choice import HOMES
from warmfleet_loadtest.stacks.processes import free_ports

if TYPE_CHECKING:
    from tests.drills.fleet import Fleet

FIRST, ADDED = [f"{MODEL}#1", f"{MODEL}#2", f"{MODEL}#3"], f"{MODEL}#4"
CLIENTS, PREFIXES, PAUSE_S = 8, 64, (0.0, 0.05)
WARM_S, SETTLED_S = 10.0, 10.0

pytestmark = [
    pytest.mark.long(
        minutes=5,
        shows=(
            "pools are added, drained and removed under load, with 16 simulated engines that find their pools, three "
            "replicas and a Cluster as processes: no request fails; the share of prefixes that move, hits over time"
        ),
    ),
    pytest.mark.timeout(900),
]


@dataclass
class Hits:
    """The share of prompt tokens that the chosen engines held, second by second."""

    fleet: Spread
    began: float = field(default_factory=time.monotonic)
    shares: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the begin, share)

    async def look(self) -> None:
        before = await self._sums()
        while True:
            await asyncio.sleep(1)
            now = await self._sums()
            matched, prompt = (count - was for count, was in zip(now, before, strict=True))
            if prompt > 0:
                self.shares.append((time.monotonic() - self.began, matched / prompt))
            before = now

    async def _sums(self) -> tuple[float, float]:
        sums = [
            sum((await self.fleet.counted(f"warmfleet_{kind}_tokens_total")).values()) for kind in ("matched", "prompt")
        ]
        return sums[0], sums[1]

    def mean(self, first_s: float, last_s: float) -> float:
        found = [share for when, share in self.shares if first_s <= when < last_s]
        return sum(found) / len(found) if found else float("nan")


async def test_pools_come_and_go_under_load() -> None:
    async with spread(FIRST, [MODEL], find=True) as fleet:
        await pools(fleet, "add", *FIRST)
        await fleet.begin()
        await poll(lambda: fleet.whole(len(FIRST) * ENGINES), START_S, "all engines are used", every_s=0.5)
        clients = Clients(cast("Fleet", fleet), pause=PAUSE_S, prefixes=PREFIXES)
        running, hits = asyncio.create_task(clients.run(CLIENTS)), Hits(fleet)
        looking = asyncio.create_task(hits.look())
        clock = [await after(hits, WARM_S)]
        homes = [await homes_of(fleet)]

        await pools(fleet, "add", ADDED)
        fleet.tags.append(ADDED)
        [fleet.tables[ADDED]] = free_ports(1)
        fleet.start_engines("late", fleet.tables[ADDED])
        await poll(lambda: filled(fleet, ADDED), START_S, "new engines have joined the new pool", every_s=0.5)
        homes.append(await homes_of(fleet))
        clock.append(await after(hits, SETTLED_S))

        await pools(fleet, "drain", FIRST[0], "--move")
        await poll(lambda: emptied(fleet, FIRST[0]), START_S, "its engines have gone", every_s=0.5)
        await pools(fleet, "remove", FIRST[0])
        fleet.tags.remove(FIRST[0])
        await poll(lambda: fleet.whole(4 * ENGINES), START_S, "all engines are used", every_s=0.5)
        homes.append(await homes_of(fleet))
        clock.append(await after(hits, SETTLED_S))
        clients.over = True
        await running
        looking.cancel()
        await unbooked(fleet)
        await right(fleet)

        print(f"\n{len(clients.asked)} requests, {sum(bool(request.failure) for request in clients.asked)} failed")
        for what, (old, new) in zip(("added", "removed"), pairwise(homes), strict=True):
            print(f"a pool was {what}: {moved(old, new)} of {2 * PREFIXES} home pools of prefixes are others")
        print("hits by second:", " ".join(f"{when:.0f}:{share:.2f}" for when, share in hits.shares))
        print("clock: warm, added, removed, end at", " ".join(f"{when:.0f}" for when in clock))
        assert [request.failure for request in clients.asked if request.failure] == []
        assert moved(*homes[:2]) < 2 * PREFIXES * 0.4, "a fourth pool gets a quarter"
        assert moved(*homes[1:]) < 2 * PREFIXES * 0.4, "only those of the removed pool move"
        assert hits.mean(clock[-1] - SETTLED_S / 2, clock[-1]) > hits.mean(clock[0] - WARM_S / 2, clock[0]) - 0.1


async def after(hits: Hits, seconds: float) -> float:
    await asyncio.sleep(seconds)
    return time.monotonic() - hits.began


async def pools(fleet: Spread, *words: str) -> None:
    """Run ``warmfleet pools``."""
    argv = [sys.executable, "-m", "warmfleet", "pools", *words, "--redis", fleet.cluster.url]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    assert process.returncode == 0, told.decode()
    print(told.decode().strip())


async def filled(fleet: Spread, tag: str) -> bool:
    found = [await fleet.workers(replica) for replica in fleet.replicas]
    return all(len(workers.get(tag, ())) >= ENGINES for workers in found)


async def emptied(fleet: Spread, tag: str) -> bool:
    one = fleet.fleet(tag)
    try:
        return not [worker for worker in await one.workers.read() if worker.heard]
    finally:
        await one.close()


async def homes_of(fleet: Spread) -> list[frozenset[str]]:
    """The pools that a replica asks for each prefix."""
    found: list[frozenset[str]] = []

    async def told() -> bool:
        """Whether both pools decided at once: a request that waited in a line, or met a late pool, does not count."""
        prefix = " ".join(random.Random(len(found)).choices(WORDS, k=300))
        body = {"model": MODEL, "prompt": f"{prefix} x", "max_tokens": 1}
        headers = {"X-Warmfleet-Explain": "1"}
        async with fleet.http.post(f"{fleet.replicas[0].url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            asked = json.loads(answer.headers.get("x-warmfleet-explain", "{}")).get("pools", ())
        homes = frozenset(attempt["pool"] for attempt in asked)
        if len(homes) == HOMES:
            found.append(homes)
        return len(homes) == HOMES

    for _ in range(PREFIXES):
        await poll(told, 60, "a request that asks both home pools", every_s=0.1)
    return found


def moved(before: list[frozenset[str]], after: list[frozenset[str]]) -> int:
    """The number of new home pools; each prefix has two."""
    return sum(len(new - old) for old, new in zip(before, after, strict=True))
