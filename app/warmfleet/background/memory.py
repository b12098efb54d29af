"""How full Redis is: what every model's next tick is told, and people."""

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
    """Tells every model's next tick how full Redis is, and people what they should know about it."""

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self._pools = pools
        self._metrics = metrics
        self._warned: set[tuple[str, str]] = set()
        self._short: set[str] = set()

    async def look(self) -> None:
        """One reading for every model. Raises FleetUnavailable; then the next ticks know only whether writes pass."""
        read: list[Memory] = []

        async def one(pool: Pool) -> None:
            try:
                memory = await pool.fleet.memory()
            except FleetUnavailable:
                pool.fleet.used_permille = -1
                raise
            read.append(memory)
            pool.fleet.used_permille = memory.used_permille
            self._warn(pool, memory.policy)
            self._tell(pool)

        await self._pools.each(one)
        self._metrics.memory_used_ratio.set(max(memory.used_permille for memory in read) / 1_000)
        self._metrics.memory_used_bytes.set(max(memory.used for memory in read))
        self._metrics.memory_short.set(len(self._short))

    def _warn(self, pool: Pool, policy: str) -> None:
        if policy != "noeviction" and (pool.tag, policy) not in self._warned:
            self._warned.add((pool.tag, policy))
            logger.warning("%s: maxmemory-policy is %s: Redis may drop the index; set noeviction", pool.tag, policy)

    def _tell(self, pool: Pool) -> None:
        if pool.fleet.short and pool.tag not in self._short:
            self._short.add(pool.tag)
            logger.error("%s: Redis is short of memory: new blocks are not indexed until it has room again", pool.tag)
        elif not pool.fleet.short and pool.tag in self._short:
            self._short.discard(pool.tag)
            logger.warning("%s: Redis has room again: workers whose blocks were left out send them anew", pool.tag)
