"""Chooses the worker of an attempt: by a decision in Redis, or by this replica's last reading while Redis cannot."""

from __future__ import annotations

import time
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.errors import CancelledReservation, FleetUnavailable, NoWorker, RateLimited, WarmfleetError
from warmfleet.fleet import Decision, Question, Queued
from warmfleet.pools.degraded import unbooked
from warmfleet.pools.served_models import NOT_READ
from warmfleet.pools.served_names import misnamed
from warmfleet.routing.decision_log import record
from warmfleet.routing.explain_header import explanation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from warmfleet.metrics import Counter, Histogram, Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Job
    from warmfleet.routing.decision_log import DecisionLog


NO_ENGINE = (
    "No engine of `{}` has joined this fleet. For the operator: start vLLM with the plugin and WARMFLEET_REDIS_URL, or "
    "name engines in WARMFLEET_STATIC_WORKERS; `warmfleet doctor` says what is missing."
)
#: The first words of the next two, by whether the model has more than one engine.
NONE_OF_ALL, NOT_THE_ONE = "None of the {} engines of `{}` takes requests", "The only engine of `{1}` takes no requests"
NONE_ROUTABLE = (
    "{} at this moment: ask again. For the operator: `warmfleet workers` tells the state of each, and `warmfleet "
    "doctor` what to do."
)
OTHER_NAMES = (
    "{} at this moment: ask again. For the operator: an engine is misnamed, {}. `warmfleet workers` tells the state of "
    "each."
)
#: A request that waits keeps its ticket over a short silence of Redis: it asks again, and learns if it was booked.
STILL_QUEUED = Queued("queued", 0, 0.0)


class _OfModel(NamedTuple):
    """The metrics of one model that every decision counts in, looked up once."""

    seconds: Histogram
    prompt_tokens: Counter
    matched_tokens: Counter

    @classmethod
    def of(cls, metrics: Metrics, tag: str) -> _OfModel:
        return cls(
            metrics.decision_seconds.labels(tag), metrics.prompt_tokens.labels(tag), metrics.matched_tokens.labels(tag)
        )


class Decider:
    """Tells an attempt which worker it gets. Redis chooses and books in one call; without Redis nothing is booked."""

    def __init__(self, log: DecisionLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        self._decisions = cache(metrics.decisions.labels)  # by policy, reason and model, of which there are few
        self._of_model = cache(partial(_OfModel.of, metrics))

    async def decide(
        self, job: Job, attempt: Attempt, *, may_wait: bool, displaces: bool = True, alone: bool = True
    ) -> Decision | Queued:
        """Choose a worker, or take a ticket if that has no room yet.

        may_wait: the queue has room for the body. displaces: in a full queue the ticket may take the place of another.

        A request that waits goes on waiting over a short silence of Redis, and is decided without Redis after that.

        alone: False if another pool may serve the job. Then nothing is chosen without Redis, the error is raised
        instead, and the caller tells by ``keep`` that the decision stands.

        Raises NoWorker, CancelledReservation, RateLimited, and FleetUnavailable if the fleet was never read.
        """
        pool, call = job.pool, job.call
        exclude = attempt.excluded()
        if not pool.degraded.asks_redis:
            if attempt.keeps_place:
                return STILL_QUEUED
            if alone:
                return await self.without_redis(job, attempt, "open")
        attempt.asks()
        pool.idle.wake()
        question = _question(job, attempt, exclude, may_wait=may_wait, displaces=displaces)
        # Those of this moment: the workers may be others once Redis has answered.
        rings = pool.policy.orders(pool.view, job.request, call.hints.session) if job.logged else None
        tell, pool.recent.wanted = job.logged or call.hints.explain or pool.recent.wanted, False
        try:
            answer = await pool.fleet.decide_in_turn(question, tell=tell)
        except WarmfleetError as error:
            reason = self._unanswered(job, attempt, error)
            if not reason:
                return STILL_QUEUED
            if not alone:
                raise
            return await self.without_redis(job, attempt, reason)
        finally:
            self._of_model(pool.tag).seconds.observe(time.perf_counter() - attempt.asked_at)
        pool.degraded.succeeded()
        if isinstance(answer, Queued):
            attempt.queued(answer) if answer.outcome == "queued" else attempt.refused()
            return answer
        attempt.booked(answer)
        if answer.seen is not None:
            self._explain(job, attempt, question, answer, rings)
        if alone:
            self.keep(job, attempt, answer, question.policy)
        return answer

    def _unanswered(self, job: Job, attempt: Attempt, error: WarmfleetError) -> str:
        """Why a worker is to be chosen without Redis; empty if the request goes on waiting.

        Raises the error if it is about the request: CancelledReservation, RateLimited.
        """
        pool = job.pool
        if isinstance(error, NoWorker):  # Redis may have come back empty
            attempt.not_booked()
            return "no_worker"
        if isinstance(error, CancelledReservation):  # only under a gateway's key: Redis is well, and books nothing
            attempt.not_booked()
            raise error
        if isinstance(error, RateLimited):
            pool.degraded.succeeded()
            attempt.limited()
            if job.call.limits is not None:
                self._metrics.client_limits.labels(job.call.limits.name, error.type).inc()
            raise error
        # Redis is away or slow, or a script refuses: no reason to fail a request.
        pool.degraded.failed(f"{error.code}: {error}")
        away = isinstance(error, FleetUnavailable)
        if attempt.waits and away and not pool.degraded.silent:
            return ""
        attempt.unanswered()
        return "away" if away else error.code

    def keep(self, job: Job, attempt: Attempt, decision: Decision, policy: str) -> None:
        """Count a decision of Redis that stands, and keep it for people who look."""
        pool, call, prompt = job.pool, job.call, job.prompt
        counted = self._of_model(pool.tag)
        if attempt.record is not None:
            self._log.note(attempt.record)
        self.noted(attempt, decision, policy)
        counted.prompt_tokens.inc(decision.prompt_tokens)
        counted.matched_tokens.inc(decision.matched_tokens)
        self._decisions(policy, decision.why, pool.tag).inc()
        pool.recent.note(call.request_id, call.path.name, prompt.kind, policy, decision)
        if len(prompt.prompts) == 1:
            pool.uses.note(prompt.prompts[0], prompt.identity_key)

    @staticmethod
    def noted(attempt: Attempt, decision: Decision, policy: str, fallback: str = "") -> None:
        """Note in the record of the attempt, where it has one, which worker was chosen."""
        if attempt.noted is not None:
            token_s = attempt.pool.view.token_s_of(decision.worker_id)
            attempt.noted.decided(decision, policy, attempt.asked_at, token_s, fallback)

    def _explain(
        self,
        job: Job,
        attempt: Attempt,
        question: Question,
        decision: Decision,
        rings: Mapping[str, tuple[str, ...]] | None,
    ) -> None:
        """Give the attempt the record of a decision that belongs to the sample, and the explanation if it is wanted."""
        pool = job.pool
        if rings is not None:
            attempt.record = record(pool.tag, question, pool.fleet.weights, decision, rings)
        if job.call.hints.explain:
            attempt.explanation = explanation(question, pool.fleet.weights, decision)

    async def without_redis(self, job: Job, attempt: Attempt, reason: str) -> Decision:
        """Choose among the workers of the last reading. reason: for the metrics, why Redis did not choose.

        Raises NoWorker, and FleetUnavailable if the fleet was never read.
        """
        pool, exclude = job.pool, attempt.excluded()
        key = job.prompt.beginning or attempt.reservation.encode()
        if reason == "no_worker":
            await pool.last_known.look()  # the operator may have drained the last worker since the last reading
        worker = pool.degraded.choose(pool.last_known.workers, key, exclude)
        if worker is None and reason != "no_worker" and not attempt.avoided:
            await pool.last_known.look()  # a worker may have joined since the last reading, while decisions were slow
            worker = pool.degraded.choose(pool.last_known.workers, key, exclude)
        if worker is None:
            if not pool.contacted:
                raise FleetUnavailable(NOT_READ)
            told = nobody(job.homes or (pool,), pool.name, tells_names=job.call.models is None)
            raise NoWorker(told)
        self._metrics.fallback.labels(reason, pool.tag).inc()
        if job.call.limits is not None and not job.homes:
            self._metrics.client_limits.labels(job.call.limits.name, "unchecked").inc()
        decision = unbooked(attempt.reservation, worker, job.prompt.prompt_tokens)
        attempt.chose_without_redis(decision)
        self.noted(attempt, decision, "", reason)
        pool.recent.note(job.call.request_id, job.call.path.name, job.prompt.kind, "", decision, reason)
        return decision


def _question(job: Job, attempt: Attempt, exclude: tuple[str, ...], *, may_wait: bool, displaces: bool) -> Question:
    """The question under the policy and the TTFT objective in force."""
    pool, call, prompt = job.pool, job.call, job.prompt
    return Question(
        attempt.reservation,
        prompt.chains,
        prompt.prompt_tokens,
        prompt.decode_tokens,
        pool.policy.name,
        exclude,
        0,
        call.hints.prefix_tokens,
        pool.policy.order(pool.view, job.request, call.hints.session),
        pool.ttft.in_force_s,
        None if job.homes else call.limits,  # of several pools one counts: routing/client_limits
        call.flow,
        job.priority,
        round(1_000 * (attempt.asked_at - call.received_at)),
        attempt.never,
        may_wait,
        displaces,
    )


def nobody(pools: Iterable[Pool], model: str, *, tells_names: bool = True) -> str:
    """Why no worker of any of these pools of a model can be chosen, and what to do about it.

    tells_names: who reads it may know names besides this one. Which workers there are is told to operators only.
    """
    workers = [worker for pool in pools for worker in pool.view.workers or pool.last_known.workers]
    if not workers:
        return NO_ENGINE.format(model)
    none = (NONE_OF_ALL if len(workers) > 1 else NOT_THE_ONE).format(len(workers), model)
    wrong = next((worker for worker in workers if worker.misnamed), None)
    if wrong is not None and tells_names:
        return OTHER_NAMES.format(none, misnamed(wrong, model))
    return NONE_ROUTABLE.format(none)
