"""Random histories of reservations and the reports of their engine: load is given back once, and none is left."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.engine_with_ends import WORKER, EngineWithEnds, reservation
from tests.support.redis.servers import PATIENT

from warmfleet.errors import CancelledReservation, NoWorker
from warmfleet.fleet import Fleet, Stage, connect

if TYPE_CHECKING:
    from typing import Literal

    Outcome = Literal["started", "finished", "failed", "cancelled"]

#: Every third reservation is of two answers or prompts; the engine's requests of a reservation end one by one.
RESERVATIONS = [*(reservation(number, "0-_"[number % 3]) for number in range(6)), reservation(6, "p")]
#: The last is a prefill leg: its context stays booked after its end, until it is settled or expires.
LEG = {RESERVATIONS[-1]}
WHICH = st.integers(0, 6)
STEPS = st.one_of(
    st.tuples(st.just("decide"), WHICH),
    st.tuples(st.just("arrive"), WHICH),
    st.tuples(st.sampled_from(["prefill", "end", "miss", "again"]), st.integers(0, 9)),
    st.tuples(st.just("settle"), WHICH, st.sampled_from(["started", "finished", "failed", "cancelled"])),
    st.tuples(st.just("renew"), WHICH, st.booleans()),
    st.tuples(st.sampled_from(["reap", "lose", "forged"]), WHICH),
    st.tuples(st.sampled_from(["round", "beat", "apply", "restart", "rejoin", "leave", "forget"])),
    st.tuples(st.sampled_from(["round", "beat", "apply", "dead"])),
)


class History:
    """One engine, its routers, and the reservations that they settled: these must not come back."""

    def __init__(self, engine: EngineWithEnds) -> None:
        self.engine, self.settled = engine, set[str]()
        self.unheard = set[str]()  # reservations of which the only report may have been lost: they expire

    async def step(self, action: str, *what: Any) -> None:
        await getattr(self, action)(*what)
        self.engine.check()

    async def decide(self, number: int) -> None:
        if RESERVATIONS[number] in self.engine.leases():
            return
        try:
            await self.engine.decide(RESERVATIONS[number])
        except (NoWorker, CancelledReservation):
            return
        self.settled.discard(RESERVATIONS[number])
        self.unheard.discard(RESERVATIONS[number])

    async def arrive(self, number: int) -> None:
        """The engine gets a booked request; if it may, as two."""
        reserved = RESERVATIONS[number]
        if reserved in self.engine.open():
            for child in (0, 1) if number % 3 == 1 else (None,):
                self.engine.arrive(reserved, child)

    async def prefill(self, which: int) -> None:
        if present := sorted(self.engine.present):
            self.engine.prefill(present[which % len(present)])

    async def end(self, which: int, *, told: bool = True) -> None:
        if present := sorted(self.engine.present):
            self.engine.end(present[which % len(present)], told=told)

    async def miss(self, which: int) -> None:
        """The report of an end is lost; without any report before, only the lease's time would end it."""
        engine = self.engine
        told = [name for name, reserved in sorted(engine.present.items()) if reserved in engine.told()]
        if told:
            engine.end(told[which % len(told)], told=False)

    async def again(self, which: int) -> None:
        """The engine goes on with a reservation that had ended, as in the steps of a beam search."""
        reserved = RESERVATIONS[which % 7]
        if reserved in self.engine.seen and reserved in self.engine.leases():
            self.engine.arrive(reserved)

    async def settle(self, number: int, outcome: Outcome) -> None:
        await self.engine.fleet.bookings.settle(RESERVATIONS[number], outcome)
        if outcome != "started":
            self.settled.add(RESERVATIONS[number])

    async def renew(self, number: int, started: bool) -> None:
        """A replica renews what it has not settled."""
        if RESERVATIONS[number] in self.engine.leases():
            await self.engine.renew(RESERVATIONS[number], started=started)

    async def reap(self, number: int) -> None:
        reserved, engine = RESERVATIONS[number], self.engine
        owned = reserved in engine.open() and reserved in engine.running() & set(engine.present.values())
        believed = engine.store.zscore(engine.keys.running(WORKER), "") is not None
        await engine.reap(reserved)
        if owned and believed:
            assert reserved in engine.open(), "the engine has it"

    async def lose(self, number: int) -> None:
        self.unheard |= self.engine.seen - self.engine.running()
        self.engine.lose(number)

    async def forged(self, number: int) -> None:
        """Redis forgets, or invents, that the engine has a reservation."""
        engine, reserved = self.engine, RESERVATIONS[number]
        if not engine.store.zrem(engine.keys.running(WORKER), reserved):
            engine.store.zadd(engine.keys.running(WORKER), {reserved: 1})

    async def round(self) -> None:
        self.engine.round()

    async def beat(self) -> None:
        self.engine.round(beat=True)

    async def apply(self) -> None:
        await self.engine.fleet.upkeep.apply(WORKER)

    async def restart(self) -> None:
        self.engine.start()
        await self.engine.routable()

    async def rejoin(self) -> None:
        self.engine.publisher._update(joined=False, acknowledged=False)
        await self.engine.routable()

    async def leave(self) -> None:
        left = self.engine.running()
        self.engine.publisher._stopping.set()
        self.engine.round()
        await self.engine.apply()
        assert self.engine.row().in_flight == len(self.engine.open() - self.engine.running())
        assert all(self.engine.leases()[leg].prefill_tokens == 0 for leg in LEG & self.engine.open() & left)
        self.engine.start()
        await self.engine.routable()

    async def dead(self) -> None:
        """The engine is taken for dead; it may come back with what it has."""
        had = self.engine.running()
        self.engine.silent(20)
        await self.engine.second()
        assert self.engine.load() == (0, 0, 0) or not had

    async def forget(self) -> None:
        await self.engine.fleet.upkeep.forget(WORKER)
        self.engine.round()
        await self.engine.routable()

    async def rest(self) -> None:
        """Redis knows what the engine has, and then that it has nothing; nobody settles what is left."""
        engine = self.engine
        await engine.quiet()
        engine.check()
        has = set(engine.present.values())
        assert engine.running() == has
        left = engine.open() & engine.seen - has - self.unheard - LEG
        assert not left, "the engine has ended it"
        booked = {name for name, lease in engine.leases().items() if lease.stage <= Stage.STARTED}
        assert booked & has <= engine.open(), "the engine has it, so it is part of its load"
        kept = engine.open() & has
        await engine.reap(*kept)
        assert kept <= engine.open(), "the engine has it, so it needs no renewal"
        for request in sorted(engine.present):
            engine.end(request)
        engine.round()
        await engine.apply()
        assert not engine.open() & engine.seen - (self.unheard - has) - LEG
        assert all(engine.leases()[leg].prefill_tokens == 0 for leg in LEG & engine.open() & engine.seen - self.unheard)
        await engine.reap(*engine.leases())
        assert engine.load() == (0, 0, 0)
        assert not engine.leases()
        assert not engine.running()


async def run(url: str, steps: list[Any]) -> None:
    client, store = connect(url, timeout_s=10), redis.Redis.from_url(url)
    try:
        engine = EngineWithEnds(store, Fleet(client, f"ends/{uuid.uuid4().hex}", timeouts=PATIENT))
        await engine.routable()
        history = History(engine)
        for action in steps:
            await history.step(*action)
        await history.rest()
    finally:
        await client.aclose()
        store.close()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=10, max_size=50))
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
@pytest.mark.in_turn
async def test_load_is_given_back_once_and_none_is_left(request: Any, which: str, steps: list[Any]) -> None:
    await run(request.getfixturevalue(which), steps)


@pytest.mark.long(
    minutes=4,
    shows="load is the sum of open reservations, and is given back once, over 4,000 random histories of engine reports",
)
@settings(max_examples=2_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=10, max_size=120))
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
async def test_load_is_given_back_once_and_none_is_left_for_long(request: Any, which: str, steps: list[Any]) -> None:
    await run(request.getfixturevalue(which), steps)
