"""A booking gives back exactly what it took, once, from every state."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone
from tests.support.polling import poll

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Decision, Hold, Queued, QueueLimits
from warmfleet.metrics import Metrics
from warmfleet.pools import open_reservations
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.pools.pool import Pool
from warmfleet.routing.booking import Booking, BookingState
from warmfleet.routing.settlements import Settlements
from warmfleet.routing.tickets import Tickets

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import Fleet, Moved, SessionEnd
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.fleet.connection.multiplexed import OnAnswer

NAME = "wf-0attempt"
DECISION = Decision(NAME, "booked", "w.0", "w", "http://w", 0, 10, False, False, 0.1, 0, False, 10, 20)


class Store(ConstantsAlone):
    """A stand-in for Redis that keeps settled outcomes and left tickets. ``away``: settling fails."""

    def __init__(self) -> None:
        super().__init__(limits=QueueLimits(1.0))
        self.settled: list[Outcome] = []
        self.left: list[str] = []
        self.away = False
        self.bookings = self

    def settle_later(
        self,
        reservation: str,
        outcome: Outcome,
        on_answer: OnAnswer,
        tokens: int = 0,
        shortfall: object = None,
        session: SessionEnd | None = None,
        moved: Moved | None = None,
    ) -> None:
        assert moved is None
        assert (reservation, tokens, shortfall, session) == (NAME, 0, None, None)
        asyncio.get_running_loop().call_soon(self._answer, outcome, on_answer)

    def _answer(self, outcome: Outcome, on_answer: OnAnswer) -> None:
        if self.away:
            on_answer(None, FleetUnavailable("away"))
            return
        self.settled.append(outcome)
        on_answer([b"SETTLED"], None)


class RecordedTickets(Tickets):
    def leave(self, pool: Pool, ticket: str) -> None:
        cast("Any", pool.fleet).left.append(ticket)

    def leave_line(self, pool: Pool, ticket: str, session: bytes) -> None:
        assert ticket == NAME
        cast("Any", pool.fleet).left.append(session.decode())


def begun() -> tuple[Booking, Settlements, Store]:
    store = Store()
    pool = Pool("m", cast("Fleet", store), DegradedMode(1.0))
    settlements = Settlements(RecordedTickets(), Metrics())
    return Booking(settlements, pool, IdentifiedPrompt((), 10, 20, "load"), NAME), settlements, store


def asked(booking: Booking) -> None:
    booking.asks()


def queued(booking: Booking) -> None:
    booking.asks()
    booking.queued(Queued("queued", 1, 0.5))


def held(booking: Booking) -> None:
    booking.asks()
    booking.queued(Queued("held", 0, 0.0, hold=Hold(b"session", 1, 2, 8.0, paused=False)))


def let_in_to_the_queue(booking: Booking) -> None:
    held(booking)
    queued(booking)


def refused(booking: Booking) -> None:
    booking.asks()
    booking.queued(Queued("full", 1, 0.5))


def limited(booking: Booking) -> None:
    booking.asks()
    booking.limited()


def limited_at_its_turn(booking: Booking) -> None:
    queued(booking)
    limited(booking)


def booked(booking: Booking) -> None:
    queued(booking)
    booking.asks()
    booking.booked(DECISION)


def asked_again(booking: Booking) -> None:
    queued(booking)
    booking.asks()
    assert booking.waits
    booking.asks()


def unanswered(booking: Booking) -> None:
    booking.asks()
    booking.unanswered()
    booking.chose_without_redis(DECISION)


def not_booked(booking: Booking) -> None:
    booking.asks()
    booking.not_booked()
    booking.chose_without_redis(DECISION)


def never_asked(booking: Booking) -> None:
    booking.chose_without_redis(DECISION)


@pytest.mark.parametrize(
    ("way", "state", "settled", "leaves"),
    [
        (lambda _: None, BookingState.NEW, [], False),
        (asked, BookingState.ASKED, ["finished"], True),
        (queued, BookingState.QUEUED, [], True),
        (held, BookingState.HELD, [], "session"),
        (let_in_to_the_queue, BookingState.QUEUED, [], True),
        (refused, BookingState.NEW, [], False),
        (limited, BookingState.NEW, [], False),
        (limited_at_its_turn, BookingState.QUEUED, [], True),
        (booked, BookingState.BOOKED, ["finished"], False),
        (asked_again, BookingState.ASKED, ["finished"], True),
        (unanswered, BookingState.QUEUED, ["cancelled"], True),
        (not_booked, BookingState.QUEUED, [], True),
        (never_asked, BookingState.NEW, [], False),
    ],
)
async def test_release_gives_back_what_was_taken_once(
    way: Callable[[Booking], None], state: BookingState, settled: list[str], leaves: bool | str
) -> None:
    booking, settlements, store = begun()
    way(booking)
    assert booking.state is state
    assert (NAME in booking.pool.reservations) == (state is BookingState.BOOKED)
    for _ in range(2):
        booking.release("finished")
        assert booking.state is BookingState.RELEASED
    await settlements.drained()
    assert store.settled == settled
    assert store.left == ([leaves if isinstance(leaves, str) else NAME] if leaves else [])
    assert len(booking.pool.reservations) == 0
    assert not booking.pool.degraded.in_flight


async def test_the_worker_is_told_only_a_reservation_that_is_booked() -> None:
    booking, settlements, _ = begun()
    booking.chose_without_redis(DECISION)
    assert (booking.id_at_engine("id", ended=True), booking.reservation_word) == ("unbooked.~id", "fallback")
    booking.release("finished")
    booking, settlements, _ = begun()
    booked(booking)
    assert (booking.id_at_engine("id", ended=False), booking.reservation_word) == (f"{NAME}.id", "booked")
    booking.release("finished")
    await settlements.drained()


async def test_the_prefill_is_given_back_at_the_first_token_and_not_after_the_end() -> None:
    booking, settlements, store = begun()
    booked(booking)
    booking.prefill_done()
    renewal = booking.pool.reservations.renewal(NAME)
    assert renewal is not None
    assert (renewal.prefill_tokens, renewal.decode_tokens, renewal.started) == (0, 20, True)
    booking.release("finished")
    booking.prefill_done()
    await settlements.drained()
    assert store.settled == ["started", "finished"]


async def test_a_prefill_of_whose_end_nobody_tells_is_given_back_when_it_is_due() -> None:
    booking, settlements, store = begun()
    booked(booking)
    booking.prefill_due_in(3_600.0)
    booking.prefill_due_in(0.0)
    await poll(lambda: store.settled == ["due"], 5, "its time is over")
    booking.prefill_done()
    booking.release("finished")
    await settlements.drained()
    assert store.settled == ["due", "finished"]


@pytest.mark.parametrize("ends", ["first byte", "end"])
async def test_no_clock_runs_on_for_a_prefill_that_is_done(ends: str) -> None:
    booking, settlements, store = begun()
    booked(booking)
    booking.prefill_due_in(0.0)
    timer = booking._due
    assert timer is not None
    if ends == "first byte":
        booking.prefill_done()
    booking.release("finished")
    assert timer.cancelled()
    await asyncio.sleep(0)
    await settlements.drained()
    assert store.settled == (["started", "finished"] if ends == "first byte" else ["finished"])


async def test_an_outcome_that_redis_does_not_take_is_kept() -> None:
    booking, settlements, store = begun()
    booked(booking)
    store.away = True
    booking.prefill_done()
    booking.release("failed")
    await settlements.drained()
    assert booking.pool.reservations.outcomes() == [(NAME, "failed")]
    booking.pool.reservations.outcome_taken(NAME)
    assert booking.pool.reservations.outcomes() == []


async def test_an_outcome_is_kept_no_longer_than_its_lease_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master of a removed pool may never come back; outcomes that wait for it would keep the pool forever."""
    monkeypatch.setattr(open_reservations, "KEPT_S", 0.0)
    booking, settlements, store = begun()
    booked(booking)
    store.away = True
    booking.release("failed")
    await settlements.drained()
    assert booking.pool.reservations.outcomes() == []


async def test_drained_waits_until_redis_has_taken_or_refused_every_outcome() -> None:
    booking, settlements, store = begun()
    booked(booking)
    answers: list[OnAnswer] = []

    def settle_later(_reservation: str, _outcome: Outcome, on_answer: OnAnswer, *_more: object) -> None:
        answers.append(on_answer)

    store.settle_later = settle_later  # type: ignore[method-assign, assignment]
    booking.prefill_done()
    booking.release("finished")
    drained = asyncio.ensure_future(settlements.drained())
    for on_answer in answers:
        await asyncio.sleep(0)
        assert not drained.done()
        on_answer([b"SETTLED"], None)
    await drained
    assert len(answers) == 2
