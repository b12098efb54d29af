"""A peer that speaks HTTP/2 frame by frame, also wrongly, and gRPC on top of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from hpack import Decoder, Encoder

from warmfleet.picker import frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROCESS = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class Peer:
    """A client's connection. ``encoder`` has a table like any other's until it reads of the setting."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.encoder, self.decoder = Encoder(), Decoder()

    def send(self, *made: bytes) -> None:
        self.writer.write(b"".join(made))

    def greet(self, **settings: int) -> None:
        known = {"table": 1, "streams": 3, "window": 4, "frame": 5}
        self.send(frames.PREFACE, frames.settings({known[name]: value for name, value in settings.items()}))

    def call(self, stream: int, path: bytes = PROCESS, *, ends: bool = False, **more: bytes) -> None:
        """Open a call."""
        fields = {
            b":method": b"POST",
            b":scheme": b"http",
            b":path": path,
            b":authority": b"picker",
            b"te": b"trailers",
        }
        fields |= {b"content-type": b"application/grpc"} | {name.encode(): value for name, value in more.items()}
        block = self.encoder.encode([*fields.items()])
        self.send(frames.frame(frames.HEADERS, frames.END_HEADERS | ends, stream, block))

    def data(self, stream: int, message: bytes, *, ends: bool = False) -> None:
        """Send a gRPC message, in frames of the usual size."""
        whole = frames.message(message)
        pieces = [whole[at : at + frames.MAX_FRAME] for at in range(0, len(whole), frames.MAX_FRAME)]
        for piece in pieces:
            self.send(frames.frame(frames.DATA, ends and piece is pieces[-1], stream, piece))

    async def frame(self) -> Frame:
        """Return the next frame. Raises IncompleteReadError at the end of the connection."""
        high, low, kind, flags, stream = frames.HEAD.unpack(await self.reader.readexactly(frames.HEAD_BYTES))
        return Frame(kind, flags, stream, await self.reader.readexactly(high << 8 | low))

    async def until(self, kind: int, stream: int | None = None) -> Frame:
        """Return the next frame of this kind, and skip all before it."""
        async with asyncio.timeout(20):
            while True:
                found = await self.frame()
                if found.kind == kind and stream in (None, found.stream):
                    return found

    async def trailers(self, stream: int) -> dict[bytes, bytes]:
        """Return the headers that end a call."""
        while True:
            found = await self.until(frames.HEADERS, stream)
            told = {bytes(name): bytes(value) for name, value in self.decoder.decode(found.payload, raw=True)}
            if found.flags & frames.END_STREAM:
                return told

    async def goaway(self) -> tuple[int, int]:
        """Return the last stream that the server serves, and its reason."""
        found = await self.until(frames.GOAWAY)
        return int.from_bytes(found.payload[:4], "big"), int.from_bytes(found.payload[4:8], "big")

    async def closed(self) -> bool:
        """Return once the server has closed the connection."""
        try:
            async with asyncio.timeout(20):
                while True:
                    await self.frame()
        except (asyncio.IncompleteReadError, ConnectionError):
            return True


@asynccontextmanager
async def peer(port: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
