"""Ends requests that an engine does not answer although its heartbeats go on, and requests over a time limit.

A thread of the plugin sends the heartbeats, so they go on when the event loop of the API server hangs. (Heartbeats stop
if the engine's core has work and makes no step for half a minute: the worker is lost, ``pools/stalled_requests``.) An
engine that keeps a request waiting for ``hung_after_s`` is asked for ``/health``. If the engine does not answer
UNANSWERED times in a row, or if it stands still (``pools/stalled_requests``), then its requests that wait for their
first byte are tried at another worker. Decisions avoid the hung worker until it answers again.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.settings import Settings
    from warmfleet.timing import Timing

ASKED_AT_ONCE = 32
UNANSWERED = 2  # unanswered /health requests in a row after which an engine counts as hung; a busy engine may miss one


class HungEngines:
    """Finds engines that hang, and ends or moves the requests of this replica that wait for them."""

    def __init__(
        self, pools: Pools, client: EngineClient, settings: Settings, timing: Timing, metrics: Metrics
    ) -> None:
        self._pools = pools
        self._client = client
        self._idle_s = settings.stream_idle_s
        self._total_s = settings.request_max_s
        self._timing = timing
        self._pass_over_s = timing.hung_interval_s + 2 * timing.hung_timeout_s  # hung workers are avoided for this time
        self._metrics = metrics
        self._unanswered: dict[tuple[str, str], int] = {}  # (tag, worker_id) -> /health requests in a row unanswered

    async def end_late(self) -> None:
        """End the requests that are over a time limit of the settings."""
        now = time.perf_counter()
        for pool in self._pools.all:
            for limit, count in pool.tries.expire(now, self._idle_s, self._total_s).items():
                self._metrics.time_limits.labels(limit).inc(count)

    async def round(self) -> None:
        """Send /health to the engines that keep requests waiting; give up the requests that wait for hung engines."""
        gate, now = asyncio.Semaphore(ASKED_AT_ONCE), time.perf_counter()
        asked: list[tuple[Pool, str]] = []
        for pool in self._pools.all:
            hung = {worker_id for tag, worker_id in self._hung() if tag == pool.tag}
            asked += [(pool, worker_id) for worker_id in hung | pool.tries.keep_waiting(now, self._timing.hung_after_s)]
        answers = await asyncio.gather(*(self._answers(pool, worker_id, gate) for pool, worker_id in asked))
        before, self._unanswered = self._unanswered, {}
        for (pool, worker_id), answered in zip(asked, answers, strict=True):
            if not answered:
                self._unanswered[pool.tag, worker_id] = before.get((pool.tag, worker_id), 0) + 1
        now = time.perf_counter()
        for pool in self._pools.all:
            hung = {worker_id for tag, worker_id in self._hung() if tag == pool.tag}
            hung |= pool.tries.standing_still(now)
            for worker_id in hung:
                pool.avoid(worker_id, self._pass_over_s)
            self._metrics.given_up.inc(pool.tries.give_up(hung, now))

    def _hung(self) -> list[tuple[str, str]]:
        return [asked for asked, times in self._unanswered.items() if times >= UNANSWERED]

    async def _answers(self, pool: Pool, worker_id: str, gate: asyncio.Semaphore) -> bool:
        """Ask whether the worker's API server is healthy. A worker that left the pool counts as healthy, unasked."""
        url = next((worker.url for worker in pool.view.workers if worker.worker_id == worker_id), "")
        if not url:
            return True
        async with gate:
            return await self._client.healthy(url, self._timing.hung_timeout_s)
