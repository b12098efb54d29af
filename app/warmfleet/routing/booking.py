"""A booking is the lease, the ticket and the load that one attempt holds in one pool.

Only ``Booking.release`` gives them back.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal

from warmfleet.fleet import Hint, Renewal, SessionEnd, prefill_leg
from warmfleet.pools.stalled_requests import Try
from warmfleet.prompt.response_ids import response_id
from warmfleet.protocol.wire import ENDED_MARK
from warmfleet.routing.prefill_booking import PrefillBooking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.engines.reported_usage import AnswerTail, Finish
    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet import Decision, Question, Queued, Shortfall
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.settlements import Settlements
    from warmfleet.tracing.request_record import TryRecord


class BookingState(Enum):
    """What Redis has of a booking, as far as this replica knows; in brackets the methods that set the state.

    NEW: nothing, because Redis was not asked yet, or the queue was full (``queued``). ASKED: perhaps a lease or a
    ticket, because a decision has no answer yet (``asks``). QUEUED: no lease, perhaps a ticket (``queued``,
    ``not_booked``, ``unanswered``). HELD: neither, but its session stands in the line (``queued``). BOOKED: a lease
    (``booked``). RELEASED: nothing more of this booking: all was given back, or this is being sent to Redis
    (``release``), or a gateway has the lease (``hand_over``).

    ``limited`` leads back to the state before ``asks``. A worker that is chosen without Redis (``chose_without_redis``)
    changes no state: Redis holds what it held before.
    """

    NEW = auto()
    ASKED = auto()
    QUEUED = auto()
    HELD = auto()
    BOOKED = auto()
    RELEASED = auto()


#: The members as names of this module, because a request reads them 16 times, and a look-up in the class takes 0.1 us.
NEW, ASKED, QUEUED, HELD, BOOKED, RELEASED = BookingState
UNSERVED = frozenset({"failed", "unsent"})  # outcomes after which the prompt does not count for a client with limits


class Booking:
    """A request's lease, ticket and load in one pool, from before a worker is chosen until everything is given back.

    ``prompt``: the prompt with this pool's token ids and blocks. ``never``: workers that must not be chosen at all;
    ``avoided``: other workers that failed a request a moment ago, which the last decision passed over. ``asked_at``:
    when the last decision was asked for (``time.perf_counter``); ``question``: its arguments; ``answer``, ``error``:
    its result. ``decision``: None until a worker is chosen. ``explanation``: the decision's explanation as
    JSON; empty if the client asked for none. ``rings``: workers in hash ring order, by policy, and ``log_line``: the
    line for the decision log; None if the decision is not logged. ``session``: the id by which Redis knows the session;
    empty if it told none. ``apart``: its time in the line is over, so the ledger has no say any more. ``prefill``: what
    a split request holds at the engine that computes its prompt; None for any other. ``may_split``: the last question
    allowed two engines.

    A field that was not set has the value of the class, which saves time.
    """

    state = _before = NEW
    asked_at = 0.0
    avoided: tuple[str, ...] = ()
    question: Question
    rings: Mapping[str, tuple[str, ...]] | None = None
    answer: Decision | Queued | None = None
    error: WarmfleetError | None = None
    decision: Decision | None = None
    explanation = b""
    log_line: dict[str, Any] | None = None
    session = b""
    apart = False
    prefill: PrefillBooking | None = None
    may_split = False
    _due: asyncio.TimerHandle | None = None

    def __init__(
        self,
        settlements: Settlements,
        pool: Pool,
        prompt: IdentifiedPrompt,
        reservation: str,
        never: tuple[str, ...] = (),
        *,
        avoids_failing: bool = False,
    ) -> None:
        self._settlements = settlements
        self.pool = pool
        self.prompt = prompt
        self.reservation = reservation
        self.never = never
        self._avoids_failing = avoids_failing

    # ------------------------------------------------ the decision

    def excluded(self) -> tuple[str, ...]:
        """Return the workers that the next decision must not choose, and set ``avoided``.

        These are ``never`` and, if ``avoids_failing`` was given, the workers that failed any request a moment ago.
        """
        avoided = self.pool.avoided() if self._avoids_failing else ()
        if not avoided:
            self.avoided = ()
            return self.never
        self.avoided = tuple(worker for worker in avoided if worker not in self.never)
        return (*self.never, *self.avoided)

    def asks(self) -> None:
        """Note that Redis is asked for a decision: until it answers, the request may be booked or have a ticket."""
        self._before, self.state = self.state, ASKED
        self.asked_at = time.perf_counter()

    @property
    def waits(self) -> bool:
        """Whether the request waited already before its last decision."""
        before = self._before
        return before is QUEUED or before is ASKED or before is HELD

    @property
    def keeps_place(self) -> bool:
        """Whether the request may go on waiting while Redis does not answer: it may have a ticket, or a session in the
        line, and Redis has been silent only for a moment.
        """
        state = self.state
        return (state is QUEUED or state is ASKED or state is HELD) and not self.pool.degraded.silent

    def queued(self, answer: Queued) -> None:
        """Note that the worker that suits the request has no room, or the caches have none for its session: the request
        has a ticket, a session in the line, or neither if the queue is full.
        """
        if answer.hold is not None:
            self.state, self.session = HELD, answer.hold.session
        else:
            self.state, self.session = QUEUED if answer.outcome == "queued" else NEW, answer.session

    def leave_line(self) -> None:
        """Wait for a place no longer: the request goes on without the ledger."""
        self._settlements.tickets.leave_line(self.pool, self.reservation, self.session)
        self.state, self.apart = QUEUED, True

    def limited(self) -> None:
        """Note that a limit of the client's key refused the request. ``release`` gives up its ticket, if any."""
        self.state = self._before

    def not_booked(self) -> None:
        """Note that Redis found no worker to choose."""
        self.state = QUEUED

    def unanswered(self) -> None:
        """Note that Redis gave no answer, and cancel the reservation, because Redis may have booked it or still may."""
        self.state = QUEUED
        self._settlements.settle_later(self.pool, self.reservation, "cancelled")
        self._cancel_prefill()

    def _cancel_prefill(self) -> None:
        """Cancel what Redis may have booked, or still may, at an engine that only computes the prompt."""
        if self.may_split:
            self._settlements.settle_later(self.pool, prefill_leg(self.reservation), "cancelled")

    def raise_error(self) -> None:
        """Raise the error of the last question, and keep it no longer: its traceback would hold this booking's frames,
        with the body, until the next full collection of garbage.
        """
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def booked(self, decision: Decision) -> None:
        """Note that Redis booked the request's load at a worker, and renew the lease from now on."""
        self.state = BOOKED
        self.decision, self.session = decision, decision.session
        self.pool.reservations.add(
            Renewal(self.reservation, decision.worker_id, decision.prefill_tokens, decision.decode_tokens)
        )
        self.pool.degraded.take(decision.worker_id)
        if decision.prefill is not None:
            self.prefill = PrefillBooking(self._settlements, self.pool, decision.prefill)

    def chose_without_redis(self, decision: Decision) -> None:
        """Note a worker that was chosen without Redis; only this replica counts the request."""
        self.decision = decision
        self.pool.degraded.take(decision.worker_id)

    # ------------------------------------------------ at the worker

    def id_at_engine(self, request_id: str, *, ended: bool) -> str:
        """Return the X-Request-Id for an engine. ended: the conversation ends with this request.

        The id begins with the reservation, by which the worker plugin reports the load, or with ``unbooked`` if Redis
        booked none. The plugin reports the load of unbooked requests apart (foreign), so that decisions count it.
        """
        owner = self.reservation if self.state is BOOKED else "unbooked"
        return f"{owner}.{ENDED_MARK if ended else ''}{request_id}"

    def response_id(self, worker_id: str, *, ended: bool) -> str:
        """Return the id for an answer of /v1/responses, which the worker keeps. ended: as in ``id_at_engine``."""
        return response_id(self.reservation, worker_id, booked=self.state is BOOKED, ended=ended)

    @property
    def reservation_word(self) -> str:
        """The reservation in a word, for the client and the metrics: ``booked``, ``known`` or ``fallback``."""
        return self.decision.outcome if self.decision and self.state is BOOKED else "fallback"

    def sent(self, worker_id: str, response: EngineResponse, received_at: float) -> None:
        """Note that the request is sent, and watch whether its worker falls silent. received_at: see ``Call``."""
        self.pool.tries.begin(self.reservation, Try(worker_id, response, received_at))

    def prefill_due_in(self, seconds: float) -> None:
        """After ``seconds``, count the prefill as done if the attempt still runs: its engine reports no first token."""
        self._stop_clock()
        self._due = asyncio.get_running_loop().call_later(seconds, self.prefill_done, "due")

    def prefill_done(self, word: Literal["started", "due"] = "started") -> None:
        """Give the booked prefill back, because the first token came or was due. Only the first call does anything."""
        if self.pool.reservations.prefill_done(self.reservation):
            self._settlements.settle_later(self.pool, self.reservation, word)

    def _stop_clock(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def worker_failed(self) -> None:
        """Let all requests avoid this booking's worker for a moment."""
        if self.decision is not None:
            self.pool.avoid(self.decision.worker_id)

    # ------------------------------------------------ the end

    def hand_over(self) -> bool:
        """Leave the lease to a gateway, so that this replica renews it no longer. False if Redis booked nothing."""
        if self.state is not BOOKED or self.decision is None:
            return False
        self.state = RELEASED
        self.pool.reservations.remove(self.reservation)
        self.pool.degraded.give(self.decision.worker_id)
        return True

    def release(
        self,
        outcome: Outcome,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        record: TryRecord | None = None,
        tail: AnswerTail | None = None,
    ) -> bool:
        """Give back everything that is held in this pool; returns whether Redis may have booked the request.

        A release never waits, so no cancellation can stop it half-way. A second call does nothing. Redis gets the
        outcome before the next decision. tokens: number in the answer, for a client with limits. tail: its end, for the
        ledger of sessions.
        """
        state, self.state = self.state, RELEASED
        decision = self.decision
        if state is RELEASED or (state is NEW and decision is None):
            return False
        if self._due is not None:
            self._stop_clock()
        pool, reservation = self.pool, self.reservation
        pool.reservations.remove(reservation)
        pool.tries.end(reservation)
        if decision is not None:
            pool.degraded.give(decision.worker_id)
            if decision.use is not None and outcome in UNSERVED:
                tokens = -decision.prompt_tokens
        if (state is ASKED or state is QUEUED) and pool.fleet.constants.limits.max_engine_wait_s:
            self._settlements.tickets.leave(pool, reservation)
        if state is HELD or (state is ASKED and self._before is HELD):
            self._settlements.tickets.leave_line(pool, reservation, self.session)
        if state is not BOOKED and state is not ASKED:
            return False
        if self.prefill is not None:
            self.prefill.release(outcome)
            record = None  # the engine that computed the prompt tells what it had cached
        elif state is ASKED:
            self._cancel_prefill()
        ended: SessionEnd | None = None
        if decision is not None and decision.session:
            ended = end_of(self.question.session, decision, outcome, tail, 0 if record is None else record.chunks)
        self._settlements.settle_later(pool, reservation, outcome, tokens, shortfall, record, ended)
        return True


def end_of(session: bytes, decision: Decision, outcome: Outcome, tail: AnswerTail | None, chunks: int) -> SessionEnd:
    """Return how a request of a session ended. If the engine never got it, the session needs no place in this pool.

    session: as in the question. tail: the end of the answer, if any came. chunks: pieces of the answer, which stand for
    its tokens if the engine does not tell them.
    """
    finish: Finish = "?" if tail is None else tail.finish()
    if outcome == "unsent" or (outcome == "finished" and session[0] & Hint.ENDS):
        finish = "e"
    told = 0 if tail is None else tail.context_tokens()
    return SessionEnd(decision.session, finish, told or decision.prompt_tokens + chunks)
