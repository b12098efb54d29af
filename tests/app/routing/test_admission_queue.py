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
from contextlib import asynccontextmanager, suppress
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.replicas.replica import Replica, replica

from warmfleet.api.client_hints import patience_s
from warmfleet.errors import BadRequest, FleetUnavailable
from warmfleet.fleet import Decision, Fleet, Line, Question, Spans, Standing, connect
from warmfleet.fleet.queueing import Queue
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.engine_lead_time import EngineLeadTime
from warmfleet.pools.pool import Pool
from warmfleet.routing import admission_queue
from warmfleet.routing.tickets import PAUSES, POLL_S, TicketPolls, Tickets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT_TOKENS = 300  # the engine needs a quarter of a second for them
SETTINGS: dict[str, Any] = {"max_engine_wait_s": 0.05, "queue_max": 6}  # 500 tokens while the speed is unknown


@pytest.fixture
def lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tickets and leases outlive the test, so that a missing ticket was given up and did not expire."""
    spans = Spans(ticket_ms=600_000, lease_ms=600_000)
    monkeypatch.setattr(Spans.__init__, "__defaults__", astuple(spans))


def body(seed: int, **more: Any) -> dict[str, Any]:
    """A request with a prompt of its own for each seed."""
    rng = random.Random(seed)
    return {"prompt": [rng.randint(10, 900) for _ in range(PROMPT_TOKENS)], "max_tokens": 1, "stream": True} | more


@asynccontextmanager
async def crowded(redis_url: str, model: str, workers: int = 1, **settings: Any) -> AsyncIterator[Replica]:
    """A replica with one slow engine. ``workers``: the number of engines, including those that the test started."""
    async with (
        simulated(redis_url, model, speed="trace"),
        replica(redis_url, model, **(SETTINGS | settings)) as router,
    ):
        await router.routable(workers)
        yield router


async def tickets(router: Replica) -> int:
    return int(await router.fleet.redis.zcard(router.fleet.keys.queue2))


@asynccontextmanager
async def no_room(router: Replica) -> AsyncIterator[None]:
    """Book a load at the engine until the block ends, so that the engine gets no request."""
    decision = await router.fleet.bookings.decide(Question("wf-0busy", (), 10_000_000, 1, "cost"))
    assert decision.reservation == "wf-0busy"
    try:
        yield
    finally:
        with suppress(FleetUnavailable):
            await router.fleet.bookings.settle("wf-0busy", "finished")


async def some_wait(router: Replica, count: int) -> None:
    """Return when ``count`` requests wait. Only within ``no_room``, where none of them can leave the queue."""

    async def waiting() -> bool:
        return [await tickets(router), await router.metric("warmfleet_queued_requests{")] == [count, count]

    await poll(waiting, 30, f"{count} wait")


async def nothing_left(router: Replica) -> None:
    await router.unloaded()
    left = [key async for key in router.fleet.redis.scan_iter(match="*queue*") if router.fleet.keys.tag.encode() in key]
    assert left == []


async def test_requests_wait_are_refused_or_hang_up(valkey_url: str, model: str, lasting: None) -> None:
    async with crowded(valkey_url, model) as router:
        async with no_room(router):
            sent = [asyncio.create_task(router.post(body(number))) for number in range(12)]
            await poll(lambda: sum(request.done() for request in sent) >= 6, 30, "the others are refused")
            await some_wait(router, 6)
            refused = [request.result() for request in sent if request.done()]
            assert len(refused) == 6
            for status, headers, answer in refused:
                error = json.loads(answer)["error"]
                assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
                assert int(headers["retry-after"]) >= 1
            assert await router.metric('warmfleet_queue_rejections_total{reason="full"}') == len(refused)
            *stay, leaves = [request for request in sent if not request.done()]
            leaves.cancel()
            await some_wait(router, 5)  # the ticket of a client that hung up is given back at once
        assert [(await request)[0] for request in stay] == [200] * 5
        assert await router.metric("warmfleet_queue_seconds_count") >= 6
        await poll(lambda: nothing_waits(router), 30, "nobody waits")
        await nothing_left(router)


async def test_explain_tells_the_queue_in_which_a_request_would_wait(
    valkey_url: str, model: str, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crowded(valkey_url, model) as router:
        assert (await explained(router, 1))["queue"] is None, "it would not wait"
        async with no_room(router):
            sent = asyncio.create_task(router.post(body(2)))
            await some_wait(router, 1)
            told = await explained(router, 1)
            [only] = told["candidates"]
            assert (told["waits"], told["waits_for"], told["queue"]["waiting"]) == (True, only["worker_id"], 1)
            assert told["queue"]["next"]["prompt_tokens"] == PROMPT_TOKENS
            assert told["turn_s"] > 0
            with monkeypatch.context() as patched:
                patched.setattr(Queue, "poll", AsyncMock(side_effect=FleetUnavailable("away")))
                assert (await explained(router, 1))["queue"] is None, "the rest is told all the same"
        assert (await sent)[0] == 200


async def explained(router: Replica, seed: int) -> dict[str, Any]:
    """The answer of /explain about the request ``body(seed)``."""
    status, _, answer = await router.post(body(seed) | {"endpoint": "/v1/completions"}, "/explain")
    assert status == 200
    told: dict[str, Any] = json.loads(answer)
    return told


async def nothing_waits(router: Replica) -> bool:
    return await tickets(router) == 0 and await router.metric("warmfleet_queued_requests{") == 0


async def test_a_deadline_a_priority_and_bytes(
    valkey_url: str, model: str, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "BODIES", 1)
    async with crowded(valkey_url, model, queue_priority=True, body_max_bytes=12_000) as router:
        order: list[str] = []

        async def ask(name: str, **more: Any) -> None:
            assert (await router.post(body(6, **more)))[0] == 200
            order.append(name)

        async with no_room(router):
            first = [asyncio.create_task(router.post(body(number))) for number in range(2)]
            await some_wait(router, 2)
            status, headers, answer = await router.post(body(4, priority=9), **{"X-Request-Timeout-Ms": "50"})
            assert (status, json.loads(answer)["error"]["code"]) == (503, "queue_timeout")
            assert int(headers["retry-after"]) >= 1
            long = body(5) | {"prompt": body(5)["prompt"] * 8}
            status, _, answer = await router.post(long)
            assert (status, "one tenant together get about half" in json.loads(answer)["error"]["message"]) == (
                429,
                True,
            )
            assert await router.metric('warmfleet_queue_rejections_total{reason="bytes"}') == 1
            await some_wait(router, 2)
            late = [asyncio.create_task(ask("later", priority=1))]
            await some_wait(router, 3)
            late.append(asyncio.create_task(ask("sooner", priority=-1)))
            await some_wait(router, 4)
            status, _, answer = await router.post(body(7, priority="high"))
            assert (status, json.loads(answer)["error"]["param"]) == (400, "priority")
        await asyncio.gather(*first, *late)
        assert order == ["sooner", "later"]
        await nothing_left(router)


async def test_a_suspected_worker_is_not_avoided_for_the_whole_wait(
    valkey_url: str, model: str, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmfleet.routing.tickets.REVIEW_S", 60.0)  # a waiting request is not decided again meanwhile
    avoided = ["idle.0"]
    monkeypatch.setattr(Pool, "avoided", lambda _: tuple(avoided))
    async with simulated(valkey_url, model, "idle"), crowded(valkey_url, model, workers=2) as router:
        await router.fleet.bookings.decide(Question("wf-0busy", (), 10_000_000, 1, "cost", ("idle.0",)))
        sent = asyncio.create_task(router.post(body(1), **{"X-Request-Timeout-Ms": "20000"}))
        await some_wait(router, 1)
        avoided.clear()
        async with asyncio.timeout(15):  # at its deadline the request would get any worker with room
            status, headers, _ = await sent
        assert (status, headers["x-warmfleet-worker"]) == (200, "idle.0")
        await router.fleet.bookings.settle("wf-0busy", "finished")


async def test_one_tenant_leaves_room_for_the_bodies_of_others(valkey_url: str, model: str, lasting: None) -> None:
    limit = 8 * len(json.dumps(body(0)))
    async with crowded(valkey_url, model, queue_max=50, body_max_bytes=limit // 2) as router:
        async with no_room(router):
            of_one = [
                asyncio.create_task(router.post(body(number), authorization="Bearer one")) for number in range(16)
            ]

            async def all_decided() -> bool:
                refused = await router.metric('warmfleet_queue_rejections_total{reason="bytes"}')
                return await tickets(router) + refused == len(of_one)

            await poll(all_decided, 30, "as much of one tenant waits as may")
            await some_wait(router, 4)  # these four fill one tenant's half of the room
            large = body(99) | {"prompt": body(99)["prompt"] * 3}
            other = asyncio.create_task(router.post(large, authorization="Bearer two"))
            await some_wait(router, 5)
        assert (await other)[0] == 200
        answers = await asyncio.gather(*of_one)
        assert {status for status, _, _ in answers} == {200, 429}


async def test_a_body_without_room_takes_no_other_requests_place(
    valkey_url: str, model: str, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_queue, "BODIES", 1)
    async with crowded(valkey_url, model, queue_max=2, body_max_bytes=12_000) as router:
        async with no_room(router):
            sent = [asyncio.create_task(router.post(body(number), authorization="Bearer one")) for number in range(2)]
            await some_wait(router, 2)
            large = body(5) | {"prompt": body(5)["prompt"] * 8}
            assert (await router.post(large, authorization="Bearer two"))[0] == 429
        assert {status for status, _, _ in await asyncio.gather(*sent)} == {200}
        await nothing_left(router)


async def test_a_refused_request_did_not_wait(valkey_url: str, model: str, lasting: None) -> None:
    async with crowded(valkey_url, model, queue_max=0) as router:
        async with no_room(router):
            codes = [answer[0] for answer in await asyncio.gather(*(router.post(body(number)) for number in range(6)))]
            assert codes == [429] * 6
        assert (await router.post(body(6)))[0] == 200
        assert await router.metric("warmfleet_queue_seconds_count") == 0


async def test_a_first_byte_tells_how_long_the_way_to_the_engine_was(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[EngineLeadTime, Decision, float]] = []

    def first_byte(way: EngineLeadTime, decision: Decision, _speed_tps: int, took_s: float) -> None:
        told.append((way, decision, took_s))

    monkeypatch.setattr(EngineLeadTime, "first_byte", first_byte)
    async with simulated(valkey_url, model) as slow, replica(valkey_url, model, **SETTINGS) as router:
        await router.routable(1)
        slow.engine.core.costs = replace(slow.engine.core.costs, base_s=0.1)
        assert (await router.post(body(1)))[0] == 200
        assert (await router.post(body(2, stream=False)))[0] == 200, "its first byte comes with its last token"
        [(way, decision, took_s)] = told
        assert (decision.wait_tokens, decision.prefill_tokens) == (0, PROMPT_TOKENS)
        assert 0.1 <= took_s < 5
        assert await router.metric("warmfleet_engine_wait_seconds{") == 0.05
        way._fleet.use(limits=replace(way._fleet.constants.limits, max_engine_wait_s=0.25))
        assert await router.metric("warmfleet_engine_wait_seconds{") == 0.25


async def test_a_request_that_waits_keeps_its_ticket_when_redis_is_slow_once(
    valkey_url: str, model: str, lasting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was booked in its turn, but the answer came too late: it asks again and learns of the booking."""
    decide_in_turn, asked = Queue.decide_in_turn, Counter[str]()
    late: list[str] = []

    async def decide(queue: Queue, ask: Question, *place: Any, **more: Any) -> Any:
        answer = await decide_in_turn(queue, ask, *place, **more)
        asked[ask.reservation] += 1
        if not late and asked[ask.reservation] > 1 and isinstance(answer, Decision):
            late.append(ask.reservation)
            raise FleetUnavailable("the answer came too late")
        return answer

    monkeypatch.setattr(Queue, "decide_in_turn", decide)
    async with crowded(valkey_url, model) as router:
        async with no_room(router):
            sent = [asyncio.create_task(router.post(body(number))) for number in range(4)]
            await some_wait(router, 4)
        answers = await asyncio.gather(*sent)
        assert [status for status, _, _ in answers] == [200] * 4
        words = Counter(headers["x-warmfleet-reservation"] for _, headers, _ in answers)
        assert words == {"booked": 3, "known": 1}
        assert len(late) == 1
        assert await router.metric("warmfleet_fallback_requests_total") == 0
        await nothing_left(router)


async def test_requests_keep_their_places_when_redis_stands_still_for_a_moment(model: str, lasting: None) -> None:
    with server(valkey_binary()) as url:
        async with crowded(url, model, decide_timeout_s=0.05) as router:
            async with no_room(router):
                sent = [asyncio.create_task(router.post(body(number))) for number in range(6)]
                await some_wait(router, 6)
                redis = router.fleet.redis
                await redis.client_pause(300, all=True)
                assert await redis.ping(), "it is answered when the pause is over"
                await some_wait(router, 6)
            answers = await asyncio.gather(*sent)
            assert {(status, headers["x-warmfleet-reservation"]) for status, headers, _ in answers} == {(200, "booked")}
            assert await router.metric("warmfleet_fallback_requests_total") == 0
            await nothing_left(router)


async def test_a_place_is_given_up_though_a_poll_fails(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))
    asked: list[list[str]] = []

    async def told(_waiting: Any = (), leaving: Any = ()) -> Line:
        asked.append(list(leaving))
        if len(asked) == 1:
            raise FleetUnavailable("slow once")
        return Line(0, 0.0, {}, 0.0)

    monkeypatch.setattr(pool.fleet.queue, "poll", told)
    polls = TicketPolls(pool)
    polls.leave("wf-gone")
    await poll(lambda: polls.task is None, 30, "nothing is left to give up")
    assert asked == [["wf-gone"], ["wf-gone"]]
    await client.aclose()


async def test_tickets_that_redis_never_takes_back_are_forgotten(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such tickets expire in Redis. A replica that stops does not wait for that."""
    monkeypatch.setattr("warmfleet.routing.tickets.SILENT_S", 0.1)
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))

    async def away(_waiting: Any = (), _leaving: Any = ()) -> Line:
        raise FleetUnavailable("away")

    monkeypatch.setattr(pool.fleet.queue, "poll", away)
    polls = TicketPolls(pool)
    polls.leave("wf-gone")
    await poll(lambda: polls.task is None, 30, "it is given up on")
    await client.aclose()


async def test_a_poll_that_takes_long_is_not_made_at_once_again(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While requests end all the time, polling a long queue that costs 10 ms of Redis pauses between polls."""
    monkeypatch.setattr("warmfleet.routing.tickets.REVIEW_S", 60.0)
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))
    began, ended, poll_redis = list[float](), list[float](), pool.fleet.queue.poll

    async def slowly(*ids: Any) -> Line:
        began.append(time.monotonic())
        await asyncio.sleep(0.01)  # time that the poll costs Redis
        line = replace(await poll_redis(*ids), standings={})
        ended.append(time.monotonic())
        return line

    monkeypatch.setattr(pool.fleet.queue, "poll", slowly)
    polls = TicketPolls(pool)
    waits = asyncio.create_task(polls.wait("wf-ticket"))
    while len(ended) < 8:
        polls.ask_soon()
        await asyncio.sleep(0.001)  # another request ends every millisecond
    waits.cancel()
    await asyncio.wait([waits])
    await poll(lambda: polls.task is None, 30, "nobody waits, nothing runs")
    await client.aclose()
    pauses_s = [after - before for before, after in zip(ended, began[1:], strict=False)]
    assert min(pauses_s) > 0.9 * min(PAUSES * 0.01, POLL_S)


@pytest.mark.parametrize(("elsewhere", "review_s"), [(False, "REVIEW_S"), (True, "REVIEW_ELSEWHERE_S")])
async def test_a_replica_asks_when_an_engine_has_room_and_has_old_tickets_decided_again(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch, *, elsewhere: bool, review_s: str
) -> None:
    monkeypatch.setattr("warmfleet.routing.tickets.POLL_S", 30.0)
    for name in ("REVIEW_S", "REVIEW_ELSEWHERE_S"):
        monkeypatch.setattr(f"warmfleet.routing.tickets.{name}", 0.1 if name == review_s else 60.0)
    client = connect(valkey_url)
    pool = Pool(model, Fleet(client, model), DegradedMode(1.0))
    asked: list[float] = []

    async def foretold(waiting: Any = (), leaving: Any = ()) -> Line:
        asked.append(time.monotonic())
        return Line(2, 0.0, dict.fromkeys(waiting, Standing.WAITS), 0.06)

    monkeypatch.setattr(pool.fleet.queue, "poll", foretold)
    polls = TicketPolls(pool)
    waits = [polls.wait(name, elsewhere=elsewhere) for name in ("wf-first", "wf-second")]
    first, second = [asyncio.create_task(wait_s) for wait_s in waits]
    assert await first is Standing.WAITS, "it is decided again"
    assert not second.done(), "one at a time"
    assert len(asked) >= 2, "not only after 30 s"
    assert min(later - sooner for sooner, later in itertools.pairwise(asked)) >= 0.05, "not before there is room"
    assert await second is Standing.WAITS
    await poll(lambda: polls.task is None, 30, "nobody waits, nothing runs")
    await client.aclose()


async def test_nothing_is_kept_of_pools_without_tickets(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, tickets = connect(valkey_url), Tickets()
    turn = asyncio.Event()

    async def told(waiting: Any = (), leaving: Any = ()) -> Line:
        standing = Standing.TURN if turn.is_set() else Standing.WAITS
        return Line(1, 3.0, dict.fromkeys(waiting, standing), 0.0)

    async def waits(tag: str) -> asyncio.Task[Standing]:
        pool = Pool(tag, Fleet(client, tag), DegradedMode(1.0))
        monkeypatch.setattr(pool.fleet.queue, "poll", told)
        assert tickets.work_s(pool) == 0.0
        waiting = asyncio.create_task(tickets.wait(pool, "wf-1"))
        await poll(lambda: tickets.work_s(pool) == 3.0, 30, "it was asked about")
        return waiting

    first, second = [await waits(f"{model}#{number}") for number in range(2)]
    assert len(tickets._polls) == 2, "both have a ticket"
    turn.set()
    assert await first is await second is Standing.TURN
    await tickets.drained()
    assert await (await waits(f"{model}#2")) is Standing.TURN
    assert [*tickets._polls] == [f"{model}#2"]
    await tickets.drained()
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
        return Line(300, 0.0, dict.fromkeys(waiting, Standing.WAITS), 0.0, turns)

    monkeypatch.setattr(pool.fleet.queue, "poll", told)
    monkeypatch.setattr("warmfleet.routing.tickets.REVIEW_S", 60.0)  # ten polls may take longer
    polls = TicketPolls(pool)
    waits = [asyncio.create_task(polls.wait(name)) for name in names]
    assert await waits[-1] is Standing.TURN, "though it was not named"
    assert names[-1] not in asked[0]
    assert {await wait_s for wait_s in waits} == {Standing.TURN}
    assert set(names[:-1]) == {name for poll_of in asked for name in poll_of} - {names[-1]}
    assert max(map(len, asked)) <= 300 / 8
    await client.aclose()


@pytest.mark.long(minutes=1, shows="requests that wait when Redis dies go to the last known workers")
async def test_waiting_requests_are_served_without_redis_when_it_dies(model: str, lasting: None) -> None:
    with server(valkey_binary()) as url:
        async with crowded(url, model, decide_timeout_s=0.5) as router:
            async with no_room(router):
                sent = [asyncio.create_task(router.post(body(number))) for number in range(4)]
                await some_wait(router, 4)
                pid = (await router.fleet.redis.info("server"))["process_id"]
                os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*sent)
            assert [status for status, _, _ in answers] == [200] * 4
            assert await router.metric("warmfleet_fallback_requests_total") >= 1
            assert await router.metric("warmfleet_queued_requests{") == 0


@pytest.mark.long(minutes=1, shows="requests that wait at a replica that stops are served")
async def test_waiting_requests_are_served_when_a_replica_stops(valkey_url: str, model: str, lasting: None) -> None:
    async with aiohttp.ClientSession() as client:

        async def post(url: str, number: int) -> int:
            async with client.post(url, json=body(number)) as answer:
                await answer.read()
                return answer.status

        async with crowded(valkey_url, model, shutdown_grace_s=20.0) as router, no_room(router):
            url = router.url + "/v1/completions"
            sent = [asyncio.create_task(post(url, number)) for number in range(4)]
            await some_wait(router, 4)
        assert [await request for request in sent] == [200] * 4


@pytest.mark.parametrize("value", [b"", b"-1", b"0", b"1.5", b"soon", b"1" * 13])
def test_a_time_limit_that_is_no_number_of_milliseconds_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        patience_s(value)
    assert caught.value.param == "X-Request-Timeout-Ms"
    assert patience_s(b" 1500\t") == 1.5
