"""Judges workers by the answers that this replica got, or that gateways reported, so that failing ones are ejected.

A failure counts only if it is the worker's own: another worker served the same request later, or the answer broke
off after its first byte. A request that every worker fails says nothing about them, and clients' own mistakes (4xx) do
not count. The verdict is carried out in Redis (lua/eject.lua), for all replicas.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from warmfleet.fleet import Decision

WINDOW_S = 30.0  # time after which counts are halved
FAILURES = 3  # fewest failures for a verdict, as one bad moment must not be enough
SHARE = 0.1  # least share of failures among the worker's requests from this replica, also needed for a verdict
MAX_WORKERS = 1_024  # most workers with counts at a time; before one more, all counts are dropped


class Judged(NamedTuple):
    """A worker that a gateway reports on, and whether it is on trial; ``Outliers`` takes it in place of a Decision."""

    worker_id: str
    trial: bool = False


class Outliers:
    """The answers of one model's workers, counted in this replica.

    ``verdicts``: worker_id -> False if it is to be ejected, True if it passed its trial; a background round sends them.
    """

    def __init__(self) -> None:
        self.verdicts: dict[str, bool] = {}
        self._counts: dict[str, tuple[float, float, float]] = {}  # worker_id -> served, failed, since (monotonic s)

    def served(self, decision: Decision | Judged) -> None:
        """Count a request that a worker served."""
        worker_id = decision.worker_id
        if decision.trial:
            self.verdicts[worker_id] = True
        if worker_id in self._counts:  # a worker's requests are counted only after its first failure, to save time
            served, failed, since = self._recent(worker_id)
            self._counts[worker_id] = served + 1, failed, since

    def failed(self, decision: Decision | Judged) -> None:
        """Count a request that a worker failed through its own fault."""
        worker_id = decision.worker_id
        if worker_id not in self._counts and len(self._counts) >= MAX_WORKERS:
            self._counts.clear()
        served, failed, since = self._recent(worker_id)
        self._counts[worker_id] = served, failed + 1, since
        if decision.trial or (failed + 1 >= FAILURES and failed + 1 >= SHARE * (served + failed + 1)):
            self.verdicts[worker_id] = False
            del self._counts[worker_id]

    def _recent(self, worker_id: str) -> tuple[float, float, float]:
        now = time.monotonic()
        served, failed, since = self._counts.get(worker_id, (0.0, 0.0, now))
        if now - since >= WINDOW_S:
            share = 0.5 ** ((now - since) // WINDOW_S)
            served, failed, since = served * share, failed * share, now
        return served, failed, since
