"""Limits of clients: decide checks and books in one step, settle and expiry give back, whoever dies in between."""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fleet.keyspace import Keyspace
from tests.support.redis.servers import PATIENT

from warmfleet.errors import BadArgument, CancelledReservation, RateLimited
from warmfleet.fleet import (
    ClientLimits,
    Constants,
    Decision,
    Fleet,
    Queued,
    QueueLimits,
    Renewal,
    Spans,
    Stage,
    connect,
    new_reservation,
)

if TYPE_CHECKING:
    from warmfleet.fleet import Question

LONG = Spans(lease_ms=3_600_000, ticket_ms=3_600_000, linger_ms=0)


def asked(keyspace: Keyspace, limits: ClientLimits, **fields: Any) -> Question:
    """A request of 101 tokens of the client with these limits."""
    fields = {"prompt_tokens": 101, "decode_tokens": 10} | fields
    return keyspace.ask(reservation=new_reservation(1, client=limits.tag), limits=limits, **fields)


async def in_flight(keyspace: Keyspace, limits: ClientLimits) -> set[str]:
    """The requests that Redis counts for the client."""
    found = await cast("Any", keyspace.store.zrange(f"{keyspace.keys.prefix}client:{limits.tag}", 0, -1))
    return {name.decode() for name in found}


async def used(keyspace: Keyspace, limits: ClientLimits) -> int:
    """The tokens that the client has used, as a further request finds them."""
    decision = await keyspace.fleet.bookings.decide(asked(keyspace, limits, prompt_tokens=1))
    await keyspace.fleet.bookings.settle(decision.reservation, "failed")
    assert decision.use is not None
    assert decision.use.tokens is not None
    return decision.use.tokens - 1


async def test_a_client_has_as_many_requests_in_flight_as_its_limit(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    two, other = ClientLimits("team-a", concurrency=2), ClientLimits("team-b", concurrency=1)
    asks = [asked(keyspace, two) for _ in range(3)]
    found = [(await keyspace.fleet.bookings.decide(ask)).use for ask in asks[:2]]
    assert [use and use.in_flight for use in found] == [1, 2]
    with pytest.raises(RateLimited, match="API key team-a has 2 requests in flight, of 2") as refused:
        await keyspace.fleet.queue.decide_in_turn(asks[2])
    error = refused.value
    assert (error.status, error.type, error.code, error.retry_after_s) == (429, "requests", "rate_limit_exceeded", 1)
    assert error.headers == {"x-ratelimit-limit-requests": "2", "x-ratelimit-remaining-requests": "0"}
    assert asks[2].reservation not in await keyspace.leases()
    await keyspace.fleet.bookings.decide(asked(keyspace, other))
    assert (await keyspace.fleet.bookings.decide(asks[0])).outcome == "known", "an id that is booked counts once"
    assert await in_flight(keyspace, two) == {ask.reservation for ask in asks[:2]}
    await keyspace.fleet.bookings.settle(asks[0].reservation, "finished")
    await keyspace.fleet.bookings.decide(asks[2])
    assert await in_flight(keyspace, two) == {ask.reservation for ask in asks[1:]}


@pytest.mark.parametrize("outcome", ["finished", "failed", "cancelled", "unsent"])
@pytest.mark.parametrize("started", [False, True])
async def test_every_end_gives_the_place_back(keyspace: Keyspace, outcome: Any, started: bool) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", concurrency=1)
    for _ in range(3):
        ask = asked(keyspace, limits)
        await keyspace.fleet.bookings.decide(ask)
        if started:
            await keyspace.fleet.bookings.settle(ask.reservation, "started")
            assert await in_flight(keyspace, limits) == {ask.reservation}
        await keyspace.fleet.bookings.settle(ask.reservation, outcome)
        assert await in_flight(keyspace, limits) == set()
    assert await keys_of_clients(keyspace) == set()


async def keys_of_clients(keyspace: Keyspace) -> set[str]:
    pattern = keyspace.keys.prefix.replace("{", "\\{") + "[ct][lo][ik]e*:*"
    return {key.decode() async for key in keyspace.store.scan_iter(match=pattern, count=1_000)}


async def test_what_a_dead_replica_held_is_free_when_its_lease_expires(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", concurrency=1)
    lost = asked(keyspace, limits)
    await keyspace.fleet.bookings.decide(lost)
    await keyspace.expire(lost.reservation)
    assert await in_flight(keyspace, limits) == set()
    await keyspace.fleet.bookings.decide(asked(keyspace, limits))


async def test_a_place_is_free_at_its_expiry_even_if_nothing_was_reaped(store: Any, model: str) -> None:
    """decide reaps eight leases; a replica that died may have had more, and older ones."""
    keyspace = Keyspace(store, Fleet(store, model, timeouts=PATIENT, constants=Constants(spans=Spans(lease_ms=50))))
    await keyspace.workers(1)
    await keyspace.ticked(grace_ms=3_600_000)
    limits = ClientLimits("team-a", concurrency=2)
    lost = [keyspace.ask() for _ in range(30)] + [asked(keyspace, limits) for _ in range(2)]
    for ask in lost:
        await keyspace.fleet.bookings.decide(ask)
    for at, ask in enumerate(lost):
        await store.zadd(keyspace.keys.leases, {ask.reservation: at + 1}, xx=True)
    await asyncio.sleep(0.1)
    keyspace.fleet.use(spans=LONG)
    for _ in range(2):
        assert (await keyspace.fleet.bookings.decide(asked(keyspace, limits))).outcome == "booked"
    assert lost[-1].reservation in await keyspace.leases()


async def test_a_renewed_request_stays_in_flight(store: Any, model: str) -> None:
    keyspace = Keyspace(store, Fleet(store, model, timeouts=PATIENT, constants=Constants(spans=Spans(lease_ms=60_000))))
    await keyspace.workers(1)
    limits = ClientLimits("team-a", concurrency=1)
    ask = asked(keyspace, limits)
    decision = await keyspace.fleet.bookings.decide(ask)
    open_requests = f"{keyspace.keys.prefix}client:{limits.tag}"
    await store.zadd(open_requests, {ask.reservation: 1})
    renewal = Renewal(ask.reservation, decision.worker_id, decision.prefill_tokens, decision.decode_tokens)
    assert await keyspace.fleet.bookings.renew([renewal]) == (1, 0, 0)
    with pytest.raises(RateLimited):
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits))


async def test_requests_count_again_after_redis_lost_all(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", concurrency=1)
    ask = asked(keyspace, limits)
    decision = await keyspace.fleet.bookings.decide(ask)
    await keyspace.store.delete(keyspace.keys.lease, keyspace.keys.leases, f"{keyspace.keys.prefix}client:{limits.tag}")
    renewal = Renewal(ask.reservation, decision.worker_id, decision.prefill_tokens, decision.decode_tokens)
    assert await keyspace.fleet.bookings.renew([renewal]) == (0, 1, 0)
    assert await in_flight(keyspace, limits) == {ask.reservation}
    with pytest.raises(RateLimited):
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits))


async def test_a_second_try_counts_once(keyspace: Keyspace) -> None:
    """The first try has failed, the next one is decided under an id of its own."""
    await keyspace.workers(2)
    limits = ClientLimits("team-a", concurrency=1, tokens_per_minute=150)
    first, second = asked(keyspace, limits), asked(keyspace, limits)
    await keyspace.fleet.bookings.decide(first)
    await keyspace.fleet.bookings.settle(first.reservation, "failed")
    decision = await keyspace.fleet.bookings.decide(second)
    assert decision.use is not None
    assert (decision.use.in_flight, decision.use.tokens) == (1, 101)


async def test_another_attempt_at_an_admitted_request_counts_and_is_not_refused(keyspace: Keyspace) -> None:
    """The first worker of a request failed, and another request took its place before its second attempt."""
    await keyspace.workers(2)
    limits = ClientLimits("team-a", concurrency=1, tokens_per_minute=150)
    first, other, again = asked(keyspace, limits), asked(keyspace, limits), asked(keyspace, limits.of_admitted)
    await keyspace.fleet.bookings.decide(first)
    await keyspace.fleet.bookings.settle(first.reservation, "failed")
    await keyspace.fleet.bookings.decide(other)
    decision = await keyspace.fleet.queue.decide_in_turn(again)
    assert isinstance(decision, Decision)
    assert decision.use is not None
    assert (decision.use.in_flight, decision.use.tokens) == (2, 202)
    with pytest.raises(RateLimited):
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits))
    await keyspace.fleet.bookings.settle(again.reservation, "failed")
    assert await in_flight(keyspace, limits) == {other.reservation}


# ---------------------------------------------------------------- tokens


async def test_tokens_of_prompts_and_answers_count(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", tokens_per_minute=1_000_000)
    asks = [asked(keyspace, limits, prompt_tokens=100_000) for _ in range(4)]
    for ask in asks:
        await keyspace.fleet.bookings.decide(ask)
    await keyspace.fleet.bookings.settle(asks[0].reservation, "finished", 50_000)
    await keyspace.fleet.bookings.settle(asks[0].reservation, "finished", 50_000)
    await keyspace.fleet.bookings.settle(asks[1].reservation, "failed")
    await keyspace.fleet.bookings.settle(asks[2].reservation, "started")
    await keyspace.fleet.bookings.settle(asks[2].reservation, "failed", -100_000)
    await keyspace.fleet.bookings.settle(asks[3].reservation, "cancelled", 10_000)
    paid_back = 260_000 - await used(keyspace, limits)
    assert 0 <= paid_back < 90_000, "in five seconds"


async def test_a_request_beyond_the_rate_is_told_when_it_may_pass(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", concurrency=9, tokens_per_minute=6_000)
    await keyspace.fleet.bookings.decide(asked(keyspace, limits, prompt_tokens=6_000))
    with pytest.raises(RateLimited, match=r"used [56],\d\d\d of the 6,000 tokens .* this request has 3,000") as refused:
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits, prompt_tokens=3_000))
    error = refused.value
    assert (error.type, error.code) == ("tokens", "rate_limit_exceeded")
    assert 25 <= error.retry_after_s <= 30, "100 tokens are paid back in a second"
    assert f"try again in {error.retry_after_s} s" in error.message
    assert error.headers["x-ratelimit-limit-tokens"] == "6000"
    assert int(error.headers["x-ratelimit-remaining-tokens"]) < 600
    assert error.headers["x-ratelimit-reset-tokens"].endswith("s")
    expiry = await keyspace.store.pttl(f"{keyspace.keys.prefix}tokens:{limits.tag}")
    assert 110_000 < expiry <= 120_000


async def test_used_tokens_are_paid_back_at_the_rate(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", tokens_per_minute=600_000)
    await keyspace.fleet.bookings.decide(asked(keyspace, limits, prompt_tokens=600_000))
    with pytest.raises(RateLimited):
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits, prompt_tokens=600_000))
    await asyncio.sleep(0.2)  # 2,000 tokens
    await keyspace.fleet.bookings.decide(asked(keyspace, limits, prompt_tokens=1_500))


@pytest.mark.parametrize("renewed", [False, True])
async def test_an_answer_counts_though_its_prompt_is_paid_back(keyspace: Keyspace, renewed: bool) -> None:
    """The answer counts even if the record was about to expire when a renewal came."""
    await keyspace.workers(1)
    limits = ClientLimits("team-a", tokens_per_minute=60_000_000)
    ask, other = asked(keyspace, limits, prompt_tokens=1), asked(keyspace, limits, prompt_tokens=1)
    await keyspace.fleet.bookings.decide(ask)
    await keyspace.fleet.bookings.decide(other)
    await keyspace.fleet.bookings.settle(other.reservation, "failed", -1)
    record = f"{keyspace.keys.prefix}tokens:{limits.tag}"
    if renewed:
        await keyspace.store.pexpire(record, 2_000)
        assert await keyspace.fleet.bookings.renew([Renewal(ask.reservation, "w1.0", 1, 1)]) == (1, 0, 0)
    assert await keyspace.store.pttl(record) > 100_000
    await keyspace.fleet.bookings.settle(ask.reservation, "finished", 50_000_000)
    assert await used(keyspace, limits) > 40_000_000


async def test_a_prompt_longer_than_the_limit_passes_when_nothing_is_used(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", tokens_per_minute=100)
    await keyspace.fleet.bookings.decide(asked(keyspace, limits, prompt_tokens=10_000))
    with pytest.raises(RateLimited) as refused:
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits, prompt_tokens=1))
    assert refused.value.retry_after_s == pytest.approx(99 * 60, abs=20)


async def test_a_new_limit_counts_from_the_next_request_on(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    await keyspace.fleet.bookings.decide(asked(keyspace, ClientLimits("team-a", 1, 1_000), prompt_tokens=1_000))
    more = ClientLimits("team-a", 2, 1_000_000)
    assert (await keyspace.fleet.bookings.decide(asked(keyspace, more, prompt_tokens=1_000))).use is not None


async def test_limits_need_a_client(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.decide(keyspace.ask(limits=ClientLimits("team-a", 1)))


async def test_a_client_without_limits_leaves_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    await keyspace.done(keyspace.ask(reservation=new_reservation(1)))
    assert await keys_of_clients(keyspace) == set()


async def test_explaining_books_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    limits = ClientLimits("team-a", 1, 1_000)
    await keyspace.fleet.queue.explain(asked(keyspace, limits))
    assert await keys_of_clients(keyspace) == set()
    decision = await keyspace.fleet.bookings.decide(asked(keyspace, limits), explain=True)
    assert decision.seen is not None
    assert [row.worker_id for row in decision.seen.candidates] == ["w1.0"]
    assert decision.use is not None
    assert decision.use.in_flight == 1


# ---------------------------------------------------------------- the queue


async def saturated(keyspace: Keyspace) -> None:
    """The only worker has as much as it may have."""
    await keyspace.workers(1)
    await keyspace.ticked(grace_ms=3_600_000)
    keyspace.fleet.use(limits=QueueLimits(0.1, 8))  # 1,000 tokens
    keyspace.fleet.use(spans=LONG)
    await keyspace.fleet.bookings.decide(keyspace.ask(reservation="wf-busy", prompt_tokens=2_000))


async def test_a_request_that_waits_is_in_flight(keyspace: Keyspace) -> None:
    await saturated(keyspace)
    limits = ClientLimits("team-a", 2, 1_000)
    first, second, third = (asked(keyspace, limits, prompt_tokens=300) for _ in range(3))
    for ask in (first, second):
        assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    with pytest.raises(RateLimited):
        await keyspace.fleet.queue.decide_in_turn(third)
    await keyspace.fleet.queue.poll([first.reservation], [second.reservation])
    assert await in_flight(keyspace, limits) == {first.reservation}
    assert isinstance(await keyspace.fleet.queue.decide_in_turn(third), Queued)
    await keyspace.fleet.bookings.settle("wf-busy", "cancelled")
    decision = await keyspace.fleet.queue.decide_in_turn(first)
    assert isinstance(decision, Decision)
    assert decision.use is not None
    assert decision.use.in_flight == 2
    assert 550 < (decision.use.tokens or 0) <= 600, "the place in the queue was counted, and is counted once"
    await keyspace.fleet.bookings.settle(first.reservation, "cancelled")
    await keyspace.fleet.queue.poll((), [third.reservation])
    assert await in_flight(keyspace, limits) == set()


async def test_a_ticket_that_is_asked_about_keeps_its_clients_place(keyspace: Keyspace) -> None:
    """The place stays taken for the client's other requests, even if it expired a moment before the poll."""
    await saturated(keyspace)
    limits = ClientLimits("team-a", 1)
    ask = asked(keyspace, limits)
    assert isinstance(await keyspace.fleet.queue.decide_in_turn(ask), Queued)
    await keyspace.store.zadd(f"{keyspace.keys.prefix}client:{limits.tag}", {ask.reservation: 1})
    await keyspace.fleet.queue.poll([ask.reservation])
    with pytest.raises(RateLimited):
        await keyspace.fleet.queue.decide_in_turn(asked(keyspace, limits))
    assert await in_flight(keyspace, limits) == {ask.reservation}


async def test_a_ticket_that_expires_or_is_displaced_gives_its_place_back(keyspace: Keyspace) -> None:
    await saturated(keyspace)
    keyspace.fleet.use(limits=QueueLimits(0.1, 2))
    limits = ClientLimits("team-a", 2, 10_000)
    asks = [asked(keyspace, limits) for _ in range(2)]
    for ask in asks:
        await keyspace.fleet.queue.decide_in_turn(replace(ask, tenant=b"tenant-a"))
    # The newest of the longest flow gives way.
    await keyspace.fleet.queue.decide_in_turn(keyspace.ask(tenant=b"tenant-b"))
    assert await in_flight(keyspace, limits) == {asks[0].reservation}
    await keyspace.store.zadd(keyspace.keys.queue2 + ":leases", {asks[0].reservation: 1})
    await keyspace.fleet.queue.poll()
    assert await in_flight(keyspace, limits) == set()
    assert await used(keyspace, limits) == 0, "what waited in vain costs nothing"


# ---------------------------------------------------------------- any order of events

CLIENTS = [
    ClientLimits("free", 0, 0),
    ClientLimits("one", 1),
    ClientLimits("three", 3, 5_000),
    ClientLimits("rate", 0, 900),
]
STEPS = st.one_of(
    st.tuples(st.just("decide"), st.integers(0, 3), st.integers(0, 2), st.integers(1, 800)),
    st.tuples(st.just("again"), st.integers(0, 99)),
    st.tuples(st.just("settle"), st.integers(0, 99), st.sampled_from(["started", "finished", "failed", "cancelled"])),
    st.tuples(st.just("expire"), st.integers(0, 99)),
    st.tuples(st.just("renew"), st.integers(0, 2)),
    st.tuples(st.just("leave"), st.integers(0, 99)),
    st.tuples(st.just("kill"), st.integers(0, 2)),
    st.tuples(st.just("rejoin"), st.integers(1, 2)),
)


class History:
    """Requests of three replicas, and the leases and tickets that Redis must hold for them."""

    def __init__(self, keyspace: Keyspace) -> None:
        self.keyspace = keyspace
        self.asked: dict[str, tuple[Question, int]] = {}  # id -> the request, its replica
        self.booked: dict[str, Decision] = {}
        self.rebuilt: set[str] = set()

    async def step(self, action: str, *what: Any) -> None:
        names = sorted(self.asked)
        if action in ("decide", "rejoin", "renew", "kill"):
            await getattr(self, f"_{action}")(*what)
        elif names:
            await getattr(self, f"_{action}")(names[what[0] % len(names)], *what[1:])

    async def _decide(self, client: int, replica: int, tokens: int) -> None:
        limits = CLIENTS[client] if client else None
        name = new_reservation(1, client=limits.tag if limits else "")
        ask = self.keyspace.ask(reservation=name, prompt_tokens=tokens, limits=limits)
        self.asked[ask.reservation] = ask, replica
        await self.decide(ask)

    async def _rejoin(self, number: int) -> None:
        await self.keyspace.change(number, epoch=(await self.keyspace.row(number)).epoch + 1, in_flight=0)

    async def _renew(self, replica: int) -> None:
        """A replica renews an expired lease: its request runs on, whatever Redis has let in meanwhile."""
        before = await self.keyspace.leases()
        held = {name: own for name, own in self.booked.items() if self.asked[name][1] == replica}
        await self.keyspace.fleet.bookings.renew(
            [Renewal(name, own.worker_id, own.prefill_tokens, 10) for name, own in held.items()]
        )
        self.rebuilt |= held.keys() - before.keys()

    async def _kill(self, replica: int) -> None:
        for name, (_, own) in self.asked.items():
            if own == replica:
                await self._let_expire(name)
                self.booked.pop(name, None)
        await self.keyspace.fleet.bookings.reap()
        await self.keyspace.fleet.queue.poll()

    async def _let_expire(self, name: str) -> None:
        for key in (self.keyspace.keys.leases, self.keyspace.keys.queue2 + ":leases"):
            await self.keyspace.store.zadd(key, {name: 1}, xx=True)

    async def _again(self, name: str) -> None:
        await self.decide(self.asked[name][0])

    async def _settle(self, name: str, outcome: Any) -> None:
        await self.keyspace.fleet.bookings.settle(name, outcome, 7)
        if outcome != "started":
            self.booked.pop(name, None)

    async def _expire(self, name: str) -> None:
        await self._let_expire(name)
        await self.keyspace.fleet.bookings.reap()
        await self.keyspace.fleet.queue.poll()

    async def _leave(self, name: str) -> None:
        await self.keyspace.fleet.queue.poll((), [name])

    async def decide(self, ask: Question) -> None:
        try:
            answer = await self.keyspace.fleet.queue.decide_in_turn(ask)
        except RateLimited:
            limits = ask.limits
            assert limits is not None
            full = 0 < limits.concurrency <= len(await self.open(limits.tag))
            assert full or limits.tokens_per_minute
            return
        except CancelledReservation:
            return
        if isinstance(answer, Decision):
            self.booked[ask.reservation] = answer

    async def open(self, tag: str) -> set[str]:
        """The open leases and the tickets of a client."""
        leases = {name for name, lease in (await self.keyspace.leases()).items() if lease.stage <= Stage.STARTED}
        tickets = await cast("Any", self.keyspace.store.hgetall(self.keyspace.keys.queue2 + ":tickets"))
        waiting = {name.decode() for name, record in tickets.items() if record}
        return {name for name in leases | waiting if name[25:] == tag}

    async def check(self) -> None:
        for limits in CLIENTS[1:]:
            counted, open_now = await in_flight(self.keyspace, limits), await self.open(limits.tag)
            assert counted == open_now, limits.name
            assert not limits.concurrency or len(counted - self.rebuilt) <= limits.concurrency


async def run(url: str, steps: list[Any]) -> None:
    client = connect(url, timeout_s=10)
    try:
        keyspace = Keyspace(
            client, Fleet(client, f"limits/{uuid.uuid4().hex}", timeouts=PATIENT, constants=Constants(spans=LONG))
        )
        await keyspace.workers(2)
        await keyspace.ticked(grace_ms=3_600_000)
        keyspace.fleet.use(limits=QueueLimits(0.1, 6))
        history = History(keyspace)
        for step in steps:
            await history.step(*step)
            await history.check()
        for name in history.asked:
            await keyspace.fleet.queue.poll((), [name])
            await keyspace.fleet.bookings.settle(name, "cancelled")
        await history.check()
        assert not any([await in_flight(keyspace, limits) for limits in CLIENTS])
    finally:
        await client.aclose()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=st.lists(STEPS, min_size=10, max_size=40))
@pytest.mark.parametrize("which", ["valkey_url", "redis7_url"])
async def test_in_flight_is_what_is_live_in_any_order_of_events(request: Any, which: str, steps: list[Any]) -> None:
    await run(request.getfixturevalue(which), steps)


async def test_replicas_at_the_same_time_stay_within_the_limit(redis_url: str, model: str) -> None:
    """Four clients of Redis race for three places, again and again."""
    clients = [connect(redis_url, timeout_s=10) for _ in range(4)]
    try:
        fleets = [Fleet(client, model, timeouts=PATIENT) for client in clients]
        keyspace, rng, limits = Keyspace(clients[0], fleets[0]), random.Random(5), ClientLimits("team-a", 3)
        await keyspace.workers(2)
        await keyspace.ticked(grace_ms=3_600_000)
        most, served = 0, 0

        async def requests(fleet: Fleet) -> None:
            nonlocal most, served
            for _ in range(40):
                ask = asked(keyspace, limits)
                try:
                    await fleet.queue.decide_in_turn(ask)
                except RateLimited:
                    continue
                most = max(
                    most, len([lease for lease in (await keyspace.leases()).values() if lease.stage <= Stage.STARTED])
                )
                await asyncio.sleep(rng.random() * 0.002)
                await fleet.bookings.settle(ask.reservation, "finished")
                served += 1

        await asyncio.gather(*(requests(fleet) for fleet in fleets for _ in range(3)))
        assert most == 3
        assert served > 20
    finally:
        for client in clients:
            await client.aclose()
