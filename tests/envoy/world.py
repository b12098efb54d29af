"""Two simulated engines, a replica as picker, and a real Envoy before them."""

from __future__ import annotations

import asyncio
import io
import json
import uuid
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, get_args

import aiohttp
import pytest
from tests.envoy.envoy import Envoy, Logged, envoy
from tests.envoy.gateway_config import MODES, OTHERS, Mode
from tests.support.engines.simulated import Simulated, simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import QUEUE_PATIENCE, QueueLimits
from warmfleet.fleet.bookings import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from warmfleet.pools.pool import Pool

PATH = "/v1/completions"
OUTCOMES = get_args(Outcome)
EVERY_MODE = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def booked(mode: Mode) -> bool:
    """Whether the picker reads the prompt in this mode, so that it books the request."""
    return mode.request not in ("NONE", "STREAMED")


def under_load(long: pytest.MarkDecorator) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test in every ``mode``, with a ``count`` of 40 requests, and with 1,000 as the long test ``long``."""
    counts = pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=long)])
    return lambda test: EVERY_MODE(counts(test))


@dataclass
class World:
    """Two engines, a replica, an Envoy."""

    model: str
    engines: dict[str, Simulated]
    replica: Replica
    envoy: Envoy
    client: aiohttp.ClientSession

    def address(self, name: str) -> str:
        return self.engines[name].url.removeprefix("http://")

    def body(self, prompt: str = "Once upon a time", tokens: int = 5, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}

    async def ask(self, mode: Mode, body: dict[str, Any], **headers: str) -> Got:
        """Send a request through Envoy; return its whole answer."""
        case = uuid.uuid4().hex
        data = io.BytesIO(json.dumps(body).encode())
        headers = {"content-type": "application/json", "x-case": case, **headers}
        async with self.client.post(self.envoy.urls[mode.name] + PATH, data=data, headers=headers) as answer:
            told = {name.lower(): value for name, value in answer.headers.items()}
            return Got(case, answer.status, told, await answer.read())

    async def logged(self, got: Got) -> Logged:
        """Return Envoy's own account of the request."""
        return await self.envoy.logged(got.case)

    @property
    def pool(self) -> Pool:
        """The replica's own state of the pool."""
        return cast("Pool", cast("Any", self.replica.server)._doors.unready.__self__.all[0])

    async def queued(self, count: int) -> None:
        """Return when so many requests wait in the queue."""
        queue2 = self.replica.fleet.keys.queue2

        async def seen() -> bool:
            return await self.replica.fleet.redis.zcard(queue2) == count

        await poll(seen, 10, f"{count} requests wait")

    async def outcomes(self) -> Counter[str]:
        """Return how many reservations had each outcome so far."""
        page = (await self.replica.get("/metrics"))[1].decode()
        named = {word: f'warmfleet_settled_reservations_total{{outcome="{word}"}} ' for word in OUTCOMES}
        found = Counter[str]()
        for line in page.splitlines():
            for word, name in named.items():
                if line.startswith(name):
                    found[word] = int(float(line.removeprefix(name)))
        return found

    def running(self) -> int:
        """Return the number of requests that the engines have."""
        return sum(
            len(engine.engine.core.scheduler.running) + len(engine.engine.core.scheduler.waiting)
            for engine in self.engines.values()
        )

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Let every engine have so much work that a request has to wait."""
        keys, store = self.replica.fleet.keys, self.replica.fleet.redis
        workers = await self.replica.fleet.workers.read()
        before = {worker.worker_id: worker.load.prefill_tokens for worker in workers}

        async def set_prefill(change: Callable[[int], int]) -> None:
            for worker in await self.replica.fleet.workers.read():
                row = replace(worker.load, prefill_tokens=change(before[worker.worker_id]))
                await store.hset(keys.load, worker.worker_id, row.pack(worker.worker_id))

        await set_prefill(lambda tokens: tokens + 1_000_000_000)
        try:
            yield
        finally:
            await set_prefill(lambda tokens: tokens)


@dataclass(frozen=True)
class Got:
    """An answer. ``case``: by which Envoy logs its request."""

    case: str
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return dict(json.loads(self.body)["error"])

    @property
    def tokens(self) -> int:
        """The number of events of a whole stream; fails if it is cut off."""
        assert self.body.endswith(b"data: [DONE]\n\n"), self.body[-100:]
        return self.body.count(b"data: {")


@asynccontextmanager
async def running_world(valkey_url: str, folder: Path, *, reports_ends: bool) -> AsyncIterator[World]:
    """Run all of them. reports_ends: the engines report the ends of requests, so that calls end behind the request."""
    model, port = f"test/{uuid.uuid4().hex[:12]}", free_port()
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(simulated(valkey_url, model, name, reports_ends=reports_ends))
            for name in ("left", "right")
        }
        settings: dict[str, Any] = {
            "epp_port": port,
            "decide_timeout_s": 5.0,
            "max_engine_wait_s": 1.0,
            "queue_max": 1,
            "queue_timeout_s": 20.0,
        }
        made = await stack.enter_async_context(replica(valkey_url, model, **settings))
        await made.routable(2)
        await made.exact()
        addresses = [engine.url.removeprefix("http://") for engine in engines.values()]
        gateway = await stack.enter_async_context(envoy(folder, [f"127.0.0.1:{port}"], addresses, MODES + OTHERS))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        )
        yield World(model, engines, made, gateway, client)


def cut(engine: Simulated) -> None:
    """Break all connections of an engine off, as its death does."""
    runner = engine.engine._runner
    assert runner is not None
    assert runner.server is not None
    for connection in runner.server.connections:
        if connection.transport is not None:
            connection.transport.abort()


async def die(engine: Simulated) -> None:
    """Listen no more, and break all connections off."""
    runner = engine.engine._runner
    assert runner is not None
    for site in [*runner.sites]:
        await site.stop()
    cut(engine)


async def whole_answers(world: World, mode: Mode, count: int) -> None:
    """Send so many streamed requests of different lengths, 32 at a time; assert that all answers are whole."""
    world.pool.fleet.use(limits=QueueLimits(1.0, count, QUEUE_PATIENCE))
    gate = asyncio.Semaphore(32)

    async def one(number: int) -> Got:
        async with gate:
            return await world.ask(mode, world.body(f"Prompt {number}", tokens=1 + number % 30, stream=True))

    answers = await asyncio.gather(*map(one, range(count)))
    assert Counter(answer.status for answer in answers) == {200: count}
    assert [answer.tokens for answer in answers] == [1 + number % 30 for number in range(count)]
