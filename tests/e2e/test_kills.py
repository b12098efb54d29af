"""Replicas and engines are killed at random moments under load. Only requests that ran through them fail, and nothing
of these is booked after the lease time.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from tests.e2e.clients import Clients
from tests.e2e.conftest import left_of_requests, load
from tests.support.polling import poll

from warmfleet.cli.local.engines import EngineOptions, engine_command
from warmfleet.cli.local.stack import Member, Plan, Stack
from warmfleet.fleet import Spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.cli.local.children import Child

KILLS, CLIENTS, ENGINES, REPLICAS = 30, 12, 4, 4
TOGETHER = 6  # times that several engines are killed together
FEWEST = 2  # replicas that serve at any time


@dataclass
class Killer:
    """Kills processes and starts each of them again. tasks: one for each replica that is getting ready."""

    stack: Stack
    clients: Clients
    rng: random.Random
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)

    async def run(self) -> None:
        for _ in range(KILLS):
            await asyncio.sleep(self.rng.uniform(0.2, 1.5))
            if self.rng.random() < 0.3:
                await self._engine()
            else:
                await self._replica()
        await asyncio.gather(*self.tasks)

    async def _replica(self) -> None:
        await poll(lambda: len(self.clients.replicas) > FEWEST, 60, "another replica is ready")
        victim = self.clients.replicas.pop(self.rng.randrange(len(self.clients.replicas)))
        self.clients.killed.add(victim.name)
        kill(victim.child)
        self.killed.append(victim.name)
        member = await asyncio.to_thread(self.stack.add_replica)

        async def ready() -> None:
            await asyncio.to_thread(self.stack.wait_ready, [member])
            await poll(lambda: asyncio.to_thread(lambda: len(routable(self.stack, member)) >= ENGINES - 1), 30)
            self.clients.replicas.append(member)

        self.tasks.append(asyncio.create_task(ready()))

    async def _engine(self) -> None:
        """Kill one engine, once the engine that was killed before is back."""
        await self.engines(1, 0.0)

    async def engines(self, count: int, apart_s: float) -> None:
        """Kill ``count`` engines, ``apart_s`` apart, once all are there; start them again."""
        replica = self.clients.replicas[0]
        await poll(lambda: asyncio.to_thread(lambda: len(routable(self.stack, replica)) == ENGINES), 60, "all engines")
        # An engine that was killed is routable until its heartbeat is old.
        await poll(lambda: asyncio.to_thread(lambda: all(map(healthy, self.stack.engines))), 60, "all engines answer")
        victims = self.rng.sample(self.stack.engines, count)
        for number, victim in enumerate(victims):
            if number and apart_s:
                await asyncio.sleep(apart_s)
            self.clients.engine_deaths.append(time.monotonic())
            assert victim.child is not None
            victim.child.process.send_signal(signal.SIGKILL)
            self.killed.append(victim.name)
        for victim in victims:
            kill(victim.child)
            argv, environment = engine_command(
                self.stack.plan.engines, victim.name, int(victim.url.rsplit(":", 1)[1]), self.stack.redis_url
            )
            child = await asyncio.to_thread(self.stack.children.start, victim.name, argv, environment)
            self.stack.engines[self.stack.engines.index(victim)] = Member(victim.name, victim.url, child)
        await asyncio.sleep(1)  # until replicas have noticed: the answers that a kill cut began before this moment
        self.clients.engine_deaths[-1] = time.monotonic()


def kill(child: Child | None) -> None:
    assert child is not None
    child.process.send_signal(signal.SIGKILL)
    child.process.wait()


def routable(stack: Stack, replica: Member) -> list[str]:
    return [worker["worker_id"] for worker in stack.workers(replica) if worker["routable"]]


def healthy(engine: Member) -> bool:
    try:
        with urllib.request.urlopen(f"{engine.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture
def many() -> Iterator[Stack]:
    with Stack(Plan(engines=EngineOptions(count=ENGINES), replicas=REPLICAS)) as running:
        yield running


@pytest.mark.long(
    minutes=6,
    shows=(
        "60 kills of replicas and engines at random moments under load: no other request fails, and "
        "nothing stays booked"
    ),
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
async def test_kills_at_random(many: Stack, seed: int) -> None:
    clients = Clients(list(many.replicas))
    killer = Killer(many, clients, random.Random(seed))
    running = asyncio.create_task(clients.run(CLIENTS))
    try:
        await killer.run()
    finally:
        clients.over = True
        await running
    ended = time.monotonic()
    booked = await asyncio.to_thread(load, many)

    async def nothing() -> bool:
        return await asyncio.to_thread(lambda: load(many) == 0 and not left_of_requests(many))

    await poll(nothing, Spans().lease_ms / 1000 + 5, "nothing is booked, nothing is left")
    print(f"{len(killer.killed)} killed: {' '.join(killer.killed)}\n{dict(clients.outcomes)}")
    print(f"booked when all was over {booked}, nothing {time.monotonic() - ended:.1f} s later")
    assert clients.failures == []
    assert clients.outcomes["whole"] > 200
    assert clients.outcomes["its replica was killed"] > 0


@pytest.mark.long(
    minutes=3,
    shows="two and three of four engines are killed together, or half a second apart, under load: no request fails",
)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "apart_s"), [(2, 0.0), (2, 0.05), (2, 0.5), (3, 0.0), (3, 0.5)])
async def test_engines_are_killed_together(many: Stack, count: int, apart_s: float) -> None:
    clients = Clients(list(many.replicas))
    killer = Killer(many, clients, random.Random(1))
    running = asyncio.create_task(clients.run(2 * CLIENTS))
    try:
        for _ in range(TOGETHER):
            await killer.engines(count, apart_s)
    finally:
        clients.over = True
        await running
    print(f"{killer.killed}\n{dict(clients.outcomes)}")
    assert clients.failures == []
