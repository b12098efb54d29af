"""Ends requests that wait for a silent engine, because a frozen process or a vanished machine never answers them.

No request has a timer; instead all requests are looked at in rounds. A request is ended on three grounds.

*A lost worker* is not alive while other workers of its model are: its last heartbeat is older than the TTL, or it has
been out of the fleet for a TTL (it left, its API server is gone, or its health check fails). A request that got
no byte from a lost worker for ``quiet_s`` is given up. An outage of Redis silences all workers, so it ends no request:
no worker is lost until the fleet was readable for a whole TTL without a gap. A worker that moved to another pool of its
model finishes its requests: it is lost only if it is not alive there either.

*A hung worker* is heard, but does not work: its API server does not answer ``/health`` (``background/hung_engines``),
or it stands still: for STILL_S it sent no byte at all, though an answer had begun. An engine that works sends each
running stream a token every few milliseconds. Requests that wait for their first byte at a hung worker are given up.

*A time limit* of the settings is exceeded: for the silence within a stream, or for the duration of a request.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from warmfleet.errors import EngineTimeout, UpstreamGone
from warmfleet.protocol.wire import WORKER_TTL_SECONDS
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.fleet import WorkerView

logger = logging.getLogger("warmfleet.pools.stalled_requests")

GAP_S = WORKER_TTL_SECONDS / 2  # after a longer time without a reading no worker is lost for a TTL
STILL_S = 30.0  # silence after which an engine counts as hung; a long prefill without chunks takes seconds


class Try:
    """A request at one worker, from when the request is sent until its answer has ended."""

    __slots__ = ("_bytes", "_bytes_at", "received_at", "response", "worker_id")

    def __init__(self, worker_id: str, response: EngineResponse, received_at: float = 0.0) -> None:
        """received_at: when the request was read from its client; times are those of ``time.perf_counter``."""
        self.worker_id = worker_id
        self.response = response
        self.received_at = received_at
        self._bytes = -1
        self._bytes_at = 0.0

    def quiet_s(self, now: float) -> float:
        """Return the seconds without a byte from the engine, counted from the first call; 0 if the client is slow."""
        response = self.response
        if response.received != self._bytes or not response.waiting:
            self._bytes, self._bytes_at = response.received, now
        return now - self._bytes_at


class Tries:
    """The requests of one model that are under way in this replica."""

    def __init__(self, timing: Timing = Timing()) -> None:
        self._timing = timing
        self._open: dict[str, Try] = {}
        self._out_since: dict[str, float] = {}
        self._looked_at = self._steady_since = float("-inf")

    def begin(self, reservation: str, begun: Try) -> None:
        """Follow a request that is sent to a worker. However it ends, call ``end`` with the same reservation."""
        self._open[reservation] = begun

    def end(self, reservation: str) -> None:
        self._open.pop(reservation, None)

    def look(self, workers: Sequence[WorkerView], now: float, others: Sequence[Iterable[WorkerView]] = ()) -> int:
        """Give up the requests that wait for a lost worker; return their number.

        workers: from a new reading. now: by ``time.perf_counter``. others: the workers of each other pool of the
        model, from its last reading.
        """
        if now - self._looked_at > GAP_S:
            self._steady_since = now
        self._looked_at = now
        out = [worker for worker in workers if not worker.state.alive]
        self._out_since = {worker.worker_id: self._out_since.get(worker.worker_id, now) for worker in out}
        if len(out) == len(workers) or now - self._steady_since < self._timing.grace_s:
            return 0
        out_s = self._timing.grace_s + (self._timing.parted_s if others else 0.0)
        lost = {w.worker_id for w in out if _expired(w) or now - self._out_since[w.worker_id] > out_s}
        if lost:
            lost -= {worker.worker_id for pool_workers in others for worker in pool_workers if worker.state.alive}
        if not lost:
            return 0
        return self._give_up([request for request in self._open.values() if request.worker_id in lost], now)

    def expire(self, now: float, idle_s: float, total_s: float) -> Counter[str]:
        """End the requests that are over a limit in seconds (0: no limit); return how many, by the limit's name."""
        ended = Counter[str]()
        for request in self._open.values():
            quiet_s, age_s = request.quiet_s(now), now - request.received_at
            if 0 < idle_s <= quiet_s and request.response.began:
                limit, error = "stream_idle", EngineTimeout(f"The worker sent nothing for {quiet_s:.0f} s.")
            elif 0 < total_s <= age_s:
                limit, error = "request_max", EngineTimeout(f"The request took longer than {total_s:g} s.")
            else:
                continue
            ended[limit] += request.response.fail(error)
        return ended

    def keep_waiting(self, now: float, seconds: float) -> set[str]:
        """Return the workers that keep a request waiting for its first byte for at least ``seconds``."""
        waiting = [request for request in self._open.values() if not request.response.began]
        return {request.worker_id for request in waiting if request.quiet_s(now) >= seconds}

    def sends(self, worker_id: str, now: float, seconds: float) -> bool:
        """Return whether this worker sent a byte to some request, or got a request, within ``seconds``."""
        return any(request.worker_id == worker_id and request.quiet_s(now) < seconds for request in self._open.values())

    def standing_still(self, now: float) -> set[str]:
        """Return the workers that sent nothing for STILL_S, though a request whose answer had begun waits for more."""
        quiet_s = [(request.worker_id, request.response.began, request.quiet_s(now)) for request in self._open.values()]
        sending = {worker_id for worker_id, _, seconds in quiet_s if seconds < STILL_S}
        return {worker_id for worker_id, began, _ in quiet_s if began} - sending

    def give_up(self, hung: Collection[str], now: float) -> int:
        """Give up the requests that wait for their first byte at hung workers; return their number."""
        waiting = [request for request in self._open.values() if request.worker_id in hung]
        return self._give_up([request for request in waiting if not request.response.began], now)

    def _give_up(self, requests: Sequence[Try], now: float) -> int:
        quiet = [request for request in requests if request.quiet_s(now) >= self._timing.quiet_s]
        gone = "The worker shows no sign of life any more."
        given_up = [request.worker_id for request in quiet if request.response.fail(UpstreamGone(gone))]
        if given_up:
            names = ", ".join(sorted(set(given_up)))
            logger.warning("no sign of life from %s: %d waiting requests are given up", names, len(given_up))
        return len(given_up)


def _expired(worker: WorkerView) -> bool:
    """Return whether the worker's last heartbeat is older than the TTL; False for a worker that left."""
    return worker.heartbeat_age_s is not None and not worker.heard
