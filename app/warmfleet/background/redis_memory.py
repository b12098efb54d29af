"""Reads each model's share of used memory in Redis once per second, and passes it to the model's next tick.

The tick (lua/tick.lua) decides by this share whether memory is short. While it is short, new blocks are not indexed.
Metrics show the share; the beginning and the end of a shortage are logged.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from warmfleet.errors import FleetUnavailable
from warmfleet.pools.served_models import all_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import Memory
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

logger = logging.getLogger("warmfleet.background.redis_memory")


class MemoryWatch:
    """Reads the used share of Redis' memory: for the metrics, the log, and each model's next tick (lua/tick.lua)."""

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self._pools = pools
        self._metrics = metrics
        self._warned: set[tuple[str, str]] = set()
        self._short: set[str] = set()

    async def look(self) -> None:
        """Read the memory of every model's Redis once. The metrics show each share that could be read.

        Raises FleetUnavailable if a Redis gives no figures. The next tick of its pools then gets no share, and finds a
        shortage of memory only by writes that Redis refuses.
        """
        readings: list[Memory] = []
        sharing: dict[object, list[Pool]] = {}  # by connection: pools with the same connection have the same Redis
        for pool in self._pools.all:
            sharing.setdefault(pool.fleet.scripts.line, []).append(pool)

        async def look_at(group: Sequence[Pool]) -> None:
            try:
                memory = await group[0].fleet.index.memory()
            except FleetUnavailable:
                for pool in group:
                    pool.used_permille = -1
                raise
            readings.append(memory)
            for pool in group:
                pool.used_permille = memory.used_permille
                self._warn_of_eviction(pool, memory.policy)
                self._log_shortage(pool)

        try:
            await all_of(map(look_at, sharing.values()))
        finally:
            self._short &= {pool.tag for pool in self._pools.all}
            self._metrics.memory_short.set(len(self._short))
            if readings:
                self._metrics.memory_used_ratio.set(max(memory.used_permille for memory in readings) / 1_000)
                self._metrics.memory_used_bytes.set(max(memory.used for memory in readings))

    def _warn_of_eviction(self, pool: Pool, policy: str) -> None:
        if policy != "noeviction" and (pool.tag, policy) not in self._warned:
            self._warned.add((pool.tag, policy))
            logger.warning("%s: maxmemory-policy is %s: Redis may drop the index; set noeviction", pool.tag, policy)

    def _log_shortage(self, pool: Pool) -> None:
        short = pool.fleet.upkeep.last_tick.short
        if short and pool.tag not in self._short:
            self._short.add(pool.tag)
            logger.error("%s: Redis is short of memory: new blocks are not indexed until it has room again", pool.tag)
        elif not short and pool.tag in self._short:
            self._short.discard(pool.tag)
            logger.warning("%s: Redis has room again: workers whose blocks were left out send them anew", pool.tag)
