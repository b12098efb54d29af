"""The client of ``bench_proxy``: cheap, so that it is not the bottleneck. It reads of an answer only what it must."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST_CHUNK = b"0\r\n\r\n"
ANSWER_S = 60.0  # all answers of a burst must come within this time and SLOWEST_S for each request
SLOWEST_S = 0.1
TIMER_ABSTIME = 1  # of timerfd_settime(2): the time is a point, not a distance
CONNECTIONS = 64  # of an open loop; more requests than these never are under way at half of full load


class AnswerError(Exception):
    """A router answered in a way that makes the burst worthless."""


def request(body: bytes) -> bytes:
    """A chat request as bytes."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\nuser-agent: bench\r\naccept: */*\r\n"
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (head, len(body), body)


@dataclass
class Burst:
    """Requests that are sent as one burst.

    heads: the heads of the answers. spans: when each request was sent and answered, in ``time.perf_counter`` seconds.
    """

    waiting: deque[bytes]
    done: asyncio.Future[None]
    left: int
    heads: list[bytes] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)

    def answered(self, head: bytes, sent_at: float) -> None:
        self.heads.append(head)
        self.spans.append((sent_at, time.perf_counter()))
        self.left -= 1
        if not head.startswith(b"http/1.1 200"):
            self.failed(head.decode(errors="replace"))
        elif not self.left and not self.done.done():
            self.done.set_result(None)

    def failed(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(AnswerError(why))


class Connection(asyncio.Protocol):
    """A connection, which sends the next request of its burst after each answer."""

    def __init__(self, burst: Burst, idle: list[Connection]) -> None:
        self.burst, self.idle = burst, idle
        self.transport: asyncio.Transport
        self.sent_at = 0.0
        self.head = self.received = b""
        self.missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has no such base class

    def connection_lost(self, error: Exception | None) -> None:
        if self in self.idle:  # a router may close what it does not need
            self.idle.remove(self)
        elif self.burst.left:
            self.burst.failed(f"the connection was closed: {error}, {self.received[:500]!r}")

    def next(self) -> None:
        """Send the next request, or rest."""
        if not self.burst.waiting:
            self.idle.append(self)
            return
        self.head = self.received = b""
        self.sent_at = time.perf_counter()
        self.transport.write(self.burst.waiting.popleft())

    def data_received(self, data: bytes) -> None:
        if not self.head:
            self.received += data
            head, end, data = self.received.partition(b"\r\n\r\n")
            if not end:
                return
            self.head, self.received = head.lower(), b""
            length = (self.head + b"\r\n").partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            self.missing = int(length) if length else -1
        if self.missing >= 0:
            self.missing -= len(data)
            ended = self.missing <= 0
        else:  # chunked
            self.received = (self.received + data)[-len(LAST_CHUNK) :]
            ended = self.received == LAST_CHUNK
        if ended:
            self.burst.answered(self.head, self.sent_at)
            self.next()


async def connected(port: int, burst: Burst, count: int) -> list[Connection]:
    """Return ``count`` idle connections to a port of this machine."""
    loop, idle = asyncio.get_running_loop(), list[Connection]()
    for _ in range(count):
        _transport, connection = await loop.create_connection(lambda: Connection(burst, idle), "127.0.0.1", port)
        idle.append(connection)
    return idle


def burst_of(requests: Sequence[bytes]) -> Burst:
    return Burst(deque(requests), asyncio.get_running_loop().create_future(), len(requests))


async def finish(burst: Burst, connections: Sequence[Connection], count: int) -> None:
    """Wait for all answers and close the connections. Raises AnswerError for a bad answer or none."""
    try:
        async with asyncio.timeout(ANSWER_S + SLOWEST_S * count):
            await burst.done
    except TimeoutError as error:
        raise AnswerError(f"{burst.left} of {count} requests were not answered") from error
    finally:
        for connection in connections:
            connection.transport.close()


async def in_turn(burst: Burst, idle: list[Connection]) -> None:
    """Closed loop: each connection has one request under way until all are answered."""
    count, everyone = burst.left, [*idle]
    idle.clear()
    for connection in everyone:
        connection.next()
    await finish(burst, everyone, count)


async def at_rate(port: int, requests: Sequence[bytes], rate: float, seed: int) -> list[tuple[float, float]]:
    """Open loop: requests come at random times, ``rate`` a second on average. Returns ``Burst.spans``."""
    rng, burst = random.Random(seed), burst_of(())
    burst.left = len(requests)
    idle = await connected(port, burst, CONNECTIONS)
    everyone, due = [*idle], time.monotonic()
    with Alarm() as alarm:
        for raw in requests:
            due += rng.expovariate(rate)
            if due > time.monotonic():
                await alarm.at(due)
            burst.waiting.append(raw)
            if idle:
                idle.pop().next()
    await finish(burst, everyone, len(requests))
    return burst.spans


class Alarm:
    """Wakes a task to within some ten µs. A timer of uvloop is rounded to whole milliseconds, in which three requests
    may be due: they would come together.
    """

    def __enter__(self) -> Self:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rung = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._timer, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._timer)
        os.close(self._timer)

    async def at(self, due: float) -> None:
        """Return at this time of ``time.monotonic``."""
        self._rung.clear()
        seconds, fraction = divmod(due, 1.0)
        once = (ctypes.c_long * 4)(0, 0, int(seconds), max(1, int(fraction * 1e9)))  # struct itimerspec
        self._libc.timerfd_settime(self._timer, TIMER_ABSTIME, once, None)
        await self._rung.wait()

    def _ring(self) -> None:
        os.read(self._timer, 8)
        self._rung.set()
