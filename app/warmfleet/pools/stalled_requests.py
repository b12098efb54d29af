"""Ends requests that wait for an engine that fell silent: a frozen process or vanished machine never answers them.

The replica looks once after each reading of the fleet; no request has a timer. A worker is lost if it is not alive
while other workers of its model are: its last heartbeat is older than the TTL, or it has been out of the fleet for a
TTL (it said goodbye, its API server is gone, or its health check fails). A request that got no byte from a lost worker
for QUIET_S is given up. An outage of Redis silences all workers, so it ends no request: no worker is lost until the
fleet was readable for a whole TTL without a gap.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamGone
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.fleet import WorkerView

logger = logging.getLogger("warmfleet.pools.stalled_requests")

GRACE_S = WORKER_TTL_SECONDS
GAP_S = WORKER_TTL_SECONDS / 2  # a shorter outage is no gap: heartbeats come every third of a TTL
QUIET_S = 3.0  # a worker that lost only its way to Redis still streams: its requests go on


class Try:
    """One request at one worker, from the moment at which it is sent until its answer has ended."""

    __slots__ = ("_received", "_received_at", "response", "worker_id")

    def __init__(self, worker_id: str, response: EngineResponse) -> None:
        self.worker_id = worker_id
        self.response = response
        self._received = -1
        self._received_at = 0.0

    def quiet_s(self, now: float) -> float:
        """Seconds without a byte from the engine, counted from the first call. 0 while the client is slow to read."""
        response = self.response
        if response.received != self._received or not response.waiting:
            self._received, self._received_at = response.received, now
        return now - self._received_at


class Tries:
    """The requests of one model that are under way in this replica."""

    def __init__(self) -> None:
        self._open: dict[str, Try] = {}
        self._out_since: dict[str, float] = {}
        self._looked_at = self._steady_since = float("-inf")

    def begin(self, reservation: str, worker_id: str, response: EngineResponse) -> None:
        """A request is sent to ``worker_id``. Whatever becomes of it, call ``end`` with the same reservation."""
        self._open[reservation] = Try(worker_id, response)

    def end(self, reservation: str) -> None:
        self._open.pop(reservation, None)

    def look(self, workers: Sequence[WorkerView], now: float) -> int:
        """Give up the requests that wait for a lost worker; returns how many they were.

        workers: as they were just read. now: monotonic seconds.
        """
        if now - self._looked_at > GAP_S:
            self._steady_since = now
        self._looked_at = now
        out = [worker for worker in workers if not worker.state.alive]
        self._out_since = {worker.worker_id: self._out_since.get(worker.worker_id, now) for worker in out}
        if len(out) == len(workers) or now - self._steady_since < GRACE_S:
            return 0
        lost = {w.worker_id for w in out if _expired(w) or now - self._out_since[w.worker_id] > GRACE_S}
        if not lost:
            return 0
        quiet = [request for request in self._open.values() if request.worker_id in lost]
        quiet = [request for request in quiet if request.quiet_s(now) >= QUIET_S]
        given_up = [request.worker_id for request in quiet if request.response.fail(_gone())]
        if given_up:
            names = ", ".join(sorted(set(given_up)))
            logger.warning("no sign of life from %s: %d waiting requests are given up", names, len(given_up))
        return len(given_up)


def _expired(worker: WorkerView) -> bool:
    """Whether the worker's last heartbeat is older than the TTL. A worker that said goodbye has no heartbeat."""
    return worker.heartbeat_age_s is not None and not worker.heard


def _gone() -> UpstreamGone:
    return UpstreamGone("The worker shows no sign of life any more.")
