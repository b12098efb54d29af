"""Inspects the Redis server for ``warmfleet doctor``: facts, clock, latency, rights. No key is written."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.connection.failover import Locator
from warmfleet.fleet.connection.reply_errors import RefusedCall
from warmfleet.protocol.redis_address import CLUSTER_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet.fleet.client import Scripts
    from warmfleet.fleet.connection.packing import Argument
    from warmfleet.fleet.inspection.rights import Right
    from warmfleet.protocol.redis_address import HostPort, RedisAddress

MODEL_KEYS, SCANNED, SCAN_S = "wf:{*}:workers", 2_000, 1.0  # SCAN: pattern, keys a step, longest time in all
CLOCK_TRIES = 3  # number of readings of Redis' clock, of which the one with the quickest answer counts


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Fields of Redis' INFO. replicas: number of Redis replicas of this server. cluster: a Cluster node."""

    version: str
    used_bytes: int
    limit_bytes: int
    eviction: str
    role: str
    replicas: int
    link_up: bool
    cluster: bool

    @classmethod
    def of(cls, info: bytes) -> ServerFacts:
        told = dict(line.partition(":")[::2] for line in info.decode("utf-8", "replace").splitlines())
        valkey = told.get("valkey_version")
        return cls(
            version=f"Valkey {valkey}" if valkey else f"Redis {told.get('redis_version', '?')}",
            used_bytes=int(told.get("used_memory", 0)),
            limit_bytes=int(told.get("maxmemory", 0)),
            eviction=told.get("maxmemory_policy", ""),
            role=told.get("role", ""),
            replicas=int(told.get("connected_slaves", 0)),
            link_up=told.get("master_link_status", "up") == "up",
            cluster=told.get("cluster_enabled") == "1",
        )

    @property
    def used_share(self) -> float:
        """The share of maxmemory in use; 0 without a limit."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Node:
    """A Sentinel, or a node of a Cluster. why: the reason if it did not answer.

    master: the server that it names as owner of the model's keys. slots: number of slots with an owner, in a Cluster.
    """

    address: HostPort
    why: str = ""
    master: HostPort | None = None
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """Facts of one model's streams.

    ticked_s: seconds since a router last ran tick; None: never. cores, servers: ids of engine cores and of API servers
    that have joined. waiting: names of streams in ``hello`` that no router has looked at.
    """

    ticked_s: float | None
    cores: frozenset[str]
    servers: frozenset[str]
    waiting: frozenset[str]


class Inspection:
    """Reads from Redis. All methods raise FleetUnavailable, RefusedCall if this Redis user lacks the right."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self.redis, self.keys = scripts.redis, scripts.keys

    async def server(self) -> ServerFacts:
        return ServerFacts.of(await self._scripts.ask("INFO"))

    async def clock_ahead_s(self, wall: Callable[[], float] = time.time) -> tuple[float, float]:
        """Measure the seconds by which this machine's clock is ahead of Redis'; return them and the largest error."""
        best = (0.0, float("inf"))
        for _ in range(CLOCK_TRIES):
            before = wall()
            seconds, micros = await self._scripts.ask("TIME")
            after = wall()
            error = abs(after - before) / 2
            if error < best[1]:
                best = ((before + after) / 2 - (int(seconds) + int(micros) / 1e6), error)
        return best

    async def script_seconds(self, calls: int, limit_s: float) -> list[float]:
        """Time ``calls`` calls of a short script, one by one, for ``limit_s`` at most; return the seconds of each."""
        taken: list[float] = []
        end = time.monotonic() + limit_s
        await self.refused([])  # the first call may load the script
        while len(taken) < calls and time.monotonic() < end:
            began = time.perf_counter()
            await self.refused([])
            taken.append(time.perf_counter() - began)
        return taken

    # ------------------------------------------------ rights

    async def refused(self, rights: Sequence[Right]) -> list[Right]:
        """Ask which of these calls the user of this connection may not make."""
        words: list[Argument] = []
        for right in rights:
            words += [len(right.words), *right.words]
        answer = await self._scripts.keep("rights", words, commands=len(rights))
        return [rights[number - 1] for number in answer]

    async def refused_to(self, user: str, rights: Sequence[Right]) -> list[Right]:
        """Ask which of these calls ``user`` may not make. This connection's user needs the right to ACL DRYRUN."""
        answers = await asyncio.gather(*[self._scripts.ask("ACL", "DRYRUN", user, *right.words) for right in rights])
        return [right for right, answer in zip(rights, answers, strict=True) if answer != b"OK"]

    async def users(self) -> dict[str, str] | None:
        """Read the rules of every Redis user by name; None if this user may not. They contain hashes of passwords."""
        try:
            told = [line.decode("utf-8", "replace") for line in await self._scripts.ask("ACL", "LIST")]
        except RefusedCall:
            return None
        return {line.split()[1]: line for line in told if len(line.split()) > 1}

    # ------------------------------------------------ several servers

    async def nodes(self, where: RedisAddress) -> list[Node]:
        """Ask every Sentinel or Cluster node of the URL; none for a single server."""
        locator = getattr(self.redis.connection_pool, "sentinel_manager", None)
        if not isinstance(locator, Locator):
            return []
        return [_node(where, self.keys.tag, address, answer) for address, answer in await locator.survey()]

    # ------------------------------------------------ models

    async def models(self, limit_s: float = SCAN_S) -> list[str]:
        """Find the names of models that have workers in this Redis, searching for ``limit_s`` at most.

        Finds none if this user may not SCAN, which no router needs; in a Cluster only models on the same server.
        """
        found, cursor, end = set[str](), b"0", time.monotonic() + limit_s
        with suppress(RefusedCall):
            while time.monotonic() < end:
                cursor, keys = await self._scripts.ask("SCAN", cursor, "MATCH", MODEL_KEYS, "COUNT", SCANNED)
                found |= {key.decode("utf-8", "replace").split("{")[1].partition("}")[0] for key in keys}
                if cursor == b"0":
                    break
        return sorted(tag.replace("~", "/") for tag in found)

    # ------------------------------------------------ streams

    async def streams(self) -> Streams:
        """Read which engine cores and API servers have joined, and whether a router works on this model's streams."""
        keys = self.keys
        try:
            tick, cores, servers, hints, (seconds, micros) = await asyncio.gather(
                self._scripts.ask("GET", keys.tick),
                self._scripts.ask("HKEYS", keys.workers),
                self._scripts.ask("HKEYS", keys.servers),
                self._scripts.ask("XRANGE", keys.hello, "-", "+", "COUNT", 256),
                self._scripts.ask("TIME"),
            )
        except TypeError as error:  # an answer of another form: the keys are not this project's
            raise FleetUnavailable(f"the keys of {keys.tag} are not as they should be: {error}") from error
        now_ms = int(seconds) * 1_000 + int(micros) / 1_000
        waiting = (dict(zip(fields[::2], fields[1::2], strict=False)).get(b"s", b"") for _, fields in hints)
        return Streams(
            ticked_s=max(0.0, now_ms - float(tick.split()[0])) / 1_000 if tick else None,
            cores=frozenset(name.decode() for name in cores),
            servers=frozenset(name.decode() for name in servers),
            waiting=frozenset(hint.decode("utf-8", "replace") for hint in waiting if hint),
        )


def _node(where: RedisAddress, tag: str, address: HostPort, answer: Any) -> Node:
    if isinstance(answer, Exception):
        return Node(address, str(answer) or type(answer).__name__)
    try:
        master = where.master_in(answer, tag, address[0])
        slots = sum(last - first + 1 for first, last, *_ in answer or ()) if where.kind == "cluster" else CLUSTER_SLOTS
    except (ValueError, TypeError, IndexError) as error:
        return Node(address, f"its answer cannot be read: {error}")
    return Node(address, "", master, slots)
