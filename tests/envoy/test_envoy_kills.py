"""Two pickers as processes behind a real Envoy; one is killed, with and without retries of the gateway's calls."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from tests.envoy.envoy import MODES, OTHERS, Envoy, Mode, envoy
from tests.support.engines.simulated import Simulated, simulated
from tests.support.polling import poll

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

MODE = {mode.name: mode for mode in (*MODES, *OTHERS)}
DRILLED = [MODE["duplex"], MODE["buffered"], MODE["no_retries"], MODE["buffered_no_retries"]]


@dataclass
class World:
    model: str
    engine: Simulated
    parent: asyncio.subprocess.Process
    admin: int
    fleet: Fleet
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

    def post(self, mode: Mode, tokens: int = 5, *, stream: bool = False) -> Any:
        body = {"model": self.model, "prompt": uuid.uuid4().hex, "max_tokens": tokens, "ignore_eos": True}
        url = f"{self.envoy.urls[mode.name]}/v1/completions"
        return self.client.post(url, json=body | {"stream": stream})

    async def statuses(self, mode: Mode, count: int) -> list[int]:
        """Send requests one after the other; return their statuses."""
        found = []
        for _ in range(count):
            async with self.post(mode) as answer:
                await answer.read()
                found.append(answer.status)
        return found

    async def no_load(self) -> None:
        """Settle what the killed process held, in place of the leases that nobody renews; then nothing is booked."""
        for name in await self.fleet.redis.zrange(self.fleet.keys.leases, 0, -1):
            await self.fleet.bookings.settle(name.decode() if isinstance(name, bytes) else str(name), "cancelled")

        async def empty() -> bool:
            rows = [worker.load for worker in await self.fleet.workers.read()]
            return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows) == 0

        await poll(empty, 15, "the load is given back")


@asynccontextmanager
async def replicas(
    folder: Path, redis_url: str, model: str, port: int
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run two replicas under a parent, whose pickers are at this port and the next one."""
    public, admin = free_port(), free_port()
    settings = {"REDIS_URL": redis_url, "MODELS": model, "PORT": public, "ADMIN_PORT": admin, "EPP_PORT": port}
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
    model, port = f"test/{uuid.uuid4().hex[:12]}", two_ports()
    folder = tmp_path_factory.mktemp("kills")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(simulated(valkey_url, model, "one", reports_ends=False))
        parent, admin = await stack.enter_async_context(replicas(folder, valkey_url, model, port))
        places = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        gateway = await stack.enter_async_context(envoy(folder, places, [engine.url.removeprefix("http://")], DRILLED))
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        )
        fleet = Fleet(connect(valkey_url, timeout_s=2), model)
        stack.push_async_callback(fleet.close)
        found = World(model, engine, parent, admin, fleet, gateway, client)
        await found.both()
        yield found


LONG = pytest.mark.long(minutes=1, shows="pickers that are killed behind a gateway that buffers bodies")
DRILLS = [pytest.param(mode, marks=[] if mode.duplex else LONG, id=mode.name) for mode in DRILLED]


@pytest.mark.parametrize("mode", DRILLS)
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


@pytest.mark.parametrize("mode", DRILLS[:2])
async def test_a_picker_that_dies_breaks_the_answers_of_its_open_calls(world: World, mode: Mode) -> None:
    """In each mode; the engines stop their work, and nothing stays booked."""
    await world.both()

    async def answered() -> int:
        """Return the number of events that came, negative if the answer broke off."""
        count = 0
        try:
            async with world.post(mode, 1_500, stream=True) as answer:
                async for line in answer.content:
                    count += line.startswith(b"data: {")
        except aiohttp.ClientError:
            return -1 - count
        return count

    running = [asyncio.create_task(answered()) for _ in range(6)]
    scheduler = world.engine.engine.core.scheduler
    await poll(lambda: len(scheduler.running) == 6, 20, "all answers run")
    world.kill_one()
    counts = await asyncio.gather(*running)
    assert {count for count in counts if count > 0} <= {1_500}, "an answer is whole or visibly broken"
    assert 0 < sum(count < 0 for count in counts) < 6, "only those of the dead picker break off"
    await poll(lambda: not scheduler.running, 10, "the engine stops its work")
    await world.no_load()
