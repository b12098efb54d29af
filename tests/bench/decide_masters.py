"""Measures decisions of pools on several masters of a Cluster: ``make -s bench NAME=decide ARGS="--masters"``.

A Cluster of three masters has six pools: all of them on one master, then three on each of two, then two on each of
three. A router's own client asks each pool for decisions and settles them, many at a time. On a machine with few cores
the masters and the client share them, so the rate says little: compare the CPU time of the masters for one decision
with its settlement, which stays the same if masters share nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
from tests.bench.filled_store import BLOCK_TOKENS, SCHEME, Data, FilledStore
from tests.bench.output import say
from tests.support.redis.topology import whole_cluster

from warmfleet.fleet import Constants, Fleet, Question, QueueLimits, RedisConnections, Timeouts, new_reservation
from warmfleet.fleet.connection.pool_masters import master_of
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.redis.topology import WholeCluster

POOLS, MASTERS = 6, 3
PATIENCE = Timeouts(request_s=30, upkeep_s=30)


@dataclass(frozen=True)
class Size:
    """workers, pairs of the index and blocks of a prompt: of each pool. routes: of all pools together in a round."""

    workers: int
    pairs: int
    blocks: int
    routes: int
    at_once: int


FULL = Size(64, 40_000, 625, 6_000, 16)
QUICK = Size(8, 2_000, 64, 600, 4)


def tags_on(cluster: WholeCluster, masters: int) -> list[str]:
    """POOLS tags, as many on each of the first ``masters``."""
    wanted = [("127.0.0.1", node.port) for node in cluster.masters[:masters]]
    return [
        next(tag for k in range(10_000) if master_of(tag := f"m{masters}-{number}-{k}", cluster.ranges) == owner)
        for number, owner in enumerate(wanted[number % masters] for number in range(POOLS))
    ]


def cpu_us(node: Any) -> float:
    info: Any = node.info("cpu")
    return (float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])) * 1e6


def scripts_run(node: Any) -> int:
    stats: Any = node.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


def fill(cluster: WholeCluster, tag: str, size: Size, rng: random.Random) -> list[bytes]:
    """Write a pool's workers and index; returns its chains."""
    node = cluster.masters[cluster.number_of(tag)]
    store = FilledStore(f"redis://127.0.0.1:{node.port}/0", size.workers, tag)
    store.fleet(rng)
    data = Data(size.workers, size.blocks, size.pairs, rng)
    data.load(store.client, store.keys.prefix.encode())
    return data.chains


async def burn(fleet: Fleet, chains: Sequence[bytes], routes: int, at_once: int, rng: random.Random) -> None:
    """Decide and settle ``routes`` requests, ``at_once`` at a time."""
    left = iter(range(routes))

    async def client() -> None:
        for _ in left:
            chain = rng.choice(chains)
            prompt = len(chain) // 8 * BLOCK_TOKENS + 5
            reservation = new_reservation(1)
            await fleet.bookings.decide(
                Question(reservation, (Chain(SCHEME, BLOCK_TOKENS, chain),), prompt, prompt + 300)
            )
            await fleet.bookings.settle(reservation, "finished")

    await asyncio.gather(*(client() for _ in range(at_once)))


@dataclass
class Setting:
    """POOLS pools on a number of masters, and the measurements of each round."""

    masters: int
    pools: list[tuple[Fleet, list[bytes]]]
    rounds: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def filled(cls, cluster: WholeCluster, connections: RedisConnections, masters: int, size: Size) -> Setting:
        rng, pools = random.Random(1), []
        for tag in tags_on(cluster, masters):
            say(f"{masters} masters: filling {tag}")
            chains = fill(cluster, tag, size, rng)
            constants = Constants(limits=QueueLimits(2.0), block_tokens={SCHEME: BLOCK_TOKENS})
            fleet = Fleet(connections.of(tag), tag, PATIENCE, constants)
            pools.append((fleet, chains))
        return cls(masters, pools)

    async def measure(self, nodes: Sequence[Any], size: Size) -> None:
        """Run one round."""
        rng, each = random.Random(len(self.rounds)), size.routes // POOLS
        spent, run = [cpu_us(node) for node in nodes], [scripts_run(node) for node in nodes]
        began, client = time.monotonic(), time.process_time()
        await asyncio.gather(*(burn(*pool, each, size.at_once, rng) for pool in self.pools))
        wall, client = time.monotonic() - began, time.process_time() - client
        spent = [cpu_us(node) - before for node, before in zip(nodes, spent, strict=True)]
        routes = [(scripts_run(node) - before) // 2 for node, before in zip(nodes, run, strict=True)]
        self.rounds.append(
            {
                "masters": self.masters,
                "routes_s": round(sum(routes) / wall),
                "us_per_route": round(sum(spent[: self.masters]) / sum(routes), 1),
                "us_per_route_of_each": [
                    round(us / count, 1) for us, count in zip(spent, routes, strict=True) if count
                ],
                "routes_of_each": routes,
                "idle_master_us_per_s": round(max(spent[self.masters :], default=0.0) / wall),
                "client_us_per_route": round(client * 1e6 / sum(routes), 1),
            }
        )
        say(json.dumps(self.rounds[-1]))

    @property
    def best(self) -> dict[str, Any]:
        """The round in which other work on the machine cost the masters least."""
        return min(self.rounds, key=lambda row: float(row["us_per_route"]))


async def measured(cluster: WholeCluster, size: Size, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of masters; the rounds take turns, so that other work hits all alike."""
    connections = RedisConnections(cluster.url)
    settings = [Setting.filled(cluster, connections, masters, size) for masters in range(1, MASTERS + 1)]
    nodes = [redis.Redis(port=node.port) for node in cluster.masters]
    for number in range(rounds + 1):
        for setting in settings:
            await setting.measure(nodes, size)
            if number == 0:
                setting.rounds.clear()  # the scripts are loaded into Redis
    lines = await connected(nodes)
    for setting in settings:
        for fleet, _ in setting.pools:
            await fleet.close()
    await connections.aclose()
    return [setting.best | {"script_connections": lines[: setting.masters]} for setting in settings]


async def connected(nodes: Sequence[Any]) -> list[int]:
    """The connections on which scripts were called last, by master."""
    clients = [await asyncio.to_thread(node.client_list) for node in nodes]
    return [sum(client["cmd"] == "evalsha" for client in found) for found in clients]


def run(*, quick: bool, rounds: int) -> dict[str, Any]:
    """Return a row for each number of masters: the cheapest of the rounds."""
    with whole_cluster(15_000) as cluster:  # as by default: a busy machine is no lost master
        rows = asyncio.run(measured(cluster, QUICK if quick else FULL, rounds))
    per_core = 1e6 / rows[0]["us_per_route"]
    return {
        "three_over_one_us": round(rows[-1]["us_per_route"] / rows[0]["us_per_route"], 3),
        "routes_s_of_a_core": round(per_core),
        "routes_s_of_three_on_paper": round(sum(1e6 / us for us in rows[-1]["us_per_route_of_each"])),
        "rows": rows,
    }
