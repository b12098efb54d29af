"""Health checks over HTTP while no heartbeat can be heard: Redis is away, refuses writes, or came back empty.

An outage of Redis is no reason to take workers for dead, so no worker expires in an outage. But a worker that dies
during the outage would get one request after another, so these checks find such workers. The replica avoids them until
they answer a check or the outage ends. If Redis has lost all workers and none has joined again, the workers that were
known last stay in use while some of them answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

logger = logging.getLogger("warmfleet.background.outage_checks")

CHECK_TIMEOUT_S = 3.0
CHECKS_AT_ONCE = 32  # most checks at a time, or 1 / TURNS of all checks if that is more, so that a round stays short
TURNS = 2  # longest round in multiples of CHECK_TIMEOUT_S, reached if no server answers


class OutageChecks:
    """Asks every API server for /health while its heartbeats cannot be heard, and at no other time."""

    def __init__(self, pools: Pools, client: EngineClient, metrics: Metrics, interval_s: float) -> None:
        """interval_s: time between two rounds."""
        self._pools = pools
        self._client = client
        self._pass_over_s = interval_s + TURNS * CHECK_TIMEOUT_S  # a silent worker is avoided until the next round ends
        self._metrics = metrics
        self._silent: dict[str, frozenset[str]] = {}  # tag -> URLs that did not answer

    async def round(self) -> None:
        """Check the workers of every model whose heartbeats cannot be heard now. Never raises WarmfleetError."""
        asked = [(pool, _by_url(_unheard(pool))) for pool in self._pools.all]
        at_once = math.ceil(sum(len(servers) for _, servers in asked) / TURNS)
        gate = asyncio.Semaphore(max(CHECKS_AT_ONCE, at_once))
        await asyncio.gather(*(self._check(pool, servers, gate) for pool, servers in asked))

    async def _check(self, pool: Pool, workers: Mapping[str, Sequence[str]], gate: asyncio.Semaphore) -> None:
        """Check servers of this pool, and let decisions avoid the workers of servers that do not answer.

        workers: URL of each server to ask -> names of its workers.
        """
        missing = pool.last_known.missing

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
        if any(worker.url not in silent for worker in missing):
            pool.last_known.answered()
        self._log_changes(pool, silent)

    def _log_changes(self, pool: Pool, silent: frozenset[str]) -> None:
        if silent != self._silent.get(pool.tag, frozenset()):
            named = ", ".join(sorted(silent)[:8])
            if silent:
                logger.warning("%s: servers that do not answer /health: %d: %s", pool.tag, len(silent), named)
            else:
                logger.info("%s: no server is silent any more", pool.tag)
        self._silent[pool.tag] = silent


def _unheard(pool: Pool) -> Sequence[WorkerView]:
    """Return the workers whose heartbeats cannot be heard now."""
    missing = pool.last_known.missing
    away = pool.contacted and (pool.fleet.upkeep.last_tick.grace or pool.unread)
    return missing or (pool.last_known.workers if away else ())


def _by_url(workers: Sequence[WorkerView]) -> dict[str, list[str]]:
    """Return the names of the routable workers, by the URL of their server."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        if worker.routable:
            names.setdefault(worker.url, []).append(worker.worker_id)
    return names
