"""Whether a job may have another attempt after one has failed, and how often the requests of one replica may."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from warmfleet.errors import NameRefused

if TYPE_CHECKING:
    from warmfleet.errors import NoWorker, UpstreamGone
    from warmfleet.fleet import Decision
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Job

MAX_ATTEMPTS = 4  # most attempts, at different workers that take the request, before an answer's first byte
MAX_GONE = 16  # most dead workers that a request may meet, as half of a large fleet may die at once
MAX_DEATHS = 2  # most deaths of workers that had read the request, which may have killed them
#: Fewest workers of a model with which a third one gets the request after MAX_DEATHS, and the wait before that: engines
#: that die of a common cause have died by then. A third death blames the request, so no fourth worker gets it.
LARGE_FLEET, MOMENT_S = 4, 1.0
BUSY = frozenset({429, 502, 503})  # the worker did not begin to work on the request
FAILED = frozenset({500, 504})  # the worker began to work on the request, which may be the reason
NO_ANSWER = BUSY | FAILED
NO_STATUS = frozenset[int]()
BUDGET_SHARE = 0.2  # further tries per request that a replica's requests may have on average
BUDGET_MOST = 128.0  # most tries saved up: as many as requests may be under way at a worker that dies


class RetryBudget:
    """Bounds the further tries of one replica, so that a fleet that fails is not asked several times as much.

    A try after a refused connection is free: it did not cost the worker anything. ``empty``: there is no further try.
    ``full``: what requests add is lost.
    """

    def __init__(self) -> None:
        self._left = BUDGET_MOST
        self.empty, self.full = False, True

    def earn(self) -> None:
        """Add a request's share of a try. Needs no call while the budget is full."""
        self._add(BUDGET_SHARE)

    def spend(self) -> None:
        """Take one try, as a request is tried again."""
        self._add(-1.0)

    def _add(self, tries: float) -> None:
        self._left = min(self._left + tries, BUDGET_MOST)
        self.empty, self.full = self._left < 1.0, self._left == BUDGET_MOST


class Retries:
    """The attempts at one job that have failed, and what follows for the next one.

    ``failed_workers``: must not be chosen again. ``to_blame``: the workers that are to blame if another one serves the
    job, as they were decided, by their pools. ``avoids_failing``: the next attempt passes over workers that failed
    other requests. ``pause_s``: to wait before it (``moment``).
    """

    failed_workers: tuple[str, ...] = ()
    to_blame: tuple[tuple[Pool, Decision], ...] = ()
    avoids_failing = True
    pause_s = 0.0
    _attempts_left = MAX_ATTEMPTS
    _gone_left = MAX_GONE
    _deaths = 0
    _failure: UpstreamGone | None = None

    def __init__(self, job: Job, budget: RetryBudget) -> None:
        self._job = job
        self._budget = budget
        if not budget.full:
            budget.earn()

    @property
    def tried_elsewhere(self) -> frozenset[int]:
        """The statuses of an answer that the client does not get, because another worker is tried instead."""
        if self._attempts_left == 1 or self._budget.empty or self._job.worker_count <= 1:
            return NO_STATUS
        return BUSY if self._deaths + 1 >= MAX_DEATHS else NO_ANSWER

    def blame(self) -> None:
        """Blame the workers that failed the job, because another worker has served it."""
        for pool, decision in self.to_blame:
            pool.outliers.failed(decision)

    def worker_failed(self, pool: Pool, decision: Decision, error: UpstreamGone) -> None:
        """Exclude this worker from the next attempt. Raises ``error`` if no other attempt may follow."""
        self._failure = error
        gone = error.refused and not error.answered
        self._deaths += not error.refused
        by_name = isinstance(error, NameRefused)
        # All requests that were under way at a worker that died are tried again once. To refuse a name costs a worker
        # nothing.
        costs = not by_name and (error.answered or (not gone and self._deaths > 1))
        free = gone or by_name
        if (self._attempts_left == 1 and not free) or self._too_much or (costs and self._budget.empty):
            raise error
        if costs:
            self._budget.spend()
        if not gone and (not isinstance(error, NameRefused) or error.counts):
            self.to_blame = (*self.to_blame, (pool, decision))
        if free:
            self._gone_left -= 1
        else:
            self._attempts_left -= 1
            self.pause_s = MOMENT_S if self._deaths >= MAX_DEATHS else 0.0
        self.failed_workers = (*self.failed_workers, decision.worker_id)

    @property
    def _too_much(self) -> bool:
        """Whether the request itself may have been too much for the workers that had it."""
        most = MAX_DEATHS + (self._job.worker_count >= LARGE_FLEET)
        # A request that is too long for every engine may have been too much for the first one.
        return (
            self._deaths >= most
            or not self._gone_left
            or (bool(self._deaths) and self._job.prompt.reason == "too_long")
        )

    async def moment(self) -> None:
        """Wait before another worker is risked, if two have died under the request."""
        pause_s, self.pause_s = self.pause_s, 0.0
        await asyncio.sleep(pause_s)

    def no_worker(self, error: NoWorker, *, avoided_some: bool) -> None:
        """Let the next attempt choose the avoided workers, too, but none that failed this job.

        Raises if this attempt avoided none.
        """
        if not avoided_some:
            raise self._failure or error  # no worker is left: the client gets the last worker's failure
        self.avoids_failing = False
