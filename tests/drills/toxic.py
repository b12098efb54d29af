"""A TCP proxy that stands between two processes and spoils what passes: held back, late, reset, replaced by garbage."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

PIECE_BYTES = 65_536
GARBAGE = b"\x00\xff garbage \r\n\r\n" * 8
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: closing sends RST instead of FIN


@dataclass(eq=False)
class Link:
    """A connection through the proxy. ``open`` while its bytes may pass."""

    client: asyncio.StreamWriter
    open: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.open.set()
        self.writers.append(self.client)

    def reset(self) -> None:
        """End both sides with RST."""
        for writer in self.writers:
            found: socket.socket | None = writer.get_extra_info("socket")
            if found is not None and not writer.transport.is_closing():
                found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        self.open.set()

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


class Toxic:
    """A proxy for a port of this machine, which passes all bytes on until a fault is set; ``heal`` ends every fault."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.late_s = 0.0
        self.garbles = self.resets = False
        self._flows = asyncio.Event()
        self._flows.set()
        self._links: set[Link] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.heal()
        self.reset()  # also what was accepted a moment ago, and has no task yet
        while self._links:  # noqa: ASYNC110  their tasks end in this turn or the next
            await asyncio.sleep(0.01)

    def hold(self) -> None:
        """A partition: no byte passes in either direction, and what was sent arrives once it has healed."""
        self._flows.clear()

    def forget(self) -> None:
        """Half-open: the connections of now are silent for good; new ones pass. ``heal`` resets the silent ones."""
        for link in self._links:
            link.open.clear()

    def reset(self) -> None:
        """Every connection, and each new one, ends with RST."""
        self.resets = True
        for link in list(self._links):
            link.reset()

    def heal(self) -> None:
        self.late_s, self.garbles, self.resets = 0.0, False, False
        for link in list(self._links):
            if not link.open.is_set():
                link.reset()
        self._flows.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(writer)
        self._links.add(link)
        try:
            if self.resets:
                link.reset()
                return
            await self._flows.wait()
            server_reader, server = await asyncio.open_connection("127.0.0.1", self.target)
            link.writers.append(server)
            if self.resets:
                link.reset()
                return
            await asyncio.gather(self._pump(link, reader, server), self._pump(link, server_reader, writer, back=True))
        except OSError:  # a side has closed its connection
            link.reset()
        finally:
            link.close()
            self._links.discard(link)

    async def _pump(
        self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool = False
    ) -> None:
        """back: from the server to the client, the direction that garbage replaces."""
        while data := await reader.read(PIECE_BYTES):
            await asyncio.sleep(self.late_s)
            await self._flows.wait()
            await link.open.wait()
            writer.write(GARBAGE if self.garbles and back else data)
            await writer.drain()
        await self._flows.wait()
        await link.open.wait()
        if back:
            writer.close()
        else:
            with suppress(OSError):
                writer.write_eof()
