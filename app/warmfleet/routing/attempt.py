"""One attempt to serve a job at one worker: the lease, the ticket and the load that it takes.

``Attempt.release`` is the one place where all of these are given back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from warmfleet.fleet import Renewal, new_reservation
from warmfleet.fleet.reservations import Outcome, Told
from warmfleet.pools.stalled_requests import Try

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.engines.output_tokens import OutputTokens
    from warmfleet.engines.reported_usage import AnswerTail
    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet import Decision, Queued, Shortfall
    from warmfleet.metrics import Counter, Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_limits import Counted
    from warmfleet.routing.tickets import Tickets
    from warmfleet.tracing.request_record import TryRecord

logger = logging.getLogger("warmfleet.routing.attempt")


class AttemptState(Enum):
    """What Redis may hold of an attempt.

    ========  ==========================================================================================
    NEW       Nothing: Redis was not asked yet, or refused the request.
    ASKED     In doubt: a decision was asked for and Redis did not answer yet; it may hold a lease or a ticket.
    QUEUED    No lease; perhaps a ticket in the queue.
    BOOKED    A lease.
    RELEASED  Nothing that is still this attempt's: all of it was given back, or Redis is being told.
    ========  ==========================================================================================

    With several pools one more attempt is made in each that is asked (``beside``). What one of them got is taken over
    (``take_over``), the others are withdrawn; both end in RELEASED.

    =================  =================================  ====================================================
    method             from → to                          when
    =================  =================================  ====================================================
    ``asks``           NEW, QUEUED, ASKED → ASKED         a decision is asked for, first or when its turn came, or
                                                          once more after Redis did not answer one that waits
    ``booked``         ASKED → BOOKED                     a worker was chosen and its load was booked
    ``queued``         ASKED → QUEUED                     its worker has no room now; the request got a ticket
    ``refused``        ASKED → NEW                        the queue is full
    ``limited``        ASKED → as it was before           the client's key is at a limit; an earlier ticket may be left
    ``not_booked``     ASKED → QUEUED                     no worker can be chosen; an earlier ticket may be left
    ``unanswered``     ASKED → QUEUED                     Redis failed; the reservation is cancelled besides
    ``hand_over``      BOOKED → RELEASED                  a gateway keeps the lease, and settles it by itself
    ``withdraw``       every state → NEW                  another pool got the request, or is asked instead
    ``release``        every state → RELEASED             the attempt is over
    =================  =================================  ====================================================

    A worker that is chosen without Redis (``chose_without_redis``) changes no state: Redis holds what it held before.
    """

    NEW = auto()
    ASKED = auto()
    QUEUED = auto()
    BOOKED = auto()
    RELEASED = auto()


#: To look a member up at its class costs 0.1 us, and a request needs sixteen.
NEW, ASKED, QUEUED, BOOKED, RELEASED = AttemptState

#: The fields of an attempt that change when another pool gets the request (``take_over``).
OF_POOL = ("_before", "asked_at", "avoided", "decision", "explanation", "never", "pool", "record", "state")


class Attempts:
    """Begins the attempts of this replica, and tells Redis how they went."""

    def __init__(self, tickets: Tickets, metrics: Metrics) -> None:
        self.tickets = tickets
        self.settled: dict[Outcome, Counter] = {word: metrics.settled.labels(word) for word in get_args(Outcome)}
        self._settle_failures = metrics.settle_failures
        self._telling = 0  # outcomes that Redis has neither taken nor refused
        self._all_told = asyncio.Event()

    def begin(self, job: Job, failed_workers: tuple[str, ...], *, avoids_failing: bool, key: bytes = b"") -> Attempt:
        """A new attempt under a reservation of its own. The caller must ``release`` it in every case.

        failed_workers: workers that failed earlier attempts at this job. avoids_failing: see ``Attempt.excluded``.
        key: see ``new_reservation``.
        """
        prompt, limits = job.prompt, job.call.limits
        tag = "" if limits is None or job.homes else limits.tag  # of several pools one counts: routing/clients/counting
        reservation = new_reservation(prompt.prompt_count, exact=prompt.kind == "exact", key=key, client=tag)
        never = (*prompt.unable_workers, *failed_workers) if failed_workers else prompt.unable_workers
        attempt = Attempt(self, job.pool, reservation, never, avoids_failing=avoids_failing)
        attempt.noted = job.call.record.begin_try(reservation)
        return attempt

    def tell(
        self,
        pool: Pool,
        reservation: str,
        outcome: Told,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        noted: TryRecord | None = None,
    ) -> None:
        """Tell Redis an outcome, and wait for nothing. An outcome that it does not take is told by a background round,
        without the tokens and the shortfall. noted: gets the cached tokens, if the engine's plugin has reported them.

        Redis takes it before every decision that is asked for later, because all go over one connection.
        """
        self._telling += 1
        told = partial(self._told, pool, reservation, outcome, noted=noted)
        pool.fleet.tell(reservation, outcome, told, tokens, shortfall)

    def _told(
        self,
        pool: Pool,
        reservation: str,
        outcome: Told,
        answer: list[Any] | None,
        error: WarmfleetError | None,
        *,
        noted: TryRecord | None = None,
    ) -> None:
        self._telling -= 1
        if not self._telling:
            self._all_told.set()
        if error is None:
            if noted is not None and answer is not None and len(answer) > 1:
                noted.cached_tokens = answer[1]
            self.tickets.room_freed(pool)
            return
        self._settle_failures.inc()
        if outcome != "started" and outcome != "due":
            pool.reservations.keep_outcome(reservation, outcome)
        logger.info("settle %s: %s; a final outcome is sent again, and the lease expires by itself", outcome, error)

    def gateway_settled(self, pool: Pool, outcome: Outcome) -> None:
        """Redis took an outcome of a reservation that a gateway kept."""
        self.settled[outcome].inc()
        self.tickets.room_freed(pool)

    async def drained(self) -> None:
        """Return when Redis has taken or refused every outcome, and no ticket is left to give up."""
        while self._telling:
            self._all_told.clear()
            await self._all_told.wait()
        await self.tickets.drained()


class Attempt:
    """A worker's chance to serve a job, from before it is chosen until everything is given back.

    ``asked_at``: when its last decision was asked for (``time.perf_counter``). ``decision`` is None until a worker is
    chosen. ``never`` are workers that must not be chosen at all; ``avoided`` are other workers that failed a request a
    moment ago, which the last decision passed over. ``explanation`` explains the decision as JSON; empty if the client
    asked for none. ``record``: of the decision, for the decision log; None if it does not belong to the sample.

    ``several``: whether the model has several pools; ``pool`` is then the chosen one. ``on_first_byte`` is called
    before the client is answered; None unless two attempts race. ``output`` counts the tokens of the answer, for a
    client with limits only. ``counted``: the request as it counts for such a client, where the model has several pools.
    ``tail``: the end of an approximate worker's answer, and ``shortfall`` what that says it lacked of the prompt.
    ``noted``: the record of this try; None for an attempt beside another one.
    """

    __slots__ = (
        *OF_POOL, "_attempts", "_avoids_failing", "_beside", "_due", "counted", "on_first_byte", "output",
        "noted", "reservation", "several", "shortfall", "tail",
    )  # fmt: skip

    def __init__(
        self,
        attempts: Attempts,
        pool: Pool,
        reservation: str,
        never: tuple[str, ...] = (),
        *,
        avoids_failing: bool = False,
    ) -> None:
        self._attempts = attempts
        self._avoids_failing = avoids_failing
        self.pool = pool
        self.reservation = reservation
        self.never = never
        self.avoided: tuple[str, ...] = ()
        self._before = self.state = NEW
        self.asked_at = 0.0
        self.decision: Decision | None = None
        self.explanation = b""
        self.record: dict[str, Any] | None = None
        self.on_first_byte: Callable[[Attempt], None] | None = None
        self.output: OutputTokens | None = None
        self.tail: AnswerTail | None = None
        self.shortfall: Shortfall | None = None
        self.noted: TryRecord | None = None
        self.counted: Counted | None = None
        self.several = False
        self._due: asyncio.TimerHandle | None = None
        self._beside: tuple[Attempt, ...] = ()  # not yet taken over or withdrawn: they belong to this attempt

    # ------------------------------------------------ in several pools

    def beside(self, pool: Pool, unable: tuple[str, ...]) -> Attempt:
        """The same attempt in another pool. What it takes this attempt gives back, unless it is withdrawn before.

        unable: workers of that pool that cannot serve the request.
        """
        never = tuple(dict.fromkeys((*self.never, *unable)))
        other = Attempt(self._attempts, pool, self.reservation, never, avoids_failing=self._avoids_failing)
        self._beside = (*self._beside, other)
        return other

    def take_over(self, other: Attempt) -> None:
        """Become an attempt that was made ``beside`` this one; give back what this one and all others hold."""
        if self.state is not NEW:
            self.give_back("unsent", unserved=True)
        for name in OF_POOL:
            setattr(self, name, getattr(other, name))
        other.state, other.decision = RELEASED, None
        self.withdraw_others()

    def withdraw_others(self) -> None:
        """Give back what the attempts beside this one hold."""
        others, self._beside = self._beside, ()
        for other in others:
            other.give_back("unsent", unserved=True)

    def withdraw(self) -> None:
        """Give back all that this attempt holds, so that it may be made in another pool."""
        self.withdraw_others()
        self.give_back("unsent", unserved=True)
        self.state, self.decision, self.explanation = NEW, None, b""

    # ------------------------------------------------ what becomes of it

    def excluded(self) -> tuple[str, ...]:
        """Workers that the decision about to be asked for must not choose.

        These are ``never`` and, if ``avoids_failing`` was given, the workers that failed any request a moment ago.
        """
        avoided = self.pool.avoided() if self._avoids_failing else ()
        if not avoided:
            self.avoided = ()
            return self.never
        self.avoided = tuple(worker for worker in avoided if worker not in self.never)
        return (*self.never, *self.avoided)

    def asks(self) -> None:
        """A decision is asked for: until Redis answers, it may have booked the request or given it a ticket."""
        self._before, self.state = self.state, ASKED
        self.asked_at = time.perf_counter()

    @property
    def waits(self) -> bool:
        """Whether the decision that was asked for last is about a request that waited already."""
        return self._before is QUEUED or self._before is ASKED

    @property
    def keeps_place(self) -> bool:
        """Whether the request goes on waiting if Redis is not asked at this moment: it has a ticket, and Redis has not
        been silent for long.
        """
        return (self.state is QUEUED or self.state is ASKED) and not self.pool.degraded.silent

    def queued(self, ticket: Queued) -> None:
        """Redis' answer to the decision was a ticket: the worker that suits the request has no room, so it waits."""
        self.state = QUEUED
        if self.noted is not None:
            self.noted.queued(ticket.waiting, ticket.work_s)

    def refused(self) -> None:
        """Redis' answer was that the queue is full: the request got no ticket, and has none."""
        self.state = NEW

    def limited(self) -> None:
        """Redis' answer was that the client's key is at a limit. A ticket from before is left at the end."""
        self.state = self._before

    def not_booked(self) -> None:
        """Redis' answer to the decision was that no worker can be chosen."""
        self.state = QUEUED

    def unanswered(self) -> None:
        """Redis gave no answer. The reservation is cancelled, because Redis may have booked it or may book it late."""
        self.state = QUEUED
        self._attempts.tell(self.pool, self.reservation, "cancelled")

    def booked(self, decision: Decision, explanation: bytes = b"") -> None:
        """Redis' answer to the decision was a worker: this request's load is booked there, and renewed from now on."""
        self.state = BOOKED
        self.decision, self.explanation = decision, explanation
        self.pool.reservations.add(
            Renewal(self.reservation, decision.worker_id, decision.prefill_tokens, decision.decode_tokens)
        )
        self.pool.degraded.take(decision.worker_id)

    def chose_without_redis(self, decision: Decision) -> None:
        """A worker was chosen without Redis; only this replica counts the request."""
        self.decision = decision
        self.pool.degraded.take(decision.worker_id)

    # ------------------------------------------------ at the worker

    @property
    def owner(self) -> str:
        """The owner of this request's load, as the worker is told: the reservation, or ``unbooked`` if Redis booked
        none.

        The worker must report unbooked load as foreign, or else no decision would count it.
        """
        return self.reservation if self.state is BOOKED else "unbooked"

    @property
    def reservation_word(self) -> str:
        """The reservation in a word, for the client and the metrics: ``booked``, ``known`` or ``fallback``."""
        return self.decision.outcome if self.decision and self.state is BOOKED else "fallback"

    def sent(self, worker_id: str, response: EngineResponse, received_at: float) -> None:
        """The request is sent to the worker: watch for the worker falling silent. received_at: see ``Call``."""
        self.pool.tries.begin(self.reservation, Try(worker_id, response, received_at))

    def prefill_due_in(self, seconds: float) -> None:
        """Count the prefill as done after so many seconds, if the attempt lasts: nobody tells of its first token."""
        self._stop_clock()
        self._due = asyncio.get_running_loop().call_later(seconds, self.prefill_done, "due")

    def prefill_done(self, word: Literal["started", "due"] = "started") -> None:
        """The first token came: give the booked prefill back, once. No byte waits for that."""
        if self.pool.reservations.prefill_done(self.reservation):
            self._attempts.tell(self.pool, self.reservation, word)

    def _stop_clock(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def failed(self, error: WarmfleetError) -> None:
        """The worker failed, or its answer broke off: its record tells why."""
        if self.noted is not None:
            self.noted.failed(error)

    def worker_failed(self) -> None:
        """Let all requests avoid this attempt's worker for a moment."""
        if self.decision is not None:
            self.pool.avoid(self.decision.worker_id)

    # ------------------------------------------------ the end

    def hand_over(self) -> str | None:
        """Leave the lease to a gateway, so that this replica renews it no longer; returns the reservation.

        Returns None, and gives everything back, if Redis booked nothing.
        """
        if self.state is not BOOKED or self.decision is None:
            self.release("cancelled")
            return None
        self.state = RELEASED
        self.pool.reservations.remove(self.reservation)
        self.pool.degraded.give(self.decision.worker_id)
        return self.reservation if self.counted is None else self.counted.hand_over()

    def release(self, outcome: Outcome) -> None:
        """Give back everything that this attempt took; a second call does nothing.

        It never waits, so no cancellation can stop it half-way. Redis knows the end before another attempt is decided.
        """
        if self.state is RELEASED:
            return
        unserved = outcome == "failed"
        if self.several:
            self.withdraw_others()
            if self.counted is not None:
                unpaid = unserved or self.decision is None
                self.counted.end(None if unpaid else self.output.count if self.output is not None else 0)
        if self.give_back(outcome, unserved=unserved):
            self._attempts.settled[outcome].inc()
        if self.noted is not None:
            self.noted.end(outcome)

    def give_back(self, outcome: Outcome, *, unserved: bool) -> bool:
        """Give back what this attempt holds in its pool; returns whether Redis may have booked it.

        unserved: a client with limits does not pay for the prompt.
        """
        state, self.state = self.state, RELEASED
        if state is RELEASED:
            return False
        if self._due is not None:
            self._stop_clock()
        pool, reservation = self.pool, self.reservation
        pool.reservations.remove(reservation)
        pool.tries.end(reservation)
        if self.decision is not None:
            pool.degraded.give(self.decision.worker_id)
        if (state is ASKED or state is QUEUED) and pool.fleet.limits.max_engine_wait_s:
            self._attempts.tickets.leave(pool, reservation)
        if state is not BOOKED and state is not ASKED:
            return False
        tokens = 0 if self.output is None else self.output.count
        if unserved and self.decision is not None and self.decision.use is not None:
            tokens = -self.decision.prompt_tokens
        self._attempts.tell(pool, reservation, outcome, tokens, self.shortfall, self.noted)
        return True
