"""Six pools over three masters of a Cluster: 24 engines, whose tables are known, and three replicas, as processes."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import aiohttp
from tests.drills.fleet import DECIDE_TIMEOUT_S, MODEL, Replica
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT
from tests.support.redis.topology import whole_cluster

from warmfleet.fleet import Fleet, RedisConnections
from warmfleet.fleet.connection.pool_masters import next_tag
from warmfleet_loadtest.stacks.processes import Processes, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tests.drills.toxic import Toxic
    from tests.support.redis.topology import WholeCluster

POOLS, ENGINES, REPLICAS = 6, 4, 3  # ENGINES: of each pool
START_S = 240.0  # for all processes on a busy machine
NODE_TIMEOUT_MS = 2_000  # a node is lost after this silence, which a busy machine alone does not cause
NO_TOXIC = cast("Toxic", None)  # its replicas connect without a proxy


@dataclass
class Spread:
    """The processes. ``tags``: of the pools. ``tables``: by tag, the port that shows its engines' tables."""

    cluster: WholeCluster
    processes: Processes
    http: aiohttp.ClientSession
    connections: RedisConnections
    tags: list[str] = field(default_factory=list)
    tables: dict[str, int] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    models: tuple[str, ...] = ()  # of the replicas
    find: bool = False  # engines find their pools by themselves

    async def begin(self) -> None:
        """Start all processes."""
        ports = free_ports(len(self.tags) + REPLICAS)
        for tag in self.tags:
            self.tables[tag] = ports.pop()
            self.start_engines(tag.replace("#", "-"), self.tables[tag], "" if self.find else tag)
        for number in range(REPLICAS):
            self.start_replica(f"replica-{number + 1}", ports.pop(), self.models or self.tags)

    def fleet(self, tag: str) -> Fleet:
        return Fleet(self.connections.of(tag), tag, PATIENT)

    def on_master(self, number: int) -> set[str]:
        """The pools on this master."""
        return {tag for tag in self.tags if self.cluster.number_of(tag) == number}

    def start_engines(self, name: str, port: int, tag: str = "", environment: Mapping[str, str] | None = None) -> None:
        """ENGINES engines in one process. tag: of their pool; without one they find it by themselves."""
        argv = [sys.executable, "-m", "tests.drills.tabled_engines", "--port", str(port), "--model", MODEL]
        argv += ["--redis", self.cluster.url, "--worker-id", name, "--count", str(ENGINES)]
        self.processes.spawn("engine", name, [*argv, *(["--fleet", tag] if tag else [])], environment)

    def start_replica(self, name: str, port: int, models: Sequence[str]) -> None:
        settings = {"REDIS_URL": self.cluster.url, "MODELS": ",".join(models), "PORT": str(port), "ADMIN_PORT": "0"}
        settings |= {"APPROVED_TEMPLATES": "*", "DRAIN_S": "2", "DECIDE_TIMEOUT_S": DECIDE_TIMEOUT_S}
        environment = {f"WARMFLEET_{key}": value for key, value in settings.items()}
        self.processes.spawn("replica", name, [sys.executable, "-m", "warmfleet", "serve"], environment)
        self.replicas.append(Replica(name, port, NO_TOXIC))

    async def watch(self) -> None:
        """Ask every replica for /readyz again and again, as a balancer does."""

        async def look(replica: Replica) -> None:
            replica.ready = await self.text(f"{replica.url}/readyz") is not None

        while True:
            await asyncio.gather(*map(look, self.replicas))
            await asyncio.sleep(0.2)

    async def text(self, url: str) -> str | None:
        """The text of a good answer."""
        try:
            async with self.http.get(url, timeout=aiohttp.ClientTimeout(5)) as answer:
                return await answer.text() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def workers(self, replica: Replica) -> dict[str, list[str]]:
        """The proven routable workers of each pool, as this replica sees them."""
        try:
            async with self.http.get(f"{replica.url}/workers", timeout=aiohttp.ClientTimeout(5)) as answer:
                page = await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return {}
        found: dict[str, list[str]] = {}
        for model in page["models"]:
            for worker in model["workers"]:
                if worker["routable"] and worker["proof"] == "proven":
                    found.setdefault(worker.get("pool") or model["model"], []).append(worker["worker_id"])
        return found

    async def whole(self, engines: int) -> bool:
        """Whether every replica is ready and can use ``engines`` engines."""
        for replica in self.replicas:
            found = await self.workers(replica)
            if not replica.ready or sum(map(len, found.values())) != engines:
                return False
        return True

    async def counted(self, metric: str) -> dict[str, float]:
        """A counter of all replicas, by pool."""
        found: dict[str, float] = {}
        for replica in self.replicas:
            page = await self.text(f"{replica.url}/metrics") or ""
            for line in re.findall(rf"^{metric}{{.*$", page, re.MULTILINE):
                labels, _, value = line.rpartition(" ")
                if tag := re.search(r'model="([^"]*)"', labels):
                    found[tag[1]] = found.get(tag[1], 0.0) + float(value)
        return found

    async def load(self) -> int:
        """The sum of all that is booked, in the requests and tokens of all workers of all pools."""
        booked = 0
        for tag in self.tags:
            fleet = self.fleet(tag)
            rows = [worker.load for worker in await fleet.workers.read()]
            booked += sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows)
            await fleet.close()
        return booked

    async def differing(self) -> list[str]:
        """The workers whose blocks in the index are not those of their engine's table."""
        found: list[str] = []
        held: dict[str, list[str]] = {}
        for port in self.tables.values():
            async with self.http.get(f"http://127.0.0.1:{port}/tables") as answer:
                held |= await answer.json()
        for tag in self.tags:
            fleet = self.fleet(tag)
            for worker in await fleet.workers.read():
                members: list[bytes] = await fleet.scripts.ask("SMEMBERS", fleet.keys.slot(worker.load.slot))
                if sorted(member.hex() for member in members) != held.pop(worker.worker_id, None):
                    found.append(worker.worker_id)
            await fleet.close()
        return [*found, *held]


@asynccontextmanager
async def spread(tags: Sequence[str] = (), models: Sequence[str] = (), *, find: bool = False) -> AsyncIterator[Spread]:
    """A Cluster, and a fleet that ``begin`` starts. All of it is killed at the end.

    tags: of the pools; without them two on each master. models: of the replicas; without them all pools. find: engines
    find their pools by themselves.
    """
    with (
        tempfile.TemporaryDirectory(prefix="wf-spread-", ignore_cleanup_errors=True) as folder,
        whole_cluster(NODE_TIMEOUT_MS) as cluster,
        Processes(Path(folder)) as processes,
    ):
        connections = RedisConnections(cluster.url, timeout_s=5)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            made = Spread(cluster, processes, http, connections, list(tags), models=tuple(models), find=find)
            while len(made.tags) < POOLS and not tags:
                made.tags.append(next_tag(MODEL, made.tags, cluster.ranges))
            watch = asyncio.create_task(made.watch())
            try:
                yield made
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
                await connections.aclose()


async def started(made: Spread) -> None:
    await made.begin()
    await poll(lambda: made.whole(len(made.tags) * ENGINES), START_S, "every replica can use every engine", every_s=0.5)
