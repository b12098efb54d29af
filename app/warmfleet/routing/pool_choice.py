"""Chooses the pool of a job whose model has several of them.

The two home pools of the prompt are asked at once. Each decides exactly, among its own workers, and books; the cheaper
booking stands, the other one is cancelled before the request is sent. Pools that are away or without a worker are
passed over; if both home pools are full, one more pool is asked. A worker is chosen without Redis if no pool can be
asked, or if all that can be are full: the workers of a pool that is away may have nothing to do meanwhile. A request
takes the place of another in a full queue only if all pools that were asked are full.

A pool may let the request wait for the worker that holds its beginning: what counts is the price of each answer, the
wait included (``routing/pool_prices``). While it waits, its other home pool is asked again now and then.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, cast

from warmfleet.errors import CancelledReservation, FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.fleet import Decision, Queued
from warmfleet.pools.identified_prompt import same_in
from warmfleet.pools.late_pools import LatePool, late
from warmfleet.routing.attempt import AttemptState
from warmfleet.routing.explain_header import with_pools
from warmfleet.routing.pool_prices import HOMES, Offer, best, turn_s
from warmfleet.routing.token_handoff import offer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.admission_queue import AdmissionQueue
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_limits import Counted, Counting
    from warmfleet.routing.decider import Decider
    from warmfleet.routing.identifier import Identifier

logger = logging.getLogger("warmfleet.routing.pool_choice")

MOST_ASKED = 3  # pools that may be full before the request is refused
LONG_S = 1.0  # by which a turn may be dearer than the whole prompt at a worker of a pool that is away
ENOUGH = 4  # requests of this replica at each worker of a pool that is away, or as many as workers of full pools have


class PoolChoice:
    """Admits the jobs of one replica to a worker of whichever pool is best."""

    def __init__(
        self, queue: AdmissionQueue, decider: Decider, identifier: Identifier, counting: Counting, metrics: Metrics
    ) -> None:
        self._queue = queue
        self.decider = decider
        self.identifier = identifier
        self.counting = counting
        self.passed_over = cache(metrics.passed_over.labels)

    async def admit(self, job: Job, attempt: Attempt) -> tuple[Job, Decision]:
        """As ``AdmissionQueue.admit``; the job is then that of the chosen pool, and so is the attempt."""
        if not job.homes:
            return job, await self._queue.admit(job, attempt, self.decider.decide)
        choosing = _Choosing(self, job)
        decision = await self._queue.admit(job, attempt, choosing.decide)
        if attempt.noted is not None:
            attempt.noted.pool = attempt.pool.tag
        return choosing.job, decision

    async def decide(self, job: Job, attempt: Attempt) -> tuple[Job, Decision | Queued]:
        """As ``admit``, for a job that does not wait. Raises what ``Decider.decide`` raises."""
        if not job.homes:
            return job, await self.decider.decide(job, attempt, may_wait=False)
        choosing = _Choosing(self, job, must=False)
        answer = await choosing.decide(job, attempt, may_wait=False)
        if attempt.noted is not None:
            attempt.noted.pool = attempt.pool.tag
        return choosing.job, answer


class _Asked:
    """A pool that is asked, and its answer. ``error``: why it gave no answer, None while it has not failed."""

    __slots__ = ("answer", "attempt", "error", "job")

    def __init__(self, job: Job, attempt: Attempt) -> None:
        self.job = job
        self.attempt = attempt
        self.answer: Decision | Queued | None = None
        self.error: WarmfleetError | None = None

    async def ask(self, decider: Decider, *, may_wait: bool, displaces: bool = False) -> None:
        self.answer = None
        try:
            self.answer = await decider.decide(
                self.job, self.attempt, may_wait=may_wait, displaces=displaces, alone=False
            )
        except WarmfleetError as error:
            self.error = error

    @property
    def line(self) -> Queued | None:
        """The line in which the request has a ticket."""
        return self.answer if isinstance(self.answer, Queued) and self.answer.outcome == "queued" else None

    @property
    def offer(self) -> Offer | None:
        """What it costs here; None if the request got neither a worker nor a ticket."""
        answer, view = self.answer, self.job.pool.view
        if isinstance(answer, Decision):
            token_s = view.token_s_of(answer.worker_id)
            turn = turn_s(token_s * answer.wait_tokens, token_s * answer.prefill_tokens)
            return Offer(answer.cost_s, turn, answer.matched_tokens, view.token_s)
        line = self.line
        return None if line is None else Offer(None, line.turn_s, line.matched_tokens, view.token_s)


class _Choosing:
    """The choice of a pool for one attempt. ``job``: in the pool that was chosen last."""

    def __init__(self, choice: PoolChoice, job: Job, *, must: bool = True) -> None:
        """must: the request fails unless it gets a worker."""
        self.job = self._first = job
        self._choice = choice
        self._must = must
        #: Tag -> why. A pool that failed this attempt is asked by no other round: it may refuse this reservation, which
        #: was cancelled there.
        self._failed: dict[str, str] = {}
        self._jobs = {job.pool: job}  # as the workers of each pool that was asked have the job
        self._counted_over: set[str] = set()  # tags of home pools that were counted as passed over

    async def decide(self, job: Job, attempt: Attempt, *, may_wait: bool) -> Decision | Queued:  # noqa: ARG002
        """A worker of the best pool, or a place in its line. Raises as ``Decider.decide``.

        job: as it was before a pool was chosen.
        """
        attempt.several = True
        if attempt.state is not AttemptState.NEW:
            answer = await self._in_line(attempt, may_wait=may_wait)
            if answer is not None:
                return answer
        counted = await self._counted(attempt)
        asked: list[_Asked] = []
        left = self._candidates()
        while left:
            count = 1 if asked else at_once(left)
            asked += await self._ask(attempt, left[:count], may_wait=may_wait)
            if counted is not None:
                await counted.check()
            left = left[count:]
            _raise_refusal(asked)
            offers = [(one, offer) for one in asked if (offer := one.offer) is not None]
            if offers:
                chosen = _best(offers, self.job.pool.fleet.weights.stay)
                line = chosen.line
                idle = None if line is None else await self._worker_of_pool_away(attempt, chosen.job.pool, line)
                return idle or self._take(attempt, chosen, asked)
            if sum(one.answer is not None for one in asked) >= MOST_ASKED:
                break
        if any(isinstance(one.answer, Queued) for one in asked):
            return await self._all_full(attempt, asked, may_wait=may_wait)
        return await self._without_redis(attempt, asked)

    async def _all_full(self, attempt: Attempt, asked: Sequence[_Asked], *, may_wait: bool) -> Decision | Queued:
        """A worker of a pool that is away, or a place that another request leaves to this one, or else a refusal.

        Only now may the request displace another: before, a pool may have had a worker or a place for it.
        """
        full = [(one, one.answer) for one in asked if isinstance(one.answer, Queued)]
        idle = await self._worker_of_pool_away(attempt, full[0][0].job.pool, None)
        if idle is not None:
            return idle
        for one, _ in full if may_wait else ():
            await one.ask(self._choice.decider, may_wait=True, displaces=True)
            self._pass_over_failed([one])
            _raise_refusal([one])
            if one.offer is not None:
                return self._take(attempt, one, asked)
        refusing, refusal = full[0]
        attempt.take_over(refusing.attempt)  # so the log and the metrics name the pool that refuses the request
        return refusal

    async def _counted(self, attempt: Attempt) -> Counted | None:
        """Have the request counted for its client; None if that has no limits."""
        job = self._first
        if job.call.limits is not None and attempt.counted is None:
            begun = self._choice.counting.begin(
                job.pool.name, attempt.reservation, job.call.limits, job.prompt.prompt_tokens
            )
            attempt.counted = begun
            if begun.first:
                await begun.check_first()
        return attempt.counted

    async def _in_line(self, attempt: Attempt, *, may_wait: bool) -> Decision | Queued | None:
        """Ask again in the pool where the attempt has a ticket.

        None if its pool is away, or has no place left: the ticket was displaced, or expired and found the queue full.
        Then the request is decided as if it came now.
        """
        own = _Asked(self.job, attempt)
        if attempt.pool.degraded.asks_redis or attempt.keeps_place:
            await own.ask(self._choice.decider, may_wait=may_wait)
        if isinstance(own.answer, Decision):
            return self._stands(attempt, own.answer)
        if own.line is None:
            _raise_refusal([own])
            if own.answer is None:
                self._pass_over(attempt.pool, own.error)
            attempt.withdraw()
            return None
        others = [pool for pool in self._candidates()[:HOMES] if pool is not attempt.pool and not pool.draining]
        for other in await self._ask(attempt, others[:1], may_wait=False):
            offers = [(one, offer) for one in (own, other) if (offer := one.offer) is not None]
            if _best(offers, attempt.pool.fleet.weights.stay) is other:
                return self._take(attempt, other, (own, other))
        attempt.withdraw_others()
        return await self._worker_of_pool_away(attempt, attempt.pool, own.line) or own.line

    def _candidates(self) -> list[Pool]:
        """The pools that can be asked, in order; those with workers as of the last reading, if there are any."""
        reachable = [pool for pool in self._first.homes if pool.tag not in self._failed]
        reachable = [pool for pool in reachable if pool.degraded.asks_redis or self._note(pool, "away")]
        return [pool for pool in reachable if pool.usable or self._note(pool, "empty")] or reachable

    def _note(self, pool: Pool, reason: str) -> bool:
        """Count once that a home pool is passed over by this request; returns False."""
        if pool in self._first.homes[:HOMES] and pool.tag not in self._counted_over:
            self._counted_over.add(pool.tag)
            self._choice.passed_over(reason, pool.tag).inc()
            level = logging.INFO if reason == "empty" else logging.WARNING  # of an empty pool the readings tell
            logger.log(level, "%s is passed over, other pools of the model are asked: %s", pool.tag, reason)
        return False

    def _pass_over(self, pool: Pool, error: WarmfleetError | None) -> None:
        """Ask this pool no more for this attempt. error: why; None: it is known to be away."""
        reason = "no_worker" if isinstance(error, NoWorker) else "late" if isinstance(error, LatePool) else "away"
        self._failed[pool.tag] = reason
        self._note(pool, reason)

    async def _ask(self, attempt: Attempt, pools: Sequence[Pool], *, may_wait: bool) -> list[_Asked]:
        """Ask these pools at once. In a full queue the request takes nobody's place: others may have room for it."""
        asked = []
        for pool in pools:
            job = await self._at(pool)
            asked.append(_Asked(job, attempt.beside(pool, job.prompt.unable_workers)))
        if len(asked) == 1:
            await asked[0].ask(self._choice.decider, may_wait=may_wait)
        elif asked:
            await self._at_once(asked, may_wait=may_wait)
        self._pass_over_failed(asked)
        return asked

    def _pass_over_failed(self, asked: Sequence[_Asked]) -> None:
        for one in asked:
            if one.error is not None and not isinstance(one.error, CancelledReservation):
                self._pass_over(one.job.pool, one.error)

    async def _at_once(self, asked: Sequence[_Asked], *, may_wait: bool) -> None:
        """Ask them together. Once one has answered, the others may be late."""
        tasks = {asyncio.create_task(one.ask(self._choice.decider, may_wait=may_wait)): one for one in asked}
        waiting = set(tasks)
        try:
            while waiting and all(one.answer is None for one in asked):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = await late(waiting)
        finally:
            for task in waiting:
                task.cancel()
        for task, one in tasks.items():
            if task in waiting:
                one.error = LatePool()
                one.job.pool.degraded.failed(str(one.error))
            else:
                task.result()  # raises a bug of ours

    async def _at(self, pool: Pool) -> Job:
        """The job as the workers of this pool have it. It is identified once, however long it waits."""
        known, first = self._jobs.get(pool), self._first
        if known is not None:
            return known
        prompt = same_in(first.prompt, first.request, first.pool.view, pool.view)
        if prompt is not None:
            job = first._replace(pool=pool, prompt=prompt)
        else:
            identify = self._choice.identifier.identify
            prompt = await identify(pool, first.request, first.body, first.call.headers)
            job = first._replace(pool=pool, prompt=prompt, offer=offer(first.request, prompt))
        self._jobs[pool] = job
        return job

    def _take(self, attempt: Attempt, best: _Asked, asked: Sequence[_Asked]) -> Decision | Queued:
        """Let the best answer stand, and cancel what the other pools booked."""
        attempt.take_over(best.attempt)
        self.job = best.job
        if attempt.explanation:
            attempt.explanation = with_pools(attempt.explanation, attempt.pool.tag, map(_told, asked))
        if isinstance(best.answer, Decision):
            return self._stands(attempt, best.answer)
        ticket = cast("Queued", best.answer)
        if attempt.noted is not None:
            attempt.noted.queued(ticket.waiting, ticket.work_s)
        return ticket

    def _stands(self, attempt: Attempt, decision: Decision) -> Decision:
        if attempt.counted is not None:
            decision.use = attempt.counted.use
        self._choice.decider.keep(self.job, attempt, decision, self.job.pool.policy.name)
        return decision

    async def _without_redis(self, attempt: Attempt, asked: Sequence[_Asked]) -> Decision:
        """Choose among the workers of the last readings, of the first pool that has any.

        Raises NoWorker, and FleetUnavailable if no pool was ever read.
        """
        avoided = [worker for one in asked for worker in one.attempt.avoided]
        attempt.withdraw_others()
        if attempt.counted is not None:
            await attempt.counted.check()
        failure: WarmfleetError | None = None
        for pool in self._first.homes:
            answer = await self._known_last(attempt, pool)
            if isinstance(answer, Decision):
                return answer
            failure = answer.error if failure is None or isinstance(answer.error, NoWorker) else failure
            avoided += answer.attempt.avoided
        attempt.withdraw_others()
        attempt.avoided = tuple(dict.fromkeys(avoided))
        raise failure or NoWorker(f"`{self._first.pool.name}` has no pool.")

    async def _known_last(self, attempt: Attempt, pool: Pool) -> Decision | _Asked:
        """A worker of the last reading of this pool, else why there is none."""
        job = await self._at(pool)
        one = _Asked(job, attempt.beside(pool, job.prompt.unable_workers))
        reason = self._failed.get(pool.tag, "open")
        try:
            decision = await self._choice.decider.without_redis(job, one.attempt, reason)
        except (NoWorker, FleetUnavailable) as error:
            one.error = error
            return one
        attempt.take_over(one.attempt)
        self.job = job
        if attempt.counted is not None:
            decision.use = attempt.counted.use
        self._choice.decider.noted(attempt, decision, "", reason)
        return decision

    async def _worker_of_pool_away(self, attempt: Attempt, busy: Pool, line: Queued | None) -> Decision | None:
        """A worker of a pool that is away, for a request that would be refused or wait for long; None if there is none.

        busy: a pool that is full. line: where the request would wait, None if it is refused.
        """
        homes = self._first.homes
        pools = homes if line is None else [pool for pool in homes[:HOMES] if not pool.draining]
        for pool in pools:
            has_failed = pool.degraded.failing and self._failed.get(pool.tag) in ("away", "late")
            if not self._must or (pool.degraded.asks_redis and not has_failed):
                continue
            if line is not None and line.turn_s < LONG_S + self._first.prompt.prompt_tokens * pool.view.token_s:
                continue
            if _in_flight(pool, attempt.never) < max(ENOUGH, _in_flight(busy, ())):
                answer = await self._known_last(attempt, pool)
                if isinstance(answer, Decision):
                    return answer
        return None


def at_once(pools: Sequence[Pool]) -> int:
    """How many of these, which can be asked, are asked first: a draining one only if no other can serve."""
    return 1 if pools[-1 if len(pools) < HOMES else HOMES - 1].draining else HOMES


def _in_flight(pool: Pool, never: Sequence[str]) -> float:
    """Requests of this replica at each worker that may be chosen, as of the last reading; infinite without one."""
    workers = [one for one in pool.last_known.workers if one.routable and one.worker_id not in never]
    return pool.degraded.in_flight.total() / len(workers) if workers else float("inf")


def _raise_refusal(asked: Sequence[_Asked]) -> None:
    """Raise CancelledReservation if a pool did, unless the reservation was decided before in another."""
    if not any(isinstance(one.answer, Decision) and one.answer.outcome == "known" for one in asked):
        for one in asked:
            if isinstance(one.error, CancelledReservation):
                raise one.error


def _best(offers: Sequence[tuple[_Asked, Offer]], stay: float) -> _Asked:
    """The best offer, but a reservation that was decided before stays where it is."""
    for one, _ in offers:
        if isinstance(one.answer, Decision) and one.answer.outcome == "known":
            return one
    return offers[best([offer for _, offer in offers], stay)][0]


def _told(asked: _Asked) -> dict[str, object]:
    """One pool's answer, for people."""
    told: dict[str, object] = {"pool": asked.job.pool.tag}
    answer = asked.answer
    if isinstance(answer, Decision):
        told |= {"worker": answer.worker_id, "matched": answer.matched_tokens, "cost": answer.cost_s}
    elif answer is not None:
        told |= {"answer": answer.outcome, "matched": answer.matched_tokens, "turn": answer.turn_s}
    elif asked.error is not None:
        told["answer"] = asked.error.code
    return told
