"""Health over HTTP while heartbeats tell nothing: Redis is away, refuses writes, or has just come back.

An outage is not a death, so nobody expires then; who is dead all the same would be met by one request after another.
Here they are found and passed over, as long as the outage lasts and they do not answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from warmfleet.errors import WarmfleetError

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools

logger = logging.getLogger("warmfleet.background.outage_checks")

CHECK_INTERVAL_S = 5.0  # between two rounds during an outage: as often as heartbeats would come
CHECK_TIMEOUT_S = 3.0
CHECKS_AT_ONCE = 32
UNREAD_S = 3.0  # no reading of the fleet for so long: Redis is away


class HealthChecks:
    """GET /health of every API server, only while its heartbeats cannot be heard."""

    def __init__(self, pools: Pools, client: EngineClient, metrics: Metrics) -> None:
        self._pools = pools
        self._client = client
        self._pass_over_s = CHECK_INTERVAL_S + 2 * CHECK_TIMEOUT_S  # until the next round has ended
        self._metrics = metrics
        self._silent: dict[str, frozenset[str]] = {}  # tag -> URLs that did not answer

    async def round(self) -> None:
        """Check every model that is in the dark. Never raises WarmfleetError."""
        for pool in self._pools.all:
            dark = pool.contacted and (pool.fleet.grace or pool.view_age_s > UNREAD_S)
            self._tell(pool, await self._check(pool) if dark else frozenset())

    async def _check(self, pool: Pool) -> frozenset[str]:
        """Suspect the workers of every server that does not answer; returns the URLs of these."""
        workers: dict[str, list[str]] = {}
        for worker in pool.last_known.workers:
            if worker.routable:
                workers.setdefault(worker.url, []).append(worker.worker_id)
        gate = asyncio.Semaphore(CHECKS_AT_ONCE)

        async def answers(url: str) -> bool:
            async with gate:
                try:
                    status, _ = await self._client.get(url, "/health", {}, CHECK_TIMEOUT_S)
                except WarmfleetError:
                    return False
                return status < 500  # an engine that is no vLLM may not know /health, but it is there

        results = await asyncio.gather(*map(answers, workers))
        silent = frozenset(url for url, fine in zip(workers, results, strict=True) if not fine)
        self._metrics.health_checks.labels("silent").inc(len(silent))
        self._metrics.health_checks.labels("answered").inc(len(workers) - len(silent))
        for url in silent:
            for worker_id in workers[url]:
                pool.suspect(worker_id, self._pass_over_s)
        return silent

    def _tell(self, pool: Pool, silent: frozenset[str]) -> None:
        if silent != self._silent.get(pool.tag, frozenset()):
            named = ", ".join(sorted(silent)[:8])
            logger.warning("%s: %d servers do not answer /health: %s", pool.tag, len(silent), named)
        self._silent[pool.tag] = silent
