"""Two pickers as processes behind a real Envoy; one is killed, with and without retries of the gateway's calls.

They serve a model whose engine does not report the ends of requests, so that calls stay open, and one whose engine
does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from tests.envoy.envoy import Envoy, envoy
from tests.envoy.gateway_config import MODES, Mode
from tests.support.engines.simulated import Simulated, simulated
from tests.support.polling import poll

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

WITHOUT_RETRIES = [replace(mode, name=f"{mode.name}_no_retries", retries=False) for mode in MODES]
#: The modes in which the picker reads the prompt: without it, it cannot choose between two models.
DRILLED = [mode for mode in (*MODES, *WITHOUT_RETRIES) if mode.request not in ("NONE", "STREAMED")]


@dataclass
class World:
    """``models``, ``engines``: by whether the engine reports the ends of requests."""

    models: dict[bool, str]
    engines: dict[bool, Simulated]
    parent: asyncio.subprocess.Process
    admin: int
    fleets: dict[bool, Fleet]
    envoy: Envoy
    client: aiohttp.ClientSession

    def pickers(self) -> list[psutil.Process]:
        """Return the processes of the replicas."""
        return [child for child in psutil.Process(self.parent.pid).children() if "--place" in child.cmdline()]

    def kill_one(self) -> None:
        self.pickers()[0].send_signal(signal.SIGKILL)

    async def both(self) -> None:
        """Return once both replicas are ready."""

        async def ready() -> bool:
            for port in (self.admin, self.admin + 1):
                try:
                    async with self.client.get(f"http://127.0.0.1:{port}/readyz") as answer:
                        if answer.status != 200:
                            return False
                except aiohttp.ClientError:
                    return False
            return True

        await poll(ready, 60, "both replicas are ready", every_s=0.1)

    def post(self, mode: Mode, tokens: int = 5, *, stream: bool = False, reports_ends: bool = False) -> Any:
        body = {
            "model": self.models[reports_ends],
            "prompt": uuid.uuid4().hex,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        url = f"{self.envoy.urls[mode.name]}/v1/completions"
        return self.client.post(url, json=body | {"stream": stream})

    async def status(self, mode: Mode) -> int:
        """Send a request; return its status."""
        async with self.post(mode) as answer:
            await answer.read()
            return int(answer.status)

    async def statuses(self, mode: Mode, count: int) -> list[int]:
        """Send requests one after the other; return their statuses."""
        return [await self.status(mode) for _ in range(count)]

    async def load(self, *, reports_ends: bool) -> int:
        rows = [worker.load for worker in await self.fleets[reports_ends].workers.read()]
        return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows)

    async def no_load(self, *, reports_ends: bool = False) -> None:
        """Return once nothing is booked. Leases that nobody renews are settled in place of their expiry, unless the
        engine reports the ends.
        """
        fleet = self.fleets[reports_ends]
        for name in [] if reports_ends else await fleet.redis.zrange(fleet.keys.leases, 0, -1):
            await fleet.bookings.settle(name.decode() if isinstance(name, bytes) else str(name), "cancelled")

        async def empty() -> bool:
            return await self.load(reports_ends=reports_ends) == 0

        await poll(empty, 15, "the load is given back")

    async def events(self, mode: Mode, tokens: int, begun: asyncio.Semaphore, *, reports_ends: bool) -> int:
        """Stream an answer; return the number of its events, negative if it broke off. begun: released once it came."""
        count = 0
        try:
            async with self.post(mode, tokens, stream=True, reports_ends=reports_ends) as answer:
                begun.release()
                async for line in answer.content:
                    count += line.startswith(b"data: {")
        except aiohttp.ClientError:
            return -1 - count
        return count

    async def stream_while_one_dies(self, mode: Mode, tokens: int, *, reports_ends: bool) -> list[int]:
        """Kill a picker while six answers run; return the numbers of their events, as ``events`` does.

        An answer whose headers no picker has seen yet would be an error of the gateway, not a stream that breaks off.
        """
        begun = asyncio.Semaphore(0)
        running = [asyncio.create_task(self.events(mode, tokens, begun, reports_ends=reports_ends)) for _ in range(6)]
        async with asyncio.timeout(60):
            for _ in running:
                await begun.acquire()
        scheduler = self.engines[reports_ends].engine.core.scheduler
        assert len(scheduler.running) == 6, "all answers run"
        self.kill_one()
        counts = await asyncio.gather(*running)
        await poll(lambda: not scheduler.running, 10, "the engine stops its work")
        return counts

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Let the engine have so much work that a request has to wait in the queue."""
        fleet = self.fleets[False]
        [worker] = await fleet.workers.read()

        async def add(tokens: int) -> None:
            [now] = await fleet.workers.read()
            row = replace(now.load, prefill_tokens=now.load.prefill_tokens + tokens)
            await fleet.redis.hset(fleet.keys.load, worker.worker_id, row.pack(worker.worker_id))

        await add(1_000_000_000)
        try:
            yield
        finally:
            await add(-1_000_000_000)


@asynccontextmanager
async def replicas(
    folder: Path, redis_url: str, models: Iterable[str], port: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run two replicas under a parent, whose pickers are at this port and the next one."""
    public, admin = free_port(), free_port()
    settings = {
        "REDIS_URL": redis_url,
        "MODELS": ",".join(models),
        "PORT": public,
        "ADMIN_PORT": admin,
        "EPP_PORT": port,
    }
    settings |= {"APPROVED_TEMPLATES": "*", "DECIDE_TIMEOUT_S": 5, "MAX_ENGINE_WAIT_S": 30}
    environment = os.environ | {f"WARMFLEET_{name}": str(value) for name, value in settings.items()}
    with open(folder / "replicas.log", "wb") as log:  # noqa: ASYNC230, PTH123  a file of a test
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "warmfleet", "serve", "--workers", "2"),
            env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=log,
            stderr=log,
        )
    try:
        yield process, admin
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        await process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def two_ports() -> int:
    """Return a free port whose next one is free, too."""
    while True:
        first = free_port()
        if free_port(wanted=first + 1) == first + 1:
            return first


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    models, port = {reports_ends: f"test/{uuid.uuid4().hex[:12]}" for reports_ends in (False, True)}, two_ports()
    folder = tmp_path_factory.mktemp("kills")
    async with AsyncExitStack() as stack:
        engines = {
            reports: await stack.enter_async_context(simulated(valkey_url, model, "one", reports_ends=reports))
            for reports, model in models.items()
        }
        parent, admin = await stack.enter_async_context(replicas(folder, valkey_url, models.values(), port))
        places = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        addresses = [engine.url.removeprefix("http://") for engine in engines.values()]
        gateway = await stack.enter_async_context(envoy(folder, places, addresses, DRILLED))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        )
        fleets = {reports: Fleet(connect(valkey_url, timeout_s=2), model) for reports, model in models.items()}
        for fleet in fleets.values():
            stack.push_async_callback(fleet.close)
        found = World(models, engines, parent, admin, fleets, gateway, client)
        await found.both()
        yield found


LONG = pytest.mark.long(
    minutes=5, shows="pickers killed while they decide and while engines answer: each mode, with and without retries"
)
#: Of these gateways the calls stay open, so that the death of a picker breaks answers.
HELD = [mode for mode in DRILLED if mode.name.removesuffix("_no_retries") != "duplex_none"]


def drills(modes: Sequence[Mode], often: str) -> pytest.MarkDecorator:
    """Run a test with these modes, in the default suite with one of them: each case waits for a replica's start."""
    return pytest.mark.parametrize(
        "mode", [pytest.param(mode, marks=[] if mode.name == often else LONG, id=mode.name) for mode in modes]
    )


@drills(DRILLED, "duplex_no_retries")
async def test_requests_go_on_when_a_picker_dies(world: World, mode: Mode) -> None:
    """With retries none fails; without, those that the gateway gave to the dead picker do, and no others."""
    await world.both()
    assert await world.statuses(mode, 4) == [200] * 4
    world.kill_one()
    statuses = await world.statuses(mode, 12)
    if mode.retries:
        assert statuses == [200] * 12
    else:
        assert {200, 500} >= {*statuses}
        assert 200 in statuses
    await world.both()
    await world.no_load()
    assert (await world.statuses(mode, 4))[-1] == 200, "the picker that was started again serves"


@drills(DRILLED, "duplex")
async def test_a_picker_that_dies_while_it_decides(world: World, mode: Mode) -> None:
    """Its requests are asked anew at the other, or fail; what waits at the other goes on.

    With BUFFERED they fail in any case: a gateway asks no other picker once one has answered the headers.
    """
    await world.both()
    queue = world.fleets[False].keys.queue2

    async def all_wait() -> bool:
        return int(await world.fleets[False].redis.zcard(queue)) == len(waits)

    async with world.busy():
        waits = [asyncio.create_task(world.status(mode)) for _ in range(6)]
        await poll(all_wait, 20, "all requests wait")
        world.kill_one()
        await asyncio.sleep(0.2)  # the gateway asks anew while the engine is still busy
    statuses = sorted(await asyncio.gather(*waits))
    failed = statuses.count(500)
    assert statuses == [200] * (6 - failed) + [500] * failed
    assert failed == 0 if mode.retries and mode.duplex else 0 < failed < 6
    await world.no_load()


@drills(HELD, "duplex")
async def test_a_picker_that_dies_breaks_the_answers_of_its_open_calls(world: World, mode: Mode) -> None:
    """The engines stop their work, and nothing stays booked."""
    await world.both()
    counts = await world.stream_while_one_dies(mode, 1_500, reports_ends=False)
    assert {count for count in counts if count >= 0} == {1_500}, "an answer is whole or visibly broken"
    assert 0 < sum(count < 0 for count in counts) < 6, f"only those of the dead picker break off: {counts}"
    await world.no_load()


@drills(DRILLED, "duplex")
async def test_a_picker_that_dies_breaks_no_answer_whose_end_the_engine_reports(world: World, mode: Mode) -> None:
    """Nor does the load stay that it booked: the reports of the engine give it back."""
    await world.both()
    counts = await world.stream_while_one_dies(mode, 1_500, reports_ends=True)
    assert counts == [1_500] * 6
    await world.no_load(reports_ends=True)
