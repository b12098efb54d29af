"""Engines that only rest: ``python -m tests.bench.resting_engines --redis URL --pools a,b --each 16``.

Each is the plugin's two publishers, called when a heartbeat or a look at the worker's command is due. So Redis gets the
entries of real engines at their times, with the files and facts that a server announces; nothing listens at their URLs.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import random
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from warmfleet.fleet import Fleet, Proof, Timeouts, connect
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.load import Load
from warmfleet_worker.protocol import artifacts, wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.stream import connect as plugin_connect
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

    Duty = Callable[[float], float]  # now -> when it is due next, both in monotonic seconds

READY = "all engines rest"
CACHE_BLOCKS, MAX_TOKENS, SPEED_TPS = 40_000, 32_768, 10_000
SCHEME = wire.Scheme("sha256", wire.default_none_hash("sha256"), 16)
JOINS_S = 30.0  # until Redis knows the engines of a pool; no replica runs meanwhile
LEAST_S = 0.001


@dataclass(frozen=True)
class Announced:
    """Files and facts of every server. They are read and cut into pieces once."""

    artifacts: dict[str, bytes]
    facts: dict[str, Any]

    @classmethod
    def load(cls) -> Announced:
        tokenizer = PromptTokenizer.load(None)
        return cls(tokenizer.artifacts(), tokenizer.facts(MAX_TOKENS))


split = cache(artifacts.split)


def unstored(content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A server's announcement of a file without its pieces: 1,000 copies of a tokenizer are over a gigabyte.

    The names of pieces are left out, too: routers would ask for missing pieces again and again.
    """
    return {**split(content)[0], "chunks": []}, {}


class Engine:
    """Both halves of engine ``number`` of a pool. They write through one connection that all engines share."""

    def __init__(self, url: str, client: redis.Redis, pool: str, number: int, told: Announced) -> None:
        server_id = f"{pool.replace('#', '-')}-{number:04d}"
        self.worker_id = wire.worker_id_of(server_id, 0)
        core = PublisherConfig(url, pool, self.worker_id, server_id, 0, SCHEME, CACHE_BLOCKS, MAX_TOKENS, "resting")
        address, models = f"http://127.0.0.1:{10_000 + number}", (pool.partition("#")[0],)
        server = ServerConfig(
            *(url, pool, server_id, address, models, "resting"),
            artifacts=told.artifacts,
            facts=told.facts,
        )
        self._core = WorkerPublisher(core, Tracker(), lambda: Load(speed_tps=SPEED_TPS))
        self._server = ServerPublisher(server)
        for half in (self._core, self._server):
            half._stream.client.close()
            half._stream.client = client

    def join(self) -> None:
        self._server._round()
        self._core.step(time.monotonic())

    def core(self, now: float) -> float:
        """Do what the core's thread does. It need not wake for a flush: there are no blocks."""
        self._core.step(now)
        return max(now + LEAST_S, min(self._core._due.heartbeat, self._core._due.command))

    def server(self, now: float) -> float:
        self._server._round()
        return now + wire.HEARTBEAT_SECONDS


async def join(url: str, pool: str, engines: list[Engine]) -> None:
    """Let the engines of a pool join, and prove them as a replica's probe would. Raises TimeoutError."""
    async with connect(url) as client:
        fleet = Fleet(client, pool, Timeouts(5.0, 5.0))
        for number, engine in enumerate(engines):
            with patch.object(artifacts, "split", unstored if number else split):
                engine.join()
        async with asyncio.timeout(JOINS_S):
            while len(known := await fleet.workers.read()) < len(engines) or not all(worker.server for worker in known):
                await fleet.upkeep.step()
                await asyncio.sleep(fleet.upkeep.pace.min_gap_ms / 1000)
        for worker in known:
            await fleet.probes.prove(worker.worker_id, worker.record["nonce"], Proof("proven", "resting"))


def rest(engines: list[Engine]) -> None:
    """Keep all of them publishing, each at its own moment of the period, until the process is killed."""
    order, now = itertools.count(), time.monotonic()
    duties: list[Duty] = [duty for engine in engines for duty in (engine.core, engine.server)]
    due = [(now + random.random() * wire.HEARTBEAT_SECONDS, next(order), duty) for duty in duties]
    heapq.heapify(due)
    while True:
        at, _, duty = due[0]
        if (pause := at - time.monotonic()) > 0:
            time.sleep(pause)
        heapq.heapreplace(due, (duty(time.monotonic()), next(order), duty))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", required=True, metavar="URL")
    parser.add_argument("--pools", required=True, metavar="A,B", help="tags of the pools")
    parser.add_argument("--each", type=int, default=8, help="engines of a pool (default %(default)s)")
    parser.add_argument("--times", type=float, default=1.0, help="heartbeats come so many times as often")
    options = parser.parse_args()
    client, told = plugin_connect(options.redis), Announced.load()
    engines: list[Engine] = []
    for pool in options.pools.split(","):
        fresh = [Engine(options.redis, client, pool, number, told) for number in range(options.each)]
        asyncio.run(join(options.redis, pool, fresh))
        engines += fresh
    print(json.dumps({READY: len(engines)}), flush=True)
    wire.HEARTBEAT_SECONDS /= options.times
    rest(engines)


if __name__ == "__main__":
    main()
