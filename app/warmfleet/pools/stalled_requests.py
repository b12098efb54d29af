"""Waits for an engine that fell silent are ended here: a frozen process or a vanished machine never ends them itself.

One look after each reading of the fleet, no timer per request. A worker is lost if others of its model are alive and it
is not: its heartbeat is older than the TTL, or it has been out of the fleet for as long (it said goodbye, its server or
its health check is gone). Whoever got no byte from it for QUIET_S is given up. An outage of Redis silences everybody,
so it ends nothing: nobody is lost until the fleet was readable for a whole TTL without a gap.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamGone
from warmfleet.fleet import Flag
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    import aiohttp

    from warmfleet.fleet import WorkerView

logger = logging.getLogger("warmfleet.pools.stalled_requests")

GRACE_S = WORKER_TTL_SECONDS
GAP_S = WORKER_TTL_SECONDS / 2  # heartbeats come every third of a TTL: a shorter outage lets nobody look dead
QUIET_S = 3.0  # a worker that only lost Redis still streams: it is left alone


class Try:
    """One request at one worker, from before it is sent until its answer has ended."""

    __slots__ = ("_answer", "_limit", "_received", "_received_at", "worker_id")

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._limit: asyncio.Timeout | None = None
        self._answer: aiohttp.ClientResponse | None = None
        self._received = -1
        self._received_at = 0.0

    async def headers(self, answer: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
        """Wait for ``answer``. Raises UpstreamGone if it is given up meanwhile; its body raises it later on."""
        try:
            async with asyncio.timeout(None) as self._limit:
                self._answer = await answer
        except TimeoutError as error:
            raise _gone() from error
        finally:
            self._limit = None  # it has been left: from here on there is nothing to reschedule
        return self._answer

    def quiet_s(self, now: float) -> float:
        """For how many seconds nothing has come, counted from the first call. 0 while it is the client that is slow."""
        received = self._answer.content.total_bytes if self._answer is not None else 0
        if received != self._received or not self._waits():
            self._received, self._received_at = received, now
        return now - self._received_at

    def give_up(self) -> bool:
        """End the wait. False if it was ended before, has not begun, or ended by itself."""
        if self._answer is not None:
            content = self._answer.content
            if content.exception() is not None:
                return False
            content.set_exception(_gone())
            return True
        if self._limit is None or self._limit.expired():
            return False
        self._limit.reschedule(0.0)
        return True

    def _waits(self) -> bool:
        if self._answer is None:
            return True
        connection = self._answer.connection  # none: the whole answer is here
        transport = connection.transport if connection is not None else None
        return transport is not None and transport.is_reading()


class Tries:
    """Everything that is under way for one model."""

    def __init__(self) -> None:
        self._open: dict[str, Try] = {}
        self._out_since: dict[str, float] = {}
        self._looked_at = self._steady_since = float("-inf")

    def begin(self, reservation: str, worker_id: str) -> Try:
        """Call ``end`` with the same reservation, whatever happens."""
        made = self._open[reservation] = Try(worker_id)
        return made

    def end(self, reservation: str) -> None:
        self._open.pop(reservation, None)

    def look(self, workers: Sequence[WorkerView], now: float) -> int:
        """Give up what waits for a lost worker; returns how many. workers: as just read. now: monotonic seconds."""
        if now - self._looked_at > GAP_S:
            self._steady_since = now
        self._looked_at = now
        out = [worker for worker in workers if not _alive(worker)]
        self._out_since = {one.worker_id: self._out_since.get(one.worker_id, now) for one in out}
        if len(out) == len(workers) or now - self._steady_since < GRACE_S:
            return 0
        lost = {one.worker_id for one in out if _expired(one) or now - self._out_since[one.worker_id] > GRACE_S}
        if not lost:
            return 0
        quiet = [one for one in self._open.values() if one.worker_id in lost and one.quiet_s(now) >= QUIET_S]
        given_up = [one.worker_id for one in quiet if one.give_up()]
        if given_up:
            names = ", ".join(sorted(set(given_up)))
            logger.warning("no sign of life from %s: %d waiting requests are given up", names, len(given_up))
        return len(given_up)


def _alive(worker: WorkerView) -> bool:
    in_time = worker.heartbeat_age_s is not None and not _expired(worker)
    return in_time and bool(worker.load.flags & Flag.SERVER)


def _expired(worker: WorkerView) -> bool:
    return worker.heartbeat_age_s is not None and worker.heartbeat_age_s > WORKER_TTL_SECONDS


def _gone() -> UpstreamGone:
    return UpstreamGone("The worker shows no sign of life any more.")
