"""An attempt gives back exactly what it took, once, from every state."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.polling import poll

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Decision, Queued
from warmfleet.metrics import Metrics
from warmfleet.pools import open_reservations
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.routing.attempt import Attempt, Attempts, AttemptState
from warmfleet.routing.tickets import Tickets

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import Fleet
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.fleet.reservations import Outcome

NAME = "wf-0attempt"
DECISION = Decision(NAME, "booked", "w.0", "w", "http://w", 0, 10, False, False, 0.1, 0, False, 10, 20)


class Store:
    """What Redis is told: settled outcomes and tickets that were left. ``away``: it takes no outcome."""

    def __init__(self) -> None:
        self.settled: list[Outcome] = []
        self.left: list[str] = []
        self.away = False
        self.limits = SimpleNamespace(max_engine_wait_s=1.0)
        self.timeouts = SimpleNamespace(request_s=1.0)

    def tell(
        self, reservation: str, outcome: Outcome, on_answer: OnAnswer, tokens: int = 0, shortfall: object = None
    ) -> None:
        assert (reservation, tokens, shortfall) == (NAME, 0, None)
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


def begun() -> tuple[Attempt, Attempts, Store]:
    store = Store()
    pool = Pool("m", cast("Fleet", store), DegradedMode(1.0))
    attempts = Attempts(RecordedTickets(), Metrics())
    return Attempt(attempts, pool, NAME), attempts, store


def asked(attempt: Attempt) -> None:
    attempt.asks()


def queued(attempt: Attempt) -> None:
    attempt.asks()
    attempt.queued(Queued("queued", 1, 0.5))


def refused(attempt: Attempt) -> None:
    attempt.asks()
    attempt.refused()


def limited(attempt: Attempt) -> None:
    attempt.asks()
    attempt.limited()


def limited_at_its_turn(attempt: Attempt) -> None:
    queued(attempt)
    limited(attempt)


def booked(attempt: Attempt) -> None:
    queued(attempt)
    attempt.asks()
    attempt.booked(DECISION)


def asked_again(attempt: Attempt) -> None:
    queued(attempt)
    attempt.asks()
    assert attempt.waits
    attempt.asks()


def unanswered(attempt: Attempt) -> None:
    attempt.asks()
    attempt.unanswered()
    attempt.chose_without_redis(DECISION)


def not_booked(attempt: Attempt) -> None:
    attempt.asks()
    attempt.not_booked()
    attempt.chose_without_redis(DECISION)


def never_asked(attempt: Attempt) -> None:
    attempt.chose_without_redis(DECISION)


@pytest.mark.parametrize(
    ("way", "state", "settled", "leaves"),
    [
        (lambda _: None, AttemptState.NEW, [], False),
        (asked, AttemptState.ASKED, ["finished"], True),
        (queued, AttemptState.QUEUED, [], True),
        (refused, AttemptState.NEW, [], False),
        (limited, AttemptState.NEW, [], False),
        (limited_at_its_turn, AttemptState.QUEUED, [], True),
        (booked, AttemptState.BOOKED, ["finished"], False),
        (asked_again, AttemptState.ASKED, ["finished"], True),
        (unanswered, AttemptState.QUEUED, ["cancelled"], True),
        (not_booked, AttemptState.QUEUED, [], True),
        (never_asked, AttemptState.NEW, [], False),
    ],
)
async def test_release_gives_back_what_was_taken_once(
    way: Callable[[Attempt], None], state: AttemptState, settled: list[str], leaves: bool
) -> None:
    attempt, attempts, store = begun()
    way(attempt)
    assert attempt.state is state
    assert (NAME in attempt.pool.reservations) == (state is AttemptState.BOOKED)
    for _ in range(2):
        attempt.release("finished")
        assert attempt.state is AttemptState.RELEASED
    await attempts.drained()
    assert store.settled == settled
    assert store.left == ([NAME] if leaves else [])
    assert len(attempt.pool.reservations) == 0
    assert not attempt.pool.degraded.in_flight


async def test_the_worker_is_told_only_a_reservation_that_is_booked() -> None:
    attempt, attempts, _ = begun()
    attempt.chose_without_redis(DECISION)
    assert (attempt.owner, attempt.reservation_word) == ("unbooked", "fallback")
    attempt.release("finished")
    attempt, attempts, _ = begun()
    booked(attempt)
    assert (attempt.owner, attempt.reservation_word) == (NAME, "booked")
    attempt.release("finished")
    await attempts.drained()


async def test_the_prefill_is_given_back_at_the_first_token_and_not_after_the_end() -> None:
    attempt, attempts, store = begun()
    booked(attempt)
    attempt.prefill_done()
    renewal = attempt.pool.reservations.renewal(NAME)
    assert renewal is not None
    assert (renewal.prefill_tokens, renewal.decode_tokens, renewal.started) == (0, 20, True)
    attempt.release("finished")
    attempt.prefill_done()
    await attempts.drained()
    assert store.settled == ["started", "finished"]


async def test_a_prefill_of_whose_end_nobody_tells_is_given_back_when_it_is_due() -> None:
    attempt, attempts, store = begun()
    booked(attempt)
    attempt.prefill_due_in(3_600.0)
    attempt.prefill_due_in(0.0)
    await poll(lambda: store.settled == ["due"], 5, "its time is over")
    attempt.prefill_done()
    attempt.release("finished")
    await attempts.drained()
    assert store.settled == ["due", "finished"]


@pytest.mark.parametrize("ends", ["first byte", "end"])
async def test_no_clock_runs_on_for_a_prefill_that_is_done(ends: str) -> None:
    attempt, attempts, store = begun()
    booked(attempt)
    attempt.prefill_due_in(0.0)
    timer = attempt._due
    assert timer is not None
    if ends == "first byte":
        attempt.prefill_done()
    attempt.release("finished")
    assert timer.cancelled()
    await asyncio.sleep(0)
    await attempts.drained()
    assert store.settled == (["started", "finished"] if ends == "first byte" else ["finished"])


async def test_an_outcome_that_redis_does_not_take_is_kept() -> None:
    attempt, attempts, store = begun()
    booked(attempt)
    store.away = True
    attempt.prefill_done()
    attempt.release("failed")
    await attempts.drained()
    assert attempt.pool.reservations.outcomes() == [(NAME, "failed")]
    attempt.pool.reservations.outcome_taken(NAME)
    assert attempt.pool.reservations.outcomes() == []


async def test_an_outcome_is_kept_no_longer_than_its_lease_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The master of a removed pool may never come back: outcomes that wait for it would hold the pool for ever."""
    monkeypatch.setattr(open_reservations, "KEPT_S", 0.0)
    attempt, attempts, store = begun()
    booked(attempt)
    store.away = True
    attempt.release("failed")
    await attempts.drained()
    assert attempt.pool.reservations.outcomes() == []


async def test_a_request_that_is_cancelled_while_it_releases_still_settles() -> None:
    attempt, attempts, store = begun()
    booked(attempt)

    async def request() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            attempt.release("cancelled")

    task = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    task.cancel()
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await attempts.drained()
    assert store.settled == ["cancelled"]


async def test_drained_waits_until_redis_has_taken_or_refused_every_outcome() -> None:
    attempt, attempts, store = begun()
    booked(attempt)
    answers: list[OnAnswer] = []

    def tell(_reservation: str, _outcome: Outcome, on_answer: OnAnswer, *_more: object) -> None:
        answers.append(on_answer)

    store.tell = tell  # type: ignore[method-assign, assignment]
    attempt.prefill_done()
    attempt.release("finished")
    drained = asyncio.ensure_future(attempts.drained())
    for on_answer in answers:
        await asyncio.sleep(0)
        assert not drained.done()
        on_answer([b"SETTLED"], None)
    await drained
    assert len(answers) == 2
