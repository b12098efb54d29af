"""Health checks over HTTP while no heartbeat can be heard: Redis is away, refuses writes, or came back empty.

An outage of Redis is no reason to take workers for dead, so no worker expires during it. But a worker that dies during
the outage would get one request after another. These checks find such workers, and the replica avoids them until they
answer a check or the outage ends. If Redis has lost all workers and none has joined again, those that were known last
stay in use while some of them answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools

logger = logging.getLogger("warmfleet.background.outage_checks")

CHECK_INTERVAL_S = 5.0  # between two rounds during an outage: the interval of heartbeats
CHECK_TIMEOUT_S = 3.0
CHECKS_AT_ONCE = 32
UNREAD_S = 3.0  # Redis counts as away when the last reading of the fleet is older


class OutageChecks:
    """Asks every API server for /health while its heartbeats cannot be heard, and at no other time."""

    def __init__(self, pools: Pools, client: EngineClient, metrics: Metrics) -> None:
        self._pools = pools
        self._client = client
        self._pass_over_s = CHECK_INTERVAL_S + 2 * CHECK_TIMEOUT_S  # until the next round has ended
        self._metrics = metrics
        self._silent: dict[str, frozenset[str]] = {}  # tag -> URLs that did not answer

    async def round(self) -> None:
        """Check the workers of every model whose heartbeats cannot be heard now. Never raises WarmfleetError."""
        for pool in self._pools.all:
            unheard = pool.contacted and (pool.fleet.grace or pool.view_age_s > UNREAD_S)
            missing = pool.last_known.missing
            silent = frozenset[str]()
            if unheard or missing:
                silent = await self._check(pool, missing or pool.last_known.workers)
                if any(worker.url not in silent for worker in missing):
                    pool.last_known.answered()
            self._log_changes(pool, silent)

    async def _check(self, pool: Pool, known: Sequence[WorkerView]) -> frozenset[str]:
        """Pass over the workers of every server that does not answer; returns the URLs of these servers."""
        workers: dict[str, list[str]] = {}
        for worker in known:
            if worker.routable:
                workers.setdefault(worker.url, []).append(worker.worker_id)
        gate = asyncio.Semaphore(CHECKS_AT_ONCE)

        async def answers(url: str) -> bool:
            async with gate:
                return await self._client.healthy(url, CHECK_TIMEOUT_S)

        results = await asyncio.gather(*map(answers, workers))
        silent = frozenset(url for url, answered in zip(workers, results, strict=True) if not answered)
        self._metrics.health_checks.labels("silent").inc(len(silent))
        self._metrics.health_checks.labels("answered").inc(len(workers) - len(silent))
        for url in silent:
            for worker_id in workers[url]:
                pool.avoid(worker_id, self._pass_over_s)
        return silent

    def _log_changes(self, pool: Pool, silent: frozenset[str]) -> None:
        if silent != self._silent.get(pool.tag, frozenset()):
            named = ", ".join(sorted(silent)[:8])
            logger.warning("%s: %d servers do not answer /health: %s", pool.tag, len(silent), named)
        self._silent[pool.tag] = silent
