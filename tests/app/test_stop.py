"""A replica stops: answers that take longer than ``WARMFLEET_SHUTDOWN_GRACE_S`` are ended so that clients notice."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.app.engine import STREAM_HEAD, engine, event, freezing
from tests.app.replica import replica
from tests.conftest import poll

from warmfleet.fleet import Fleet, connect
from warmfleet.main import _Server, server
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from tests.app.engine import Answer
    from tests.app.replica import Replica

    from warmfleet.api.service_routes import Health

LARGE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n" + b"x" * 50_000


async def cut(valkey_url: str, model: str, answer: Answer, **body: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    """The part of an endless answer that a client gets from a replica that stops; nothing stays booked."""
    looking = Fleet(connect(valkey_url, timeout_s=2), model)
    async with engine(model, answer) as upstream:
        async with replica(valkey_url, model, upstream.url, shutdown_grace_s=0.0, buffer_max_bytes=20_000) as router:
            asked = asyncio.create_task(_read(router, {"model": model, "prompt": "x" * 100} | body))
            await poll(lambda: upstream.seen, what="the engine has the request")
            await poll(router.load, what="load is booked")
            await asyncio.sleep(0.1)  # what the engine sent has arrived
        answered = await asked
        rows = [worker.load for worker in await looking.workers()]
        assert sum(row.in_flight + row.prefill_tokens + row.decode_tokens for row in rows) == 0 < len(rows)
    await looking.close()
    return answered


async def _read(router: Replica, body: dict[str, Any]) -> tuple[aiohttp.ClientResponse, bytes]:
    # Not with the replica's own test client, which is closed before the replica stops.
    async with aiohttp.ClientSession() as client, client.post(f"{router.url}/v1/completions", json=body) as answer:
        return answer, await answer.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_without_an_answer_yet_is_told_to_ask_again(valkey_url: str, model: str, stream: bool) -> None:
    """So is a client whose engine has sent the headers of a stream: they wait for the first event."""
    answer, body = await cut(valkey_url, model, freezing(STREAM_HEAD if stream else b""), stream=stream)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"]["code"] == "stopping"


async def test_a_stream_says_why_it_ends(valkey_url: str, model: str) -> None:
    answer, body = await cut(valkey_url, model, freezing(STREAM_HEAD, event(" one"), b'data: {"half'), stream=True)
    first, half, last = body.decode().strip().split("\n\n")
    assert (answer.status, first + "\n\n", half) == (200, event(" one").decode(), 'data: {"half')
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    assert b"[DONE]" not in body


async def test_half_a_plain_answer_ends_with_a_closed_connection(valkey_url: str, model: str) -> None:
    with pytest.raises(aiohttp.ClientPayloadError):
        await cut(valkey_url, model, freezing(LARGE))


async def test_a_stop_signal_drains_first() -> None:
    made = server(Settings(models=("m",), drain_s=0.1))
    assert isinstance(made, _Server)
    health: Health = made._health
    made.handle_exit(signal.SIGTERM, None)
    assert health.draining
    assert not made.should_exit
    await poll(lambda: made.should_exit, 5, "it stops after the drain")
    other = server(Settings(models=("m",), drain_s=60.0))
    other.handle_exit(signal.SIGTERM, None)
    other.handle_exit(signal.SIGTERM, None)
    assert other.should_exit  # a second signal stops at once
