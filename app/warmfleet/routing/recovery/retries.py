"""Decides whether a job gets another attempt after a failure, and bounds the further attempts of one replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from warmfleet.errors import NameRefused

if TYPE_CHECKING:
    from warmfleet.errors import NoWorker, UpstreamGone
    from warmfleet.fleet import Decision
    from warmfleet.pools.outliers import Judged
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Job
    from warmfleet.routing.transfer_params import PrefillFailed

MAX_ATTEMPTS = 4  # most attempts, at different workers that take the request, before an answer's first byte
MAX_GONE = 16  # most attempts at workers that are dead already or do not know the model, which cost no work
MAX_DEATHS = 2  # most workers that may die with a request, which may have caused their deaths
#: Least number of a model's workers with which a third worker gets the request after MAX_DEATHS, and the wait before
#: that: engines that die of a common cause have died by then. After a third death no fourth worker gets the request.
LARGE_FLEET, MOMENT_S = 4, 1.0
BUSY = frozenset({429, 502, 503})  # the worker did not begin to work on the request
FAILED = frozenset({500, 504})  # the worker began to work on the request, which may be the reason
NO_ANSWER = BUSY | FAILED
NO_STATUS = frozenset[int]()
BUDGET_SHARE = 0.2  # further tries that each request adds to the budget
BUDGET_MOST = 128.0  # most tries in the budget: as many as requests may be under way at a worker that dies


class RetryBudget:
    """Bounds the further tries of one replica, so that retries do not multiply the load of a failing fleet.

    A try after a refused connection is free, because that did not cost the worker anything. ``empty``: less than one
    try is left. ``full``: requests add nothing more.
    """

    def __init__(self) -> None:
        self._left = BUDGET_MOST
        self.empty, self.full = False, True

    def earn(self) -> None:
        """Add a request's share of a try. Needs no call while the budget is full."""
        self._add(BUDGET_SHARE)

    def spend(self) -> None:
        """Take one try from the budget, because a request is tried again."""
        self._add(-1.0)

    def _add(self, tries: float) -> None:
        self._left = min(self._left + tries, BUDGET_MOST)
        self.empty, self.full = self._left < 1.0, self._left == BUDGET_MOST


class Retries:
    """The attempts at one job that have failed, and what follows for the next one.

    ``failed_workers``: must not be chosen again. ``to_blame``: pool and decision of each worker that gets the blame if
    another worker serves the job. ``avoids_failing``: the next attempt passes over workers that failed other requests.
    ``pause_s``: time to wait before the next attempt (``moment``).
    """

    failed_workers: tuple[str, ...] = ()
    to_blame: tuple[tuple[Pool, Decision | Judged], ...] = ()
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
        self._failure = error.with_traceback(None)  # a traceback would hold frames that hold this object
        gone = error.refused and not error.answered
        self._deaths += not error.refused
        by_name = isinstance(error, NameRefused)
        # The first try after a death is free: many requests may have been under way there. A refused name cost no work.
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

    def prefill_failed(self, pool: Pool, error: PrefillFailed) -> None:
        """Note that another engine than the worker failed to compute the prompt."""
        self._deaths += error.died
        if error.to_blame is not None:
            self.to_blame = (*self.to_blame, (pool, error.to_blame))

    @property
    def _too_much(self) -> bool:
        """Whether the request itself may have made its workers fail."""
        most = MAX_DEATHS + (self._job.worker_count >= LARGE_FLEET)
        # A request that is too long for every engine may have killed its first worker, so one death is enough.
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
        """Let the next attempt also choose workers that were avoided, but none that failed this job.

        Raises if this attempt avoided no worker.
        """
        if not avoided_some:
            failure, self._failure = self._failure or error, None
            try:
                raise failure  # no worker is left: the client gets the last worker's failure
            finally:
                del failure, error  # or their traceback would hold this frame, and this frame them
        self.avoids_failing = False
