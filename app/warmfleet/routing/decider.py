"""Chooses the worker of an attempt: by a decision in Redis, or among the last known workers while Redis is away."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from warmfleet.errors import CancelledReservation, FleetUnavailable, NoWorker, RateLimited, WarmfleetError
from warmfleet.fleet import Decision, Question, Queued, Split
from warmfleet.pools.degraded import unbooked
from warmfleet.pools.served_models import NOT_READ
from warmfleet.pools.served_names import misnamed
from warmfleet.prompt.request import NO_LABELS
from warmfleet.routing.decision_log import record
from warmfleet.routing.explain_header import explanation
from warmfleet.routing.prefills import unfit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.metrics import Metrics
    from warmfleet.pools.pairing import Splits
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.booking import Booking
    from warmfleet.routing.call import Job
    from warmfleet.routing.decision_log import DecisionLog


NO_ENGINE = (
    "No engine of `{}` has joined this fleet. For the operator: start vLLM with the plugin and WARMFLEET_REDIS_URL, or "
    "name engines in WARMFLEET_STATIC_WORKERS; `warmfleet doctor` says what is missing."
)
#: The first words of NONE_ROUTABLE and OTHER_NAMES, for a model with several engines, and for one with one engine.
NONE_OF_ALL, NOT_THE_ONE = "None of the {} engines of `{}` takes requests", "The only engine of `{1}` takes no requests"
NONE_ROUTABLE = (
    "{} at this moment: ask again. For the operator: `warmfleet workers` tells the state of each, and `warmfleet "
    "doctor` what to do."
)
NO_LABELLED = (
    "No engine of `{}` that takes requests has the labels {}. For the operator: `warmfleet workers --wide` shows the "
    "labels of each."
)
OTHER_NAMES = (
    "{} at this moment: ask again. For the operator: an engine is misnamed, {}. `warmfleet workers` tells the state of "
    "each."
)
#: The answer for a waiting request while Redis is silent for a moment: it keeps its ticket and asks again later.
STILL_QUEUED = Queued("queued", 0, 0.0)
#: Why one engine serves a request of a pool whose engines have roles, for the metrics.
WHY_ALONE = {Split.ROLES_IGNORED: "no_pair", Split.FORBIDDEN: "unfit", Split.ALLOWED: "cheaper"}
NO_WORKER = "no_worker"  # the reason for a choice without Redis although Redis answers


class Decider:
    """Asks Redis, which chooses and books in one call, for a worker of a pool; without Redis nothing is booked."""

    def __init__(self, log: DecisionLog, metrics: Metrics) -> None:
        self._log = log
        self._metrics = metrics
        self._decisions = cache(metrics.decisions.labels)  # counters by policy, reason and model
        seconds, prompt, matched = metrics.decision_seconds, metrics.prompt_tokens, metrics.matched_tokens
        self._splits = cache(metrics.splits.labels)
        self._of_model = cache(lambda tag: (seconds.labels(tag), prompt.labels(tag), matched.labels(tag)))

    async def decide(self, job: Job, attempt: Attempt, *, may_wait: bool) -> Decision | Queued:
        """Choose a worker of the chosen pool, or take a ticket if the worker that suits the request has no room.

        may_wait: this replica has room for the body; without, its session takes no part in the ledger. If Redis is
        silent, a waiting request goes on waiting for a moment, and is then decided without Redis. Raises NoWorker,
        CancelledReservation, RateLimited, and FleetUnavailable if the fleet was never read.
        """
        booking = attempt.chosen
        await self.ask(job, booking, may_wait=may_wait, displaces=True)
        answer = booking.answer
        if isinstance(booking.error, CancelledReservation | RateLimited):  # about the request: Redis is well
            booking.raise_error()
        if answer is None:
            return await self.without_redis(job, attempt, booking, reason_of(booking.error))
        if isinstance(answer, Decision):
            self.keep(job, attempt, answer)
        elif answer.outcome == "queued":
            attempt.record.queued(answer.waiting, answer.work_s)
        return answer

    async def ask(self, job: Job, booking: Booking, *, may_wait: bool, displaces: bool = False) -> None:
        """Ask for a decision in the booking's pool, and put the answer or the error into the booking. If Redis is not
        asked now, the answer is STILL_QUEUED for a request that keeps its place, else neither is set.

        may_wait: see ``decide``. displaces: in a full queue the ticket may take the place of another. Without Redis no
        worker is chosen here. A caller that asks several pools calls ``keep`` for the decision that counts.
        """
        pool, booking.answer, booking.error = booking.pool, None, None
        if not pool.degraded.asks_redis:
            booking.answer = STILL_QUEUED if booking.keeps_place else None
            return
        question, explain = self._question(job, booking, may_wait=may_wait, displaces=displaces)
        try:
            answer = booking.answer = await pool.fleet.queue.decide_in_turn(question, explain=explain)
        except WarmfleetError as error:
            if self._goes_on_waiting(job, booking, error):
                booking.answer = STILL_QUEUED
            else:
                booking.error = error.with_traceback(None)  # a traceback would hold this frame, which holds the booking
            return
        finally:
            self._of_model(pool.tag)[0].observe(time.perf_counter() - booking.asked_at)
        pool.degraded.succeeded()
        if isinstance(answer, Queued):
            booking.queued(answer)
            return
        booking.booked(answer)
        if answer.seen is None:
            return
        if booking.rings is not None:
            booking.log_line = record(pool.tag, question, pool.fleet.constants, answer, booking.rings)
        if job.call.hints.explain:
            booking.explanation = explanation(question, pool.fleet.constants.weights, answer)

    def _question(self, job: Job, booking: Booking, *, may_wait: bool, displaces: bool) -> tuple[Question, bool]:
        """Make the question under the policy and TTFT objective in force; return it, and whether to ask for reasons.

        Sets the booking to ASKED.
        """
        pool, prompt, call = booking.pool, booking.prompt, job.call
        exclude = booking.excluded()
        booking.asks()
        pool.idle.wake()
        question = booking.question = Question(
            booking.reservation,
            prompt.chains,
            prompt.prompt_tokens,
            prompt.decode_tokens,
            pool.policy.name,
            exclude,
            0,
            call.hints.prefix_tokens,
            pool.policy.order(pool.view, job.request, call.hints.session),
            call.hints.ttft_s or pool.ttft.in_force_s,
            job.limits,
            call.flow,
            job.priority,
            round(1_000 * (booking.asked_at - call.received_at)),
            booking.never,
            may_wait,
            displaces,
            session=job.session_as(booking.session) if may_wait and not booking.apart else b"",
            only=job.only,
            split=Split.ROLES_IGNORED if pool.view.splits is None else _split(job, booking, pool.view.splits),
        )
        if job.logged:
            booking.rings = pool.policy.orders(pool.view, job.request, call.hints.session)
        explain, pool.recent.wanted = job.logged or call.hints.explain or pool.recent.wanted, False
        return question, explain

    def _goes_on_waiting(self, job: Job, booking: Booking, error: WarmfleetError) -> bool:
        """Set the booking's state after an error. Return True if the request goes on waiting, because Redis
        has been silent only for a moment.
        """
        pool = booking.pool
        if isinstance(error, NoWorker | CancelledReservation):
            booking.not_booked()
            return False
        if isinstance(error, RateLimited):
            pool.degraded.succeeded()
            booking.limited()
            if job.limits is not None:
                self._metrics.client_limits.labels(job.limits.name, error.type).inc()
            return False
        # Redis is away or slow, or a script refuses: the request is served without Redis.
        pool.degraded.failed(f"{error.code}: {error}")
        if booking.waits and isinstance(error, FleetUnavailable) and not pool.degraded.silent:
            return True
        booking.unanswered()
        return False

    def keep(self, job: Job, attempt: Attempt, decision: Decision) -> None:
        """Put a final decision of Redis into metrics, log, the request's record and the recent decisions."""
        booking, call = attempt.chosen, job.call
        pool, prompt, policy = booking.pool, booking.prompt, booking.question.policy
        if booking.log_line is not None:
            self._log.note(booking.log_line)
        attempt.record.decided(decision, policy, booking.asked_at, pool.view.token_s_of(decision.worker_id))
        _, prompt_tokens, matched_tokens = self._of_model(pool.tag)
        prompt_tokens.inc(decision.prompt_tokens)
        matched_tokens.inc(decision.reused_tokens)
        if pool.view.pairing is not None and decision.prefill is None:
            self._splits(WHY_ALONE[booking.question.split], pool.tag).inc()
        self._decisions(policy, decision.why, pool.tag).inc()
        pool.recent.note(call.record.request_id, call.path.name, prompt.kind, policy, decision)
        if len(prompt.prompts) == 1:
            pool.uses.note(prompt.prompts[0], prompt.identity_key)

    async def without_redis(self, job: Job, attempt: Attempt, booking: Booking, reason: str) -> Decision:
        """Choose among the workers of the pool's last reading, and make the booking the attempt's chosen one.

        reason: why Redis did not choose, for the metrics. Raises NoWorker, and FleetUnavailable if the fleet was never
        read.
        """
        pool, call, exclude = booking.pool, job.call, booking.excluded()
        key = booking.prompt.beginning or booking.reservation.encode()
        if reason == NO_WORKER:
            await pool.last_known.look()  # the operator may have drained the last worker since the last reading
        worker = pool.degraded.choose(pool.last_known.workers, key, exclude, job.only)
        if worker is None and reason != NO_WORKER and not booking.avoided:
            await pool.last_known.look()  # a worker may have joined since the last reading, while decisions were slow
            worker = pool.degraded.choose(pool.last_known.workers, key, exclude, job.only)
        if worker is None:
            if not pool.contacted:
                raise FleetUnavailable(NOT_READ)
            told = nobody(job.pools, pool.name, job.request.labels, tells_names=call.models is None)
            raise NoWorker(told)
        self._metrics.fallback.labels(reason, pool.tag).inc()
        if job.limits is not None:
            self._metrics.client_limits.labels(job.limits.name, "unchecked").inc()
        decision = unbooked(booking.reservation, worker, booking.prompt.prompt_tokens)
        booking.chose_without_redis(decision)
        attempt.choose(booking)
        attempt.record.decided(decision, "", booking.asked_at, pool.view.token_s_of(worker.worker_id), reason)
        pool.recent.note(call.record.request_id, call.path.name, booking.prompt.kind, "", decision, reason)
        return decision


def _split(job: Job, booking: Booking, splits: Splits) -> Split:
    """Return whether the job may be split in a pool in which some may, and note it in the booking."""
    longest = booking.pool.view.max_model_len
    fit = not job.alone and not unfit(job.request, job.call.path.form, booking.prompt, splits, longest)
    booking.may_split = fit and booking.pool.policy.name == "cost"
    return Split.ALLOWED if booking.may_split else Split.FORBIDDEN


def reason_of(error: WarmfleetError | None) -> str:
    """Return why Redis did not choose, for the metrics. NO_WORKER may mean that Redis came back empty."""
    if error is None:
        return "open"
    if isinstance(error, NoWorker):
        return NO_WORKER
    return "away" if isinstance(error, FleetUnavailable) else error.code


def nobody(pools: Iterable[Pool], model: str, labels: frozenset[str] = NO_LABELS, *, tells_names: bool = True) -> str:
    """Tell why no worker of any of these pools of a model can be chosen, and what to do about it.

    labels: that the worker must have. tells_names: the client may learn other names than ``model``. Only operators
    learn which workers exist.
    """
    workers = [worker for pool in pools for worker in pool.view.workers or pool.last_known.workers]
    if not workers:
        return NO_ENGINE.format(model)
    if labels and any(worker.routable for worker in workers):
        return NO_LABELLED.format(model, ",".join(sorted(labels)))
    none = (NONE_OF_ALL if len(workers) > 1 else NOT_THE_ONE).format(len(workers), model)
    wrong = next((worker for worker in workers if worker.misnamed), None)
    if wrong is not None and tells_names:
        return OTHER_NAMES.format(none, misnamed(wrong, model))
    return NONE_ROUTABLE.format(none)
