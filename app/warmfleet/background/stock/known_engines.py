"""Finds listed URLs that lead to an engine of the fleet, so that the engine counts as one worker only.

Two URLs lead to one engine if both give the same identity of its process (``engine_facts.identity_of``). If a URL gives
no identity, the URLs count as one engine if they lead to the same address, port and path, unless both have different
host names, because a proxy may route by name. A worker of the plugin or a bridge that has answered a probe takes
precedence over a listed URL, even while the worker drains or is paused. Of two listed URLs, the URL that is a worker
already takes precedence; when that worker is gone, the other URL takes its place.
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
ASK_AGAIN_S = 30.0  # time until an engine that did not tell its identity is asked again
#: If two listed URLs lead to one engine, only one URL is its worker. Once the last check of that URL is older than this
#: (two check intervals), the other URL takes over, before the worker expires.
STANDS_S = 10.5


class EngineKey(NamedTuple):
    """Recognizes an engine. identity: of its process, "" if not known. place: the address at which connections end."""

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
        """Yield the look-up keys (marks) of the engine. Two EngineKeys of the same engine share at least one mark."""
        if self.identity:
            yield self.identity
        if self.place is not None:
            yield self.place.end


class _Has(NamedTuple):
    key: EngineKey
    pool: Pool
    worker: WorkerView


class KnownEngines:
    """The engines that are workers of any pool, as last read, and the listed engines that this replica checks."""

    def __init__(self, pools: Pools, client: EngineClient) -> None:
        self._pools = pools
        self._client = client
        self._told: dict[tuple[str, str], tuple[str, float]] = {}  # process -> its identity, when to ask again
        self._fleet: dict[object, list[_Has]] = {}  # mark (``EngineKey.marks``) -> engines with this mark
        self._listed: dict[str, tuple[EngineKey, str]] = {}  # URL that passed its last check -> its key and worker
        self._holders: dict[object, str] = {}  # mark -> the only URL by which this replica registers that engine
        self._told_s: dict[tuple[str, str], float] = {}  # (tag, worker_id) -> age of its last reported load

    async def look(self) -> None:
        """Read the engines of the fleet again. A pool that was never read, and cannot be now, counts as empty."""
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
        """Return the seconds since a check read the load of worker ``name`` in pool ``tag``; infinite if none did."""
        return self._told_s.get((tag, name), math.inf)

    async def key_of(self, url: str, identity: str) -> EngineKey:
        """Make the key of the engine at a URL. identity: from the engine's last /metrics page at this URL."""
        return EngineKey(identity, await self._client.place(url))

    def holder(self, url: str, key: EngineKey, tag: str, name: str) -> str:
        """Return another worker that is this engine; if there is none, note that this URL's worker is, and return "".

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
        """Forget that this URL's worker is its engine, so that another URL may take over."""
        listed = self._listed.pop(url, None)
        for mark in listed[0].marks() if listed is not None else ():
            if self._holders.get(mark) == url:
                del self._holders[mark]

    async def _key(self, worker: WorkerView, gate: asyncio.Semaphore) -> EngineKey:
        if worker.approximate:
            return await self.key_of(worker.url, str(worker.record.get("identity") or ""))
        process, now = _process(worker), time.monotonic()
        identity, until = self._told.get(process, ("", 0.0))
        if now >= until:  # an identity holds for as long as the process runs
            async with gate:
                told = await identity_at(self._client, worker.url)
            identity = told or ""
            self._told[process] = identity, math.inf if told is not None else now + ASK_AGAIN_S
        return await self.key_of(worker.url, identity)


async def identity_at(client: EngineClient, url: str) -> str | None:
    """Read the identity (``identity_of``) of the engine's process at this URL; None if its page cannot be read."""
    try:
        status, page = await client.get(url, "/metrics", {}, ASK_TIMEOUT_S)
    except WarmfleetError:
        return None
    return identity_of(page) if status == 200 else None


def _counts(worker: WorkerView) -> bool:
    """Whether this worker keeps its engine, so that a listed URL of the same engine becomes no second worker."""
    if worker.approximate:
        age_s = worker.heartbeat_age_s
        return age_s is not None and age_s <= STANDS_S and not worker.record.get("leaving")
    return worker.state.alive and bool(worker.load.flags & Flag.URL) and bool(worker.url)


def _goes_before(has: _Has, own: _Has | None, name: str) -> bool:
    """Whether worker ``has`` stays and ``own`` ends: in one pool the older stays, in two pools the lower name."""
    if has is own or (own is None and has.worker.worker_id == name):
        return False
    if own is None:
        return True
    if has.pool is own.pool:
        return has.worker.load.epoch < own.worker.load.epoch
    return has.worker.worker_id < name


def _process(worker: WorkerView) -> tuple[str, str]:
    return str(worker.record.get("server_id")), str((worker.server or {}).get("nonce"))
