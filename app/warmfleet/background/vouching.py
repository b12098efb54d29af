"""Asks engines over HTTP whose heartbeats are missing, and vouches for those that answer.

The plugin sends heartbeats to Redis. If only its connection to Redis is broken, the engine is healthy. So before a
worker expires for silence, and for as long as Redis remembers the worker, a replica asks its API server. If the server
answers, ``lua/vouch.lua`` keeps the worker routable for one TTL, for all replicas, and no other replica needs to ask.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import orjson

from warmfleet.background.outage_checks import CHECK_TIMEOUT_S, CHECKS_AT_ONCE
from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Flag, WorkerState
from warmfleet.protocol.wire import HEARTBEAT_SECONDS, WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.background.vouching")

VOUCH_INTERVAL_S = 1.0  # time between two looks for silent workers
#: Age of the last heartbeat at which a worker is asked: two are missing, and the worker expires half an interval later.
#: Not earlier: a stuck core is known only by heartbeats that its API server still sends long after the core's last.
ASK_AFTER_S = WORKER_TTL_SECONDS - HEARTBEAT_SECONDS / 2
ASK_AGAIN_S = HEARTBEAT_SECONDS  # time between two health checks of one worker


class Vouching:
    """Asks silent workers over HTTP, and records in Redis those that answer (vouches). Never raises WarmfleetError."""

    def __init__(self, pools: Pools, client: EngineClient, settings: Settings, metrics: Metrics) -> None:
        self._pools = pools
        self._client = client
        self._metrics = metrics
        self._headers = {"Authorization": f"Bearer {settings.worker_api_key}"} if settings.worker_api_key else {}
        self._asked_at: dict[tuple[str, str], float] = {}  # (tag, worker_id) -> monotonic seconds
        self._unheard: dict[str, frozenset[str]] = {}  # tag -> workers that were unheard at the last look

    async def round(self) -> None:
        """Ask the workers that are due, all at once."""
        now = time.monotonic()
        due: list[tuple[Pool, WorkerView]] = []
        for pool in self._pools.all:
            self._log_changes(pool)
            if pool.unread or pool.fleet.upkeep.last_tick.grace:
                continue  # Redis is away: no worker expires, and ``OutageChecks`` asks the engines
            due += [(pool, worker) for worker in pool.view.workers if _due(worker)]
        self._asked_at = {name: at for name, at in self._asked_at.items() if now - at < ASK_AGAIN_S}
        due = [pair for pair in due if _name(*pair) not in self._asked_at]
        self._asked_at |= {_name(*pair): now for pair in due}
        gate = asyncio.Semaphore(CHECKS_AT_ONCE)
        await asyncio.gather(*(self._ask(gate, pool, worker) for pool, worker in due))

    async def _ask(self, gate: asyncio.Semaphore, pool: Pool, worker: WorkerView) -> None:
        try:
            async with gate:
                answered = await self._answers(worker)
            self._metrics.health_checks.labels("answered" if answered else "silent").inc()
            if answered:
                told = await pool.fleet.workers.vouch(worker.worker_id, str(worker.record.get("nonce")))
                self._metrics.vouched.labels(told.lower()).inc()
            elif worker.routable:
                pool.avoid(worker.worker_id, ASK_AGAIN_S + CHECK_TIMEOUT_S)
        except WarmfleetError as error:
            logger.info("%s: nobody vouches for %s: %s", pool.tag, worker.worker_id, error)

    async def _answers(self, worker: WorkerView) -> bool:
        """Ask whether the server at the worker's URL is healthy and serves its models: it may be another server now."""
        try:
            healthy, _ = await self._client.get(worker.url, "/health", {}, CHECK_TIMEOUT_S)
            if healthy != 200:
                return False
            status, page = await self._client.get(worker.url, "/v1/models", self._headers, CHECK_TIMEOUT_S)
            served = {entry["id"] for entry in orjson.loads(page)["data"]} if status == 200 else set()
        except (WarmfleetError, ValueError, KeyError, TypeError):
            return False
        return not served.isdisjoint(worker.models)

    def _log_changes(self, pool: Pool) -> None:
        unheard = frozenset(w.worker_id for w in pool.view.workers if w.state is WorkerState.UNHEARD)
        if unheard != self._unheard.get(pool.tag, frozenset()):
            named = ", ".join(sorted(unheard)[:8])
            logger.warning(
                "%s: %d workers answer over HTTP but send no heartbeats, their way to Redis is broken%s",
                *(pool.tag, len(unheard), f": {named}" if named else ""),
            )
        self._unheard[pool.tag] = unheard


def _due(worker: WorkerView) -> bool:
    """Whether the worker's heartbeats, or those of its API server, are missing, and no replica vouched for it lately.

    A worker that has left the fleet, or whose URL no probe has proved, is not asked.
    """
    core_s, server_s = worker.heartbeat_age_s, worker.server_age_s
    if worker.server is None or core_s is None or server_s is None or not worker.url:
        return False
    if max(core_s, server_s) < ASK_AFTER_S or worker.load.flags & (Flag.URL | Flag.HOSTILE) != Flag.URL:
        return False
    unheard = bool(worker.load.flags & Flag.UNHEARD)
    return not unheard or worker.vouched_age_s is None or worker.vouched_age_s >= ASK_AGAIN_S


def _name(pool: Pool, worker: WorkerView) -> tuple[str, str]:
    return pool.tag, worker.worker_id
