"""Hedging: if a stream waits too long for its first byte, a second worker gets the request, too. The first byte wins.

Hedging is off unless the operator sets a delay. The second worker computes the whole prompt again, so hedging helps
only if engines are late at random. It costs a try of the retry budget. Only streams are hedged, because the first byte
of a plain answer comes with its last token; and no long prompts, which are late because they are long. The delay is a
fixed time and no quantile of recent times: under overload, nearly every stream would exceed the quantile of a calm
minute, and would be computed twice.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from warmfleet.errors import NoWorker, UpstreamGone
from warmfleet.fleet import Decision
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.transfer_params import PrefillFailed

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from warmfleet.fleet.bookings import Outcome
    from warmfleet.metrics import Metrics
    from warmfleet.pools.outliers import Judged
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.routing.pool_choice import PoolChoice
    from warmfleet.routing.recovery.retries import RetryBudget
    from warmfleet.routing.relay import Relay
    from warmfleet.routing.settlements import Settlements

MAX_PROMPT_TOKENS = 8_192  # longest prompt that is hedged: to compute a longer one twice costs more than a late answer
FAILURES = frozenset({429, 500, 502, 503, 504})  # statuses of the second worker that the client does not get


class Race:
    """Two attempts at one request: the attempt with the earlier first byte answers the client, the other is cancelled.

    ``winner``: None until the first byte.
    """

    def __init__(self, job: Job, answer: ClientAnswer) -> None:
        self.job = job
        self.answer = answer
        self.winner: Attempt | None = None
        self._tasks: dict[Attempt, asyncio.Task[Outcome]] = {}

    def run(self, attempt: Attempt, work: Coroutine[Any, Any, Outcome]) -> asyncio.Task[Outcome]:
        """Start an attempt that takes part in the race; return its task."""
        attempt.on_first_byte = self._first_byte
        task = self._tasks[attempt] = asyncio.create_task(work)
        return task

    def _first_byte(self, attempt: Attempt) -> None:
        """Let this attempt win with its first byte. Raises CancelledError if the other attempt has won before."""
        if self.winner is not None and self.winner is not attempt:
            raise asyncio.CancelledError
        self.winner = attempt
        for other, task in self._tasks.items():
            if other is not attempt:
                task.cancel()
                task.add_done_callback(partial(_release, other))  # because the task may take a worker before it ends

    async def end(self) -> None:
        """Cancel the attempts that still run; return when both have ended."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


class Hedging:
    """Forwards the jobs of one replica, and asks a second worker where the first one is late."""

    def __init__(
        self,
        after_s: float,
        relay: Relay,
        settlements: Settlements,
        choice: PoolChoice,
        budget: RetryBudget,
        metrics: Metrics,
    ) -> None:
        """after_s: the delay before a second worker is asked."""
        self._after_s = after_s
        self._relay = relay
        self._settlements = settlements
        self._choice = choice
        self._budget = budget
        self._hedged = metrics.hedged

    async def forward(
        self, job: Job, attempt: Attempt, decision: Decision, answer: ClientAnswer, tried_elsewhere: frozenset[int]
    ) -> Outcome:
        """Forward as ``Relay.forward`` does. Returns how this attempt ended, also if another worker served the job."""
        work = self._relay.forward(job, attempt, decision, answer, tried_elsewhere)
        if not hedgeable(job):
            return await work
        race = Race(job, answer)
        first = race.run(attempt, work)
        try:
            await asyncio.wait((first,), timeout=self._after_s)
            if first.done() or race.winner is not None:
                return await first
            if self._budget.empty:
                self._hedged.labels("budget").inc()
                return await first
            self._budget.spend()
            return await self._with_second(race, first, attempt, decision)
        finally:
            await race.end()

    async def _with_second(
        self, race: Race, first: asyncio.Task[Outcome], attempt: Attempt, decision: Decision
    ) -> Outcome:
        job = race.job
        job.call.record.event("hedge", **{"warmfleet.worker": decision.worker_id})
        job = job._replace(alone=True)  # a late prompt is computed twice, not three times
        other = Attempt(self._settlements, job, (*attempt.chosen.never, decision.worker_id))
        second = race.run(other, self._second(job, other, race.answer))
        await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        failed = race.winner is None and first.done()
        to_blame: Decision | Judged | None = decision
        if failed:
            error = first.exception()
            if isinstance(error, PrefillFailed):
                to_blame = error.to_blame
            if isinstance(error, UpstreamGone) and error.warns_others:
                attempt.chosen.worker_failed()
            attempt.release("failed")
        if race.winner is None:
            await asyncio.wait((first, second))  # one of them failed, so the other one goes on alone
        if race.winner is not other:
            self._hedged.labels("lost" if other.chosen.decision is not None else "none").inc()
            return await first
        self._hedged.labels("won").inc()
        outcome = await second
        if outcome == "finished" and other.chosen.decision is not None:
            other.chosen.pool.outliers.served(other.chosen.decision)
            if failed and to_blame is not None:
                attempt.chosen.pool.outliers.failed(to_blame)
        return "failed" if failed else "cancelled"

    async def _second(self, job: Job, attempt: Attempt, answer: ClientAnswer) -> Outcome:
        """Serve the job at a second worker. Raises WarmfleetError if no worker has room, or if the worker fails."""
        outcome: Outcome = "failed"
        try:
            decision = await self._choice.choose(job, attempt, may_wait=False, must=False)
            if not isinstance(decision, Decision):
                raise NoWorker("No other worker has room.")
            outcome = await self._relay.forward(job, attempt, decision, answer, FAILURES)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except UpstreamGone as error:
            if error.warns_others:
                attempt.chosen.worker_failed()
            raise
        finally:
            attempt.release(outcome)
        return outcome


def _release(attempt: Attempt, _task: object) -> None:
    attempt.release("cancelled")


def hedgeable(job: Job) -> bool:
    """Return whether the answer's first byte may be late by chance, and a second prefill costs little."""
    request, prompt = job.request, job.prompt
    small = prompt.prompt_tokens <= MAX_PROMPT_TOKENS and prompt.prompt_count == request.samples == 1
    counts_once = job.call.limits is None  # a client with limits would pay for both attempts
    return small and counts_once and request.stream and job.call.path.generates and job.worker_count > 1
