"""A tiny real HTTP server that answers as an engine would, or misbehaves in many ways if a test says so."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
ACCEPTED = 5  # rounds of the event loop from the acceptance of a connection until ``serve`` has it


Answer = Callable[["Engine", "Seen", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Seen:
    """A request to a completion endpoint."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def sent(self) -> bytes:
        """The body as it was before the router named the answer (of /v1/responses)."""
        return _NAMED.sub(b"}", self.body)


_NAMED = re.compile(rb',"request_id":"resp_[^"]+"}$')


@dataclass
class Engine:
    """``answer`` serves completion requests; all other members serve health checks.

    ``hangs``: it answers nothing. ``late``: paths that get no answer. ``statuses``: by path, if not 200.
    names: those that /v1/models lists, in place of ``model``.
    """

    model: str
    answer: Answer
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    connections: Counter[str] = field(default_factory=Counter)
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    readers: set[asyncio.StreamReader] = field(default_factory=set)
    server: asyncio.Server | None = None
    hangs: bool = False
    late: set[str] = field(default_factory=set)
    statuses: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections["opened"] += 1
        self.writers.add(writer)
        self.readers.add(reader)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                line, *lines = head.split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (item.partition(":") for item in lines if item)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = line.split(" ")
                while self.hangs or path in self.late:  # noqa: ASYNC110  a test may let it answer again
                    await asyncio.sleep(0.01)
                if method == "GET":
                    reply(writer, self._page(path), self.statuses.get(path, "200 OK"))
                    continue
                seen = Seen(path, headers, body)
                self.seen.append(seen)
                await self.answer(self, seen, writer)
                if writer.is_closing():
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.connections["hung_up"] += 1
        finally:
            self.writers.discard(writer)
            self.readers.discard(reader)
            writer.close()

    def _page(self, path: str) -> bytes:
        if path == "/v1/models":
            return json.dumps(
                {"object": "list", "data": [{"id": name} for name in self.names or [self.model]]}
            ).encode()
        return b'vllm:cache_config_info{block_size="16",num_gpu_blocks="8000"} 1.0\n' if path == "/metrics" else b"{}"

    async def die(self) -> None:
        """Stop listening and close every connection as SIGKILL does: with FIN where all bytes were read, else RST."""
        await self._listen_no_more()
        for writer in list(self.writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop listening and close every connection."""
        await self._listen_no_more()
        for writer in list(self.writers):
            writer.transport.abort()

    async def _listen_no_more(self) -> None:
        """Stop listening, once every connection that asyncio has accepted is in ``writers``: nobody else closes it.

        A server that is closed right after it accepted one drops its socket (Python 3.11), which is a ResourceWarning.
        """
        assert self.server is not None
        for listener in self.server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(ACCEPTED):
            await asyncio.sleep(0)
        self.server.close()


def reply(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK", kind: str = "application/json") -> None:
    """A whole answer."""
    writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """A piece of a chunked answer; empty = the end."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset."""
    import socket

    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close as the kernel does for a process that dies: with FIN, because all bytes were read."""
    writer.transport.abort()


def freezing(head: bytes, *events: bytes) -> Answer:
    """An answer that begins with these pieces and then neither goes on nor ends."""

    async def answer(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for piece in events:
            chunk(writer, piece)
        await writer.drain()
        await asyncio.sleep(60)

    return answer


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


async def answer_well(_engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """``max_tokens`` events 1 ms apart and [DONE], or one JSON answer."""
    body = seen.json
    count = body.get("max_tokens", 3)
    if not body.get("stream"):
        reply(writer, json.dumps({"choices": [{"index": 0, "text": " word" * count}]}).encode())
        return
    writer.write(STREAM_HEAD)
    for number in range(count):
        chunk(writer, event(f" {number}"))
        await writer.drain()
        await asyncio.sleep(0.001)
    chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")


def no_model(name: str) -> bytes:
    """The answer of vLLM to a request for a model that it does not serve."""
    error = {"message": f"The model `{name}` does not exist.", "type": "NotFoundError", "param": "model", "code": 404}
    return json.dumps({"error": error}).encode()


async def answer_by_name(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answer as ``answer_well``, but with 404 for a name that the engine does not list."""
    name = seen.json.get("model", "")
    if name in engine.names or not name:
        await answer_well(engine, seen, writer)
        return
    reply(writer, no_model(name), "404 Not Found")


@asynccontextmanager
async def engine(model: str, answer: Answer = answer_well) -> AsyncIterator[Engine]:
    """An engine on a free loopback port."""
    made = Engine(model, answer)
    made.server = await asyncio.start_server(made.serve, "127.0.0.1", 0, limit=2**24)
    made.url = f"http://127.0.0.1:{made.server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        await made.close()
