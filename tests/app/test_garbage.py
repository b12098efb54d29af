"""The memory of requests and their connections is free when they have ended, without Python's garbage collector.

A full collection looks at every object of a replica and takes a third of a second with 5,000 streams, so ``main`` makes
it rare.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.scripted import STREAM_HEAD, chunk, engine, event, freezing, reply, reset
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.replicas.replica import replica

from warmfleet import main
from warmfleet.api.http_connection import HttpConnection
from warmfleet.api.http_request import HttpRequest
from warmfleet.api.listening.server import Sockets
from warmfleet.engines import engine_connection
from warmfleet.engines.engine_connection import Connection, EngineResponse
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.call import Call, Job
from warmfleet.routing.client_answer import ClientAnswer
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.engines.scripted import Answer, Engine, Seen
    from tests.support.replicas.replica import Replica

KINDS = (HttpConnection, HttpRequest, ClientAnswer, Call, Job, Attempt, EngineResponse, Connection)
ALL_DONE_S = 10.0
LOOK_S = 0.1  # pause between two slow listings of all objects of the process


async def plain(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, b'{"choices": []}')


async def streamed(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    chunk(writer, event(" one"))
    chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")


async def reset_midway(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    chunk(writer, event(" one"))
    await writer.drain()
    await asyncio.sleep(0.1)  # what was sent has left
    reset(writer)


async def plain_reset_midway(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nContent-Length: 100\r\n\r\nbegun")
    await writer.drain()
    await asyncio.sleep(0.1)  # what was sent has left
    reset(writer)


async def dies(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reset(writer)


async def refused(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    reply(writer, b"", "503 Service Unavailable")


@pytest.fixture
def no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine_connection, "KEEPALIVE_S", 0.2)  # how long idle connections to engines are kept
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> Counter[str]:
    """The number of live objects of requests and connections, by class."""
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in KINDS)


async def sent(router: Replica, raw: bytes, until: bytes) -> None:
    """Send the bytes, and hang up when the answer has arrived up to ``until``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(router.url.rsplit(":", 1)[1]))
    writer.write(raw)
    await reader.readuntil(until)
    writer.close()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("answer", "until"),
    [
        pytest.param(plain, b'{"choices": []}', id="plain"),
        pytest.param(streamed, b"[DONE]", id="streamed"),
        pytest.param(freezing(STREAM_HEAD, event(" one")), b"one", id="the client hangs up"),
        pytest.param(reset_midway, b"upstream_gone", id="the engine dies"),
        pytest.param(plain_reset_midway, b"begun", id="the engine dies in a plain answer"),
        pytest.param(refused, b"\r\n\r\n", id="the engine refuses"),
        pytest.param(dies, b"error", id="the engine dies before its answer"),
    ],
)
async def test_what_a_request_held_is_free_when_it_has_ended(
    valkey_url: str, model: str, answer: Answer, until: bytes
) -> None:
    body = json.dumps({"model": model, "prompt": "x" * 100, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with engine(model, answer) as upstream, replica(valkey_url, model, upstream.url) as router:
        for _ in range(3):
            await sent(router, request, until)
        await poll(lambda: not left(), ALL_DONE_S, f"{left()} are free", every_s=LOOK_S)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("away", [False, True], ids=["nobody serves it", "Redis is away"])
async def test_what_a_request_held_is_free_if_redis_chose_no_worker(valkey_url: str, model: str, away: bool) -> None:
    body = json.dumps({"model": model, "prompt": "x" * 100}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with gate(valkey_url) as door, engine(model, plain) as upstream:
        url = f"redis://127.0.0.1:{door.port}"
        async with replica(url, model, *[upstream.url] if away else [], look_url=valkey_url) as router:
            if away:
                await router.routable(1)
                await door.shut()
            for _ in range(3):
                await sent(router, request, b'"choices"' if away else b"no_worker")
            await poll(lambda: not left(), ALL_DONE_S, f"{left()} are free", every_s=LOOK_S)


@pytest.mark.usefixtures("no_collector")
async def test_what_a_request_held_is_free_if_another_engine_served_it(valkey_url: str, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "x" * 100}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    answers = iter((dies, plain))  # of the two engines the one that is asked first dies

    async def answer(asked: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        await next(answers)(asked, seen, writer)

    async with (
        engine(model, answer) as one,
        engine(model, answer) as other,
        replica(valkey_url, model, one.url, other.url) as router,
    ):
        await router.routable(2)
        await sent(router, request, b'"choices"')
        assert await router.metric('warmfleet_retries_total{where="another"}') == 1
        await poll(lambda: not left(), ALL_DONE_S, f"{left()} are free", every_s=LOOK_S)


@pytest.mark.usefixtures("no_collector")
async def test_a_connection_that_was_refused_is_free(valkey_url: str, model: str) -> None:
    async with engine(model, plain) as upstream, replica(valkey_url, model, upstream.url) as router:
        for raw in (b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1, 2\r\n\r\n"):
            await sent(router, raw, b"bad_request")
        await poll(lambda: not left(), ALL_DONE_S, f"{left()} are free", every_s=LOOK_S)


async def test_full_collections_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    class Served:
        async def serve(self) -> None:
            pass

    before = gc.get_threshold()
    monkeypatch.setattr(main, "server", lambda *_: Served())
    try:
        await main.serve(Settings(models=("m",)), Sockets([]))
        assert gc.get_threshold() == (*before[:2], main.FULL_COLLECTION_AFTER)
    finally:
        gc.set_threshold(*before)
