"""Failures around a request do not fail the request, and the replica recovers from its own failures."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.scripted import STREAM_HEAD, Answer, Engine, Seen, answer_well, engine, hang_up, reply
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.replicas.replica import Replica, replica

from warmfleet.fleet import Question
from warmfleet.prompt import request as prompt
from warmfleet_worker.protocol.wire import reservation_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT = "a prompt that is long enough to have blocks of its own " * 20
POISON = "the request that no engine survives"


def poisoned(way: str) -> Answer:
    """Serve every request but POISON, which kills this engine."""

    async def answer(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.json["prompt"] != POISON:
            await answer_well(one, seen, writer)
            return
        if way == "headers":
            writer.write(STREAM_HEAD)
            await writer.drain()
            await asyncio.sleep(0.02)
        if way == "connection":
            hang_up(writer)
        else:
            await one.die()

    return answer


@asynccontextmanager
async def fleet_of(valkey_url: str, model: str, *answers: Answer) -> AsyncIterator[tuple[Replica, list[Engine]]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(model, answer)) for answer in answers]
        urls = [upstream.url for upstream in engines]
        router = await stack.enter_async_context(
            replica(valkey_url, model, *urls, policy="round_robin", health_interval_s=60.0)
        )
        yield router, engines
        await router.unloaded()


def had_poison(engines: list[Engine]) -> int:
    return sum(any(seen.json["prompt"] == POISON for seen in upstream.seen) for upstream in engines)


@pytest.mark.parametrize("kept", [False, True], ids=["fresh", "kept"])
@pytest.mark.parametrize("way", ["process", "headers", "connection"])
async def test_a_request_that_killed_three_workers_is_sent_to_no_fourth(
    valkey_url: str, model: str, way: str, kept: bool
) -> None:
    async with fleet_of(valkey_url, model, *[poisoned(way)] * 4) as (router, engines):
        if kept:
            while not all(upstream.seen for upstream in engines):
                await router.post({"model": model, "prompt": PROMPT})
        status, _, answer = await router.post({"model": model, "prompt": POISON, "stream": True})
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_gone")
        assert had_poison(engines) == 3
        ids = [
            s.headers["x-request-id"].partition(".")[0]
            for upstream in engines
            for s in upstream.seen
            if s.json["prompt"] == POISON
        ]
        assert len(set(ids)) == 3
        assert await router.metric('warmfleet_retries_total{where="another"}') == 2
        status, _, _ = await router.post({"model": model, "prompt": PROMPT})
        assert status == 200, "the other serves on"


async def test_workers_that_refuse_are_no_deaths(valkey_url: str, model: str) -> None:
    """The request reaches the worker that answers after any others, and kills one worker at most."""

    async def busy(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        reply(writer, b"{}", "503 Busy")

    async with fleet_of(valkey_url, model, poisoned("process"), busy, answer_well, answer_well) as (router, engines):
        await engines[2].die()
        for number in range(8):
            status, _, _ = await router.post({"model": model, "prompt": POISON if number else PROMPT})
            assert status == 200


async def test_three_refused_connections_do_not_fail_a_request(valkey_url: str, model: str) -> None:
    async with fleet_of(valkey_url, model, *[answer_well] * 4) as (router, engines):
        for upstream in engines[:3]:
            await upstream.die()
        status, _, _ = await router.post({"model": model, "prompt": PROMPT})
        assert (status, len(engines[3].seen)) == (200, 1)


async def test_refused_then_three_deaths_end_it(valkey_url: str, model: str) -> None:
    async with fleet_of(valkey_url, model, *[poisoned("process")] * 4) as (router, engines):
        await engines[0].die()
        status, _, answer = await router.post({"model": model, "prompt": POISON})
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_gone")
        assert had_poison(engines) == 3


async def test_half_of_the_fleet_dies_and_no_request_fails(valkey_url: str, model: str) -> None:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(model)) for _ in range(4)]
        router = await stack.enter_async_context(
            replica(valkey_url, model, *(upstream.url for upstream in engines), health_interval_s=60.0)
        )
        for upstream in engines[:2]:
            await upstream.die()
        answers = [await router.post({"model": model, "prompt": f"{number} {PROMPT}"}) for number in range(24)]
        assert [status for status, _, _ in answers] == [200] * 24
        await router.unloaded()


async def test_an_emptied_redis_is_not_a_reason_to_refuse(model: str) -> None:
    with server(valkey_binary()) as url:
        async with engine(model) as upstream, replica(url, model, upstream.url, health_interval_s=60.0) as router:
            await router.fleet.redis.flushall()
            for _ in range(5):
                status, headers, _ = await router.post({"model": model, "prompt": PROMPT})
                assert (status, headers["x-warmfleet-reservation"]) == (200, "fallback")
            assert reservation_of(f"cmpl-{upstream.seen[-1].headers['x-request-id']}-0") is None, "it is foreign load"
            assert await router.metric('warmfleet_fallback_requests_total{reason="no_worker"}') == 5


async def test_an_emptied_redis_and_dead_engines_fail_nobody(model: str) -> None:
    """Without workers in Redis a request also goes on to the next worker; only workers that failed it are excluded."""
    with server(valkey_binary()) as url:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(engine(model)) for _ in range(4)]
            urls = [upstream.url for upstream in engines]
            router = await stack.enter_async_context(replica(url, model, *urls, health_interval_s=60.0))
            await router.fleet.redis.flushall()
            for upstream in engines[:2]:
                await upstream.die()
            answers = [await router.post({"model": model, "prompt": f"{number} {PROMPT}"}) for number in range(16)]
            assert [status for status, _, _ in answers] == [200] * 16
            assert await router.metric('warmfleet_retries_total{where="another"}') >= 2, "dead engines were met"


async def test_leases_of_a_dead_replica_are_reaped_without_any_request(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        for number in range(20):
            await router.fleet.bookings.decide(Question(f"wf-left-behind-{number:08d}", (), 100, 100))
        keys = router.fleet.keys
        for member in await router.fleet.redis.zrange(keys.leases, 0, -1):
            await router.fleet.redis.zadd(keys.leases, {cast("bytes", member): 1})
        await router.unloaded()


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": 5}, {"role": "user", "content": "x"}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":' * 50_000}}]},
                {"role": "user", "content": "x"},
            ]
        },
    ],
    ids=["type of a part", "tool_calls", "nested arguments"],
)
async def test_odd_input_is_the_engines_to_judge(valkey_url: str, model: str, more: dict[str, Any]) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, _, _ = await router.post({"model": model, **more}, "/v1/chat/completions")
        assert (status, len(upstream.seen)) == (200, 1)


async def test_too_many_messages_name_the_field(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        messages = [{"role": "user", "content": "x"}] * (prompt.MAX_MESSAGES + 1)
        status, _, answer = await router.post({"model": model, "messages": messages}, "/v1/chat/completions")
        assert status == 400
        assert b'"param":"messages"' in answer


async def test_an_outcome_that_redis_did_not_take_is_repeated(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        body = {"model": model, "prompt": PROMPT, "stream": True, "max_tokens": 300}
        async with router.client.post(f"{router.url}/v1/completions", json=body) as answer:
            await answer.content.readany()
            await router.fleet.redis.client_pause(5_000, all=False)
            await answer.read()
        await poll(lambda: router.metric("warmfleet_settle_failures_total"), 10, "the settle meets a stalled Redis")
        await poll(lambda: _no_leases(router), 10, "told again")
        await router.unloaded()


async def _no_leases(router: Any) -> bool:
    return int(await router.fleet.redis.zcard(router.fleet.keys.leases)) == 0
