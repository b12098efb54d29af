"""Requests through a replica over real sockets with a real Redis: their load is given back in every case."""

from __future__ import annotations

import asyncio
import gzip
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.engines.scripted import (
    STREAM_HEAD,
    Engine,
    Seen,
    answer_well,
    chunk,
    engine,
    event,
    freezing,
    reply,
    reset,
)
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.engines.upstream import Upstream
from warmfleet.fleet import Fleet
from warmfleet.fleet.bookings import Bookings
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import view_of
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.routing.call import Call
from warmfleet.routing.client_answer import ClientAnswer
from warmfleet.routing.engine_tokenizer import EngineTokenizer
from warmfleet.routing.identifier import Identifier
from warmfleet.routing.router import Router
from warmfleet.settings import Settings
from warmfleet.tracing.request_record import RequestRecord

if TYPE_CHECKING:
    from warmfleet.fleet.bookings import Told
    from warmfleet.fleet.connection.multiplexed import OnAnswer

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


async def test_answer_is_the_engines_own(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 2, "odd": [1.50, "\u00e9"]}).encode()
    status, headers, answer = await router.post(body, **{"X-Request-Id": "mine-1"})
    assert (status, json.loads(answer)["choices"][0]["text"]) == (200, " word word")
    assert upstream.seen[-1].body == body  # the body is passed on byte for byte
    reservation, _, rest = upstream.seen[-1].headers["x-request-id"].partition(".")
    assert reservation.startswith("wf-")
    assert (len(reservation), rest, headers["x-request-id"]) == (25, "mine-1", "mine-1")
    assert headers["x-warmfleet-reservation"] == "booked"
    assert headers["x-warmfleet-worker"] == upstream.url.removeprefix("http://").replace(":", "-")
    assert int(headers["x-warmfleet-prompt-tokens"]) > 200
    await router.unloaded()


async def test_second_turn_is_matched(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    await router.post({"model": model, "prompt": PROMPT})
    _, headers, _ = await router.post({"model": model, "prompt": PROMPT + "And then? "})
    assert int(headers["x-warmfleet-matched-tokens"]) >= 192
    _, headers, _ = await router.post({"model": model, "prompt": PROMPT, "cache_salt": "other tenant"})
    assert int(headers["x-warmfleet-matched-tokens"]) == 0


async def test_stream_comes_whole(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    status, headers, answer = await router.post({"model": model, "prompt": PROMPT, "stream": True, "max_tokens": 5})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert answer == b"".join(event(f" {n}") for n in range(5)) + b"data: [DONE]\n\n"
    await router.unloaded()


async def test_client_hangs_up_mid_stream(valkey_url: str, model: str) -> None:
    async def endless(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while True:  # until the connection is gone
            chunk(writer, event(" more"))
            await writer.drain()
            await asyncio.sleep(0.005)

    async with engine(model, endless) as upstream, replica(valkey_url, model, upstream.url) as router:
        async with router.client.post(
            f"{router.url}/v1/completions", json={"model": model, "prompt": PROMPT, "stream": True}
        ) as answer:
            await answer.content.readany()
            await poll(router.load, what="load is booked while the answer runs")
        await router.unloaded()  # the connection was closed by leaving the block
        await poll(lambda: upstream.connections["hung_up"], what="the engine is told as well")
        assert await router.metric('warmfleet_settled_reservations_total{outcome="cancelled"}') == 1


async def test_client_hangs_up_before_the_first_byte(valkey_url: str, model: str) -> None:
    async with engine(model, freezing(b"")) as upstream, replica(valkey_url, model, upstream.url) as router:
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await router.post({"model": model, "prompt": PROMPT})
        assert upstream.seen
        await router.unloaded()
        assert await router.metric('warmfleet_settled_reservations_total{outcome="cancelled"}') == 1


@pytest.mark.parametrize("cut", [b"", b'data: {"choi'], ids=["between events", "within an event"])
async def test_engine_dies_mid_stream(valkey_url: str, model: str, cut: bytes) -> None:
    async def dies(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        chunk(writer, event(" one") + cut)
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with engine(model, dies) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, _, answer = await router.post({"model": model, "prompt": PROMPT, "stream": True})
        first, *_, last = answer.decode().strip().split("\n\n")
        assert status == 200
        assert first == event(" one").decode().strip()
        error = json.loads(last.removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "server_error"
        assert len(upstream.seen) == 1  # an answer that had begun is not tried again
        await router.unloaded()
        assert await router.metric('warmfleet_settled_reservations_total{outcome="failed"}') == 1
        assert await router.metric("warmfleet_stream_errors_total") == 1


@pytest.mark.parametrize("way", ["closed", "reset"])
async def test_a_stream_without_chunks_ends_with_its_connection(valkey_url: str, model: str, way: str) -> None:
    """Only a reset shows that the stream was cut, because neither chunks nor a length tell its end."""

    async def until_close(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event(" one"))
        await writer.drain()
        await asyncio.sleep(0.05)
        if way == "reset":
            reset(writer)
        else:
            writer.close()

    async with engine(model, until_close) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, _, answer = await router.post({"model": model, "prompt": PROMPT, "stream": True})
        assert status == 200
        assert answer.startswith(event(" one"))
        assert (b'"upstream_gone"' in answer) == (way == "reset")
        await router.unloaded()
        assert await router.metric("warmfleet_stream_errors_total") == (1 if way == "reset" else 0)


async def test_an_encoded_answer_says_so(valkey_url: str, model: str) -> None:
    async def zipped(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        body = gzip.compress(b'{"choices": []}')
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))

    async with engine(model, zipped) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, headers, answer = await router.post({"model": model, "prompt": PROMPT})
        assert (status, headers["content-encoding"], answer) == (200, "gzip", b'{"choices": []}')


async def test_engine_dies_within_a_plain_answer(valkey_url: str, model: str) -> None:
    async def dies(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with engine(model, dies) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, _, answer = await router.post({"model": model, "prompt": PROMPT})
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_error")
        assert len(upstream.seen) == 1
        await router.unloaded()


async def test_engine_dies_within_a_large_plain_answer(valkey_url: str, model: str) -> None:
    async def dies(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2000000\r\n\r\n")
        writer.write(b"{" + b"y" * 2_999)
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with (
        engine(model, dies) as upstream,
        replica(valkey_url, model, upstream.url) as router,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):  # part of the answer was already sent
            await router.post({"model": model, "prompt": PROMPT})
        await router.unloaded()
        assert await router.metric('warmfleet_settled_reservations_total{outcome="failed"}') == 1
        assert await router.metric("warmfleet_stream_errors_total") == 1


@pytest.mark.parametrize("way", ["reset", "502", "503", "stream_reset"])
async def test_engine_fails_before_the_first_byte(valkey_url: str, model: str, way: str) -> None:
    async def fails(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if way == "stream_reset":
            writer.write(STREAM_HEAD)
            await writer.drain()
            await asyncio.sleep(0.02)
        if way.endswith("reset"):
            reset(writer)
        else:
            reply(writer, b"{}", f"{way} Trouble")

    async with (
        engine(model, fails) as bad,
        engine(model) as good,
        replica(valkey_url, model, bad.url, good.url, policy="round_robin") as router,
    ):
        for _ in range(4):
            status, headers, _ = await router.post({"model": model, "prompt": PROMPT, "stream": True})
            assert status == 200
            assert headers["x-warmfleet-worker"].endswith(good.url.rsplit(":", 1)[1])
        assert bad.seen
        assert len(good.seen) == 4
        ids = {seen.headers["x-request-id"].partition(".")[0] for seen in bad.seen + good.seen}
        retries = await router.metric('warmfleet_retries_total{where="another"}')
        assert retries >= 1
        assert len(ids) == retries + 4  # each retry at another worker has its own reservation
        await router.unloaded()


async def test_only_engine_is_gone(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, health_interval_s=30.0) as router:
        await upstream.die()
        status, _, answer = await router.post({"model": model, "prompt": PROMPT})
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_gone")
        await router.unloaded()


async def test_failed_try_is_settled_before_the_next_is_decided(valkey_url: str, model: str) -> None:
    loads: list[int] = []
    routers: list[Replica] = []

    async def fails(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reply(writer, b"{}", "503 Busy")

    async def looks(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        loads.extend(worker.load.in_flight for worker in await routers[0].fleet.workers.read())
        await answer_well(engine, seen, writer)

    async with (
        engine(model, fails) as bad,
        engine(model, looks) as good,
        replica(valkey_url, model, bad.url, good.url, policy="round_robin") as router,
    ):
        routers.append(router)
        while not bad.seen:
            loads.clear()
            await router.post({"model": model, "prompt": PROMPT})
    assert sorted(loads) == [0, 1]


async def test_stale_connection_is_replaced_on_the_same_worker(valkey_url: str, model: str) -> None:
    async def closes_when_idle(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if engine.connections["served"] == 1:  # the second request on a kept connection finds it dead
            engine.connections["served"] = 0
            reset(writer)
            return
        engine.connections["served"] = 1
        await answer_well(engine, seen, writer)

    async with (
        engine(model, closes_when_idle) as upstream,
        replica(valkey_url, model, upstream.url, health_interval_s=30.0) as router,
    ):
        for _ in range(3):
            status, _, _ = await router.post({"model": model, "prompt": PROMPT})
            assert status == 200
        assert await router.metric('warmfleet_retries_total{where="same"}') >= 1
        assert await router.metric('warmfleet_retries_total{where="another"}') == 0
        await router.unloaded()


async def test_engines_own_errors_pass_through(valkey_url: str, model: str) -> None:
    async def refuses(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reply(writer, b'{"error": {"message": "too long", "code": 400}}', "400 Bad Request")

    async with engine(model, refuses) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, headers, answer = await router.post({"model": model, "prompt": PROMPT})
        assert (status, answer) == (400, b'{"error": {"message": "too long", "code": 400}}')
        assert headers["x-warmfleet-reservation"] == "booked"
        assert len(upstream.seen) == 1
        await router.unloaded()


async def test_sixty_four_clients(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine

    async def one(number: int) -> int:
        body = {"model": model, "prompt": f"{number} {PROMPT}", "stream": number % 2 == 0, "max_tokens": 8}
        return (await router.post(body))[0]

    assert await asyncio.gather(*map(one, range(64))) == [200] * 64
    assert len(upstream.seen) == 64
    await router.unloaded()


class Unwritten:
    """A client's connection that fails the test at any write."""

    lost = False
    writable: asyncio.Future[None] | None = None

    def write(self, _data: bytes) -> None:
        pytest.fail("nothing is to be sent")

    def write_chunk(self, _data: bytes) -> bool:
        pytest.fail("nothing is to be sent")

    def keeps_open(self) -> bool:
        return True

    def peer(self) -> str:
        return "127.0.0.1"

    def answered(self, *, keep: bool) -> None:
        pytest.fail("nothing is to be sent")


class SlowBookings(Bookings):
    """Bookings that settle late, as over a connection that must be made anew."""

    def settle_later(self, reservation: str, outcome: Told, on_answer: OnAnswer, *more: Any, **named: Any) -> None:
        late = partial(super().settle_later, reservation, outcome, on_answer, *more, **named)
        asyncio.get_running_loop().call_later(0.05, late)


async def test_settle_survives_being_cancelled_itself(valkey_url: str, model: str) -> None:
    """A client hangs up and the replica shuts down at once, so the second cancellation meets the settle."""

    async with engine(model, freezing(b"")) as upstream, replica(valkey_url, model, upstream.url) as router:
        settings = Settings(redis_url=valkey_url, models=(model,), decide_timeout_s=1.0)
        fleet = Fleet(router.fleet.redis, model)
        fleet.bookings = SlowBookings(fleet.scripts)
        pool = Pool(model, fleet, DegradedMode(1.0))
        pool.show(view_of([], None, [], text=False))
        addresses, metrics = Addresses(settings.worker_addresses), Metrics()
        client = Upstream(addresses, 1.0)
        await client.open()
        tokenizer = EngineTokenizer(EngineClient(addresses, 1.0), metrics, 0.25)
        identifier = Identifier(tokenizer, metrics)
        served = Router(Pools([pool]), client, identifier, settings, metrics)
        body = json.dumps({"model": model, "prompt": PROMPT}).encode()
        task = asyncio.create_task(
            served.serve(
                Call(KNOWN["/v1/completions"], body, RequestRecord("id", KNOWN["/v1/completions"], "POST", 0.0), b""),
                ClientAnswer(Unwritten()),
            )
        )
        await poll(lambda: upstream.seen, what="the engine has the request")
        assert await router.load() > 0
        task.cancel()
        while pool.reservations:  # noqa: ASYNC110  until the release has begun: reservations are given back first
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await router.unloaded()
        await client.close()
