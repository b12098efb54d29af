"""Follows the registry of pools, so that added pools are served and removed pools end without a restart.

A removed pool gets no new request. Its background tasks and its connection end after ``leave_s``, or later, when no
request of this replica is left in the pool.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from warmfleet.background.supervisor import stop
from warmfleet.errors import WarmfleetError
from warmfleet.fleet.pool_registry import clear
from warmfleet.pools.served_models import ServedModel, as_answered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

logger = logging.getLogger("warmfleet.background.pool_changes")

FIRST_READING_S = 5.0  # most seconds that engine checks wait for the pool lists in Redis; a worker expires after 15 s


class PoolChanges:
    """Begins and ends this replica's pools and their tasks, as the registries (lists of pools in Redis) say."""

    def __init__(
        self,
        pools: Pools,
        registries: Sequence[PoolRegistry],
        make: Callable[[str], Pool],
        begin: Callable[[Pool], Sequence[asyncio.Task[Any]]],
        waits_in: Callable[[Pool], bool],
        metrics: Metrics,
        leave_s: float,
    ) -> None:
        """registries: one of every served model. make: creates the pool of a tag. begin: starts the tasks of a pool.
        waits_in: whether a request waits in the queue of a pool.
        """
        self._pools = pools
        self._registries = registries
        self._make = make
        self._begin = begin
        self._waits_in = waits_in
        self._metrics = metrics
        self._leave_s = leave_s
        self._named = {name: tuple(pool.tag for pool in model.pools) for name, model in pools.served.items()}
        self._tasks = {pool.tag: begin(pool) for pool in pools.all}
        self._since: dict[str, float] = {}  # tag -> when the pool began to leave
        self._registered: set[str] = set()  # tags that a registry named at some time
        self._unregistered: frozenset[str] = frozenset()  # tags that are served though no registry ever named them
        self._first_reading = asyncio.Event()

    async def round(self) -> None:
        """Read all registries once, and follow changes. Raises FleetUnavailable at the end if one cannot be read."""

        async def follow(registry: PoolRegistry, found: Mapping[bytes, bytes]) -> None:
            self._change(registry.name, await registry.told(found))

        try:
            await as_answered({registry.ask(): registry for registry in self._registries}, follow)
            self._first_reading.set()
        finally:
            await self._let_go()

    async def known(self) -> None:
        """Wait until every registry was read once, or until FIRST_READING_S after the first call.

        Without this wait, engines without the plugin could join a pool of the settings that is not in the registry.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_READING_S):
                await self._first_reading.wait()
        self._first_reading.set()

    def _change(self, name: str, entries: Sequence[PoolEntry]) -> None:
        """Give the model the pools of its registry, or those of the settings if the registry has no entries."""
        model = self._pools.served[name]
        before = {pool.tag: pool for pool in model.pools}
        known = before | {pool.tag: pool for pool in self._pools.leaving}
        tags = self._tags(name, entries, known)
        moving = frozenset(entry.tag for entry in entries if entry.moving)
        draining = frozenset(entry.tag for entry in entries if entry.draining) - moving
        if draining != model.draining:
            logger.info("%s: pools that are drained: %s", name, ", ".join(sorted(draining)) or "none")
        if (*before,) == tags:
            model.drain(draining, moving)
            return
        pools = [known.get(tag) or self._new(tag) for tag in tags]
        self._pools.change(ServedModel(name, pools, draining, moving))
        self._since = {tag: at for tag, at in self._since.items() if tag not in tags}
        now = asyncio.get_running_loop().time()
        self._since |= {tag: now for tag in before if tag not in tags}
        added, gone = (", ".join(sorted(changed)) or "none" for changed in ({*tags} - {*before}, {*before} - {*tags}))
        logger.info("%s: pools that were added: %s, removed: %s", name, added, gone)

    def _tags(self, name: str, entries: Sequence[PoolEntry], known: Mapping[str, Pool]) -> tuple[str, ...]:
        """Return the tags of the pools that the model has now.

        A first `warmfleet pools add` may leave out pools that only the settings name. Such a pool is served while it
        has workers: if it were removed, its workers and its keys in Redis would be lost.
        """
        tags = tuple(entry.tag for entry in entries)
        if not tags:
            return self._named[name]
        self._registered.update(tags)
        strange = [tag for tag in self._named[name] if tag not in self._registered]
        kept = tuple(tag for tag in strange if tag in known and known[tag].view.workers)
        for tag in {*kept} - self._unregistered:
            logger.warning("%s: in WARMFLEET_MODELS, but not in the registry: call `warmfleet pools add %s`", tag, tag)
        self._unregistered = (self._unregistered - {*strange}) | {*kept}
        return (*tags, *kept)

    def _new(self, tag: str) -> Pool:
        pool = self._make(tag)
        self._metrics.expect(tag)
        self._tasks[tag] = self._begin(pool)
        return pool

    async def _let_go(self) -> None:
        """End each leaving pool after ``leave_s``, once this replica has no request and no unsent outcome in it."""
        now = asyncio.get_running_loop().time()
        for pool in self._pools.leaving:
            held = pool.reservations or pool.reservations.outcomes() or pool.degraded.in_flight or self._waits_in(pool)
            if held or now - self._since.get(pool.tag, now) < self._leave_s:
                continue
            self._pools.forget(pool)
            self._metrics.forget_pool(pool.tag)
            del self._since[pool.tag]
            await stop(self._tasks.pop(pool.tag))
            await _clear(pool)
            await pool.fleet.close()
            logger.info("%s: nothing is left of it here", pool.tag)

    async def close(self) -> None:
        """End the tasks of all pools."""
        await stop([task for tasks in self._tasks.values() for task in tasks])


async def _clear(pool: Pool) -> None:
    """Delete a removed pool's keys in Redis. Each replica does so, because those that end it later may add keys."""
    try:
        await clear(pool.fleet, shared=pool.tag == pool.name)
    except WarmfleetError as error:
        logger.warning("%s: what Redis holds of it could not be deleted; call pools remove again: %s", pool.tag, error)
