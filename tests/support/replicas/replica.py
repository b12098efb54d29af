"""A router replica on a free port, served by uvicorn in the test's own event loop, with helpers for tests."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvicorn
import uvicorn.server
from tests.support.polling import poll

from warmfleet import main
from warmfleet.api.listening.server import Sockets
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.fleet import Fleet, connect
from warmfleet.main import server
from warmfleet.prompt.tokenizer import Encoder
from warmfleet.settings import Settings
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet.logs.output import LogOutput


STOP_LOOK_S = 0.005  # between two looks whether the connections of a replica that stops are closed
ASK_S = 0.03  # between two questions to a replica: a page of metrics costs it as much as several requests
ROUTABLE = ("proven", "identity", "approximate")  # states of workers
#: All replicas that trust the system's authorities share a context, as reading these takes 20 ms of CPU.
shared_tls = cache(engine_tls)
#: Tokenizers that replicas have loaded, and where their texts may be cut: half a second for the 5 MB of the simulator.
LOAD, CUTS = Encoder.__dict__["load"], Encoder.cuts
SHARED = {"load": staticmethod(lru_cache(maxsize=4)(Encoder.load)), "cuts": lru_cache(maxsize=16)(Encoder.cuts)}
TIMES = {time.name for time in fields(Timing)}


class Prompt:
    """asyncio as uvicorn's server sees it. A replica that stops would wait a tenth of a second, and often."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, STOP_LOOK_S))


@dataclass
class Replica:
    """``url`` for clients, ``operators`` for operators; ``fleet`` to look at the same state.

    ``client`` uses no connection twice.
    """

    url: str
    operators: str
    fleet: Fleet
    client: aiohttp.ClientSession
    server: uvicorn.Server

    @property
    def connections(self) -> int:
        """The number of open connections of clients."""
        return len(self.server.server_state.connections)

    async def post(self, body: Any, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case), whole body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body, from the operators' port where the replica has one."""
        async with self.client.get(self.operators + path) as answer:
            return answer.status, await answer.read()

    async def metric(self, sample: str) -> float:
        """The sum of all samples with this name and at least these labels (``name{label="value"``); 0 without any."""
        return sample_of((await self.get("/metrics"))[1].decode(), sample)

    async def routable(self, count: int) -> None:
        """Return when the replica itself has seen ``count`` routable workers."""

        async def seen() -> bool:
            page = (await self.get("/metrics"))[1].decode()
            return sum(sample_of(page, f'warmfleet_workers{{state="{state}"}}') for state in ROUTABLE) == count

        await poll(seen, 60, f"{count} routable workers", every_s=ASK_S)

    async def exact(self) -> None:
        """Return once the replica identifies prompts exactly."""

        async def known() -> bool:
            return bool(json.loads((await self.get("/workers"))[1])["models"][0]["identity"] == "exact")

        await poll(known, 60, "an exact identity", every_s=ASK_S)

    async def proven(self) -> None:
        """Return once the replica knows one worker to be right, and its tokenizer if it brought one."""

        async def known() -> bool:
            model = json.loads((await self.get("/workers"))[1])["models"][0]
            if [worker["proof"] for worker in model["workers"]] != ["proven"]:
                return False
            seen = await self.metric('warmfleet_workers{state="proven"}')
            return seen == 1 and (await self.get("/readyz"))[0] == 200

        await poll(known, 60, "the worker is proven, and the replica ready", every_s=ASK_S)

    async def load(self) -> int:
        """Everything that open reservations hold, over all workers."""
        rows = [worker.load for worker in await self.fleet.workers.read()]
        return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows)

    async def unloaded(self) -> None:
        """Return when the sum of all load is 0 again."""

        async def empty() -> bool:
            return await self.load() == 0

        await poll(empty, 15, "the load is given back")


def sample_of(page: str, sample: str) -> float:
    """See ``Replica.metric``. page: of metrics."""
    name, _, labels = sample.partition("{")
    wanted = [f'{key}="{value}"' for key, value in re.findall(r'(\w+)="([^"]*)"', labels)]
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))


@asynccontextmanager
async def replica(
    redis_url: str, model: str, *engines: str, look_url: str = "", **settings: Any
) -> AsyncIterator[Replica]:
    """A replica with ``engines`` as static workers, all of them routable.

    look_url: the store by which the test itself reads the fleet. log: gets the access log. settings: fields of
    Settings and of Timing; any admin_port but 0 stands for a free port of its own.
    The replica trusts the files that workers bring, unless told otherwise: trying their tokenizers takes time.
    """
    log: LogOutput | None = settings.pop("log", None)
    chosen: dict[str, Any] = {"view_interval_s": 0.1, "health_interval_s": 0.2, "decide_timeout_s": 1.0}
    chosen |= {"shutdown_grace_s": 2.0, "approved_templates": ("*",), "admin_port": 0}
    chosen |= {"clear_interval_s": 0.5, "files_interval_s": 0.1} | settings
    timing = Timing(**{name: chosen.pop(name) for name in TIMES & chosen.keys()})
    chosen = {"models": (model,), "static_workers": engines} | chosen
    made = Settings(redis_url=redis_url, **chosen)
    listener = socket.create_server(("127.0.0.1", 0))
    admin = [socket.create_server(("127.0.0.1", 0))] if made.admin_port else []
    gateways = [socket.create_server(("127.0.0.1", port)) for port in (made.epp_port,) if port]
    probes = [socket.create_server(("127.0.0.1", port)) for port in (made.epp_health_port,) if port]
    patch = pytest.MonkeyPatch()
    patch.setattr(uvicorn.server, "asyncio", Prompt())
    patch.setattr(main, "engine_tls", engine_tls if made.worker_ca else shared_tls)
    if (Encoder.__dict__["load"], Encoder.cuts) == (LOAD, CUTS):  # unless a test has put something in their place
        for name, shared in SHARED.items():
            patch.setattr(Encoder, name, shared)
    running = server(made, Sockets([listener], admin, gateways, probes), log, timing)
    task = asyncio.create_task(running._serve())
    fleet = Fleet(connect(look_url or redis_url, timeout_s=2), model)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            url, operators = (
                f"http://127.0.0.1:{server.getsockname()[1]}" for server in (listener, [listener, *admin][-1])
            )
            found = Replica(url, operators, fleet, client, running)
            await poll(lambda: running.started or task.done(), 60, "the replica starts")
            if engines:
                await found.routable(len(engines))
            yield found
    finally:
        running.should_exit = True
        await task
        patch.undo()
        await fleet.close()
