"""Real vLLM tells when a request has left it: load is right within a second, whichever router sees the end, or none.

CHAOS_SECONDS in the environment sets how long the last test strikes; by default 90.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import ROOT, SERVED_NAME, TRUTH, EngineOptions, VllmEngine, running
from tests.vllm.replicas import Replica, running_replicas

from warmfleet.fleet import Fleet, Lease, Question, Stage
from warmfleet.fleet.bookings import new_reservation
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

STEP_S = "0.03"  # as long as a larger model's step, so that answers take seconds
DEAD_MS = 17_000  # after its last heartbeat an engine is dead: TTL, and VOUCH_MS of lua/parts/tick/each_second.lua
SOON_S = 1.0  # within this time after any event load is what the engines have
CHAOS_S = float(os.environ.get("CHAOS_SECONDS", "90"))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows="real vLLM reports the ends of requests: killed replica, n = 3, client gone, no renewal, dead engine",
    ),
]


@dataclass
class World:
    """One engine or more, two replicas, and requests under way. tasks: clients that read answers."""

    fleet: Fleet
    engines: dict[str, VllmEngine]
    replicas: list[Replica]
    session: aiohttp.ClientSession
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def ask(self, url: str, tokens: int, headers: dict[str, str] | None = None, **more: Any) -> asyncio.Task[None]:
        """Send a request of so many tokens and read its answer in the background."""
        body = {"model": SERVED_NAME, "prompt": f"{random.random()} tell me more", "max_tokens": tokens}
        body |= {"ignore_eos": True, "stream": True} | more

        async def read() -> None:
            with suppress(aiohttp.ClientError, ConnectionError):
                async with self.session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                    await answer.read()

        task = asyncio.create_task(read())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def pick(self, tokens: int) -> str:
        """Send a request as a picker that leaves after its decision: nobody renews or settles the reservation."""
        reservation = new_reservation(1)
        decision = await self.fleet.bookings.decide(Question(reservation, (), 10, 10 + tokens))
        assert decision.reports_ends
        self.ask(decision.url, tokens, {"x-request-id": f"{reservation}.picked"})
        return reservation

    async def load(self) -> dict[str, int]:
        return {view.worker_id: view.load.in_flight for view in await self.fleet.workers.read()}

    async def open(self) -> dict[str, int]:
        """The open reservations of each worker, by their stage."""
        store: Any = self.fleet.redis
        leases = {
            name.decode(): Lease.unpack(lease) for name, lease in (await store.hgetall(self.fleet.keys.lease)).items()
        }
        return {name: lease.stage for name, lease in leases.items() if lease.stage <= Stage.STARTED}

    async def load_of_dead(self, worker_id: str, seconds: dict[str, list[float]]) -> None:
        """Wait until a dead engine has no load; note how many seconds after its death was known, by Redis' clock."""
        store: Any = self.fleet.redis
        heard_ms, found = float(await store.zscore(self.fleet.keys.alive, worker_id)), 0.0

        async def none() -> bool:
            nonlocal found
            whole, micros = await store.time()
            found = whole + micros / 1e6 - (heard_ms + DEAD_MS) / 1e3
            return (await self.load())[worker_id] == 0

        assert (await self.load())[worker_id] > 0
        await poll(none, 40, "the dead engine has no load")
        seconds.setdefault("dead", []).append(round(found, 2))

    async def becomes(self, in_flight: int, within_s: float, about: str) -> float:
        """Return after how many seconds the fleet's load became this."""
        begun = time.monotonic()

        async def so() -> bool:
            return sum((await self.load()).values()) == in_flight

        await poll(so, within_s, f"{about}: load {in_flight}")
        return time.monotonic() - begun


def engine_options(name: str, redis_url: str) -> EngineOptions:
    environment = {
        "ENGINE_TRUTH_STEP_S": STEP_S,
        "ENGINE_TRUTH_SLEEPS": "1",
        "PYTHONPATH": os.pathsep.join((str(TRUTH), str(ROOT / "worker_plugin"))),
    }
    return EngineOptions(redis_url=redis_url, worker_id=name, blocks=512, environment=environment)


@pytest.fixture(scope="module")
def ends_store(installed: None) -> Iterator[str]:
    """URL of a Valkey to which no engine of other tests reports."""
    with server(valkey_binary()) as redis_url:
        yield redis_url


@pytest.fixture(scope="module")
def fleet_of_engines(ends_store: str) -> Iterator[tuple[dict[str, VllmEngine], list[Replica]]]:
    with ExitStack() as stack:
        engines = stack.enter_context(running(engine_options("ends-a", ends_store)))
        replicas = stack.enter_context(running_replicas(ends_store, engines=1, WARMFLEET_DECIDE_TIMEOUT_S="2"))
        yield {engine.worker_id: engine for engine in engines}, replicas


@pytest.fixture
async def world(fleet_of_engines: tuple[dict[str, VllmEngine], list[Replica]], ends_store: str) -> AsyncIterator[World]:
    engines, replicas = fleet_of_engines
    fleet = Fleet(connect(ends_store, timeout_s=5), SERVED_NAME)
    async with aiohttp.ClientSession() as session:
        world = World(fleet, engines, replicas, session)
        await world.becomes(0, 40, "the test before has ended")
        yield world
        for task in list(world.tasks):
            task.cancel()
    await fleet.close()


async def test_a_killed_replica_leaves_no_load(world: World) -> None:
    """Its requests are aborted as their connections close; today's leases would last for 30 s."""
    killed = world.replicas[0]
    for _ in range(3):
        world.ask(killed.url, 600)
    world.ask(killed.url, 600, n=3)
    world.ask(killed.url, 600, stream=False)
    await world.becomes(5, 20, "all are booked")
    await poll(lambda: started(world, 5), 20, "the engine has computed the prompts")
    await asyncio.to_thread(killed.kill)
    try:
        assert await world.becomes(0, 5, "the replica is dead") < SOON_S
    finally:
        killed.start()
        await poll(lambda: asyncio.to_thread(lambda: killed.proven >= 1), 60, "the replica knows the fleet")


async def started(world: World, count: int) -> bool:
    stages = (await world.open()).values()
    return len(stages) == count and all(stage == Stage.STARTED for stage in stages)


async def test_three_answers_end_with_the_last(world: World) -> None:
    reservation = new_reservation(1)
    decision = await world.fleet.bookings.decide(Question(reservation, (), 10, 200))
    asked = world.ask(decision.url, 60, {"x-request-id": f"{reservation}.picked"}, n=3)
    await poll(lambda: started(world, 1), 20, "the prompt is computed")
    await asked
    assert await world.becomes(0, 5, "all answers have ended") < SOON_S
    lease = await world.fleet.bookings.lease(reservation)
    assert lease is not None
    assert (lease.stage, lease.prefill_tokens) == (Stage.ENDED, 180), "the tokens of all answers"


async def test_a_client_that_leaves_is_seen_by_the_engine(world: World) -> None:
    reservation = await world.pick(600)
    await poll(lambda: started(world, 1), 20, "the prompt is computed")
    for task in world.tasks:
        task.cancel()
    assert await world.becomes(0, 5, "the client has left") < SOON_S
    lease = await world.fleet.bookings.lease(reservation)
    assert lease is not None
    assert 0 < lease.prefill_tokens < 600, "the tokens that were computed"


async def test_a_reservation_needs_no_renewal_while_its_engine_has_it(world: World) -> None:
    reservation = await world.pick(500)
    await poll(lambda: started(world, 1), 20, "the prompt is computed")
    keys = world.fleet.keys
    for _ in range(3):
        await world.fleet.redis.zadd(keys.leases, {reservation: 1})
        await world.fleet.bookings.settle("nobody", "finished")
        assert sum((await world.load()).values()) == 1
    await asyncio.gather(*world.tasks)
    assert await world.becomes(0, 5, "the answer has ended") < SOON_S


async def test_a_dead_engine_has_no_load_and_its_successor_begins_with_none(world: World) -> None:
    """Nobody settles. Last, because the engine starts anew."""
    await world.pick(2_000)
    await poll(lambda: started(world, 1), 20, "the prompt is computed")
    [engine] = world.engines.values()
    await asyncio.to_thread(engine.kill)
    seconds: dict[str, list[float]] = {}
    await world.load_of_dead(engine.worker_id, seconds)
    print("\nseconds from the death that is known to load 0:", seconds["dead"])
    assert 0 <= seconds["dead"][0] <= SOON_S
    engine.start()
    await asyncio.to_thread(engine.wait)
    await world.becomes(0, 10, "the new process has joined")


def unfinished(engine: VllmEngine) -> int:
    """The requests that an engine has, by its own metrics."""
    text = httpx.get(f"{engine.url}/metrics", timeout=5).text
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in text.splitlines() if line.startswith(names))


@pytest.mark.long(
    minutes=6,
    shows=(
        "replicas and an engine of real vLLM are killed, clients leave, and pickers settle nothing: after each strike, "
        "load is within a second what the engines have"
    ),
)
@pytest.mark.timeout(1_800)
async def test_load_is_what_the_engines_have_under_chaos(installed: None) -> None:
    with ExitStack() as stack:
        redis_url = stack.enter_context(server(valkey_binary()))
        engines = stack.enter_context(running(*[engine_options(f"chaos-{name}", redis_url) for name in "ab"]))
        replicas = stack.enter_context(running_replicas(redis_url, WARMFLEET_DECIDE_TIMEOUT_S="2"))
        fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
        async with aiohttp.ClientSession() as session:
            world = World(fleet, {engine.worker_id: engine for engine in engines}, replicas, session)
            strikes = Strikes(world, random.Random(1))
            await strikes.run(CHAOS_S)
            for task in list(world.tasks):
                task.cancel()
            await world.becomes(0, 40, "all clients have left")
        print("\nseconds until load was right:", strikes.seconds)
        await fleet.close()
    # Of requests that are sent, load has those that are on their way to the engine. The median counts, because two
    # engines and two replicas share the machine's cores with whatever else runs there.
    for what in ("leave", "replica", "engine", "dead"):
        assert statistics.median(strikes.seconds[what]) <= SOON_S
        assert max(strikes.seconds[what]) <= 3 * SOON_S


@dataclass
class Strikes:
    """Strikes at random, and after each the time until every living engine's load is that of its requests."""

    world: World
    rng: random.Random
    seconds: dict[str, list[float]] = field(default_factory=dict)

    async def run(self, seconds: float) -> None:
        kinds = itertools.cycle(("leave", "picked", "replica"))
        ends, engine_due = time.monotonic() + seconds, time.monotonic() + seconds / 2
        while time.monotonic() < ends:
            await self.requests()
            await self.right("requests")
            await self.strike(next(kinds))
            if time.monotonic() > engine_due:
                engine_due = ends + 1
                await self.engine()

    async def requests(self) -> None:
        for _ in range(self.rng.randint(2, 6)):
            tokens = self.rng.choice([20, 200, 400])
            self.world.ask(self.rng.choice(self.world.replicas).url, tokens, stream=self.rng.random() < 0.7)
        await asyncio.sleep(0.5)

    async def strike(self, what: str) -> None:
        world = self.world
        if what == "leave" and world.tasks:
            for task in self.rng.sample(sorted(world.tasks, key=id), 1 + len(world.tasks) // 3):
                task.cancel()
            await self.right(what)
        elif what == "picked":
            for _ in range(3):
                await world.pick(self.rng.choice([20, 300]))
            await asyncio.sleep(0.3)
            await self.right(what)
        elif what == "replica":
            replica = self.rng.choice(world.replicas)
            await asyncio.to_thread(replica.kill)
            await self.right(what)
            replica.start()
            await poll(lambda: asyncio.to_thread(lambda: replica.proven >= 2), 90, "the replica knows the fleet")

    async def engine(self) -> None:
        """Kill an engine that has requests of which nobody sees the end; its successor begins with nothing."""
        for _ in range(4):
            await self.world.pick(1_000)
        engine = next(iter(self.world.engines.values()))
        await asyncio.to_thread(engine.kill)
        await self.world.load_of_dead(engine.worker_id, self.seconds)
        engine.start()
        await asyncio.to_thread(engine.wait)
        await asyncio.sleep(2 * SOON_S)  # /health answers before the engine has joined
        await self.right("engine")

    async def right(self, what: str) -> None:
        """Wait until load is what the engines have; note how long that took."""
        begun = time.monotonic()

        async def so() -> bool:
            load = await self.world.load()
            engines = self.world.engines.items()
            has = await asyncio.gather(*[asyncio.to_thread(unfinished, engine) for _, engine in engines])
            return [load.get(name) for name, _ in engines] == has

        await poll(so, 10, f"{what}: load is what the engines have")
        self.seconds.setdefault(what, []).append(round(time.monotonic() - begun, 2))
