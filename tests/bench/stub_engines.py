"""Engines whose answers cost next to nothing: ``python -m tests.bench.stub_engines --redis URL --count 4``.

Behind each of them stands a simulated engine of ``warmfleet_loadtest``, which joins the fleet under the stub's address
and is proven like any other. A stub passes every request on to it, probes included, except those of the bench: a body
that holds ``"stub:CHUNKS:GAP_MS"`` (as ``stop``, which every router keeps) is answered at once from memory, with a
plain answer for 0 chunks, else with a stream. A gap of 0 ms sends all chunks in one write. With ``:stamped`` behind
the gap each chunk tells when it was sent. ``/tokenize`` and ``/render``, which some routers of other projects call for
every request, are answered from memory, too: a token is four bytes of the body. With ``--reports`` the prefills and the
ends of the bench's requests are reported to the fleet, as by an engine's plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import struct
import time
from functools import cache, partial
from typing import TYPE_CHECKING, cast

import orjson
import uvloop

from warmfleet_loadtest.engine import Engine, engine_config
from warmfleet_loadtest.engine import parser as engine_parser
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b'"stub:'
CHAT_HEAD = {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "created": 1_764_000_000, "model": "stub"}
SAID = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
TOKEN_BYTES = 4
STAMP_DIGITS = 20
PROMPT_TOKENS = 100  # as the answers tell
CRLF = b"\r\n"
TOKENISING = (b"/tokenize", b"/render")


class Reports:
    """What a stub tells the fleet of the requests that it answers itself. ``present``: their ids."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.present: dict[str, None] = {}
        requests = engine.core.requests
        engine.core.requests = lambda: [*requests(), *self.present.copy()]  # type: ignore[method-assign]

    def came(self, head: bytes) -> str:
        """Report the begin of a request, and the end of its prefill; returns its id, empty if no router sent it."""
        _, _, rest = head.lower().partition(b"\r\nx-request-id:")
        request_id = f"chatcmpl-{head[len(head) - len(rest) :].partition(CRLF)[0].strip().decode()}-0"
        reservation = wire.first_child(request_id) if rest else None
        halves = self._engine.halves
        if reservation is None or halves is None:
            return ""
        self.present[request_id] = None
        if halves.worker.reservations is not None:
            halves.worker.reservations.arrive(request_id)
        halves.worker.progress(reservation, 0, PROMPT_TOKENS)
        return request_id

    def ended(self, request_id: str, tokens: int) -> None:
        """Report the end of a request; a second call does nothing."""
        if request_id in self.present and self._engine.halves is not None:
            del self.present[request_id]
            if (told := self._engine.halves.worker.reservations) is not None:
                told.end([(request_id, tokens, "stop")])


class Stub(asyncio.Protocol):
    """A connection of a router to a stub. inner: the port of the simulated engine behind it."""

    def __init__(self, inner: int, reports: Reports | None = None) -> None:
        self.inner = inner
        self.reports = reports
        self.request_id = ""
        self.received = bytearray()
        self.needed = 0
        self.gone = False
        self.transport: asyncio.Transport
        self.passing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has no such base class

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self.ended(0)

    def ended(self, tokens: int) -> None:
        if self.request_id and self.reports is not None:
            self.reports.ended(self.request_id, tokens)
            self.request_id = ""

    def data_received(self, data: bytes) -> None:
        self.received += data
        if len(self.received) < self.needed:
            return
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.received[:end])
        self.needed = end + 4 + content_length(head)
        if len(self.received) < self.needed:
            return
        request = bytes(self.received)
        self.received.clear()
        self.needed = 0
        at = request.find(MARK, end)
        if head.split(b" ", 2)[1].endswith(TOKENISING):
            self.transport.write(tokenised(request[end + 4 :]))
        elif at >= 0:
            chunks, gap_ms, *stamped = request[at + len(MARK) : request.index(b'"', at + len(MARK))].split(b":")
            if self.reports is not None:
                self.request_id = self.reports.came(head)
            self.answer(int(chunks), int(gap_ms), stamped_event if stamped else event)
        else:
            self.passing = asyncio.get_running_loop().create_task(self.pass_on(request))

    def answer(self, chunks: int, gap_ms: int, made: Callable[[], bytes]) -> None:
        if not chunks:
            self.transport.write(plain())
            self.ended(1)
        elif not gap_ms:
            self.transport.write(whole_stream(chunks))
            self.ended(chunks)
        else:
            self.transport.write(stream_head())
            self.chunk(chunks, gap_ms / 1e3, made)

    def chunk(self, left: int, gap_s: float, made: Callable[[], bytes]) -> None:
        """Send one chunk and plan the next."""
        if self.gone:
            return
        self.transport.write(made() if left > 1 else made() + stream_end())
        if left == 1:
            self.ended(1)
        else:
            asyncio.get_running_loop().call_later(gap_s, self.chunk, left - 1, gap_s, made)

    async def pass_on(self, request: bytes) -> None:
        """Let the simulated engine answer, then close the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.inner)
        writer.write(request.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                self.transport.write(data)
        writer.close()
        self.transport.close()


def content_length(head: bytes) -> int:
    """The length of the body that a head announces; 0 if it announces none."""
    return int((head.lower() + b"\r\n").partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0] or 0)


def framed(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )


@cache
def plain() -> bytes:
    message = {"role": "assistant", "content": SAID * 5}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "total_tokens": 116, "completion_tokens": 16}
    return framed(orjson.dumps({**CHAT_HEAD, "object": "chat.completion", "choices": [choice], "usage": usage}))


@cache
def stream_head() -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    return head + b"transfer-encoding: chunked\r\n\r\n"


@cache
def event() -> bytes:
    choice = {"index": 0, "delta": {"content": " fox"}, "logprobs": None, "finish_reason": None}
    text = orjson.dumps({**CHAT_HEAD, "object": "chat.completion.chunk", "choices": [choice]})
    return chunked(b"data: " + text + b"\n\n")


@cache
def stamp_template() -> bytes:
    choice = {"index": 0, "delta": {"content": f"@{'0' * STAMP_DIGITS}@"}, "logprobs": None, "finish_reason": None}
    text = orjson.dumps({**CHAT_HEAD, "object": "chat.completion.chunk", "choices": [choice]})
    return chunked(b"data: " + text + b"\n\n").replace(b"0" * STAMP_DIGITS, b"%%0%dd" % STAMP_DIGITS)


def stamped_event() -> bytes:
    """A chunk whose text is the time at which it is sent, in ns of the clock that all processes share."""
    return stamp_template() % time.monotonic_ns()


@cache
def stream_end() -> bytes:
    return chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


@cache
@cache  # clients that read slowly share one copy
def whole_stream(chunks: int) -> bytes:
    return stream_head() + event() * chunks + stream_end()


def chunked(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def tokenised(body: bytes) -> bytes:
    """An answer of ``/tokenize`` or ``/render`` in which equal beginnings of bodies have equal tokens."""
    count = len(body) // TOKEN_BYTES
    ids = [token_id & 0x7FFF for token_id in struct.unpack_from(f"<{count}I", body)]
    return framed(orjson.dumps({"count": count, "max_model_len": 131_072, "tokens": ids, "token_ids": ids}))


async def serve(options: argparse.Namespace) -> None:
    """Run the engines until SIGTERM, and print a line with both ports of each."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    args = engine_parser().parse_args(["--blocks", str(options.blocks), "--step-time", "fast"])
    tokenizer, config, served = PromptTokenizer.load(None), engine_config(args), Served((options.model,))
    engines = [Engine(config, tokenizer, served) for _ in range(options.count)]
    for number, engine in enumerate(engines):
        await engine.start("127.0.0.1", 0)
        reports = Reports(engine) if options.reports else None
        server = await loop.create_server(partial(Stub, engine.port, reports), "127.0.0.1", 0, backlog=1_024)
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        engine.join(
            Membership(options.redis, options.model, (options.model,), f"stub-{number}", url), tokenizer.artifacts()
        )
        print(f"engine {number} stub {port} inner {engine.port}", flush=True)
    await stopping.wait()
    await asyncio.gather(*(engine.stop() for engine in engines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", required=True, metavar="URL")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--blocks", type=int, default=40_000, help="of each engine's cache (default %(default)s)")
    parser.add_argument("--reports", action="store_true", help="report the ends of the bench's requests")
    uvloop.run(serve(parser.parse_args()))
