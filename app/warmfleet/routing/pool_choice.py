"""Chooses the pool of a job, and in it the worker.

A model's only pool is asked. Of several pools the two home pools of the prompt are asked at once. Each pool decides
among its own workers, and books; the cheaper booking is used, the other is cancelled before the request is sent.
Pools that are away or without a worker are passed over; if both home pools are full, one more pool is asked. A worker
is chosen without Redis if no pool can be asked, or if all pools that can be asked are full, as the workers of a pool
whose Redis is away may be idle. A request takes the place of another in a full queue only if all asked pools are full.

The answers are compared by a price in seconds. If each asked pool offers a worker with room, the price is the worker's
cost, plus the cost of moving a session away from blocks that only another pool's worker holds (by the weight ``stay``):
lua/decide.lua adds this cost among the workers of one pool, but only the router can compare pools.

If a pool lets the request wait for the worker that holds its first blocks, the price in all pools is the seconds to
compute what the worker lacks of the prompt, plus those by which the worker is later than expected, plus half of the
wait for it. (Inside a pool, the weight of the wait depends on how busy the engines are, lua/parts/shared/turns.lua.) A
pool that lets the request wait is not worse for that: its worker with the wait is cheaper than its free workers. While
the request waits, its other home pool is asked again now and then.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from warmfleet.errors import CancelledReservation, FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.fleet import Decision, Queued
from warmfleet.pools.identified_prompt import same_in
from warmfleet.pools.late_pools import LatePool, late
from warmfleet.routing.booking import BookingState
from warmfleet.routing.decider import NO_WORKER
from warmfleet.routing.explain_header import with_more

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from warmfleet.metrics import Metrics
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.booking import Booking
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_limits import Counted, Counting
    from warmfleet.routing.decider import Decider
    from warmfleet.routing.identifier import Identifier

logger = logging.getLogger("warmfleet.routing.pool_choice")

HOMES = 2  # number of a prompt's home pools: the first in its order of pools, asked at the same time
MOST_ASKED = 3  # most pools that are asked: if all of them are full, the request is refused
LONG_S = 1.0  # if a turn's price exceeds the whole prompt's prefill by this, a pool whose Redis is away is used instead
ENOUGH = 4  # a pool that is away gets a request only below so many per worker, or below the busy pool's number
TIE_S = 0.005  # least difference of two costs that counts, as inside a pool (lua/parts/decide/cost_rule.lua)
WAIT_PRICE = 0.5  # a second of waiting counts as half a second of prefill, as in lua/parts/decide/wait_turn.lua


class Offer(NamedTuple):
    """A pool's answer. cost_s: cost at the chosen worker, wait included; None if the request must wait in the queue.

    turn_s, matched_tokens: price (by ``turn_s``) and cached tokens of the prompt, both at the worker that
    the request gets or waits for. token_s: seconds of prefill of one token in this pool.
    """

    cost_s: float | None
    turn_s: float
    matched_tokens: int
    token_s: float


def turn_s(wait_s: float, compute_s: float) -> float:
    """Return the price of a place at a worker. wait_s: time until the prefill starts. compute_s: time that it takes."""
    return WAIT_PRICE * wait_s + compute_s


def prices(offers: Sequence[Offer], stay: float) -> list[float]:
    """Return the price of each offer. stay: factor on the prefill of tokens that only another pool caches."""
    most = max(offer.matched_tokens for offer in offers)
    found: list[float] = []
    for offer in offers:
        if offer.cost_s is None:
            return [each.turn_s for each in offers]
        found.append(offer.cost_s + (stay - 1) * (most - offer.matched_tokens) * offer.token_s)
    return found


def best(offers: Sequence[Offer], stay: float) -> int:
    """Return the index of the cheapest offer; of equal ones the offer with the longer match, then one with room."""
    priced = prices(offers, stay)
    lowest = min(priced)
    tied = [number for number, price in enumerate(priced) if price <= lowest + TIE_S]
    return max(tied, key=lambda number: (offers[number].matched_tokens, offers[number].cost_s is not None))


class PoolChoice:
    """Chooses the pools and workers of one replica's jobs."""

    def __init__(self, decider: Decider, identifier: Identifier, counting: Counting, metrics: Metrics) -> None:
        self.decider = decider
        self.identifier = identifier
        self.counting = counting
        self.passed_over = cache(metrics.passed_over.labels)

    def choose(
        self, job: Job, attempt: Attempt, *, may_wait: bool, must: bool = True
    ) -> Coroutine[Any, Any, Decision | Queued]:
        """Choose a worker of the best pool, or take a ticket in its queue, and set ``attempt.chosen``.

        may_wait, and what is raised: see ``Decider.decide``. must: the request fails if it gets no worker.
        """
        if not job.several:
            return self.decider.decide(job, attempt, may_wait=may_wait)
        if attempt.comparison is None:
            attempt.comparison = _Comparison(self, job, attempt, must=must)
        return attempt.comparison.choose(may_wait=may_wait)


class _Comparison:
    """The choice among a model's pools for one attempt. It remembers failed pools while the attempt waits."""

    def __init__(self, choice: PoolChoice, job: Job, attempt: Attempt, *, must: bool) -> None:
        self._choice = choice
        self._job = job
        self._attempt = attempt
        self._must = must
        #: Tag of a failed pool -> reason. The pool is not asked again: the reservation was cancelled there.
        self._failed: dict[str, str] = {}
        self._prompts = {job.pool: job.prompt}  # asked pool -> the prompt with the token ids of its tokenizer
        self._counted_over: set[str] = set()  # tags of HOMES that the metric ``passed_over`` has counted

    async def choose(self, *, may_wait: bool) -> Decision | Queued:
        """See ``PoolChoice.choose``."""
        if self._attempt.chosen.state is not BookingState.NEW:
            answer = await self._in_line(may_wait=may_wait)
            if answer is not None:
                return answer
        counted = await self._counted()
        asked: list[Booking] = []
        left = self._candidates()
        while left:
            count = 1 if asked else at_once(left)
            asked += await self._ask(left[:count], may_wait=may_wait)
            if counted is not None:
                await counted.check()
            left = left[count:]
            _raise_refusal(asked)
            cheapest = self._cheapest(asked)
            if cheapest is not None:
                line = _line(cheapest)
                idle = None if line is None else await self._worker_of_pool_away(cheapest.pool, line)
                return idle or self._take(cheapest, asked)
            if sum(booking.answer is not None for booking in asked) >= MOST_ASKED:
                break
        if any(isinstance(booking.answer, Queued) for booking in asked):
            return await self._all_full(asked, may_wait=may_wait)
        return await self._without_redis(asked)

    async def _all_full(self, asked: Sequence[Booking], *, may_wait: bool) -> Decision | Queued:
        """Take a worker of a pool that is away, or displace another request in a queue, or else refuse the request.

        The request may displace another only here, once no asked pool has a worker or a free place for it.
        """
        full = [(booking, booking.answer) for booking in asked if isinstance(booking.answer, Queued)]
        refusing, refusal = full[0]
        idle = await self._worker_of_pool_away(refusing.pool, None)
        if idle is not None:
            return idle
        for booking, _ in full if may_wait else ():
            await self._choice.decider.ask(self._job, booking, may_wait=True, displaces=True)
            self._pass_over_failed([booking])
            _raise_refusal([booking])
            if _offer(booking) is not None:
                return self._take(booking, asked)
        self._attempt.choose(refusing)  # so that the log and the metrics name the pool that refuses the request
        return refusal

    async def _counted(self) -> Counted | None:
        """Have the request counted for its client; return None if the client has no limits."""
        job, attempt = self._job, self._attempt
        if job.call.limits is not None and attempt.counted is None:
            begun = self._choice.counting.begin(
                job.pool.name, attempt.reservation, job.call.limits, job.prompt.prompt_tokens
            )
            attempt.counted = begun
            if begun.first:
                await begun.check_first()
        return attempt.counted

    async def _in_line(self, *, may_wait: bool) -> Decision | Queued | None:
        """Ask again in the pool where the attempt has a ticket; return the worker, the ticket or None.

        None if that pool is away, or the ticket is gone (displaced, or expired) and the queue is full. Then the request
        is decided like a new one.
        """
        own = self._attempt.chosen
        await self._choice.decider.ask(self._job, own, may_wait=may_wait)
        if isinstance(own.answer, Decision):
            return self._stands(own.answer)
        line = _line(own)
        if line is None:
            _raise_refusal([own])
            if own.answer is None:
                self._pass_over(own.pool, own.error)
            return None
        if line.hold is not None:  # another pool would be asked without the session
            return line
        others = [pool for pool in self._candidates()[:HOMES] if pool is not own.pool and not pool.draining]
        asked = [own, *await self._ask(others[:1], may_wait=False)]
        cheapest = self._cheapest(asked)
        if cheapest is not None and cheapest is not own:
            return self._take(cheapest, asked)
        self._attempt.choose(own)
        return await self._worker_of_pool_away(own.pool, line) or line

    def _candidates(self) -> list[Pool]:
        """Return the pools that can be asked, in order; if the last readings found any usable pools, only these."""
        reachable = [pool for pool in self._job.pools if pool.tag not in self._failed]
        reachable = [pool for pool in reachable if pool.degraded.asks_redis or self._note(pool, "away")]
        return [pool for pool in reachable if pool.usable or self._note(pool, "empty")] or reachable

    def _note(self, pool: Pool, reason: str) -> bool:
        """Count in the metrics, once a request, that one of its HOMES is not asked; returns False."""
        if pool in self._job.pools[:HOMES] and pool.tag not in self._counted_over:
            self._counted_over.add(pool.tag)
            self._choice.passed_over(reason, pool.tag).inc()
            level = logging.INFO if reason == "empty" else logging.WARNING  # ``waiting_models`` logs empty pools
            logger.log(level, "%s is passed over, other pools of the model are asked: %s", pool.tag, reason)
        return False

    def _pass_over(self, pool: Pool, error: WarmfleetError | None) -> None:
        """Exclude this pool from this attempt. error: the reason; None: the pool's Redis is away."""
        reason = NO_WORKER if isinstance(error, NoWorker) else "late" if isinstance(error, LatePool) else "away"
        self._failed[pool.tag] = reason
        self._note(pool, reason)

    async def _ask(self, pools: Sequence[Pool], *, may_wait: bool) -> list[Booking]:
        """Ask these pools at once. In a full queue no other request is displaced: another pool may have room."""
        asked = [self._attempt.book(pool, await self._prompt_in(pool)) for pool in pools]
        if len(asked) == 1:
            await self._choice.decider.ask(self._job, asked[0], may_wait=may_wait)
        elif asked:
            await self._at_once(asked, may_wait=may_wait)
        self._pass_over_failed(asked)
        return asked

    def _pass_over_failed(self, asked: Sequence[Booking]) -> None:
        for booking in asked:
            if booking.error is not None and not isinstance(booking.error, CancelledReservation):
                self._pass_over(booking.pool, booking.error)

    async def _at_once(self, asked: Sequence[Booking], *, may_wait: bool) -> None:
        """Ask these pools together. Once a pool has answered, the others get little more time (``late_pools``)."""
        ask = self._choice.decider.ask
        tasks = {asyncio.create_task(ask(self._job, booking, may_wait=may_wait)): booking for booking in asked}
        waiting = set(tasks)
        try:
            while waiting and all(booking.answer is None for booking in asked):
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = await late(waiting)
        finally:
            for task in waiting:
                task.cancel()
        for task, booking in tasks.items():
            if task in waiting:
                booking.error = LatePool()
                booking.pool.degraded.failed(str(booking.error))
            else:
                task.result()  # raises only after a bug: expected errors are in the booking

    async def _prompt_in(self, pool: Pool) -> IdentifiedPrompt:
        """Return the prompt as identified for this pool's workers; it is identified once per attempt."""
        prompt, job = self._prompts.get(pool), self._job
        if prompt is None:
            prompt = same_in(job.prompt, job.request, job.pool.view, pool.view)
        if prompt is None:
            prompt = await self._choice.identifier.identify(pool, job.request, job.body, job.call.headers)
        self._prompts[pool] = prompt
        return prompt

    def _cheapest(self, asked: Sequence[Booking]) -> Booking | None:
        """Return the best offer, or the offer of the pool that has the reservation already; None without any offer."""
        offers = {booking: offer for booking in asked if (offer := _offer(booking)) is not None}
        for booking in offers:
            if isinstance(booking.answer, Decision) and booking.answer.outcome == "known":
                return booking
        stay = self._attempt.chosen.pool.fleet.constants.weights.stay
        return [*offers][best([*offers.values()], stay)] if offers else None

    def _take(self, cheapest: Booking, asked: Sequence[Booking]) -> Decision | Queued:
        """Use the best answer, and cancel the bookings of the other pools."""
        self._attempt.choose(cheapest)
        if cheapest.explanation:
            more = {"pool": cheapest.pool.tag, "pools": [*map(_in_words, asked)]}
            cheapest.explanation = with_more(cheapest.explanation, more)
        if isinstance(cheapest.answer, Decision):
            return self._stands(cheapest.answer)
        line = cast("Queued", cheapest.answer)
        if line.hold is None:
            self._attempt.record.queued(line.waiting, line.work_s)
        return line

    def _stands(self, decision: Decision) -> Decision:
        self._choice.decider.keep(self._job, self._attempt, decision)
        return self._served(decision)

    def _served(self, decision: Decision) -> Decision:
        attempt = self._attempt
        attempt.record.pool = attempt.chosen.pool.tag
        if attempt.counted is not None:
            decision.use = attempt.counted.use
        return decision

    async def _without_redis(self, asked: Sequence[Booking]) -> Decision:
        """Choose among the last known workers of the first pool that has any.

        Raises NoWorker, and FleetUnavailable if no pool was ever read.
        """
        for booking in asked:
            booking.release("unsent")
        if self._attempt.counted is not None:
            await self._attempt.counted.check()
        failure: WarmfleetError | None = None
        for pool in self._job.pools:
            answer = await self._known_last(pool)
            if isinstance(answer, Decision):
                return answer
            failure = answer if failure is None or isinstance(answer, NoWorker) else failure
        raise failure or NoWorker(f"`{self._job.pool.name}` has no pool.")

    async def _known_last(self, pool: Pool) -> Decision | WarmfleetError:
        """Choose among the last known workers of this pool; return the error if there is none."""
        booking, reason = self._attempt.book(pool, await self._prompt_in(pool)), self._failed.get(pool.tag, "open")
        try:
            decision = await self._choice.decider.without_redis(self._job, self._attempt, booking, reason)
        except (NoWorker, FleetUnavailable) as error:
            return error
        return self._served(decision)

    async def _worker_of_pool_away(self, busy: Pool, line: Queued | None) -> Decision | None:
        """Find a worker of a pool that is away, for a request that would be refused or wait for long, else None.

        busy: the pool that is full. line: the ticket with which the request would wait; None if it is refused.
        """
        homes, never = self._job.pools, self._attempt.chosen.never
        pools = homes if line is None else [pool for pool in homes[:HOMES] if not pool.draining]
        for pool in pools:
            has_failed = pool.degraded.failing and self._failed.get(pool.tag) in ("away", "late")
            if not self._must or (pool.degraded.asks_redis and not has_failed):
                continue
            if line is not None and line.turn_s < LONG_S + self._job.prompt.prompt_tokens * pool.view.token_s:
                continue
            if _in_flight(pool, never) < max(ENOUGH, _in_flight(busy, ())):
                answer = await self._known_last(pool)
                if isinstance(answer, Decision):
                    return answer
        return None


def at_once(pools: Sequence[Pool]) -> int:
    """Return how many of these pools to ask first: two, or one if the second is draining or missing."""
    return 1 if pools[-1 if len(pools) < HOMES else HOMES - 1].draining else HOMES


def _in_flight(pool: Pool, never: Sequence[str]) -> float:
    """Return this replica's requests per last known worker that may be chosen; infinite without such a worker."""
    workers = [worker for worker in pool.last_known.workers if worker.routable and worker.worker_id not in never]
    return pool.degraded.in_flight.total() / len(workers) if workers else float("inf")


def _raise_refusal(asked: Sequence[Booking]) -> None:
    """Raise CancelledReservation if a pool did, unless another pool had booked the reservation before."""
    if not any(isinstance(booking.answer, Decision) and booking.answer.outcome == "known" for booking in asked):
        for booking in asked:
            if isinstance(booking.error, CancelledReservation):
                booking.raise_error()


def _line(booking: Booking) -> Queued | None:
    """Return the answer that says that the request has a ticket, or that its session is held; None without either."""
    answer = booking.answer
    return answer if isinstance(answer, Queued) and answer.outcome in ("queued", "held") else None


def _offer(booking: Booking) -> Offer | None:
    """Return the offer of a booking's pool; None if the request got neither a worker nor a ticket there."""
    answer, view = booking.answer, booking.pool.view
    if isinstance(answer, Decision):
        token_s = view.token_s_of(answer.worker_id)
        turn = turn_s(token_s * answer.wait_tokens, token_s * answer.prefill_tokens)
        return Offer(answer.cost_s, turn, answer.reused_tokens, view.token_s)
    line = _line(booking)
    return None if line is None else Offer(None, line.turn_s, line.matched_tokens, view.token_s)


def _in_words(booking: Booking) -> dict[str, object]:
    """Return a pool's answer in words, for logs and explanations."""
    words: dict[str, object] = {"pool": booking.pool.tag}
    answer = booking.answer
    if isinstance(answer, Decision):
        words |= {"worker": answer.worker_id, "matched": answer.reused_tokens, "cost": answer.cost_s}
    elif answer is not None:
        words |= {"answer": answer.outcome, "matched": answer.matched_tokens, "turn": answer.turn_s}
    elif booking.error is not None:
        words["answer"] = booking.error.code
    return words
