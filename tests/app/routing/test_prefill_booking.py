"""What is booked at a prefill engine is given back as far as its step has come, once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.constants_alone import ConstantsAlone

from warmfleet.fleet import Decision, LoadRow, Moved, PrefillLeg, WorkerState, WorkerView, prefill_leg
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import View
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.pools.pool import Pool
from warmfleet.routing.booking import Booking
from warmfleet.routing.settlements import Settlements
from warmfleet.routing.tickets import Tickets
from warmfleet.tracing.request_record import TryRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.fleet import Fleet

NAME = f"wf-0{'a' * 21}"
LEG = prefill_leg(NAME)
ENGINE = PrefillLeg(LEG, "p.0", "p", "http://p", 0, False, 0, 90, 90, False, False, True, 0, 0.0, "")
DECISION = Decision(
    NAME, "booked", "d.0", "d", "http://d", 10, 100, False, False, 0.1, 0, False, 0, 110, prefill=ENGINE
)


class Store(ConstantsAlone):
    """Keeps what is settled."""

    def __init__(self) -> None:
        super().__init__()
        self.settled: list[tuple[str, str]] = []
        self.moved: list[Moved] = []
        self.bookings = self

    def settle_later(self, reservation: str, outcome: str, on_answer: Callable[..., None], *more: Any) -> None:
        self.settled.append((reservation, outcome))
        self.moved += [each for each in more if isinstance(each, Moved)]
        asyncio.get_running_loop().call_soon(on_answer, [b"SETTLED"], None)


def booked() -> tuple[Booking, Store]:
    store = Store()
    pool = Pool("m", cast("Fleet", store), DegradedMode(1.0))
    row = LoadRow(slot=7)
    pool.view = View((WorkerView("d.0", {}, None, row, 0.0, WorkerState.PROVEN, "proven", "http://d", ["m"]),))
    booking = Booking(Settlements(Tickets(), Metrics()), pool, IdentifiedPrompt((), 100, 110, "exact"), NAME)
    booking.may_split = True
    booking.asks()
    booking.booked(DECISION)
    assert {renewal.reservation for renewal in pool.reservations.renewals()} == {NAME, LEG}
    assert pool.degraded.in_flight == {"p.0": 1, "d.0": 1}
    return booking, store


def advance(booking: Booking, steps: int) -> None:
    assert booking.prefill is not None
    if steps > 0:
        booking.prefill.sent(cast("EngineResponse", SimpleNamespace()), 0.0)
    if steps > 1:
        booking.prefill.answered()
    if steps > 2:
        booking.prefill.begun()
        booking.prefill.taken(DECISION, TryRecord(), streams=True)


CASES = {
    (0, "unsent"): ["unsent"],
    (0, "cancelled"): ["cancelled"],
    (1, "failed"): ["failed"],
    (1, "cancelled"): ["cancelled"],
    (2, "failed"): ["started"],  # the rest expires: perhaps nobody frees the blocks
    (2, "cancelled"): ["started", "finished"],
    (3, "finished"): ["started", "finished"],
    (3, "failed"): ["started", "finished"],
}


@pytest.mark.parametrize(("steps", "outcome"), CASES)
async def test_each_step_is_given_back_in_its_way(steps: int, outcome: Any) -> None:
    booking, store = booked()
    advance(booking, steps)
    for _ in range(2):
        booking.release(outcome)
    assert [word for name, word in store.settled if name == LEG] == CASES[steps, outcome]
    assert [word for name, word in store.settled if name == NAME] == [outcome]
    assert booking.pool.reservations.renewals() == []
    assert not booking.pool.degraded.in_flight
    assert [(moved.slot, moved.tokens) for moved in store.moved] == ([(7, 90)] if steps == 3 else [])


async def test_a_text_that_is_held_back_does_not_make_its_link_slow() -> None:
    booking, store = booked()
    advance(booking, 2)
    assert booking.prefill is not None
    booking.prefill.begun()
    await asyncio.sleep(0.2)
    booking.prefill.taken(DECISION, TryRecord(), streams=True)
    assert [0 < moved.seconds < 0.1 for moved in store.moved] == [True]
    booking.release("finished")


async def test_an_answer_that_is_not_streamed_does_not_hold_the_booking() -> None:
    booking, store = booked()
    advance(booking, 2)
    assert booking.prefill is not None
    booking.prefill.handed_over(DECISION, TryRecord(), cast("EngineResponse", None), streams=False)
    await asyncio.sleep(0.01)  # no speed is known, so the blocks count as moved at once
    assert (LEG, "finished") in store.settled
    booking.release("failed")
    assert len([word for name, word in store.settled if name == LEG]) == 2


async def test_a_decision_that_is_not_answered_is_cancelled_at_both_engines() -> None:
    booking, store = booked()
    booking.prefill = None
    booking.unanswered()
    assert store.settled == [(NAME, "cancelled"), (LEG, "cancelled")]
    booking, store = booked()
    booking.prefill = None
    booking.asks()
    booking.release("cancelled")
    assert sorted(store.settled) == sorted([(NAME, "cancelled"), (LEG, "cancelled")])
