"""A TCP proxy between a replica and Redis, which a test can shut, stop or slow down."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Gate:
    """A TCP door before a unix socket that can be shut, made to swallow everything, or ``delay_s`` every answer."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.swallow = False
        self.delay_s = 0.0
        self.tasks: set[asyncio.Task[None]] = set()
        self.server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        assert self.server is not None
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(self.path)
        both = [asyncio.ensure_future(self._pump(reader, outer)), asyncio.ensure_future(self._pump(inner, writer))]
        self.tasks.update(both)
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
            self.tasks.discard(task)
        writer.close()
        outer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            await asyncio.sleep(self.delay_s)
            if not self.swallow:
                sink.write(data)
                await sink.drain()


@asynccontextmanager
async def gate(valkey_url: str) -> AsyncIterator[Gate]:
    made = Gate(valkey_url.removeprefix("unix://"))
    await made.open()
    try:
        yield made
    finally:
        await made.shut()
