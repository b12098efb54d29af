"""A single one of several pools counts a client's requests, so limits hold for any order of requests and failures."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.app.routing.test_pool_choice import TAGS, Fixture
from tests.support.polling import poll
from tests.support.redis.servers import PATIENT

from warmfleet.errors import FleetUnavailable, RateLimited, WarmfleetError
from warmfleet.fleet import ClientLimits, ClientUse, Fleet, connect
from warmfleet.pools import late_pools
from warmfleet.routing import client_limits
from warmfleet.routing.booking import BookingState
from warmfleet.routing.gateway import Ending, Gateway
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from warmfleet.fleet import Decision
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.attempt import Attempt

LIMITS = ClientLimits("team-a", 3, 1_000_000)


@pytest.fixture
async def replicas(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A function that makes replicas with separate pools, which count clients in the same Redis."""
    monkeypatch.setattr(late_pools, "LATE_S", 5.0)  # the test's machine may be busy
    fleets: list[Fleet] = []

    def make(count: int) -> list[Fixture]:
        made = [Fixture() for _ in range(count)]
        for fixture in made:
            for tag, store in fixture.stores.items():
                fleet = Fleet(connect(valkey_url, timeout_s=2), f"{model}#{tag[-1]}", timeouts=PATIENT)
                fleets.append(fleet)
                store.clients = fleet.clients
        return made

    yield make
    for fleet in fleets:
        await fleet.close()


async def keys(url: str, model: str) -> dict[str, list[str]]:
    """The requests that count for any client, by the number of the counting pool."""
    redis = connect(url, timeout_s=2)
    try:
        pattern = f"wf:{{{model.replace('/', '~')}#*}}:client:*"
        found = [key async for key in redis.scan_iter(match=pattern, count=1_000)]
        return {
            key.decode().partition("#")[2][0]: [str(request) for request in await redis.zrange(key, 0, -1)]
            for key in found
        }
    finally:
        await redis.aclose()


async def begin(replica: Fixture, limits: ClientLimits = LIMITS) -> tuple[Attempt, Decision]:
    """An attempt with its decision; a refused attempt is released."""
    job, attempt = replica.attempt(replica.job(limits=limits))
    try:
        decision = await replica.queue.admit(job, attempt)
    except BaseException:
        attempt.release("failed")
        raise
    return attempt, decision


async def quiet(*made: Fixture) -> None:
    for fixture in made:
        await fixture.counting.drained()
        await fixture.nothing_left()


@pytest.mark.parametrize("seed", range(6))
async def test_the_limit_holds_over_all_pools_and_replicas(
    replicas: Any, valkey_url: str, model: str, seed: int
) -> None:
    """For any interleaving the requests in flight never exceed the limit, and in the end none is counted."""
    rng, made = random.Random(seed), replicas(3)
    at_once = most = served = 0

    async def client(replica: Fixture) -> None:
        nonlocal at_once, most, served
        for _ in range(5):
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.005)))
            for store in replica.stores.values():
                store.words = rng.choices(("book", "book", "queue", "full", "none"), k=rng.randint(0, 2))
                store.slow_s = rng.choice((0.0, 0.0, 0.002))
            try:
                async with asyncio.timeout(rng.choice((0.003, 5.0, 5.0, 5.0))):
                    attempt, _ = await begin(replica)
            except (WarmfleetError, TimeoutError):
                continue
            at_once += 1
            most, served = max(most, at_once), served + 1
            try:
                await asyncio.sleep(rng.choice((0.001, 0.01)))
                if rng.random() < 0.2:
                    await replica.counting.keep()
            finally:
                at_once -= 1
                attempt.release(rng.choice(("finished", "failed", "cancelled")))

    await asyncio.gather(*(client(replica) for replica in made for _ in range(2)))
    assert 1 < most <= LIMITS.concurrency
    assert served > LIMITS.concurrency
    await quiet(*made)
    assert await keys(valkey_url, model) == {}
    assert not any(replica.counting.open for replica in made)


@pytest.mark.parametrize("seed", range(2))
async def test_no_count_is_left_whatever_answers_are_late_or_lost(
    replicas: Any, valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(late_pools, "LATE_S", 0.01)
    rng, made, loop = random.Random(seed), replicas(2), asyncio.get_running_loop()

    def unsure(admit: Any) -> Any:
        def does(name: str, limits: ClientLimits, tokens: int, on_answer: OnAnswer) -> None:
            late: OnAnswer = partial(cast("Any", loop.call_later), 0.03, on_answer)
            answers = rng.choice((on_answer, on_answer, late))
            lost = FleetUnavailable("no answer within the time limit")
            admit(name, limits, tokens, rng.choice((answers, answers, lambda *_: answers(None, lost))))

        return does

    def loses(keep: Any) -> Any:
        return lambda names: rng.choice((keep, loses_answers(keep)))(names)

    async def client(replica: Fixture) -> None:
        for _ in range(5):
            with suppress(WarmfleetError, TimeoutError):
                async with asyncio.timeout(rng.choice((0.02, 5.0))):
                    attempt, _ = await begin(replica)
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(rng.choice((0.0, 0.04)))
                    with suppress(WarmfleetError):
                        await replica.counting.keep()
                attempt.release(rng.choice(("finished", "failed", "cancelled")))

    for replica in made:
        for store in replica.stores.values():
            store.clients.admit, store.clients.keep = unsure(store.clients.admit), loses(store.clients.keep)
        for pool in replica.pools:
            pool.degraded._retry_s = 0.02
    await asyncio.gather(*(client(replica) for replica in made for _ in range(2)))
    await asyncio.sleep(0.04)
    await quiet(*made)
    assert await keys(valkey_url, model) == {}
    assert not any(replica.counting.open for replica in made)


async def test_replicas_name_the_same_pool_and_clients_spread_over_all(replicas: Any) -> None:
    one, other = replicas(2)
    tags = [ClientLimits(f"team-{number}").tag for number in range(60)]
    found = [one.counting.pool_of("m", tag).tag for tag in tags]
    client_limits._order.cache_clear()
    assert found == [other.counting.pool_of("m", tag).tag for tag in tags]
    assert {*found} == {*TAGS}


async def test_a_refused_client_costs_no_decision_until_it_may_come_again(replicas: Any) -> None:
    (replica,) = replicas(1)
    held = [await begin(replica) for _ in range(3)]
    with pytest.raises(RateLimited, match="team-a has 3 requests in flight"):
        await begin(replica)
    asked = sum(replica.asked())
    for _ in range(3):
        with pytest.raises(RateLimited):
            await begin(replica)
    assert sum(replica.asked()) == asked
    assert replica.metrics.client_limits.labels("team-a", "requests")._value.get() == 4
    held.pop()[0].release("finished")
    attempt, decision = await begin(replica)
    assert decision.use is not None
    assert decision.use.in_flight == 3
    for counted in (attempt, *(counted for counted, _ in held)):
        counted.release("finished")
    await quiet(replica)


@pytest.mark.parametrize(("outcome", "used"), [("finished", 107), ("cancelled", 107), ("failed", 0)])
async def test_what_a_request_costs_depends_on_its_end(replicas: Any, outcome: Any, used: int) -> None:
    (replica,) = replicas(1)
    slow = ClientLimits("team-a", 3, 1_000)
    attempt, decision = await begin(replica, slow)
    assert decision.use is not None
    assert (decision.use.in_flight, decision.use.tokens) == (1, 100)
    attempt.output = type("Output", (), {"count": 7})()
    attempt.release(outcome)
    await quiet(replica)
    attempt, decision = await begin(replica, slow)
    assert decision.use is not None
    assert abs((decision.use.tokens or 0) - 100 - used) < 5
    attempt.release("failed")
    await quiet(replica)


async def test_what_waited_in_vain_costs_nothing(replicas: Any) -> None:
    (replica,) = replicas(1)
    for store in replica.stores.values():
        store.words = ["queue"] * 1_000
    job, attempt = replica.attempt(replica.job(limits=LIMITS, patience_s=0.05))
    with pytest.raises(WarmfleetError):
        await replica.queue.admit(job, attempt)
    attempt.release("failed")
    for store in replica.stores.values():
        store.words = []
    attempt, decision = await begin(replica)
    assert decision.use is not None
    assert (decision.use.in_flight, decision.use.tokens) == (1, 100)
    attempt.release("failed")
    await quiet(replica)


async def test_requests_count_on_in_another_pool_when_theirs_is_away(
    replicas: Any, valkey_url: str, model: str
) -> None:
    (replica,) = replicas(1)
    first, _ = await begin(replica)
    (before,) = await keys(valkey_url, model)
    pool = replica.counting.pool_of("m", LIMITS.tag)
    assert pool is not None
    assert pool.tag[-1] == before
    for _ in range(2):
        pool.degraded.failed("away")
    second, _ = await begin(replica)
    assert {*await keys(valkey_url, model)} > {before}
    await replica.counting.keep()
    await replica.counting.drained()
    other = replica.counting.pool_of("m", LIMITS.tag)
    counted = {number: len(names) for number, names in (await keys(valkey_url, model)).items()}
    assert counted == {before: 1, other.tag[-1]: 2}, "a pool that comes back soon still has its count"
    for attempt in (first, second):
        attempt.release("finished")
    await quiet(replica)
    assert await keys(valkey_url, model) == {}


async def test_without_an_answer_a_request_passes_and_is_told_unchecked(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_pools, "LATE_S", 0.01)
    (replica,) = replicas(1)
    late: list[OnAnswer] = []
    for store in replica.stores.values():
        monkeypatch.setattr(store.clients, "admit", lambda *given: late.append(given[-1]))
    attempt, decision = await begin(replica)
    assert (attempt.chosen.state, decision.use) == (BookingState.BOOKED, None)
    assert replica.metrics.client_limits.labels("team-a", "unchecked")._value.get() == 1
    while late:
        late.pop()([1, 100], None)
    attempt.release("finished")
    for each in replica.pools:
        for _ in range(2):
            each.degraded.failed("away")
    with suppress(WarmfleetError):
        attempt, _ = await begin(replica)
        attempt.release("finished")
    assert replica.metrics.client_limits.labels("team-a", "unchecked")._value.get() == 2
    await replica.counting.drained()


def loses(replica: Fixture, *, answers: bool = True) -> Pool:
    """Make the Redis of the client's counting pool fail from now on. answers: calls fail at once, or get no answer."""
    pool = replica.counting.pool_of("m", LIMITS.tag)
    assert pool is not None
    error = FleetUnavailable("away")

    def call(*given: Any) -> None:
        if answers:
            given[-1](None, error)

    async def keep(_names: object) -> None:
        raise error

    for name, does in (("admit", call), ("end", lambda *given: given[-1](None, error)), ("keep", keep)):
        setattr(replica.stores[pool.tag].clients, name, does)
    return pool


async def as_many_as_pass(replica: Fixture, homes: Sequence[Pool] | None = None) -> list[Attempt]:
    """Begin requests one after another until a request is refused (12 at most), and return those in flight."""
    held: list[Attempt] = []
    for _ in range(12):
        job, attempt = replica.attempt(replica.job(homes, limits=LIMITS))
        try:
            await replica.queue.admit(job, attempt)
        except RateLimited:
            attempt.release("failed")
            break
        held.append(attempt)
    return held


@pytest.mark.parametrize("answers", [True, False])
async def test_while_a_pool_is_away_the_next_one_counts_whoever_else_asks_it(
    replicas: Any, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    """The pool is no prompt's home, so only the counting can find that the pool is away."""
    if not answers:
        monkeypatch.setattr(late_pools, "LATE_S", 0.2)
    (replica,) = replicas(1)
    pool = loses(replica, answers=answers)
    homes = (*(home for home in replica.pools if home is not pool), pool)
    held = await as_many_as_pass(replica, homes)
    assert len(held) == LIMITS.concurrency
    assert not pool.degraded.asks_redis
    assert replica.metrics.client_limits.labels("team-a", "unchecked")._value.get() == 0
    for attempt in held:
        attempt.release("finished")
    await quiet(replica)


async def test_a_pool_that_stays_away_takes_no_count_from_the_next_one(replicas: Any) -> None:
    (replica,) = replicas(1)
    pool = loses(replica)
    held: list[Attempt] = []
    other = replica.counting.pool_of("m", LIMITS.tag, [pool])
    assert other is not None
    store, kept = replica.stores[other.tag], list[str]()
    keep = store.clients.keep

    async def keeps(names: list[str]) -> None:
        kept[:] = names
        await keep(names)

    store.clients.keep = keeps
    for _ in range(4):
        for _ in range(2):
            pool.degraded.failed("away")
        held += await as_many_as_pass(replica)
        replica.counting._refused_until.clear()
        pool.degraded._asks_again_at = 0.0  # ends the pause after which the pool is asked again
        with pytest.raises(FleetUnavailable):
            await replica.counting.keep()
        await replica.counting.drained()
        assert {*kept} == {*replica.counting.open}, "they count on in the next pool"
    assert len(held) == LIMITS.concurrency
    for attempt in held:
        attempt.release("finished")
    await quiet(replica)


async def test_ends_that_a_pool_did_not_take_are_told_again_once_it_answers(
    replicas: Any, valkey_url: str, model: str
) -> None:
    """Otherwise a client without running requests would be refused for up to 30 s after a failover of Redis."""
    (replica,) = replicas(1)
    slow = ClientLimits("team-a", 3, 1_000)
    held = [await begin(replica, slow) for _ in range(3)]
    pool = replica.counting.pool_of("m", slow.tag)
    assert pool is not None
    store = replica.stores[pool.tag]
    calls = {name: getattr(store.clients, name) for name in ("admit", "keep", "end")}
    assert loses(replica) is pool
    for attempt, _ in held:
        attempt.output = type("Output", (), {"count": 7})()
        attempt.release("finished")
    await quiet(replica)
    for name, call in calls.items():
        setattr(store.clients, name, call)
    with pytest.raises(RateLimited):
        await begin(replica, slow)
    await quiet(replica)
    assert await keys(valkey_url, model) == {}
    replica.counting._refused_until.clear()
    attempt, decision = await begin(replica, slow)
    assert decision.use is not None
    assert (decision.use.in_flight, round((decision.use.tokens or 0) - 421, -1)) == (1, 0), "each end counts once"
    attempt.release("finished")
    await quiet(replica)


async def test_an_end_that_a_pool_did_not_take_ends_no_count_of_a_request_that_is_back_there(
    replicas: Any, valkey_url: str, model: str
) -> None:
    """The pool comes back while the request runs, and another pool has counted the request meanwhile."""
    (replica,) = replicas(1)
    pool = replica.counting.pool_of("m", LIMITS.tag)
    assert pool is not None
    store = replica.stores[pool.tag]
    calls = {name: getattr(store.clients, name) for name in ("admit", "keep", "end")}
    loses(replica)
    attempt, _ = await begin(replica)
    await replica.counting.drained()
    for name, call in calls.items():
        setattr(store.clients, name, call)
    await replica.counting.keep()
    await replica.counting.drained()
    assert pool.tag[-1] in await keys(valkey_url, model), "it counts where new requests of its client do"
    attempt.release("finished")
    await quiet(replica)
    assert await keys(valkey_url, model) == {}


async def test_what_was_not_charged_is_not_refunded(replicas: Any) -> None:
    """A request that passed unchecked is counted at the next renewal, but its prompt is not charged."""
    (replica,) = replicas(1)
    slow = ClientLimits("team-a", 3, 1_000)
    admits = {tag: store.clients.admit for tag, store in replica.stores.items()}
    for store in replica.stores.values():
        store.clients.admit = lambda *given: given[-1](None, FleetUnavailable("away"))
    unchecked, decision = await begin(replica, slow)
    assert decision.use is None
    for tag, store in replica.stores.items():
        store.clients.admit = admits[tag]
    await replica.counting.keep()
    charged, decision = await begin(replica, slow)
    assert decision.use == ClientUse(2, 100)
    unchecked.release("failed")
    await replica.counting.drained()
    third, decision = await begin(replica, slow)
    assert decision.use is not None
    assert abs((decision.use.tokens or 0) - 200) < 5
    for attempt in (charged, third):
        attempt.release("finished")
    await quiet(replica)


async def test_an_end_while_a_request_changes_its_pool_reaches_both(replicas: Any, valkey_url: str, model: str) -> None:
    (replica,) = replicas(1)
    attempt, _ = await begin(replica)
    (before,) = await keys(valkey_url, model)
    for _ in range(2):
        next(pool for pool in replica.pools if pool.tag[-1] == before).degraded.failed("away")
    store = replica.stores[replica.counting.pool_of("m", LIMITS.tag).tag]
    keep = store.clients.keep

    async def ends_meanwhile(names: list[str]) -> None:
        await keep(names)
        attempt.release("finished")

    store.clients.keep = ends_meanwhile
    await replica.counting.keep()
    await quiet(replica)
    assert await keys(valkey_url, model) == {}


async def test_a_refused_request_counts_nowhere_and_has_no_end(replicas: Any, valkey_url: str, model: str) -> None:
    """A renewal begins while the request's home pools are still being asked."""
    (replica,) = replicas(1)
    held = [await begin(replica) for _ in range(3)]
    pool = replica.counting.pool_of("m", LIMITS.tag)
    told: list[object] = []
    replica.stores[pool.tag].clients.end = lambda *given: told.append(given)
    asked = asyncio.Event()

    async def decides(*_given: object, **_more: object) -> Decision:
        asked.set()
        await asyncio.sleep(3_600)
        raise AssertionError

    for home in replica.stores.values():
        home.decide_in_turn = decides
    refused = asyncio.create_task(begin(replica))
    await asked.wait()
    await poll(lambda: all(count.answered for count in replica.counting.open.values()), what="the limit refuses it")
    await replica.counting.keep()
    assert [len(names) for names in (await keys(valkey_url, model)).values()] == [LIMITS.concurrency]
    refused.cancel()
    with pytest.raises(asyncio.CancelledError):
        await refused
    assert not told
    for attempt, _ in held:
        attempt.release("finished")
    assert len(told) == LIMITS.concurrency


async def test_one_renewal_that_fails_takes_no_count_from_the_pool(replicas: Any, valkey_url: str, model: str) -> None:
    (replica,) = replicas(1)
    held = [await begin(replica) for _ in range(3)]
    store = replica.stores[replica.counting.pool_of("m", LIMITS.tag).tag]
    keep = store.clients.keep
    store.clients.keep = loses_answers(keep)
    with pytest.raises(FleetUnavailable):
        await replica.counting.keep()
    await replica.counting.drained()
    store.clients.keep = keep
    with pytest.raises(RateLimited):
        await begin(replica)
    for attempt, _ in held:
        attempt.release("finished")
    await quiet(replica)
    assert await keys(valkey_url, model) == {}


def loses_answers(keep: Any) -> Any:
    """A renewal of counts that Redis carries out without an answer to the replica."""

    async def does(names: list[str]) -> None:
        await keep(names)
        raise FleetUnavailable("no answer within the time limit")

    return does


async def test_an_end_reaches_a_pool_that_took_a_count_and_did_not_say_so(
    replicas: Any, valkey_url: str, model: str
) -> None:
    (replica,) = replicas(1)
    attempt, _ = await begin(replica)
    for _ in range(2):
        replica.counting.pool_of("m", LIMITS.tag).degraded.failed("away")
    store = replica.stores[replica.counting.pool_of("m", LIMITS.tag).tag]
    store.clients.keep = loses_answers(store.clients.keep)
    with pytest.raises(FleetUnavailable):
        await replica.counting.keep()
    attempt.release("finished")
    await quiet(replica)
    assert await keys(valkey_url, model) == {}


async def test_a_late_answer_is_one_failure_of_its_pool(replicas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (replica,) = replicas(1)
    late: list[OnAnswer] = []
    for store in replica.stores.values():
        monkeypatch.setattr(store.clients, "admit", lambda *given: late.append(given[-1]))
    monkeypatch.setattr(late_pools, "LATE_S", 0.2)
    attempt, decision = await begin(replica)
    assert (decision.use, len(late)) == (None, 2)
    for on_answer in late:
        on_answer(None, FleetUnavailable("no answer within the time limit"))
    assert all(pool.degraded.asks_redis for pool in replica.pools), "a pool is away after two failures"
    attempt.release("finished")
    await quiet(replica)


async def test_where_all_pools_are_slow_a_refused_client_passes_no_limit(
    replicas: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused client's limit is asked first, so no decision tells whether the pool is late."""
    (replica,) = replicas(1)
    held = [await begin(replica) for _ in range(3)]
    monkeypatch.setattr(late_pools, "LATE_S", 0.1)
    for store in replica.stores.values():
        store.slow_s = 0.3
        monkeypatch.setattr(
            store.clients, "admit", partial(asyncio.get_running_loop().call_later, 0.25, store.clients.admit)
        )
    for _ in range(3):
        with pytest.raises(RateLimited):
            await begin(replica)
    assert all(pool.degraded.asks_redis for pool in replica.pools)
    for attempt, _ in held:
        attempt.release("finished")
    await quiet(replica)


async def test_no_pool_waits_for_the_renewal_of_another(replicas: Any) -> None:
    (replica,) = replicas(1)
    tags = {
        replica.counting.pool_of("m", limited.tag): limited
        for limited in map(ClientLimits, "abcdefghijklmnop", [3] * 16)
    }
    held = [await begin(replica, limits) for limits in tags.values()]
    together = asyncio.Barrier(len(held))
    assert len(held) > 1

    def waits(keep: Any) -> Any:
        async def does(names: list[str]) -> None:
            await together.wait()
            await keep(names)

        return does

    for pool in tags:
        replica.stores[pool.tag].clients.keep = waits(replica.stores[pool.tag].clients.keep)
    async with asyncio.timeout(5):
        await replica.counting.keep()
    for attempt, _ in held:
        attempt.release("finished")
    await quiet(replica)


async def test_a_gateway_keeps_and_ends_what_it_was_given(replicas: Any, valkey_url: str, model: str) -> None:
    (replica,) = replicas(1)
    attempt, _ = await begin(replica)
    name = attempt.hand_over()
    assert name == attempt.reservation + LIMITS.tag
    assert not replica.counting.open, "this replica keeps it no longer"
    await replica.counting.keep_one("m", name)
    replica.counting.end_one("m", name, 5)
    await replica.counting.drained()
    assert await keys(valkey_url, model) == {}


async def test_a_request_that_ends_while_others_are_kept_counts_no_longer(
    replicas: Any, valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_limits, "KEEP_AT_ONCE", 1)
    (replica,) = replicas(1)
    (first, _), (second, _) = await begin(replica), await begin(replica)

    async def ends() -> None:
        second.release("finished")

    await asyncio.gather(replica.counting.keep(), ends())
    first.release("finished")
    await quiet(replica)
    assert await keys(valkey_url, model) == {}


def gateway(replica: Fixture, attempt: Attempt) -> Gateway:
    """A gateway with the parts that ``settle`` and ``renew`` need, for the attempt's reservation."""

    async def booked(_model: str, _reservation: str) -> tuple[Pool, str]:
        return attempt.chosen.pool, attempt.reservation

    made: Any = Gateway(cast("Any", SimpleNamespace(pools=None)), Settings())
    settlements = SimpleNamespace(gateway_settled=lambda *_: None)
    made._booked, made._router = booked, SimpleNamespace(counting=replica.counting, settlements=settlements)
    return cast("Gateway", made)


@pytest.mark.parametrize(("outcome", "used"), [("unsent", 0), ("failed", 0), ("cancelled", 100), ("finished", 100)])
async def test_a_gateways_outcome_costs_the_client_what_it_would_cost_here(
    replicas: Any, outcome: Any, used: int
) -> None:
    (replica,) = replicas(1)
    slow = ClientLimits("team-a", 3, 1_000)
    attempt, _ = await begin(replica, slow)
    name = attempt.hand_over()
    assert name is not None

    async def lease(_reservation: str) -> SimpleNamespace:
        return SimpleNamespace(worker_id="w", prompt_tokens=100)

    async def settle(*_given: object) -> str:
        replica.stores[attempt.chosen.pool.tag].booked.discard(attempt.reservation)
        return "SAME"

    store: Any = replica.stores[attempt.chosen.pool.tag]
    store.lease, store.settle = lease, settle
    await gateway(replica, attempt).settle(attempt.chosen.pool.tag, name, Ending(outcome))
    await replica.counting.drained()
    after, decision = await begin(replica, slow)
    assert decision.use is not None
    assert abs((decision.use.tokens or 0) - 100 - used) < 5
    after.release("failed")
    await quiet(replica)


@pytest.mark.parametrize("all_away", [False, True])
async def test_a_gateways_renewal_that_redis_took_fails_for_no_pool_that_counts(
    replicas: Any, valkey_url: str, model: str, *, all_away: bool
) -> None:
    (replica,) = replicas(1)
    attempt, _ = await begin(replica)
    name = attempt.hand_over()
    assert name is not None
    ((before, _),) = (await keys(valkey_url, model)).items()

    async def renew(_renewals: object) -> tuple[int, int, int]:
        return 1, 0, 0

    store: Any = replica.stores[attempt.chosen.pool.tag]
    store.renew = renew
    loses(replica)
    while all_away and replica.counting.pool_of("m", LIMITS.tag) is not None:
        for _ in range(2):
            loses(replica).degraded.failed("away")
    assert await gateway(replica, attempt).renew(attempt.chosen.pool.tag, name) == 30.0
    assert len(await keys(valkey_url, model)) == (1 if all_away else 2), f"{before} keeps it until it expires"
    store.booked.discard(attempt.reservation)
