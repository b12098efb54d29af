"""Which engines the fleet has already, so that one that is listed by its URL, too, is booked as one worker only.

Two URLs lead to one engine if its process tells the same of itself by both (``engine_facts.identity_of``). Where one of
the two tells nothing, they do if their connections end at the same address and port, and the path is the same. Of two
names that alone proves nothing: a proxy may tell them apart. A worker that has joined by the plugin or a bridge goes
before a listed URL, once its URL has answered a probe: also while it drains or is paused. Of two listed URLs that goes
first which is a worker already. When that one is gone the other takes its place.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.background.stock.engine_facts import identity_of
from warmfleet.errors import FleetUnavailable, WarmfleetError
from warmfleet.fleet import Flag

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmfleet.engines.engine_client import EngineClient, Place
    from warmfleet.fleet import WorkerView
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

ASK_TIMEOUT_S = 1.0
ASKED_AT_ONCE = 32
ASK_AGAIN_S = 30.0  # after an engine gave no answer
#: A listed URL stands for an engine for so long after its last check: two intervals, so that another spelling takes
#: over before the worker is gone.
STANDS_S = 10.5


class EngineKey(NamedTuple):
    """By what an engine is known again. identity: what its process tells, empty: nothing. place: None if not known."""

    identity: str
    place: Place | None

    def same(self, other: EngineKey) -> bool:
        if self.identity and other.identity:
            return self.identity == other.identity
        mine, theirs = self.place, other.place
        if mine is None or theirs is None or mine.end != theirs.end:
            return False
        return mine.host == theirs.host or not (mine.named and theirs.named)

    def marks(self) -> Iterator[object]:
        """Engines that are the same have one of these in common."""
        if self.identity:
            yield self.identity
        if self.place is not None:
            yield self.place.end


class _Has(NamedTuple):
    key: EngineKey
    pool: Pool
    worker: WorkerView


class KnownEngines:
    """The engines of all pools as they were read last, and the listed ones that this replica checks."""

    def __init__(self, pools: Pools, client: EngineClient) -> None:
        self._pools = pools
        self._client = client
        self._told: dict[tuple[str, str], tuple[str, float]] = {}  # server and nonce -> identity, when to ask again
        self._fleet: dict[object, list[_Has]] = {}  # by each mark
        self._listed: dict[str, tuple[EngineKey, str]] = {}  # by URL, of those that passed their last check: its worker
        self._holders: dict[object, str] = {}  # mark -> its URL
        self._told_s: dict[tuple[str, str], float] = {}  # by pool and worker, where it is known

    async def look(self) -> None:
        """Read anew what the fleet has. A pool that was never read, and cannot be now, counts as empty."""
        readings: list[tuple[Pool, Sequence[WorkerView]]] = []
        for pool in self._pools.all:
            with suppress(FleetUnavailable):
                readings.append((pool, pool.view.workers if pool.contacted else await pool.fleet.workers.read()))
        self._told_s = {
            (pool.tag, worker.worker_id): worker.told_age_s + (pool.view_age_s if pool.contacted else 0.0)
            for pool, workers in readings
            for worker in workers
            if worker.told_age_s is not None
        }
        counting = [(pool, worker) for pool, workers in readings for worker in workers if _counts(worker)]
        gate = asyncio.Semaphore(ASKED_AT_ONCE)
        keys = await asyncio.gather(*(self._key(worker, gate) for _, worker in counting))
        self._told = {name: self._told[name] for _, worker in counting if (name := _process(worker)) in self._told}
        self._fleet = {}
        for key, (pool, worker) in zip(keys, counting, strict=True):
            for mark in key.marks():
                self._fleet.setdefault(mark, []).append(_Has(key, pool, worker))

    def told_s(self, tag: str, name: str) -> float:
        """How long ago a check has read the load of this worker of that pool; infinite if none has."""
        return self._told_s.get((tag, name), math.inf)

    async def key_of(self, url: str, identity: str) -> EngineKey:
        """identity: as the engine told it there last."""
        return EngineKey(identity, await self._client.place(url))

    def holder(self, url: str, key: EngineKey, tag: str, name: str) -> str:
        """The worker that this engine is already; empty if there is none: then this URL stands for it from now on.

        tag, name: the pool and the worker of the URL itself.
        """
        found = [has for mark in key.marks() for has in self._fleet.get(mark, ()) if has.key.same(key)]
        exact = [has.worker.worker_id for has in found if not has.worker.approximate]
        own = next((has for has in found if (has.pool.tag, has.worker.worker_id) == (tag, name)), None)
        before = [has.worker.worker_id for has in found if has.worker.approximate and _goes_before(has, own, name)]
        if holders := [*exact, *before]:
            self.release(url)
            return holders[0]
        for mark in key.marks():
            other = self._holders.get(mark, url)
            if other != url and self._listed[other][0].same(key):
                return self._listed[other][1]
        self.release(url)
        self._listed[url] = key, name
        self._holders |= dict.fromkeys(key.marks(), url)
        return ""

    def release(self, url: str) -> None:
        """This URL stands for no engine any more."""
        listed = self._listed.pop(url, None)
        for mark in listed[0].marks() if listed is not None else ():
            if self._holders.get(mark) == url:
                del self._holders[mark]

    async def _key(self, worker: WorkerView, gate: asyncio.Semaphore) -> EngineKey:
        if worker.approximate:
            return await self.key_of(worker.url, str(worker.record.get("identity") or ""))
        process, now = _process(worker), time.monotonic()
        identity, until = self._told.get(process, ("", 0.0))
        if now >= until:  # a process tells the same for as long as it runs
            async with gate:
                told = await identity_at(self._client, worker.url)
            identity = told or ""
            self._told[process] = identity, math.inf if told is not None else now + ASK_AGAIN_S
        return await self.key_of(worker.url, identity)


async def identity_at(client: EngineClient, url: str) -> str | None:
    """The identity of the engine's process at this URL, as ``identity_of``; None if its page could not be read."""
    try:
        status, page = await client.get(url, "/metrics", {}, ASK_TIMEOUT_S)
    except WarmfleetError:
        return None
    return identity_of(page) if status == 200 else None


def _counts(worker: WorkerView) -> bool:
    """Whether a listed URL of the same engine stands back for this worker."""
    if worker.approximate:
        age_s = worker.heartbeat_age_s
        return age_s is not None and age_s <= STANDS_S and not worker.record.get("leaving")
    return worker.state.alive and bool(worker.load.flags & Flag.URL) and bool(worker.url)


def _goes_before(has: _Has, own: _Has | None, name: str) -> bool:
    """Whether that listed worker is the one that stays: the elder of a pool; of two pools, the first by name."""
    if has is own or (own is None and has.worker.worker_id == name):
        return False
    if own is None:
        return True
    if has.pool is own.pool:
        return has.worker.load.epoch < own.worker.load.epoch
    return has.worker.worker_id < name


def _process(worker: WorkerView) -> tuple[str, str]:
    return str(worker.record.get("server_id")), str((worker.server or {}).get("nonce"))
