"""Replicas, simulated engines and Redis as real processes, with proxies between them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import redis.asyncio as aioredis
from redis.exceptions import RedisError
from tests.drills.toxic import Toxic
from tests.support.polling import poll
from tests.support.redis.servers import KEEPS_ENVIRONMENT, valkey_binary

from warmfleet.fleet import Fleet as Scripts
from warmfleet.fleet import connect
from warmfleet_loadtest.stacks.processes import Processes, StackError, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

MODEL = "demo"
COUNT = 3  # of replicas, and of engines
START_S = 120.0  # for all processes on a busy machine
#: A decision may take this long before the fallback chooses: a busy machine alone should not cause fallbacks.
DECIDE_TIMEOUT_S = "0.5"
DRAIN_S = "2"


@dataclass
class Replica:
    """``redis``: the proxy to Redis. ``ready``: by the last /readyz. ``killed``: by SIGKILL, not restarted."""

    name: str
    port: int
    redis: Toxic
    ready: bool = False
    killed: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass
class Engine:
    """An engine. ``http``: the proxy between all replicas and it. ``redis``: the proxy between its plugin and Redis."""

    name: str
    port: int
    http: Toxic
    redis: Toxic


@dataclass
class Fleet:
    """The processes by their names, and the proxies between them. engine_argv, settings: for engines and replicas,
    beside the usual ones.
    """

    processes: Processes
    redis_port: int
    http: aiohttp.ClientSession
    engine_argv: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    @property
    def toxics(self) -> list[Toxic]:
        return [
            *(replica.redis for replica in self.replicas),
            *(engine.redis for engine in self.engines),
            *(engine.http for engine in self.engines),
        ]

    async def start_redis(self) -> None:
        argv = [valkey_binary(), "--port", str(self.redis_port), "--bind", "127.0.0.1", "--save", ""]
        argv += ["--appendonly", "no", "--maxmemory-policy", "noeviction", "--dir", str(self.processes.folder)]
        argv += KEEPS_ENVIRONMENT
        self.processes.spawn("store", "redis", argv)

        async def answers() -> bool:
            try:
                async with aioredis.Redis(port=self.redis_port) as client:
                    return bool(await client.ping())
            except (RedisError, OSError):
                return False

        await poll(answers, START_S, "Redis answers")

    def start_replica(self, replica: Replica) -> None:
        settings = {"REDIS_URL": f"redis://127.0.0.1:{replica.redis.port}/0", "MODELS": MODEL}
        settings |= {"PORT": str(replica.port), "APPROVED_TEMPLATES": "*", "DRAIN_S": DRAIN_S, "ADMIN_PORT": "0"}
        settings |= {"DECIDE_TIMEOUT_S": DECIDE_TIMEOUT_S, **self.settings}
        environment = {f"WARMFLEET_{name}": value for name, value in settings.items()}
        self.processes.spawn("replica", replica.name, [sys.executable, "-m", "warmfleet", "serve"], environment)
        replica.killed = False

    def start_engine(self, engine: Engine) -> None:
        argv = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", str(engine.port), "--model", MODEL]
        argv += self.engine_argv
        environment = {
            "WARMFLEET_REDIS_URL": f"redis://127.0.0.1:{engine.redis.port}/0",
            "WARMFLEET_WORKER_ID": engine.name,
            "WARMFLEET_WORKER_URL": f"http://127.0.0.1:{engine.http.port}",
        }
        self.processes.spawn("engine", engine.name, argv, environment)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes.pid(name), number)

    async def stop_replica(self, replica: Replica) -> None:
        """SIGTERM; returns when the process has ended by itself."""
        self.signal(replica.name, signal.SIGTERM)

        def ended() -> bool:
            try:
                self.processes.check(replica.name)
            except StackError:
                return True
            return False

        await poll(ended, 60, f"{replica.name} ends")
        self.processes.kill(replica.name)

    async def watch(self) -> None:
        """Ask every replica for /readyz again and again, as a balancer does."""

        async def look(replica: Replica) -> None:
            while True:
                status, _ = await self.get(f"{replica.url}/readyz", 2.0)
                replica.ready = status == 200
                await asyncio.sleep(0.1)

        await asyncio.gather(*map(look, self.replicas))

    async def get(self, url: str, timeout_s: float = 5.0) -> tuple[int, Any]:
        """The status and the JSON of the answer; 0 if there is none."""
        try:
            async with self.http.get(url, timeout=aiohttp.ClientTimeout(timeout_s)) as answer:
                page = await answer.json() if answer.content_type == "application/json" else None
                return answer.status, page
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0, None

    async def whole(self) -> bool:
        """Whether every engine answers, and every replica can use all engines and has their tokenizer."""
        for engine in self.engines:
            if (await self.get(f"http://127.0.0.1:{engine.port}/health"))[0] != 200:
                return False
        for replica in self.replicas:
            _, page = await self.get(f"{replica.url}/workers")
            models = page["models"] if page else []
            workers = [worker for model in models for worker in model["workers"]]
            usable = [worker for worker in workers if worker["routable"] and worker["proof"] == "proven"]
            if (
                not replica.ready
                or len(usable) != len(self.engines)
                or any(model["identity"] != "exact" for model in models)
            ):
                return False
        return True

    async def load(self) -> int:
        """The sum of all that is booked, in the requests and tokens of all workers; -1 while Redis cannot be read."""
        scripts = Scripts(connect(f"redis://127.0.0.1:{self.redis_port}/0", timeout_s=5), MODEL)
        try:
            rows = [worker.load for worker in await scripts.workers.read()]
        except Exception as error:  # noqa: BLE001  any failure to read is the same here
            print(f"the load cannot be read: {error!r}")
            return -1
        finally:
            await scripts.close()
        return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows)


@asynccontextmanager
async def running(count: int = COUNT, engine_argv: Sequence[str] = (), **settings: str) -> AsyncIterator[Fleet]:
    """A fleet in which every replica can use every engine. All of it is killed at the end. count: of both."""
    with tempfile.TemporaryDirectory(prefix="wf-drills-", ignore_cleanup_errors=True) as folder:
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            redis_port, *ports = free_ports(1 + 2 * count)
            with Processes(Path(folder)) as processes:
                fleet = Fleet(processes, redis_port, http, engine_argv, settings)
                for number in range(count):
                    port = ports[count + number]
                    fleet.replicas.append(Replica(f"replica-{number + 1}", ports[number], Toxic(redis_port)))
                    fleet.engines.append(Engine(f"engine-{number + 1}", port, Toxic(port), Toxic(redis_port)))
                for toxic in fleet.toxics:
                    await toxic.start()
                watch = asyncio.create_task(fleet.watch())
                try:
                    await fleet.start_redis()
                    for engine in fleet.engines:
                        fleet.start_engine(engine)
                    for replica in fleet.replicas:
                        fleet.start_replica(replica)
                    await poll(fleet.whole, START_S, "every replica can use every engine")
                    yield fleet
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
                    for toxic in fleet.toxics:
                        await toxic.stop()
