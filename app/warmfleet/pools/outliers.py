"""Judges workers by the answers that this replica got, or that gateways told it of, so that one can be ejected.

Only a failure counts that is the worker's own: another worker has served the same request since, or the answer broke
off after its first byte. A request that every worker fails says nothing about them, and clients' own mistakes (4xx) do
not count. The verdict is carried out in Redis (lua/eject.lua), for all replicas.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from warmfleet.fleet import Decision

WINDOW_S = 30.0  # counts are halved when so much time has passed
FAILURES = 3  # so many failures at least, so that one bad moment is no verdict
SHARE = 0.1  # and this share of what the worker got here
MAX_WORKERS = 1_024  # that are counted at a time


class Judged(NamedTuple):
    """A worker and whether it is on trial, where no decision of this replica says so."""

    worker_id: str
    trial: bool = False


class Outliers:
    """The answers of one model's workers, counted in this replica.

    ``verdicts``: worker_id -> False if it is to be ejected, True if it passed its trial. A round tells Redis of them.
    """

    def __init__(self) -> None:
        self.verdicts: dict[str, bool] = {}
        self._counts: dict[str, tuple[float, float, float]] = {}  # worker_id -> served, failed, since (monotonic s)

    def served(self, decision: Decision | Judged) -> None:
        """A worker served a request."""
        worker_id = decision.worker_id
        if decision.trial:
            self.verdicts[worker_id] = True
        if worker_id in self._counts:  # a worker that has failed nothing is not counted, and costs nothing
            served, failed, since = self._recent(worker_id)
            self._counts[worker_id] = served + 1, failed, since

    def failed(self, decision: Decision | Judged) -> None:
        """A worker failed a request through its own fault."""
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
