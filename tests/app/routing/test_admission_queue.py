"""Requests that wait for a worker with room are served or refused, and leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.app.replica import Replica, replica
from tests.app.simulated import simulated
from tests.conftest import poll, server, valkey_binary

from warmfleet.api.client_hints import patience_s
from warmfleet.errors import BadRequest, FleetUnavailable
from warmfleet.fleet import Ask, Decision, Fleet, Line, Spans, Standing, connect
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.recent.engine_way import EngineWay
from warmfleet.routing.tickets import PAUSES, TicketPolls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT_TOKENS = 300  # a quarter of a second of the engine's time
SETTINGS: dict[str, Any] = {"max_engine_wait_s": 0.05, "queue_max": 6}  # at a speed not yet known: 500 tokens


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets outlive the test, so a ticket that is gone was given up."""
    monkeypatch.setattr(Spans.__init__, "__defaults__", astuple(Spans(ticket_ms=60_000)))


def body(seed: int, **more: Any) -> dict[str, Any]:
    """A request whose prompt no other seed has."""
    rng = random.Random(seed)
    return {"prompt": [rng.randint(10, 900) for _ in range(PROMPT_TOKENS)], "max_tokens": 1, "stream": True} | more


@asynccontextmanager
async def crowded(redis_url: str, model: str, workers: int = 1, **settings: Any) -> AsyncIterator[Replica]:
    """A replica with one slow engine, and the engines that the test has started: ``workers`` in all."""
    async with (
        simulated(redis_url, model, speed="trace"),
        replica(redis_url, model, **(SETTINGS | settings)) as router,
    ):
        await router.routable(workers)
        yield router


async def tickets(router: Replica) -> int:
    return int(await router.fleet.redis.zcard(router.fleet.keys.queue2))


async def nothing_left(router: Replica) -> None:
    await router.unloaded()
    left = [key async for key in router.fleet.redis.scan_iter(match="*queue*") if router.fleet.keys.tag.encode() in key]
    assert left == []


async def test_requests_wait_are_refused_or_hang_up(valkey_url: str, model: str, lasting: None) -> None:
    async with crowded(valkey_url, model) as router:
        sent = [asyncio.create_task(router.post(body(number))) for number in range(12)]

        async def full() -> bool:
            return await tickets(router) == 6 and sum(one.done() for one in sent) >= 4

        await poll(full, 10, "two are served, six wait, four are refused")
        refused = [one.result() for one in sent if one.done() and one.result()[0] == 429]
        assert len(refused) >= 3, "one may be late and find room"
        for status, headers, answer in refused:
            error = json.loads(answer)["error"]
            assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
            assert int(headers["retry-after"]) >= 1
        assert await router.metric('warmfleet_queue_rejections_total{reason="full"}') == len(refused)
        waiting = await router.metric("warmfleet_queued_requests{")
        assert 1 <= waiting <= 6
        late = next(one for one in reversed(sent) if not one.done())
        late.cancel()
        answers = await asyncio.gather(*sent, return_exceptions=True)
        codes = [answer[0] for answer in answers if not isinstance(answer, BaseException)]
        assert codes.count(200) + codes.count(429) == 11
        assert codes.count(200) >= 6
        assert await router.metric("warmfleet_queue_seconds_count") >= 6
        await poll(lambda: nothing_waits(router), 5, "the ticket of who hung up is given back, not left to expire")
        await nothing_left(router)


async def nothing_waits(router: Replica) -> bool:
    return await tickets(router) == 0 and await router.metric("warmfleet_queued_requests{") == 0


async def test_a_deadline_a_priority_and_bytes(valkey_url: str, model: str, lasting: None) -> None:
    async with crowded(valkey_url, model, queue_priority=True, queue_max_bytes=14_000) as router:
        first = [asyncio.create_task(router.post(body(number))) for number in range(4)]
        await poll(lambda: two(router), 5, "two wait")
        status, headers, answer = await router.post(body(4, priority=9), **{"X-Request-Timeout-Ms": "50"})
        assert (status, json.loads(answer)["error"]["code"]) == (503, "queue_timeout")
        assert int(headers["retry-after"]) >= 1
        long = body(5) | {"prompt": body(5)["prompt"] * 8}
        status, _, answer = await router.post(long)
        assert (status, "no room for so large a body" in json.loads(answer)["error"]["message"]) == (429, True)
        assert await router.metric('warmfleet_queue_rejections_total{reason="bytes"}') == 1
        order: list[str] = []

        async def ask(name: str, **more: Any) -> None:
            assert (await router.post(body(6, **more)))[0] == 200
            order.append(name)

        late = [asyncio.create_task(ask("later", priority=1))]
        await poll(lambda: at_least(router, 2), 5, "it waits")
        late.append(asyncio.create_task(ask("sooner", priority=-1)))
        status, _, answer = await router.post(body(7, priority="high"))
        assert (status, json.loads(answer)["error"]["param"]) == (400, "priority")
        await asyncio.gather(*first, *late)
        assert order == ["sooner", "later"]
        await nothing_left(router)


async def test_a_suspected_worker_is_not_avoided_for_the_whole_wait(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    until = 0.0
    monkeypatch.setattr(Pool, "avoided", lambda _: ("idle.0",) if time.monotonic() < until else ())
    async with simulated(valkey_url, model, "idle"), crowded(valkey_url, model, workers=2) as router:
        await router.fleet.decide(Ask("wf-0busy", (), 100_000, 1, "cost", ("idle.0",)))
        until = time.monotonic() + 0.6
        status, headers, _ = await router.post(body(1), **{"X-Request-Timeout-Ms": "20000"})
        waited_s = time.monotonic() - until + 0.6
        assert (status, headers["x-warmfleet-worker"]) == (200, "idle.0")
        assert 0.6 <= waited_s < 10
        await router.fleet.settle("wf-0busy", "finished")


async def test_one_tenant_leaves_room_for_the_bodies_of_others(valkey_url: str, model: str, lasting: None) -> None:
    limit = 8 * len(json.dumps(body(0)))
    async with crowded(valkey_url, model, queue_max=50, queue_max_bytes=limit) as router:
        first = [asyncio.create_task(router.post(body(-number), authorization="Bearer one")) for number in range(1, 4)]
        await poll(lambda: at_least(router, 1), 5, "the engine has what it may have")
        sent = [asyncio.create_task(router.post(body(number), authorization="Bearer one")) for number in range(16)]

        async def refused() -> bool:
            return await router.metric('warmfleet_queue_rejections_total{reason="bytes"}') >= 4

        await poll(refused, 10, "as much of one tenant waits as may")
        large = body(99) | {"prompt": body(99)["prompt"] * 3}
        assert (await router.post(large, authorization="Bearer two"))[0] == 200
        answers = await asyncio.gather(*first, *sent)
        assert {status for status, _, _ in answers} == {200, 429}


async def test_a_body_without_room_takes_no_other_requests_place(valkey_url: str, model: str, lasting: None) -> None:
    async with crowded(valkey_url, model, queue_max=2, queue_max_bytes=12_000) as router:
        sent = [asyncio.create_task(router.post(body(number), authorization="Bearer one")) for number in range(4)]
        await poll(lambda: two(router), 5, "as many wait as may")
        large = body(5) | {"prompt": body(5)["prompt"] * 8}
        assert (await router.post(large, authorization="Bearer two"))[0] == 429
        assert {status for status, _, _ in await asyncio.gather(*sent)} == {200}
        await nothing_left(router)


async def test_a_refused_request_did_not_wait(valkey_url: str, model: str) -> None:
    async with crowded(valkey_url, model, queue_max=0) as router:
        codes = [answer[0] for answer in await asyncio.gather(*[router.post(body(number)) for number in range(6)])]
        assert max(codes) == 429
        assert await router.metric("warmfleet_queue_seconds_count") == 0


async def test_a_first_byte_tells_how_long_the_way_to_the_engine_was(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[EngineWay, Decision, float]] = []

    def first_byte(way: EngineWay, decision: Decision, _speed_tps: int, took_s: float) -> None:
        told.append((way, decision, took_s))

    monkeypatch.setattr(EngineWay, "first_byte", first_byte)
    async with simulated(valkey_url, model) as slow, replica(valkey_url, model, **SETTINGS) as router:
        await router.routable(1)
        slow.engine.core.costs = replace(slow.engine.core.costs, base_s=0.1)
        assert (await router.post(body(1)))[0] == 200
        assert (await router.post(body(2, stream=False)))[0] == 200, "its first byte comes with its last token"
        [(way, decision, took_s)] = told
        assert (decision.wait_tokens, decision.prefill_tokens) == (0, PROMPT_TOKENS)
        assert 0.1 <= took_s < 5
        assert await router.metric("warmfleet_engine_wait_seconds{") == 0.05
        way._fleet.limits = replace(way._fleet.limits, max_engine_wait_s=0.25)
        assert await router.metric("warmfleet_engine_wait_seconds{") == 0.25


async def test_a_request_that_waits_keeps_its_ticket_when_redis_is_slow_once(
    valkey_url: str, model: str, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn came and it was booked, but the answer came too late. It asks again and is told."""
    decide_in_turn, asked = Fleet.decide_in_turn, Counter[str]()
    late: list[str] = []

    async def decide(fleet: Fleet, ask: Ask, *place: Any, **more: Any) -> Any:
        answer = await decide_in_turn(fleet, ask, *place, **more)
        asked[ask.reservation] += 1
        if not late and asked[ask.reservation] > 1 and isinstance(answer, Decision):
            late.append(ask.reservation)
            raise FleetUnavailable("the answer came too late")
        return answer

    monkeypatch.setattr(Fleet, "decide_in_turn", decide)
    async with crowded(valkey_url, model) as router:
        answers = await asyncio.gather(*(router.post(body(number)) for number in range(4)))
        assert [status for status, _, _ in answers] == [200] * 4
        words = Counter(headers["x-warmfleet-reservation"] for _, headers, _ in answers)
        assert words == {"booked": 3, "known": 1}
        assert len(late) == 1
        assert await router.metric("warmfleet_fallback_requests_total") == 0
        await nothing_left(router)


async def test_a_poll_that_takes_long_is_not_made_at_once_again(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred requests end each second; the line is so long that asking about it takes 10 ms of Redis."""
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))
    asked, poll_redis = 0, pool.fleet.poll

    async def slowly(*ids: Any) -> Line:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)  # of Redis's time
        return replace(await poll_redis(*ids), standings={})

    monkeypatch.setattr(pool.fleet, "poll", slowly)
    polls = TicketPolls(pool)
    waits = asyncio.create_task(polls.wait("wf-ticket"))
    began = time.monotonic()
    for _ in range(50):
        polls.ask_soon()
        await asyncio.sleep(0.01)  # until the next request ends
    took_s = time.monotonic() - began
    waits.cancel()
    await asyncio.wait([waits])
    await poll(lambda: polls.task is None, 5, "nobody waits, nothing runs")
    await client.aclose()
    assert 2 <= asked <= took_s / (0.01 * (1 + PAUSES)) + 2


async def test_a_replica_asks_when_an_engine_has_room_and_has_old_tickets_decided_again(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet.routing.tickets.POLL_S", 30.0)
    monkeypatch.setattr("warmfleet.routing.tickets.REVIEW_S", 0.1)
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))
    asked: list[float] = []

    async def foretold(waiting: Any = (), leaving: Any = ()) -> Line:
        asked.append(time.monotonic())
        return Line(2, 0, 0.0, dict.fromkeys(waiting, Standing.WAITS), 0.06)

    monkeypatch.setattr(pool.fleet, "poll", foretold)
    polls = TicketPolls(pool)
    first, second = [asyncio.create_task(polls.wait(name)) for name in ("wf-first", "wf-second")]
    assert await first is Standing.WAITS, "it is decided again"
    assert not second.done(), "one at a time"
    assert len(asked) >= 2, "not only after 30 s"
    assert min(later - sooner for sooner, later in itertools.pairwise(asked)) >= 0.05, "not before there is room"
    assert await second is Standing.WAITS
    await poll(lambda: polls.task is None, 5, "nobody waits, nothing runs")
    await client.aclose()


async def test_a_long_line_is_named_by_and_by_and_every_turn_is_told(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))
    names = [f"wf-{number}" for number in range(300)]
    asked: list[tuple[str, ...]] = []

    async def told(waiting: Any = (), leaving: Any = ()) -> Line:
        asked.append(tuple(waiting))
        turns = frozenset([names[-1]]) if len(asked) == 1 else frozenset(names if len(asked) == 10 else ())
        return Line(300, 0, 0.0, dict.fromkeys(waiting, Standing.WAITS), 0.0, turns)

    monkeypatch.setattr(pool.fleet, "poll", told)
    polls = TicketPolls(pool)
    waits = [asyncio.create_task(polls.wait(name)) for name in names]
    assert await waits[-1] is Standing.TURN, "though it was not named"
    assert names[-1] not in asked[0]
    assert {await one for one in waits} == {Standing.TURN}
    assert set(names[:-1]) == {name for poll_of in asked for name in poll_of} - {names[-1]}
    assert max(map(len, asked)) <= 300 / 8
    await client.aclose()


@pytest.mark.long(minutes=1, shows="requests that wait when Redis dies go to the last known workers")
async def test_waiting_requests_are_served_without_redis_when_it_dies(model: str) -> None:
    with server(valkey_binary()) as url:
        async with crowded(url, model, decide_timeout_s=0.5) as router:
            sent = [asyncio.create_task(router.post(body(number))) for number in range(6)]
            await poll(lambda: at_least(router, 3), 10, "some wait")
            pid = (await router.fleet.redis.info("server"))["process_id"]
            os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*sent)
            assert [status for status, _, _ in answers] == [200] * 6
            assert await router.metric("warmfleet_fallback_requests_total") >= 1
            assert await router.metric("warmfleet_queued_requests{") == 0


@pytest.mark.long(minutes=1, shows="requests that wait at a replica that stops are served")
async def test_waiting_requests_are_served_when_a_replica_stops(valkey_url: str, model: str, lasting: None) -> None:
    async with aiohttp.ClientSession() as client:

        async def post(url: str, number: int) -> int:
            async with client.post(url, json=body(number)) as answer:
                await answer.read()
                return answer.status

        async with crowded(valkey_url, model, shutdown_grace_s=20.0) as router:
            sent = [asyncio.create_task(post(router.url + "/v1/completions", number)) for number in range(6)]
            await poll(lambda: at_least(router, 3), 10, "some wait")
        assert [await one for one in sent] == [200] * 6


async def two(router: Replica) -> bool:
    return await tickets(router) == 2


async def at_least(router: Replica, count: int) -> bool:
    return await tickets(router) >= count or await router.metric("warmfleet_queue_seconds_count") > 3


@pytest.mark.parametrize("value", [b"", b"-1", b"0", b"1.5", b"soon", b"1" * 13])
def test_a_time_limit_that_is_no_number_of_milliseconds_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        patience_s(value)
    assert caught.value.param == "X-Request-Timeout-Ms"
    assert patience_s(b" 1500\t") == 1.5
