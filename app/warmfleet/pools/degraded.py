"""Chooses a worker without Redis, while Redis is away or slow, among the workers that this replica knew last."""

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
from warmfleet.fleet.connection.multiplexed import SILENT_S
from warmfleet.pools.fleet_view import View

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from warmfleet.fleet import Fleet, WorkerView

logger = logging.getLogger("warmfleet.pools.degraded")

BOUND = 1.25  # most requests in flight at a worker, as a multiple of the mean
FAILURES_TO_OPEN = 2  # failed questions in a row after which Redis is not asked for a while
#: Time until an emptied Redis has routable workers again: 5 s until workers join, 1 s until they are read, 5 s for each
#: of two probes, and a reserve.
LAST_KNOWN_S = 20.0
LOOK_S = 1.0  # least time between two calls of ``look``, and its longest duration


class LastKnown:
    """The workers to choose from while Redis makes no decision.

    First these are the workers of the last reading that had a routable worker. Redis may come back empty or with old
    data; so the workers of the newest reading replace them only after LAST_KNOWN_S in which Redis answered without any
    routable worker, and no missing worker answered a health check. By then heartbeats and probes make workers routable.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last = self._with_routable = View()
        self._answered_at = float("-inf")  # when a missing worker last answered a health check
        self._none_since = 0.0  # time of the first reading in an unbroken row of readings without a routable worker
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = 0.0

    def show(self, view: View) -> None:
        """Use a new reading of the fleet; a reading older than the last one is ignored."""
        if view.read_at < self._last.read_at:
            return  # ``look`` has shown a newer reading already
        before, self._last = self._last, view
        if any(worker.routable for worker in view.workers):
            self._with_routable = view
            return
        if before is self._with_routable or view.read_at - before.read_at > LAST_KNOWN_S:
            self._none_since = view.read_at
        # While Redis is away, requests go to the last routable workers, but for those that the operator drains, paused
        # engines, engines that serve another model name, and servers that said goodbye and are about to stop.
        left = {
            worker.worker_id
            for worker in view.workers
            if worker.draining or worker.paused or worker.misnamed or worker.said_goodbye
        }
        if left:
            others = tuple(worker for worker in self._with_routable.workers if worker.worker_id not in left)
            self._with_routable = replace(self._with_routable, workers=others)

    @property
    def workers(self) -> Sequence[WorkerView]:
        """The workers to choose from, routable or not."""
        none_for_s = self._last.read_at - self._none_since  # of times of readings, so only time with Redis counts
        if self._last is self._with_routable or none_for_s < LAST_KNOWN_S:
            return self._with_routable.workers
        return self._lost() if time.monotonic() - self._answered_at < LAST_KNOWN_S else self._last.workers

    @property
    def names(self) -> Mapping[str, int]:
        """The names that workers served at the last reading with a routable worker, by number of workers."""
        return self._with_routable.names.counts

    @property
    def missing(self) -> Sequence[WorkerView]:
        """Those of ``workers`` that the last reading lacks, or has as silent. Empty while some worker is routable."""
        return () if self._last is self._with_routable or self.workers is self._last.workers else self._lost()

    def _lost(self) -> Sequence[WorkerView]:
        """Return the workers that vanished without leaving: missing in the last reading, or silent there."""
        here = {
            worker.worker_id for worker in self._last.workers if worker.state.alive or worker.heartbeat_age_s is None
        }
        return [worker for worker in self._with_routable.workers if worker.worker_id not in here]

    def answered(self) -> None:
        """Note that a missing worker answers over HTTP, so that the last known workers stay in use."""
        self._answered_at = time.monotonic()

    async def look(self) -> None:
        """Read the workers once more, at most every LOOK_S for all requests together. Never raises."""
        if self._looking is None or (self._looking.done() and time.monotonic() - self._looked_at >= LOOK_S):
            self._looking = asyncio.ensure_future(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(LOOK_S):
                found = await self._fleet.workers.read()
            self.show(View(tuple(found), read_at=begun))
        except Exception as error:  # noqa: BLE001  a last resort: after any failure the request gets no worker
            logger.warning("no worker is known, and the workers cannot be read: %s", error or type(error).__name__)
        self._looked_at = time.monotonic()


class DegradedMode:
    """Chooses workers without Redis, by a prompt's hash and this replica's own load; tells whether to ask Redis."""

    def __init__(self, retry_s: float, tag: str = "") -> None:
        """retry_s: seconds without a question to Redis after two failures in a row. tag: the pool's, for the log."""
        self._tag = tag
        self.in_flight: Counter[str] = Counter()
        self._retry_s = retry_s
        self._failures = 0
        self._failing_since = 0.0
        self._asks_again_at = 0.0

    def take(self, worker_id: str) -> None:
        """Count one more request of this replica at the worker."""
        self.in_flight[worker_id] = self.in_flight.get(worker_id, 0) + 1  # a Counter's own default is slow

    def give(self, worker_id: str) -> None:
        left = self.in_flight[worker_id] - 1
        if left > 0:
            self.in_flight[worker_id] = left
        else:
            self.in_flight.pop(worker_id, None)

    @property
    def asks_redis(self) -> bool:
        """Whether to ask Redis: no for ``retry_s`` after two failures in a row, as each time-out delays a request."""
        return self._failures < FAILURES_TO_OPEN or time.monotonic() >= self._asks_again_at

    @property
    def failing(self) -> bool:
        """Whether the last question to Redis failed."""
        return self._failures > 0

    @property
    def silent(self) -> bool:
        """Whether Redis has answered nothing for SILENT_S. Until then waiting requests keep their places."""
        return self._failures >= FAILURES_TO_OPEN and time.monotonic() - self._failing_since >= SILENT_S

    def succeeded(self) -> None:
        """Note that Redis answered."""
        self._failures = 0

    def failed(self, why: str) -> None:
        """Note that Redis did not answer, or refused the decision. why: for the log."""
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        self._asks_again_at = now + self._retry_s
        logger.warning("%s: deciding without Redis: %s", self._tag, why)

    def choose(
        self, workers: Sequence[WorkerView], key: bytes, exclude: Collection[str] = (), only: Collection[str] = ()
    ) -> WorkerView | None:
        """Choose by rendezvous hashing with bounded load: equal keys share a worker while it keeps up with the others.

        Returns None if every routable worker is excluded. only: the workers to choose among; empty: all.
        """
        candidates = [worker for worker in workers if worker.routable and worker.worker_id not in exclude]
        if only:
            among = frozenset(only)
            candidates = [worker for worker in candidates if worker.worker_id in among]
        if not candidates:
            return None
        total = sum(self.in_flight[worker.worker_id] for worker in candidates)
        bound = math.ceil(BOUND * (total + 1) / len(candidates))
        candidates.sort(key=lambda worker: hashlib.sha256(key + worker.worker_id.encode()).digest(), reverse=True)
        return next(worker for worker in candidates if self.in_flight[worker.worker_id] < bound)


def unbooked(reservation: str, worker: WorkerView, prompt_tokens: int) -> Decision:
    """Return the decision for a request that goes to ``worker`` without a reservation: Redis holds nothing of it."""
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
