"""A stopping replica ends answers that take longer than ``WARMFLEET_SHUTDOWN_GRACE_S`` so that clients notice."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from tests.support.engines.scripted import STREAM_HEAD, engine, event, freezing
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.api.listening.server import Sockets
from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet, connect
from warmfleet.main import server
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from tests.support.engines.scripted import Answer
    from tests.support.replicas.replica import Replica

    from warmfleet.api.service_routes import Health

LARGE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2000000\r\n\r\n" + b"{" + b"x" * 49_999


async def cut(valkey_url: str, model: str, answer: Answer, **body: Any) -> tuple[aiohttp.ClientResponse, bytes]:
    """The part of an endless answer that a client gets from a stopping replica; no load may stay booked."""
    looking = Fleet(connect(valkey_url, timeout_s=2), model)
    async with engine(model, answer) as upstream:
        async with replica(valkey_url, model, upstream.url, shutdown_grace_s=0.0) as router:
            asked = asyncio.create_task(_read(router, {"model": model, "prompt": "x" * 100} | body))
            await poll(lambda: upstream.seen, what="the engine has the request")
            await poll(router.load, what="load is booked")
            await asyncio.sleep(0.1)  # the engine's bytes have arrived
        answered = await asked
        rows = [worker.load for worker in await looking.workers.read()]
        assert sum(row.in_flight + row.prefill_tokens + row.decode_tokens for row in rows) == 0 < len(rows)
    await looking.close()
    return answered


async def _read(router: Replica, body: dict[str, Any]) -> tuple[aiohttp.ClientResponse, bytes]:
    # The replica's own test client is closed before the replica stops, so this client is a separate one.
    async with aiohttp.ClientSession() as client, client.post(f"{router.url}/v1/completions", json=body) as answer:
        return answer, await answer.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_without_an_answer_yet_is_told_to_ask_again(valkey_url: str, model: str, stream: bool) -> None:
    """A client whose engine has sent only a stream's headers gets 503, too: headers wait for the first event."""
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


class Process:
    """A replica as a separate process, on the same port after every restart. ``ready``: by its last /readyz."""

    def __init__(self, redis_url: str, model: str, engine_url: str) -> None:
        self.port = free_port()
        settings = {"REDIS_URL": redis_url, "MODELS": model, "STATIC_WORKERS": engine_url, "PORT": str(self.port)}
        settings |= {"ADMIN_PORT": "0", "DRAIN_S": "1.5", "DECIDE_TIMEOUT_S": "2"}
        self.environment = os.environ | {f"WARMFLEET_{name}": value for name, value in settings.items()}
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready = False
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = (sys.executable, "-m", "warmfleet", "serve")
        self._process = await asyncio.create_subprocess_exec(*command, env=self.environment)

    async def kill(self) -> None:
        """Kill the process that a failed test leaves."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """Send SIGTERM, and return when the process has ended by itself."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(self._process.wait(), 20) in (0, -signal.SIGTERM)

    async def watch(self) -> None:
        """Ask for /readyz again and again on separate connections, as a balancer does."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            while True:
                try:
                    async with client.get(f"{self.url}/readyz") as answer:
                        self.ready = answer.status == 200
                except aiohttp.ClientError:
                    self.ready = False
                await asyncio.sleep(0.05)


class Traffic:
    """Clients behind a balancer: a new connection goes to a ready replica and stays there until it is closed.

    No client repeats a request.
    """

    def __init__(self, model: str, processes: list[Process]) -> None:
        self.model, self.processes = model, processes
        self.connections, self.answered, self.failed, self.over = 0, 0, list[object](), False

    async def client(self, number: int) -> None:
        chance = random.Random(number)
        while not self.over:
            process = chance.choice([candidate for candidate in self.processes if candidate.ready])
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            self.connections += 1
            while not self.over and not reader.at_eof():
                try:
                    head = await self.ask(reader, writer, stream=chance.random() < 0.5)
                except (OSError, EOFError) as error:
                    self.failed.append(error)
                    break
                self.answered += 1
                if not head.startswith(b"HTTP/1.1 200 "):
                    self.failed.append(head)
                if b"\r\nconnection: close\r\n" in head:
                    break
                # A fifth of the clients often send the next request at once; more would only keep both cores busy.
                await asyncio.sleep(chance.uniform(0.0, 0.4) if number % 5 else chance.choice((0.0, 0.1)))
            writer.close()

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, stream: bool) -> bytes:
        """Send one request, read the whole answer, and return its head."""
        body = json.dumps({"model": self.model, "prompt": "x" * 100, "stream": stream}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"\r\ncontent-length: (\d+)\r\n", head):
            await reader.readexactly(int(length[1]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        return head


async def test_a_rolling_restart_fails_nobody_with_a_kept_connection(valkey_url: str, model: str) -> None:
    async with engine(model) as upstream, AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        processes = [Process(valkey_url, model, upstream.url) for _ in range(2)]
        for process in processes:
            await process.start()
            stack.push_async_callback(process.kill)
        watches = [group.create_task(process.watch()) for process in processes]
        await poll(lambda: all(process.ready for process in processes), 60, "both are ready")
        traffic = Traffic(model, processes)
        clients = [group.create_task(traffic.client(number)) for number in range(20)]
        for process in processes:
            before = traffic.answered
            await poll(lambda: traffic.answered > before + 100, 60, "all clients have connections")  # noqa: B023
            await process.stop()
            await process.start()
            await poll(lambda: process.ready, 60, "it is ready again")  # noqa: B023
        traffic.over = True
        await asyncio.gather(*clients)
        for watch in watches:
            watch.cancel()
        for process in processes:
            await process.stop()
        assert traffic.failed == []
        assert traffic.connections < traffic.answered / 3, "they keep their connections"


async def test_a_stop_signal_drains_first() -> None:
    made = server(Settings(models=("m",), drain_s=0.1), Sockets([]))
    health: Health = made._health
    made.handle_exit(signal.SIGTERM, None)
    assert health.draining
    assert not made.should_exit
    await poll(lambda: made.should_exit, 30, "it stops after the drain")
    other = server(Settings(models=("m",), drain_s=60.0), Sockets([]))
    other.handle_exit(signal.SIGTERM, None)
    other.handle_exit(signal.SIGTERM, None)
    assert other.should_exit  # the second signal stops the replica at once


async def test_of_several_signals_one_is_raised_again() -> None:
    """A second raised SIGINT would end the event loop with a traceback."""
    raised: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: raised.append(number))
    try:
        made = server(Settings(models=("m",)), Sockets([]))
        with made.capture_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert made.force_exit
    finally:
        signal.signal(signal.SIGINT, before)
    assert raised == [signal.SIGINT]


async def test_after_a_second_sigint_the_background_tasks_still_end_in_order() -> None:
    made = server(Settings(models=("m",), redis_url="redis://127.0.0.1:1/0"), Sockets([]))
    serving = asyncio.create_task(made._serve())
    await poll(lambda: made.started, 30, "it serves")
    for _ in range(2):
        made.handle_exit(signal.SIGINT, None)
    await asyncio.wait_for(serving, 30)
    assert made.lifespan.shutdown_event.is_set()
