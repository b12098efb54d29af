"""Random fleets whose engines hand prompts over: choices follow a plain model of the rule, and bookings add up."""

from __future__ import annotations

import math
import random
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.keyspace import BLOCK, Keyspace
from tests.support.redis.servers import PATIENT

from warmfleet.errors import CancelledReservation
from warmfleet.fleet import (
    Decision,
    Fleet,
    LoadRow,
    Moved,
    Question,
    Renewal,
    Role,
    Split,
    Stage,
    Weights,
    connect,
    prefill_leg,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SPEED = 10_000  # tokens per second
MOST = 8  # candidates of each kind that a decision looks at
WITHOUT_ANSWERS = Weights(decode_price=0.0, context_price=0.0)


# ---------------------------------------------------------------- a plain model of the rule


@dataclass
class Engine:
    """An engine as a decision sees it. base_s: the cost without room and answers. wait_s: of its own prefill. busy_s:
    the part of base_s for its share of time in prefill."""

    row: LoadRow
    role: Role | None
    base_s: float
    wait_s: float
    busy_s: float
    held: int

    @property
    def speed(self) -> float:
        return min(max(self.row.speed_tps, SPEED / 8), SPEED * 4)

    @property
    def context(self) -> int:
        return self.row.decode_tokens + self.row.foreign_decode_tokens

    @property
    def cache(self) -> float:
        return 0.97 * self.row.capacity_blocks * BLOCK

    @property
    def step_s(self) -> float:
        return (230 + 0.0015 * self.context) / self.speed


@dataclass
class Rule:
    """The rule for one request, in seconds, written without regard to its cost."""

    engines: list[Engine]
    prompt: int
    answer: int
    links: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def harm(self) -> float:
        roles = [engine.role for engine in self.engines if engine.role is not None]
        return 0.3 if any(role.gives == 0 or role.takes == 0 for role in roles) else 0.1

    def full_s(self, e: Engine) -> float:
        over = e.context + self.prompt + self.answer - e.cache
        return max(0.0, over) / e.context * self.answer * e.step_s if e.context and e.cache else 0.0

    def answering_s(self, e: Engine) -> float:
        seconds = self.answer * (e.step_s + (e.row.in_flight + 1) * 0.0015 * self.prompt / e.speed)
        share = e.busy_s * SPEED / self.prompt / WITHOUT_ANSWERS.place
        return 0.1 * seconds / (1 - min(share, 0.9))

    def harm_s(self, e: Engine) -> float:
        return self.harm * e.row.in_flight * (self.prompt - e.held) / e.speed

    def alone_s(self, e: Engine) -> float:
        least = min((each.busy_s for each in self.engines if each.role is None or each.role.alone), default=0.0)
        return e.base_s - least + self.full_s(e) + self.harm_s(e) + self.answering_s(e)

    def first_s(self, p: Engine) -> float:
        assert p.role is not None
        pinned = max(0.0, p.context + self.prompt - p.cache) / p.speed if p.cache else 0.0
        least = min(each.busy_s for each in self.engines if each.role and each.role.gives)
        return p.base_s - least + pinned + (self.harm_s(p) if p.role.alone else 0.0)

    def last_s(self, p: Engine | None, d: Engine) -> tuple[float, float]:
        """The partner's part, with the transfer. p: None for what the partner costs whoever is first."""
        link = self.links.get((p.row.slot, d.row.slot), 0.5 / SPEED) if p else 0.5 / SPEED
        transfer = link * (self.prompt - d.held) + 0.005
        return max(transfer, self.full_s(d)) + d.step_s + self.answering_s(d), transfer

    def pair_s(self, p: Engine, d: Engine) -> float:
        last_s, transfer = self.last_s(p, d)
        ready = p.wait_s + (self.prompt - p.held) / p.speed + transfer
        return self.first_s(p) + last_s + max(0.0, d.wait_s - ready)

    def pairs(self) -> Iterator[tuple[float, Engine, Engine]]:
        givers = [engine for engine in self.engines if engine.role and engine.role.gives]
        for p in sorted(givers, key=lambda p: (self.first_s(p), p.row.slot))[:MOST]:
            assert p.role is not None
            gives = p.role.gives
            takers = [engine for engine in self.engines if engine.role and engine.role.takes & gives]
            for d in sorted(takers, key=lambda d: (self.last_s(None, d)[0], d.row.slot))[:MOST]:
                if p is not d:
                    yield self.pair_s(p, d), p, d

    def best(self) -> tuple[float, float]:
        """The lowest cost alone, and of a pair."""
        alone = [self.alone_s(e) for e in self.engines if e.role is None or e.role.alone]
        return min(alone, default=math.inf), min((pair[0] for pair in self.pairs()), default=math.inf)


ROLES = st.sampled_from([None, Role(1, 0, alone=False), Role(2, 0, alone=False), Role(0, 1, alone=True)])
PARTNERS = st.sampled_from([Role(0, 3, alone=True), Role(0, 2, alone=True), Role(1, 1, alone=True)])
ENGINES = st.lists(
    st.tuples(
        st.one_of(ROLES, PARTNERS),
        st.integers(0, 30_000),  # prefill
        st.integers(0, 200_000),  # contexts
        st.integers(0, 50),  # in flight
        st.sampled_from([1_000, 10_000, 40_000]),  # blocks
        st.sampled_from([5_000, 10_000, 30_000]),  # speed
        st.integers(0, 60),  # blocks of the prompt that it holds
        st.sampled_from([0, 3_000]),  # contexts from elsewhere
        st.sampled_from([0, 20_000, 65_535]),  # share of its time in prefill
    ),
    min_size=1,
    max_size=22,
)


async def check_choice(fleet: Fleet, store: Any, engines: list[Any], blocks: int, answer: int, seed: int) -> None:
    keyspace, rng = Keyspace(store, fleet, seed), random.Random(seed)
    await keyspace.ticked()
    chain, roles, held = keyspace.chain(blocks), {}, {}
    for slot, (role, prefill, decode, flight, capacity, speed, own, foreign, busy) in enumerate(engines, 1):
        if role and not role.gives:  # a decode engine counts as no faster than those that compute prompts
            speed = min(speed, max((each[5] for each in engines if each[0] and each[0].gives), default=speed))
        row = {
            "prefill_tokens": prefill,
            "decode_tokens": decode,
            "in_flight": flight,
            "speed_tps": speed,
            "busy_share": busy,
        }
        await keyspace.worker(slot, **row, capacity_blocks=capacity, foreign_decode_tokens=foreign)
        held[slot] = min(own, blocks)
        await keyspace.hold(slot, chain, held[slot])
        if role:
            roles[slot] = role
    links = {(p, d): rng.choice([1e-6, 1e-4, 1e-3]) for p in roles for d in roles if p != d and rng.random() < 0.3}
    for (p, d), seconds in links.items():
        await store.hset(f"{keyspace.keys.prefix}links", f"{p}:{d}", seconds)
    fleet.use(weights=WITHOUT_ANSWERS, roles=roles)
    question = keyspace.ask(chain, decode_tokens=blocks * BLOCK + 1 + answer, seed=seed + 1)
    plain = await fleet.queue.consider(question)
    base = {row.worker_id: (row.cost_s, row.terms.wait_s / 1.5, row.terms.busy_s) for row in plain[2].candidates}
    rows = await keyspace.rows()
    rule = Rule(
        [Engine(row, roles.get(row.slot), *base[name], held=held[row.slot] * BLOCK) for name, row in rows.items()],
        question.prompt_tokens,
        answer,
        links,
    )
    worker_id, _, seen = await fleet.queue.consider(replace(question, split=Split.ALLOWED))
    if not roles:
        assert worker_id == plain[0]
        return
    alone_s, pair_s = rule.best()
    if math.isinf(min(alone_s, pair_s)):
        alone_s = min(rule.alone_s(engine) for engine in rule.engines)
    told = {bool(way.partner_id): way.cost_s for way in seen.ways}
    assert told.get(False, math.inf) == pytest.approx(alone_s, rel=1e-5, abs=1e-4)
    assert told.get(True, math.inf) == pytest.approx(pair_s, rel=1e-5, abs=1e-4)
    decision = await fleet.bookings.decide(replace(question, split=Split.ALLOWED, reservation=f"wf-0{'x' * 21}"))
    assert decision.worker_id == worker_id
    lowest = min(alone_s, pair_s)
    assert decision.cost_s <= lowest + seen.tie_s + 1e-4
    if decision.prefill is None:
        assert alone_s <= lowest + seen.tie_s + 1e-4
    else:
        assert pair_s < alone_s
        first, last = (
            next(e for n, e in zip(rows, rule.engines, strict=True) if n == name)
            for name in (decision.prefill.worker_id, decision.worker_id)
        )
        assert rule.pair_s(first, last) == pytest.approx(decision.cost_s, rel=1e-5, abs=1e-4)
        assert first.role is not None
        assert last.role is not None
        assert first.role.gives & last.role.takes


async def run_choice(url: str, *what: Any) -> None:
    client = connect(url, timeout_s=10)
    try:
        await check_choice(Fleet(client, f"joint/{uuid.uuid4().hex}", timeouts=PATIENT), client, *what)
    finally:
        await client.aclose()


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(engines=ENGINES, blocks=st.integers(1, 800), answer=st.integers(0, 2_000), seed=st.integers(0, 999))
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
@pytest.mark.in_turn
async def test_the_choice_is_that_of_the_rule(
    request: Any, which: str, engines: list[Any], blocks: int, answer: int, seed: int
) -> None:
    await run_choice(request.getfixturevalue(which), engines, blocks, answer, seed)


# ---------------------------------------------------------------- histories of bookings

REQUESTS = [f"wf-0{number:021d}" for number in range(6)]
ENDS = ["started", "finished", "failed", "cancelled", "unsent"]
WHICH = st.integers(0, len(REQUESTS) - 1)
STEPS = st.one_of(
    st.tuples(st.just("decide"), WHICH, st.sampled_from([0, 1, 2, 2, 2]), st.integers(1, 700)),
    st.tuples(st.just("settle"), WHICH, st.booleans(), st.sampled_from(ENDS)),
    st.tuples(st.just("renew"), WHICH, st.booleans(), st.booleans()),
    st.tuples(st.sampled_from(["expire", "lose"]), WHICH, st.booleans()),
)


class History:
    """Two prefill engines, two decode engines and one of both roles; requests with one leg or two."""

    def __init__(self, keyspace: Keyspace) -> None:
        self.keyspace, self.known = keyspace, dict[str, Renewal]()
        self.both = 0  # decisions that booked two legs

    async def begin(self) -> None:
        roles = {1: Role(1, 0, alone=False), 2: Role(2, 0, alone=False), 3: Role(0, 1, alone=True)}
        self.keyspace.fleet.use(roles=roles | {4: Role(0, 3, alone=True), 5: Role(1, 1, alone=True)})
        await self.keyspace.workers(5)
        for number in (1, 2):  # faster, so that decisions split prompts
            await self.keyspace.change(number, speed_tps=4 * SPEED)

    def ids(self, number: int, leg: bool) -> str:
        return prefill_leg(REQUESTS[number]) if leg else REQUESTS[number]

    async def decide(self, number: int, split: int, blocks: int) -> None:
        keyspace, chain = self.keyspace, random.Random(number % 2).randbytes(8 * blocks)
        question: Question = keyspace.ask(chain, reservation=REQUESTS[number], split=Split(split))
        try:
            decision: Decision = await keyspace.fleet.bookings.decide(question)
        except CancelledReservation:
            return
        for leg in (decision, decision.prefill):
            if leg is not None:
                booked = (leg.worker_id, leg.prefill_tokens, leg.decode_tokens)
                self.known[leg.reservation] = Renewal(leg.reservation, *booked)
        leases = await keyspace.leases()
        assert leases[decision.reservation].worker_id == decision.worker_id
        if decision.outcome == "booked" and decision.prefill is not None:
            self.both += 1
            assert leases[decision.prefill.reservation].worker_id == decision.prefill.worker_id
            assert decision.prefill.worker_id != decision.worker_id

    async def settle(self, number: int, leg: bool, outcome: Any) -> None:
        await self.keyspace.fleet.bookings.settle(self.ids(number, leg), outcome, moved=Moved(3, 1_000, 0.1))

    async def renew(self, number: int, leg: bool, started: bool) -> None:
        if known := self.known.get(self.ids(number, leg)):
            await self.keyspace.fleet.bookings.renew([known._replace(started=started)])

    async def expire(self, number: int, leg: bool) -> None:
        await self.keyspace.store.zadd(self.keyspace.keys.leases, {self.ids(number, leg): 1}, xx=True)
        await self.keyspace.fleet.bookings.settle("wf-nobody", "finished")

    async def lose(self, number: int, leg: bool) -> None:
        """Redis loses all reservations and rows, as after a start without its data."""
        await self.keyspace.store.flushdb()
        await self.begin()

    async def check(self) -> None:
        leases = (await self.keyspace.leases()).values()
        for name, row in (await self.keyspace.rows()).items():
            mine = [lease for lease in leases if lease.worker_id == name and lease.stage <= Stage.STARTED]
            booked = sum(each.prefill_tokens for each in mine), sum(each.decode_tokens for each in mine), len(mine)
            assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == booked, name

    async def rest(self) -> None:
        for number in range(len(REQUESTS)):
            for leg in (False, True):
                await self.expire(number, leg)
        await self.check()
        assert not await self.keyspace.leases()
        assert not await self.keyspace.speculation()
        for row in (await self.keyspace.rows()).values():
            assert (row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0)


async def run_history(store: Any, fleet: Fleet, steps: list[Any]) -> int:
    history = History(Keyspace(store, fleet))
    await store.flushdb()
    await history.begin()
    for action, *what in steps:
        await getattr(history, action)(*what)
        await history.check()
    await history.rest()
    return history.both


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=10, max_size=50))
async def test_load_is_the_sum_of_both_legs_and_none_is_left(store: Any, fleet: Fleet, steps: list[Any]) -> None:
    await run_history(store, fleet, steps)


async def test_histories_have_both_kinds_of_decisions(store: Any, fleet: Fleet) -> None:
    steps: list[Any] = [("decide", number, 2, 700) for number in range(len(REQUESTS))]
    assert await run_history(store, fleet, steps) > 0
