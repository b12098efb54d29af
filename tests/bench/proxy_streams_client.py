"""The client of ``proxy_streams``: thousands of streams at once, whose chunks tell when the engine sent them."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from tests.bench.stub_engines import STAMP_DIGITS

if TYPE_CHECKING:
    from collections.abc import Sequence

STAMP = re.compile(rb"@(\d{%d})@" % STAMP_DIGITS)
END = b"data: [DONE]\n\n"
LATE_S = 60.0  # beyond the time that the engines take for their answers


@dataclass
class Streams:
    """Streams under way. ``flowing``: got a chunk and have not ended. ``most``: of these at one time."""

    left: int
    flowing: int = 0
    most: int = 0
    failures: list[str] = field(default_factory=list)
    all_flow: asyncio.Event = field(default_factory=asyncio.Event)
    first_end_ns: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = 0

    def starts(self) -> None:
        self.flowing += 1
        self.most = max(self.most, self.flowing)

    def ended(self, failure: str, *, flowed: bool) -> None:
        self.first_end_ns = self.first_end_ns or time.monotonic_ns()
        self.flowing -= flowed
        self.left -= 1
        if failure:
            self.failures.append(failure)
        if not self.left:
            self.over.set()


class Stream(asyncio.Protocol):
    """A connection with one request. ``sent``, ``came``: of each chunk, when the engine sent it and when it came."""

    def __init__(self, streams: Streams, request: bytes) -> None:
        self.streams, self.request = streams, request
        self.sent, self.came = array("q"), array("q")
        self.rest = b""
        self.ended = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has no such base class
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self.rest + data
        if not self.sent and b"\r\n\r\n" in data and b"text/event-stream" not in data:
            self.end(repr(data[:300]))
            return
        whole = data.rfind(b"\n\n") + 2
        if whole < 2:
            self.rest = data
            return
        self.rest = data[whole:]
        for stamp in STAMP.findall(data, 0, whole):
            if not self.sent:
                self.streams.starts()
            self.sent.append(int(stamp))
            self.came.append(now)
        if data.find(END, 0, whole) >= 0:
            self.end("" if self.sent else repr(data[:300]))

    def connection_lost(self, error: Exception | None) -> None:
        self.end(f"closed after {len(self.sent)} chunks: {error}, {self.rest[:300]!r}")

    def end(self, failure: str) -> None:
        if not self.ended:
            self.ended = True
            self.streams.ended(failure, flowed=bool(self.sent))
            self.transport.close()


async def opened(port: int, requests: Sequence[bytes], rate: float) -> tuple[Streams, list[Stream]]:
    """Open a stream for each request, ``rate`` a second."""
    loop, streams, made = asyncio.get_running_loop(), Streams(len(requests)), list[Stream]()
    begun = loop.time()
    for number, request in enumerate(requests):
        if (early := begun + number / rate - loop.time()) > 0:
            await asyncio.sleep(early)
        stream = Stream(streams, request)
        made.append(stream)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    return streams, made
