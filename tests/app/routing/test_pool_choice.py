"""A model has several pools: two home pools are asked at once, the cheaper one serves, and the other keeps nothing."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
from tests.support.engines.simulated import simulated
from tests.support.fleet.constants_alone import ConstantsAlone
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.background import upkeep
from warmfleet.errors import (
    CancelledReservation,
    FleetUnavailable,
    NoWorker,
    Overloaded,
    QueueTimeout,
    RateLimited,
    WarmfleetError,
)
from warmfleet.fleet import (
    Decision,
    Fleet,
    Hold,
    HoldLine,
    Line,
    Moved,
    Queued,
    QueueLimits,
    Renewal,
    SessionEnd,
    Standing,
    connect,
)
from warmfleet.fleet.ledger import HoldStanding
from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
from warmfleet.metrics import Metrics
from warmfleet.pools import late_pools
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import View
from warmfleet.pools.home_pools import in_order
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools, ServedModel
from warmfleet.prompt.block_hashes import Chain
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.routing import pool_choice
from warmfleet.routing.admission_queue import AdmissionQueue
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.booking import BookingState
from warmfleet.routing.call import Call, Hints, Job
from warmfleet.routing.client_limits import Counting
from warmfleet.routing.decider import Decider
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.routing.gateway import Gateway
from warmfleet.routing.pool_choice import PoolChoice
from warmfleet.routing.recovery.retries import RetryBudget
from warmfleet.routing.router import Router
from warmfleet.routing.settlements import Settlements
from warmfleet.routing.tickets import Tickets
from warmfleet.settings import Settings
from warmfleet.tracing.request_record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.replicas.replica import Replica

    from warmfleet.fleet import Question, WorkerView
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.prompt.block_hashes import Hasher
    from warmfleet.routing.identifier import Identifier

TAGS = ("m#1", "m#2", "m#3", "m#4")
Word = str  # a pool's answer: ``book``, ``queue``, ``hold``, ``full``, ``none``, ``away``, ``late`` or ``ended``


class Store(ConstantsAlone):
    """A stand-in for one pool's Redis that answers by ``words`` and keeps bookings and tickets."""

    def __init__(self, tag: str) -> None:
        super().__init__(limits=QueueLimits(1.0))
        self.words: list[Word] = []
        self.cost_s = 1.0  # cost of a worker that is booked at once
        self.turn_s = 1.0  # price of a turn in the queue
        self.ahead = 0  # tokens of prefill at a worker that is booked at once
        self.matched = 0
        self.work_s = 0.1
        self.slow_s = 0.0
        self.late_s = 0.2
        self.away = False
        self.crowded = False  # the full queue leaves a place to a request that may displace another
        self.full: set[str] = set()  # requests that found the queue full
        self.displaced = 0
        self.may_wait = True  # of the last request that asked
        self.answers_no_tell = False
        self.standing = Standing.TURN  # the standing of each ticket
        self.asked = 0
        self.booked: set[str] = set()
        self.tickets: set[str] = set()
        self.tag = tag
        self.bookings = self.queue = self.workers = self
        self.clients: Any = None  # a test may count in a real Redis
        self.ledger = SimpleNamespace(poll=self.poll_line)
        self.hold = Hold(b"", 2, 3, 8.0, paused=False)  # of a session that is held, but for its id
        self.held: set[bytes] = set()
        self.polled: list[bytes] = []  # sessions that polls named
        self.sessions: list[bytes] = []  # of each question
        self.ends: list[SessionEnd] = []

    async def decide_in_turn(self, question: Question, *, explain: bool = False) -> Decision | Queued:
        self.asked += 1
        self.may_wait = question.may_wait
        self.sessions.append(question.session)
        name, session = question.reservation, question.session and (question.session[1:] or b"made")
        if question.displaces and name in self.full:  # the same question a second time
            word = "queue" if self.crowded else "full"
            self.displaced += self.crowded
        else:
            word = self.words.pop(0) if self.words else "book"
        if word == "queue" and not question.may_wait:
            word = "full"
        if word == "hold":
            self.held.add(session)
            return Queued("held", 3, 0.0, self.hold.predicted_s / 2, hold=replace(self.hold, session=session))
        self.held.discard(session)
        if word in ("book", "late"):
            self.booked.add(name)
            self.tickets.discard(name)
        elif word == "queue":
            self.tickets.add(name)
        elif word == "full":
            self.tickets.discard(name)
            self.full.add(name)
        await asyncio.sleep(self.late_s if word == "late" else self.slow_s)
        if word == "none":
            raise NoWorker("none")
        self.away = word in ("away", "late")
        if self.away:
            raise FleetUnavailable("away")
        if word == "ended":
            raise CancelledReservation("ended")
        if word == "limit":
            raise RateLimited("the client is at its limit", {})
        if word in ("queue", "full"):
            outcome: Literal["queued", "full"] = "queued" if word == "queue" else "full"
            return Queued(outcome, len(self.tickets), self.work_s, self.turn_s, self.matched)
        worker = f"{self.tag}.w"
        own = 100 - self.matched
        return Decision(name, "booked", worker, worker, "http://w", self.matched, 100, False, False, self.cost_s,
                        self.ahead, False, own, 110, session=session)  # fmt: skip

    async def poll_line(self, held: Sequence[bytes] = (), leaving: Sequence[bytes] = ()) -> HoldLine:
        self.held -= {*leaving}
        self.polled += held
        if self.away:
            raise FleetUnavailable("away")
        known = {name: self.standing if name in self.held else Standing.UNKNOWN for name in held}
        return HoldLine(1, {name: HoldStanding(standing, 0, 1.0) for name, standing in known.items()})

    def settle_later(
        self,
        reservation: str,
        outcome: Outcome,
        on_answer: OnAnswer,
        _tokens: int = 0,
        _shortfall: object = None,
        session: SessionEnd | None = None,
        _moved: Moved | None = None,
    ) -> None:
        assert outcome in ("finished", "cancelled", "failed", "unsent")
        self.ends += [session] if session is not None else []

        def take() -> None:
            self.booked.discard(reservation)
            on_answer([b"SETTLED"], FleetUnavailable("no answer") if self.answers_no_tell else None)

        asyncio.get_running_loop().call_soon(take)

    async def poll(self, waiting: Sequence[str] = (), leaving: Sequence[str] = ()) -> Line:
        self.tickets -= {*leaving}
        if self.away:
            raise FleetUnavailable("away")
        known = {name: self.standing if name in self.tickets else Standing.UNKNOWN for name in waiting}
        return Line(len(self.tickets), self.work_s, known)

    async def settle(self, reservation: str, _outcome: Outcome) -> None:
        self.booked.discard(reservation)

    async def read(self) -> list[WorkerView]:
        return []


def worker(tag: str) -> WorkerView:
    return cast(
        "WorkerView",
        SimpleNamespace(
            worker_id=f"{tag}.w",
            url="http://w",
            routable=True,
            server=None,
            record={},
            approximate=False,
            misnamed=False,
            load=SimpleNamespace(speed_tps=100),
        ),
    )


class Fixture:
    """Four pools of one model and the choice among these pools."""

    def __init__(self) -> None:
        self.stores = {tag: Store(tag) for tag in TAGS}
        self.pools = [Pool(tag, cast("Fleet", store), DegradedMode(60.0)) for tag, store in self.stores.items()]
        for pool in self.pools:
            pool.show(View((worker(pool.tag),), read_at=1.0, ids=(f"{pool.tag}.w",), token_s=0.01))
        self.metrics = Metrics()
        self.settlements = Settlements(Tickets(), self.metrics)
        settings = Settings(models=TAGS)
        decider = Decider(DecisionLog("", self.metrics), self.metrics)
        self.counting = Counting(Pools(self.pools), self.metrics)
        self.choice = PoolChoice(decider, cast("Identifier", None), self.counting, self.metrics)
        self.queue = AdmissionQueue(self.choice, self.settlements.tickets, settings, self.metrics)

    def job(self, pools: Sequence[Pool] | None = None, **more: Any) -> Job:
        """pools: the home pools first; a single pool means that the model has no other pool."""
        pools = self.pools if pools is None else pools
        call = Call(
            KNOWN["/v1/completions"],
            b"{}",
            RequestRecord("id", KNOWN["/v1/completions"], "POST", 0.0),
            b"",
            received_at=time.perf_counter(),
            **more,
        )
        request = bodies.parse(call.path, b'{"model":"m","prompt":"text"}')
        prompt = IdentifiedPrompt((), 100, 110, "exact")
        several = len(pools) > 1
        return Job(call, request, b"{}", self.pools[0], prompt, pools, several, None if several else call.limits)

    def attempt(self, job: Job | None = None) -> tuple[Job, Attempt]:
        job = job or self.job()
        return job, Attempt(self.settlements, job)

    async def admit(self, job: Job | None = None) -> tuple[str, Decision]:
        """The tag of the chosen pool and its decision; afterwards everything is given back."""
        job, attempt = self.attempt(job)
        try:
            decision = await self.queue.admit(job, attempt)
            held = [tag for tag, store in self.stores.items() if attempt.reservation in store.booked]
            chosen = attempt.chosen
            assert chosen.pool.tag in held or chosen.state is not BookingState.BOOKED
            return chosen.pool.tag, decision
        finally:
            attempt.release("finished")
            await self.nothing_left()

    async def nothing_left(self) -> None:
        await self.settlements.drained()
        assert {tag: (store.booked, store.tickets, store.held) for tag, store in self.stores.items()} == dict.fromkeys(
            TAGS, (set(), set(), set())
        )
        assert all(not pool.reservations and not pool.degraded.in_flight for pool in self.pools)

    def asked(self) -> list[int]:
        return [store.asked for store in self.stores.values()]

    def script(self, *words: str) -> None:
        """Set the words with which each pool answers, one text for each pool."""
        for store, text in zip(self.stores.values(), words, strict=False):
            store.words = text.split()


async def test_the_cheaper_of_two_bookings_stands_and_the_other_one_is_cancelled() -> None:
    fixture = Fixture()
    fixture.stores["m#1"].cost_s = 2.0
    assert (await fixture.admit())[0] == "m#2"
    assert fixture.asked() == [1, 1, 0, 0]
    fixture.stores["m#2"].cost_s = 2.004
    assert (await fixture.admit())[0] == "m#1", "equal costs: the first home pool"
    fixture.stores["m#2"].matched = 64
    fixture.stores["m#1"].cost_s = 1.5
    assert (await fixture.admit())[0] == "m#2", "64 tokens at 100 a second would be left behind there"
    settled = fixture.metrics.settled.labels("finished")._value.get()
    assert settled == 3, "what was cancelled at once counts as no request"
    assert sum(pool.recent.decided for pool in fixture.pools) == 3


async def test_the_way_to_an_engine_counts_from_the_decision_that_stands() -> None:
    fixture, began = Fixture(), time.perf_counter()
    job, attempt = fixture.attempt()
    await fixture.queue.admit(job, attempt)
    assert began < attempt.chosen.asked_at < time.perf_counter(), "the replica learns from it how far engines are"
    attempt.release("finished")
    await fixture.nothing_left()


@pytest.mark.parametrize(
    ("words", "chosen", "asked"),
    [
        (("none", "book"), "m#2", [1, 1, 0, 0]),
        (("none", "none", "book"), "m#3", [1, 1, 1, 0]),
        (("full", "full", "book"), "m#3", [1, 1, 1, 0]),
        (("away", "away", "away", "book"), "m#4", [1, 1, 1, 1]),
        (("queue", "book"), "m#2", [1, 1, 0, 0]),
        (("late", "book"), "m#2", [1, 1, 0, 0]),
        (("away", "full", "queue book"), "m#3", [1, 1, 2, 0]),
    ],
)
async def test_pools_that_cannot_serve_are_passed_over(words: tuple[str, ...], chosen: str, asked: list[int]) -> None:
    fixture = Fixture()
    fixture.script(*words)
    for store in fixture.stores.values():
        store.late_s = 3_600.0  # so long that a stalled test process gets no late answer
    assert (await fixture.admit())[0] == chosen
    assert fixture.asked() == asked
    counted = fixture.metrics.passed_over.labels
    for tag, word in zip(TAGS[:2], words, strict=False):
        reason = {"none": "no_worker"}.get(word, word)
        told = sum(counted(reason, tag)._value.get() for reason in (reason,))
        assert told == (1 if word in ("none", "away", "late") else 0)


async def test_a_pool_that_is_away_is_not_asked_again_by_every_request() -> None:
    fixture = Fixture()
    fixture.script("away away", "")
    for _ in range(5):
        assert (await fixture.admit())[0] == "m#2"
    first, second, third, _ = fixture.asked()
    assert (first <= 2, second, first + third) == (True, 5, 5), "another pool takes its place"


async def test_the_price_of_a_turn_counts_the_wait_included() -> None:
    fixture = Fixture()
    first, second = fixture.stores["m#1"], fixture.stores["m#2"]
    first.cost_s, second.turn_s = 0.3, 0.5
    fixture.script("book", "queue book")
    assert (await fixture.admit())[0] == "m#2", "it waits for the worker that holds its beginning: 100 tokens take 1 s"
    first.ahead, second.turn_s = 90, 1.4
    fixture.script("book", "queue book")
    assert (await fixture.admit())[0] == "m#2", "what is ahead in the first counts half: 1.45 s"
    second.turn_s = 1.5
    fixture.script("book", "queue")
    assert (await fixture.admit())[0] == "m#1"
    first.ahead = 0
    fixture.script("queue queue queue book", "queue queue queue queue")
    second.turn_s = 2.0
    assert (await fixture.admit())[0] == "m#1"
    second.turn_s = 0.5
    fixture.script("book " * 400, "queue " * 400)
    asked = second.asked

    async def changes() -> None:
        while second.asked < asked + 2:  # noqa: ASYNC110  a stand-in counts its questions, it tells nobody
            await asyncio.sleep(0.001)
        first.matched, second.turn_s = 80, 3.0

    (tag, _), _ = await asyncio.gather(fixture.admit(), changes())
    assert tag == "m#1", "it waits in the second, and the first is cheaper meanwhile"


async def test_full_everywhere_is_refused() -> None:
    fixture = Fixture()
    fixture.script("full", "full", "full", "book")
    with pytest.raises(Overloaded):
        await fixture.admit()
    assert fixture.asked() == [2, 2, 2, 0]
    fixture.script("book", "ended")
    with pytest.raises(CancelledReservation):
        await fixture.admit()


async def test_a_request_displaces_another_only_if_every_pool_that_was_asked_is_full() -> None:
    fixture = Fixture()
    first, second, *_ = fixture.stores.values()
    for store in fixture.stores.values():
        store.crowded = True
    fixture.script("full", "book")
    assert (await fixture.admit())[0] == "m#2"
    fixture.script("full", "full", "queue book")
    assert (await fixture.admit())[0] == "m#3", "a place that is free costs nobody his"
    assert [store.displaced for store in fixture.stores.values()] == [0, 0, 0, 0]
    first.crowded = False
    fixture.script("full", "full book", "full", "book")
    assert (await fixture.admit())[0] == "m#2", "the tenant of the request has the longest line of the first"
    assert [store.displaced for store in fixture.stores.values()] == [0, 1, 0, 0]
    second.crowded = first.crowded = True
    fixture.script("full", "full", "full", "book")
    job, attempt = fixture.attempt()
    answer = await fixture.choice.choose(job, attempt, may_wait=False, must=False)
    assert isinstance(answer, Queued), "a request that may not wait takes nobody's place"
    assert [store.displaced for store in fixture.stores.values()] == [0, 1, 0, 0]
    attempt.release("failed")
    await fixture.nothing_left()


@pytest.mark.parametrize("standing", [Standing.DISPLACED, Standing.UNKNOWN])
async def test_a_request_that_loses_its_place_in_one_pool_is_served_by_another(standing: Standing) -> None:
    fixture = Fixture()
    fixture.stores["m#1"].standing = standing
    fixture.stores["m#2"].turn_s = 9.0
    fixture.script("queue full full", "queue book")
    assert (await fixture.admit())[0] == "m#2"
    fixture.script("queue full full", "queue full", "queue book")
    assert (await fixture.admit())[0] == "m#3"
    fixture.script("queue full full", "queue full", "full")
    with pytest.raises(Overloaded):
        await fixture.admit()
    reason = "displaced" if standing is Standing.DISPLACED else "full"
    assert fixture.metrics.queue_rejections.labels(reason, "m#1")._value.get() == 1


async def test_a_request_that_loses_its_place_in_the_only_pool_is_decided_once_more() -> None:
    fixture = Fixture()
    fixture.stores["m#1"].standing = Standing.DISPLACED
    fixture.script("queue book")
    assert (await fixture.admit(fixture.job(fixture.pools[:1])))[0] == "m#1"
    fixture.script("queue full")
    with pytest.raises(Overloaded):
        await fixture.admit(fixture.job(fixture.pools[:1]))
    assert fixture.metrics.queue_rejections.labels("displaced", "m#1")._value.get() == 1


@pytest.mark.parametrize("told", ["before it is booked anew", "after that"])
async def test_the_end_of_a_booking_that_was_given_up_ends_no_later_one_of_the_same_request(told: str) -> None:
    fixture = Fixture()
    first, second, *_ = fixture.stores.values()
    pool = fixture.pools[1]
    first.turn_s, second.turn_s, second.answers_no_tell = 0.1, 9.0, True
    fixture.script("queue " * 400, "queue " + "book " * 400)

    async def becomes_dear() -> None:
        await poll(lambda: bool(pool.reservations.outcomes()), 10, "a booking of the second pool was given up")
        first.turn_s, second.answers_no_tell = 9.0, False

    job, attempt = fixture.attempt()
    await asyncio.gather(fixture.queue.admit(job, attempt), becomes_dear())
    assert attempt.chosen.pool is pool
    if told == "after that":
        fixture.settlements._under_way += 1
        fixture.settlements._answered(pool, attempt.reservation, "unsent", None, FleetUnavailable("no answer"))
    assert pool.reservations.outcomes() == []
    await upkeep.tell_again(Pools(fixture.pools))
    assert attempt.reservation in second.booked
    attempt.release("finished")
    await fixture.nothing_left()


async def test_no_end_is_told_of_a_request_that_is_booked_anew_during_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture, told = Fixture(), list[str]()
    kept = fixture.pools[0].reservations
    for name in ("wf-1", "wf-2"):
        kept.keep_outcome(name, "unsent")

    async def settle(_: Store, reservation: str, _outcome: Outcome) -> None:
        told.append(reservation)
        kept.add(Renewal("wf-2", "w", 1, 1))

    monkeypatch.setattr(Store, "settle", settle)
    await upkeep.tell_again(Pools(fixture.pools))
    assert told == ["wf-1"]


@pytest.mark.parametrize("pools", [1, 2])
async def test_at_its_deadline_a_request_takes_whatever_worker_has_room(pools: int) -> None:
    fixture = Fixture()
    first, second = fixture.stores["m#1"], fixture.stores["m#2"]
    first.standing, second.turn_s = Standing.WAITS, 9.0

    def job() -> Job:
        return fixture.job(fixture.pools[:pools], patience_s=0.05)

    fixture.script("queue book", "queue full")
    assert (await fixture.admit(job()))[0] == "m#1"
    assert not first.may_wait, "it takes a dearer worker, and no new ticket"
    fixture.script("queue full full", "queue full")
    with pytest.raises(QueueTimeout):
        await fixture.admit(job())
    assert fixture.metrics.queue_rejections.labels("deadline", "m#1")._value.get() == 1
    if pools > 1:
        fixture.script("queue full full", "queue book")
        assert (await fixture.admit(job()))[0] == "m#2"


async def test_a_client_that_leaves_at_the_deadline_of_its_request_leaves_nothing_behind() -> None:
    fixture = Fixture()
    store = fixture.stores["m#1"]
    store.standing, store.slow_s = Standing.WAITS, 0.2
    fixture.script("queue book")
    task = asyncio.create_task(fixture.admit(fixture.job(fixture.pools[:1], patience_s=0.05)))
    await poll(lambda: not store.may_wait, 10, "it is decided for the last time")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fixture.nothing_left()


async def test_the_pool_that_refuses_is_named_and_not_the_one_by_which_prompts_are_identified(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = Fixture()
    job = fixture.job(fixture.pools[1:])
    fixture.script("", "full", "full", "full")

    async def prepare(_call: Call) -> Job:
        return job

    router: Any = SimpleNamespace(
        _continuation=SimpleNamespace(prepared=lambda job: job),
        prepare=prepare,
        _retry_budget=RetryBudget(),
        settlements=fixture.settlements,
        queue=fixture.queue,
    )
    answer: Any = SimpleNamespace(model="", started=False)
    with pytest.raises(Overloaded):
        await Router.serve(router, job.call, answer)
    assert (answer.model, job.pool.tag) == ("m#2", "m#1")
    assert fixture.metrics.queue_rejections.labels("full", "m#2")._value.get() == 1
    assert "m#2 is overloaded" in caplog.text
    await fixture.nothing_left()


async def test_a_refusal_counts_the_engines_of_all_pools() -> None:
    fixture = Fixture()
    fixture.script("none", "none", "none", "none")
    for pool in fixture.pools:
        pool.show(View((), read_at=2.0))
        pool.last_known._with_routable = View()
    worker = SimpleNamespace(worker_id="w", routable=False, server=None, draining=True, misnamed=False, record={})
    drained = cast("WorkerView", worker)
    fixture.pools[0].show(View((drained, drained), read_at=3.0))
    with pytest.raises(NoWorker, match="None of the 2 engines of `m` takes requests"):
        await fixture.admit()


async def test_a_request_that_waits_counts_in_the_pool_that_has_its_ticket() -> None:
    fixture = Fixture()
    first, second, third, _ = fixture.stores.values()
    first.turn_s, third.turn_s = 0.1, 9.0
    fixture.script("queue none", "queue " * 400, "queue " * 400)
    waiting = {tag: fixture.metrics.queued.labels(tag)._value for tag in TAGS}

    async def in_second() -> None:
        while not waiting["m#2"].get():  # noqa: ASYNC110  a metric tells nobody that it has changed
            await asyncio.sleep(0.001)
        assert waiting["m#1"].get() == 0, "no worker was left there, so the request went to another line"
        second.words = ["book"]

    (tag, _), _ = await asyncio.gather(fixture.admit(), in_second())
    assert tag == "m#2"
    assert [value.get() for value in waiting.values()] == [0, 0, 0, 0]
    [waits] = fixture.metrics.queue_seconds.collect()
    assert {sample.labels["model"] for sample in waits.samples if sample.name.endswith("_count") and sample.value} == {
        "m#2"
    }


def is_away(pool: Pool) -> None:
    for _ in range(2):
        pool.degraded.failed("away")


async def test_engines_of_a_pool_that_is_away_serve_what_full_pools_refuse() -> None:
    fixture = Fixture()
    is_away(fixture.pools[0])
    for store in fixture.stores.values():
        store.words = ["full"] * 100
    held = []
    for _ in range(pool_choice.ENOUGH):
        job, attempt = fixture.attempt()
        decision = await fixture.queue.admit(job, attempt)
        assert (decision.worker_id, attempt.chosen.state) == ("m#1.w", BookingState.NEW)
        held.append(attempt)
    assert fixture.metrics.fallback.labels("open", "m#1")._value.get() == pool_choice.ENOUGH
    job, attempt = fixture.attempt()
    with pytest.raises(Overloaded):
        await fixture.queue.admit(job, attempt)
    for each in (*held, attempt):
        each.release("finished")
    job, attempt = fixture.attempt()
    answer = await fixture.choice.choose(job, attempt, may_wait=False, must=False)
    assert isinstance(answer, Queued), "a second worker has room, or there is none"
    attempt.release("failed")
    is_away(fixture.pools[1])
    assert (await fixture.admit())[1].worker_id == "m#1.w"
    fixture.pools[0].last_known._with_routable = View()
    assert (await fixture.admit())[1].worker_id == "m#2.w"


async def test_a_long_wait_is_not_worth_it_while_engines_of_a_home_pool_stand_idle() -> None:
    fixture = Fixture()
    second = fixture.stores["m#2"]
    is_away(fixture.pools[0])
    fixture.stores["m#3"].turn_s = 9.0
    second.turn_s = 1.9  # the whole prompt takes 1 s at an engine of the pool that is away
    fixture.script("", "queue book", "queue")
    assert (await fixture.admit())[0] == "m#2"
    second.turn_s = 2.1
    fixture.script("", "queue book", "queue")
    tag, decision = await fixture.admit()
    assert (tag, decision.worker_id) == ("m#1", "m#1.w")
    assert fixture.metrics.fallback.labels("open", "m#1")._value.get() == 1
    fixture.pools[0].draining = True
    fixture.script("", "queue book", "queue")
    assert (await fixture.admit())[0] == "m#2"


async def test_a_request_in_line_leaves_it_when_its_wait_becomes_long_and_a_home_pool_is_away() -> None:
    fixture = Fixture()
    second = fixture.stores["m#2"]
    is_away(fixture.pools[0])
    fixture.stores["m#3"].turn_s = 9.0
    fixture.script("", "queue " * 400, "queue " * 400)

    async def grows() -> None:
        while second.asked < 2:  # noqa: ASYNC110  a stand-in counts its questions, it tells nobody
            await asyncio.sleep(0.001)
        second.turn_s = 5.0

    (tag, _), _ = await asyncio.gather(fixture.admit(), grows())
    assert tag == "m#1"


async def test_a_pool_that_answers_again_is_not_away_for_a_request_in_line() -> None:
    """The workers of a pool that answers again may be full, so no request goes to them without their Redis."""
    fixture = Fixture()
    second = fixture.stores["m#2"]
    fixture.stores["m#3"].turn_s = 9.0
    fixture.script("away", "queue " * 4 + "book", "queue " * 100)

    async def grows() -> None:
        while second.asked < 2:  # noqa: ASYNC110  a stand-in counts its questions, it tells nobody
            await asyncio.sleep(0.001)
        fixture.stores["m#1"].away = False
        fixture.pools[0].degraded.succeeded()  # another request's decision
        second.turn_s = 5.0

    (tag, _), _ = await asyncio.gather(fixture.admit(), grows())
    assert tag == "m#2"
    assert fixture.stores["m#1"].asked == 1, "a tombstone of this reservation may be left there"


async def test_a_request_that_waits_looks_often_whether_its_other_home_pool_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("warmfleet.routing.tickets.REVIEW_S", 60.0)  # the interval without other pools
    fixture = Fixture()
    fixture.stores["m#1"].standing = Standing.WAITS
    fixture.stores["m#2"].turn_s = 9.0
    fixture.script("queue " * 400, "queue book", "")
    async with asyncio.timeout(15):  # the request's own time in the queue is longer
        assert (await fixture.admit())[0] == "m#2"


async def test_a_request_counts_once_for_a_pool_that_it_passes_over_however_long_it_waits() -> None:
    fixture = Fixture()
    is_away(fixture.pools[0])
    fixture.stores["m#3"].turn_s = 9.0
    fixture.script("", "queue " * 4 + "book", "queue " * 100)
    assert (await fixture.admit())[0] == "m#2"
    assert fixture.stores["m#2"].asked == 5
    assert fixture.metrics.passed_over.labels("away", "m#1")._value.get() == 1


async def test_the_span_of_a_second_worker_tells_its_pool() -> None:
    fixture = Fixture()
    fixture.stores["m#1"].cost_s = 9.0
    job, attempt = fixture.attempt()
    await fixture.choice.choose(job, attempt, may_wait=False, must=False)
    assert attempt.record.pool == "m#2"
    attempt.release("finished")


async def test_a_pool_with_another_scheme_or_tokenizer_identifies_the_prompt_by_itself() -> None:
    fixture, asked = Fixture(), list[str]()

    async def identify(pool: Pool, *_request: object) -> IdentifiedPrompt:
        asked.append(pool.tag)
        return IdentifiedPrompt((Chain(2, 32, b"anything"),), 99, 110, "exact")

    fixture.choice.identifier = cast("Identifier", SimpleNamespace(identify=identify))
    await fixture.admit()
    assert asked == []
    other = cast("Hasher", SimpleNamespace(scheme=SimpleNamespace(scheme_id=2, block_tokens=32)))
    fixture.pools[1].show(replace(fixture.pools[1].view, hashers=(other,), text=True, read_at=2.0))
    fixture.stores["m#2"].cost_s = 0.1
    job, attempt = fixture.attempt()
    await fixture.queue.admit(job, attempt)
    attempt.release("finished")
    chosen = attempt.chosen
    assert (asked, chosen.pool.tag, chosen.prompt.prompt_tokens) == (["m#2"], "m#2", 99)
    fixture.stores["m#2"].turn_s = 9.0
    fixture.script("queue queue queue book", "queue full full full")
    assert (await fixture.admit())[0] == "m#1"
    assert fixture.stores["m#2"].asked == 5
    assert asked == ["m#2", "m#2"], "once for each request, however often it is asked about"
    await fixture.nothing_left()


async def test_a_draining_pool_is_asked_only_if_no_other_can_serve() -> None:
    fixture = Fixture()
    for pool in fixture.pools[1:]:
        pool.draining = True
    fixture.stores["m#1"].cost_s = 9.0
    assert (await fixture.admit())[0] == "m#1"
    fixture.script("queue queue book")
    assert (await fixture.admit())[0] == "m#1", "nor while it waits"
    assert fixture.asked() == [4, 0, 0, 0]
    fixture.script("none")
    assert (await fixture.admit())[0] == "m#2"


async def test_an_end_in_the_other_pool_refuses_no_request_that_waits() -> None:
    fixture = Fixture()
    fixture.stores["m#1"].turn_s = 0.1
    fixture.script("queue queue queue book", "queue ended ended ended")
    assert (await fixture.admit())[0] == "m#1"


async def test_without_any_redis_a_worker_is_chosen_among_those_known_last() -> None:
    fixture = Fixture()
    fixture.script("away", "away", "away", "away")
    fixture.pools[0].show(View((), read_at=2.0))
    fixture.pools[0].last_known._with_routable = View()
    tag, decision = await fixture.admit()
    assert (tag, decision.worker_id) == ("m#2", "m#2.w")
    assert fixture.metrics.fallback.labels("away", "m#2")._value.get() == 1


async def test_whatever_the_pools_answer_and_whenever_it_ends_nothing_is_left() -> None:
    ended = await asyncio.gather(*map(nothing_is_left, range(40)), return_exceptions=True)
    assert [(seed, error) for seed, error in enumerate(ended) if error] == []


async def nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    fixture = Fixture()
    words = ("book", "queue", "queue", "full", "none", "away", "late", "ended")
    for store in fixture.stores.values():
        store.words = rng.choices(words, k=rng.randint(0, 6))
        store.slow_s = rng.choice((0.0, 0.0, 0.002, 0.06))
        store.cost_s, store.turn_s = rng.choices((0.1, 0.5, 1.0, 9.0), k=2)
    job = fixture.job(hints=Hints(explain=rng.random() < 0.2), patience_s=rng.choice((0.05, 1.0)))
    task = asyncio.create_task(fixture.admit(job))
    if rng.random() < 0.5:
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.07)))
        task.cancel()
    with suppress(WarmfleetError, asyncio.CancelledError):
        await task
    await fixture.nothing_left()


@pytest.fixture
def served() -> ServedModel:
    return ServedModel("m", [Pool(tag, cast("Fleet", ConstantsAlone()), DegradedMode(1.0)) for tag in TAGS])


def chain(blocks: int, seed: int = 0) -> Chain:
    rng = random.Random(seed)
    return Chain(1, 16, rng.randbytes(8 * 1_000)[: 8 * blocks])


def test_prompts_with_the_same_beginning_have_the_same_home_pools(served: ServedModel) -> None:
    def homes(blocks: int, seed: int = 0) -> list[str]:
        prompt = IdentifiedPrompt((chain(blocks, seed),), 16 * blocks, 16 * blocks, "exact")
        return [pool.tag for pool in served.order_for(prompt, "m")]

    assert homes(64) == homes(65) == homes(1_000), "a conversation keeps its home pools while it grows"
    assert {homes(63, seed)[0] for seed in range(40)} == {*TAGS}
    served.drain(frozenset({"m#2"}))
    assert all(homes(64, seed)[-1] == "m#2" for seed in range(9))


def test_what_a_model_knows_of_beginnings_outlives_a_change_of_its_pools(served: ServedModel) -> None:
    def homes(model: ServedModel, seed: int) -> list[str]:
        hashes = chain(64).hashes + random.Random(seed).randbytes(8 * 100)  # all have the same 1,024 tokens
        prompt = IdentifiedPrompt((Chain(1, 16, hashes),), 16 * 164, 16 * 164, "exact")
        return [pool.tag for pool in model.order_for(prompt, "m")]

    pools = Pools([*served.pools])
    for seed in range(100):
        homes(pools.served["m"], seed)
    learned = [homes(pools.served["m"], seed) for seed in range(100, 140)]
    pools.change(ServedModel("m", served.pools))
    assert [homes(pools.served["m"], seed) for seed in range(100, 140)] == learned
    assert len({entry[0] for entry in learned}) == len(TAGS)


def test_a_pool_that_joins_moves_only_what_it_gets() -> None:
    keys = [random.Random(seed).randbytes(8) for seed in range(500)]
    before, after = ([in_order(key, dict.fromkeys(TAGS[:count], 8))[:2] for key in keys] for count in (3, 4))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert all("m#4" in new for new in moved)
    assert 0.4 < len(moved) / len(keys) < 0.6, "two of four home pools are the new one's"


def test_a_pool_gets_its_share_of_the_beginnings_and_a_change_moves_only_that() -> None:
    keys = [random.Random(seed).randbytes(8) for seed in range(2_000)]
    weights = {"m#1": 16, "m#2": 8, "m#3": 4, "m#4": 4}
    first = [in_order(key, weights)[0] for key in keys]
    for tag, weight in weights.items():
        assert first.count(tag) / len(keys) == pytest.approx(weight / 32, abs=0.03)
    grown = [in_order(key, weights | {"m#4": 8})[0] for key in keys]
    moved = [new for old, new in zip(first, grown, strict=True) if old != new]
    assert {*moved} == {"m#4"}
    assert len(moved) / len(keys) == pytest.approx(8 / 36 - 4 / 32, abs=0.02)
    assert [in_order(key, dict.fromkeys(weights, 3)) for key in keys] == [
        sorted(weights, key=lambda tag: sha256(key + tag.encode()).digest(), reverse=True) for key in keys
    ], "pools of one size are in the order that routers of before have"


def test_a_pool_counts_by_its_workers(served: ServedModel) -> None:
    first, second, *_ = served.pools
    first.show(View(tuple(worker("m#1") for _ in range(3)), read_at=1.0))
    assert [pool.weight for pool in (first, second)] == [3, 1], "a pool without workers is asked about, too"
    keys = [IdentifiedPrompt((chain(64, seed),), 1_025, 1_100, "exact") for seed in range(400)]
    found = Counter(served.order_for(prompt, "m")[0].tag for prompt in keys)
    assert found["m#1"] / 400 == pytest.approx(3 / 6, abs=0.08)


async def test_pools_come_and_go_while_a_replica_runs(served: ServedModel) -> None:
    first, second, third, _ = served.pools
    pools = Pools([first, second])
    pools.change(ServedModel("m", [second, third]))
    assert pools.served["m"].pools == (second, third)
    assert pools.all == (second, third, first), "its requests are looked after until they end"
    assert pools.tagged("m#1") is first
    pools.change(ServedModel("m", [first, second]))
    assert pools.all == (first, second, third)
    pools.forget(third)
    assert [*pools.all] == [first, second]
    assert pools.tagged("m#3") is None


async def test_a_gateway_may_settle_by_the_models_name_though_a_pool_has_it_as_its_tag() -> None:
    class Booked:
        def __init__(self, reservation: str) -> None:
            self.reservation = reservation
            self.bookings = self

        async def lease(self, reservation: str) -> object:
            return SimpleNamespace(worker_id="w") if reservation == self.reservation else None

    tags = ("m", "m#1", "m#2")
    pools = Pools([Pool(tag, cast("Fleet", Booked(f"wf-{tag}")), DegradedMode(1.0)) for tag in tags])
    pools.change(ServedModel("m", [pools.all[0], pools.all[1]]))  # the third pool leaves
    gateway = Gateway(cast("Router", SimpleNamespace(pools=pools)), Settings())

    async def tag_of(model: str, reservation: str) -> str:
        return (await gateway._pool_of(model, reservation)).tag

    assert [await tag_of("m", f"wf-{tag}") for tag in tags] == [*tags]
    assert await tag_of("m#1", "wf-m#2") == "m#1", "a tag with # says it all: no pool is asked"


@dataclass
class TwoPools:
    """A replica and two pools of its model with an engine each. The second pool was added while the replica ran."""

    router: Replica
    registry: PoolRegistry
    fleets: list[Fleet]
    model: str
    prompts: list[list[int]]

    @property
    def tags(self) -> tuple[str, str]:
        return f"{self.model}#1", f"{self.model}#2"

    async def pool_of(self, prompt: list[int], **headers: str) -> tuple[str, int]:
        """The pool that serves the prompt now, and the number of matched tokens."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": 1}
        status, told, answer = await self.router.post(asked, **headers)
        assert status == 200, answer
        return told["x-warmfleet-pool"], int(told["x-warmfleet-matched-tokens"])

    async def route(self, prompt: list[int], key: str) -> dict[str, str]:
        asked = {"model": self.model, "prompt": prompt}
        _, _, answer = await self.router.post(asked, "/route?endpoint=/v1/completions", **{"Idempotency-Key": key})
        return {name: json.loads(answer)[name] for name in ("reservation", "model", "worker")}

    async def conversations_stay(self) -> None:
        first = [(await self.pool_of(prompt))[0] for prompt in self.prompts]
        again = [await self.pool_of([*prompt, *prompt[:50]]) for prompt in self.prompts]
        stayed = [matched for (pool, matched), old in zip(again, first, strict=True) if pool == old]
        assert len(stayed) >= 8, "most: on a busy machine an engine may be so busy that the other one is cheaper"
        assert min(stayed) >= 384

    async def choices_are_explained(self) -> None:
        asked = {"model": self.model, "prompt": self.prompts[0]}
        _, told, _ = await self.router.post(asked | {"max_tokens": 1}, **{"X-Warmfleet-Explain": "1"})
        explained = json.loads(told["x-warmfleet-explain"])
        assert (explained["pool"] in self.tags, {row["pool"] for row in explained["pools"]}) == (True, {*self.tags})
        whole = json.loads((await self.router.post(asked, "/explain"))[2])
        assert (whole["model"] in self.tags, {row["pool"] for row in whole["pools"]}) == (True, {*self.tags})
        assert min(whole["pools"], key=lambda row: float(row["price_s"]))["worker_id"] == whole["chosen"]

    async def a_key_keeps_its_reservation(self) -> None:
        """Assert that a key keeps its reservation even if another pool would get the request now."""
        placed = await self.route(self.prompts[0], "k")
        assert placed["model"] in self.tags
        assert await self.route(self.prompts[0], "k") == placed
        pools = [PoolEntry(tag, draining=tag == placed["model"]) for tag in self.tags]
        await self.registry.write(pools)

        async def another_serves() -> bool:
            return (await self.pool_of(self.prompts[0]))[0] != placed["model"]

        await poll(another_serves, 10, "the pool that has the reservation drains")
        assert await self.route(self.prompts[0], "k") == placed
        ending = {"model": self.model, "reservation": placed["reservation"], "outcome": "finished"}
        assert json.loads((await self.router.post(ending, "/settle"))[2]) == {"result": "settled"}
        await self.registry.write(map(PoolEntry, self.tags))

    async def pools_are_listed(self) -> None:
        _, listed = await self.router.get("/v1/models")
        assert [entry["id"] for entry in json.loads(listed)["data"]] == [self.model]
        _, listed = await self.router.get("/workers")
        told_of = [(each["served_model"], each["workers"][0]["pool"]) for each in json.loads(listed)["models"]]
        assert told_of == [(self.model, tag) for tag in self.tags]

    async def the_second_serves_alone(self) -> None:
        """Assert that the second pool serves alone after the first engine's end, and after the first pool's removal."""
        assert {(await self.pool_of(prompt))[0] for prompt in self.prompts} == {self.tags[1]}
        await asyncio.gather(*map(self.pool_of, self.prompts))

        async def unloaded() -> bool:
            rows = [worker.load for fleet in self.fleets for worker in await fleet.workers.read()]
            return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows) == 0

        await poll(unloaded, 10, "the load of both pools is given back")
        await self.registry.remove(self.tags[0])

        async def gone() -> bool:
            listed = json.loads((await self.router.get("/workers"))[1])["models"]
            return [row["model"] for row in listed] == [self.tags[1]]

        await poll(gone, 10, "the first pool ends")
        assert await self.router.metric(f'warmfleet_workers{{model="{self.tags[0]}"') == 0
        asked = {"model": self.model, "prompt": self.prompts[0], "max_tokens": 1}
        status, told, _ = await self.router.post(asked)
        assert (status, told.get("x-warmfleet-pool")) == (200, None), "as with a single pool from the start"


async def test_a_reservation_is_found_where_it_is_booked_whatever_other_pools_know_of_it() -> None:
    booked, ended, none = SimpleNamespace(worker_id="w"), SimpleNamespace(worker_id=""), None

    async def found(*leases: object) -> str | None:
        async def lease(told: object) -> object:
            if isinstance(told, Exception):
                raise told
            return told

        fleets = [SimpleNamespace(bookings=SimpleNamespace(lease=lambda _, told=told: lease(told))) for told in leases]
        pools = [Pool(tag, cast("Fleet", one), DegradedMode(1.0)) for tag, one in zip(TAGS, fleets, strict=False)]
        gateway = Gateway(cast("Router", SimpleNamespace(pools=Pools(pools))), Settings())
        pool = await gateway._holder("m", "wf-1")
        return None if pool is None else pool.tag

    away = FleetUnavailable("away")
    assert await found(none, ended, booked) == "m#3"
    assert await found(away, booked) == "m#2"
    assert await found(none, ended) == "m#2", "it says that the reservation has ended"
    assert await found(none, none) is None
    with pytest.raises(FleetUnavailable):
        await found(none, away)


async def test_two_pools_of_real_engines_serve_one_model(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt goes to the pool with its beginning; when a pool loses its engine, the other pool serves."""
    monkeypatch.setattr(late_pools, "LATE_S", 1.0)  # the test's machine may be busy
    tags = (f"{model}#1", f"{model}#2")
    fleets = [Fleet(connect(valkey_url, timeout_s=2), tag) for tag in tags]
    prompts = [[rng.randint(10, 900) for _ in range(400)] for rng in map(random.Random, range(12))]
    async with (
        simulated(valkey_url, model, "a", pool=tags[0]) as one,
        simulated(valkey_url, model, "b", pool=tags[1]),
        replica(valkey_url, model, models=tags[:1], redis_retry_s=0.2, pools_interval_s=0.1, leave_s=0.1) as router,
    ):
        await router.routable(1)
        two = TwoPools(router, PoolRegistry(fleets[0].redis, model), fleets, model, prompts)
        await two.registry.write(map(PoolEntry, tags))
        await router.routable(2)
        await router.exact()
        await two.conversations_stay()
        await two.choices_are_explained()
        await two.a_key_keeps_its_reservation()
        await two.pools_are_listed()
        await one.engine.stop()
        await two.the_second_serves_alone()
    for fleet in fleets:
        await fleet.close()
