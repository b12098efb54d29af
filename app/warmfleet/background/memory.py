"""Watches how full Redis is."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from warmfleet.errors import FleetUnavailable

if TYPE_CHECKING:
    from warmfleet.fleet import Memory
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools

logger = logging.getLogger("warmfleet.background.memory")


class MemoryWatch:
    """Reads how full Redis is. The next tick of every model gets the figure; metrics and log lines tell people."""

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self._pools = pools
        self._metrics = metrics
        self._warned: set[tuple[str, str]] = set()
        self._short: set[str] = set()

    async def look(self) -> None:
        """Read the memory of every model's Redis once.

        Raises FleetUnavailable; the next tick of that model then gets no figure and sees only whether writes pass.
        """
        readings: list[Memory] = []

        async def look_at(pool: Pool) -> None:
            try:
                memory = await pool.fleet.memory()
            except FleetUnavailable:
                pool.fleet.used_permille = -1
                raise
            readings.append(memory)
            pool.fleet.used_permille = memory.used_permille
            self._warn_of_eviction(pool, memory.policy)
            self._log_shortage(pool)

        await self._pools.each(look_at)
        self._metrics.memory_used_ratio.set(max(memory.used_permille for memory in readings) / 1_000)
        self._metrics.memory_used_bytes.set(max(memory.used for memory in readings))
        self._metrics.memory_short.set(len(self._short))

    def _warn_of_eviction(self, pool: Pool, policy: str) -> None:
        if policy != "noeviction" and (pool.tag, policy) not in self._warned:
            self._warned.add((pool.tag, policy))
            logger.warning("%s: maxmemory-policy is %s: Redis may drop the index; set noeviction", pool.tag, policy)

    def _log_shortage(self, pool: Pool) -> None:
        if pool.fleet.short and pool.tag not in self._short:
            self._short.add(pool.tag)
            logger.error("%s: Redis is short of memory: new blocks are not indexed until it has room again", pool.tag)
        elif not pool.fleet.short and pool.tag in self._short:
            self._short.discard(pool.tag)
            logger.warning("%s: Redis has room again: workers whose blocks were left out send them anew", pool.tag)
