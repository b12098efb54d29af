"""Redis is gone or slow: the last known workers, chosen by a hash of the prompt's first blocks, with bounded load."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from warmfleet.fleet import Decision
from warmfleet.pools.fleet_view import View

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from warmfleet.fleet import Fleet, WorkerView

logger = logging.getLogger("warmfleet.pools.degraded")

BOUND = 1.25  # no worker gets more than this share above the mean
FAILURES_TO_OPEN = 2
REDIS_RETRY_S = 1.0  # after two failures in a row no decision waits for Redis for this long
LOG_EVERY_S = 5.0
LAST_KNOWN_S = 8.0  # an emptied Redis is whole again within one slow-path period
LOOK_S = 1.0


class LastKnown:
    """Workers for when no decision can be had: of the last reading that had any routable, unless none had for too long.

    What counts is time with Redis: when it comes back after an outage, empty or with heartbeats of an old dump, nobody
    is routable until the workers have been heard.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last = self._with_any = View()
        self._none_since = 0.0  # first of the readings without anybody routable, with no gap between them
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    def show(self, view: View) -> None:
        """Take a new reading."""
        if view.read_at < self._last.read_at:
            return  # a look that took longer than a reading
        before, self._last = self._last, view
        if any(worker.routable for worker in view.workers):
            self._with_any = view
            return
        if before is self._with_any or view.read_at - before.read_at > LAST_KNOWN_S:
            self._none_since = view.read_at
        drained = {worker.worker_id for worker in view.workers if worker.draining}
        if drained:  # workers are remembered over an outage, but a drain is an order
            others = tuple(worker for worker in self._with_any.workers if worker.worker_id not in drained)
            self._with_any = replace(self._with_any, workers=others)

    @property
    def workers(self) -> Sequence[WorkerView]:
        young = time.monotonic() - self._none_since < LAST_KNOWN_S
        return (self._with_any if young else self._last).workers

    async def look(self) -> None:
        """Read who is there, once for all who ask meanwhile and LOOK_S later. Nothing is known better if that fails."""
        if self._looking is None or (self._looking.done() and time.monotonic() - self._looked_at >= LOOK_S):
            self._looking = asyncio.ensure_future(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(LOOK_S):
                found = await self._fleet.workers()
            self.show(View(tuple(found), read_at=begun))
        except Exception as error:  # noqa: BLE001  the last resort of a request: whatever it is, there is no worker then
            logger.warning("nobody is known, and the workers cannot be read: %s", error or type(error).__name__)
        self._looked_at = time.monotonic()


class Fallback:
    """What one replica knows by itself: its own requests in flight, and whether it is worth asking Redis."""

    def __init__(self, retry_s: float) -> None:
        self.in_flight: Counter[str] = Counter()
        self._retry_s = retry_s
        self._failures = 0
        self._closed_again_at = 0.0
        self._logged_at = -LOG_EVERY_S

    def take(self, worker_id: str) -> None:
        self.in_flight[worker_id] += 1

    def give(self, worker_id: str) -> None:
        self.in_flight[worker_id] -= 1
        if self.in_flight[worker_id] <= 0:
            del self.in_flight[worker_id]

    @property
    def asks_redis(self) -> bool:
        """False for ``retry_s`` after two failures in a row: a dead Redis must not cost every request a time-out."""
        return self._failures < FAILURES_TO_OPEN or time.monotonic() >= self._closed_again_at

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, why: str) -> None:
        self._failures += 1
        now = time.monotonic()
        self._closed_again_at = now + self._retry_s
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("deciding without Redis: %s", why)

    def choose(self, workers: Sequence[WorkerView], key: bytes, exclude: Collection[str] = ()) -> WorkerView | None:
        """Rendezvous hashing with bounded load: the same prefix goes to the same worker while that one keeps up."""
        candidates = [worker for worker in workers if worker.routable and worker.worker_id not in exclude]
        if not candidates:
            return None
        total = sum(self.in_flight[worker.worker_id] for worker in candidates)
        bound = math.ceil(BOUND * (total + 1) / len(candidates))
        candidates.sort(key=lambda worker: _score(key, worker.worker_id), reverse=True)
        return next(worker for worker in candidates if self.in_flight[worker.worker_id] < bound)


def unbooked(reservation: str, worker: WorkerView, prompt_tokens: int) -> Decision:
    """For a request that goes to ``worker`` without a reservation: nothing of it is in Redis."""
    return Decision(
        reservation=reservation,
        outcome="booked",
        worker_id=worker.worker_id,
        server_id=str(worker.record.get("server_id", "")),
        url=worker.url,
        matched_tokens=0,
        prompt_tokens=prompt_tokens,
        speculative=False,
        flagged=True,
        cost_s=0.0,
        wait_tokens=0,
        approximate=worker.approximate,
        prefill_tokens=0,
        decode_tokens=0,
    )


def _score(key: bytes, worker_id: str) -> bytes:
    return hashlib.sha256(key + worker_id.encode()).digest()
