"""A client's connection: reads HTTP/1.1, hands requests on, and keeps limits of time and size."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import httptools

from warmfleet.api.content_coding import decode
from warmfleet.api.error_answers import OUR_BUG, error_body, error_headers
from warmfleet.api.http_request import HttpRequest, framing, request_id
from warmfleet.errors import BadRequest, HeadersTooLarge, TooLarge, UploadsFull, WarmfleetError
from warmfleet.routing.client_answer import ClientAnswer, first_lines

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

    from warmfleet.api.connections import Connections

logger = logging.getLogger("warmfleet.api.http")

HEAD_MAX_BYTES = 65_536
MAX_HEADERS = 100  # most headers of a request, as in haproxy and Apache
#: Most bytes of chunk sizes, extensions and trailers in a row, without a byte of the body between them.
CHUNK_FRAMING_MAX_BYTES = 8_192
CHUNK_LINE_BYTES = 24  # longest size line of a chunk without extensions, with its line ends
MAX_TRAILERS = 16
MAX_PIPELINED = 64  # most requests on a connection that wait for the answers to earlier ones
BODY_LOOK_MIN_BYTES = 10_240  # fewest bytes of a body in ``body_look_s`` (10 s): 1 kB/s; a slower body is refused
LINGER_S = 1.0  # time for a client to read its error before its further bytes reset the connection
CANCEL_AGAIN_S = 0.2

CHUNK_LINES_BELOW = 1_024  # chunk size below which the size line is made in advance; a token's chunk has some 250 bytes
CHUNK_LINES = tuple(b"%x\r\n" % size for size in range(CHUNK_LINES_BELOW))
TOO_LARGE_HEAD = f"The headers have more than {HEAD_MAX_BYTES} bytes."
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpConnection(asyncio.Protocol):
    """Reads requests one after another, and serves each by a task of its own once it is whole.

    A lost connection cancels the task of an answer that is not complete. ``Server`` makes the connections; uvicorn
    calls ``shutdown`` when the replica stops.
    """

    def __init__(
        self,
        shared: Connections,
        *,
        config: Config,  # noqa: ARG002  the names by which uvicorn passes its four arguments
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._shared = shared
        self._state = server_state
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        self._parser = httptools.HttpRequestParser(self)
        self.writable: asyncio.Future[None] | None = None
        self.lost = False
        # state of the request that is being read
        self._in_head = False
        self._in_body = False
        self._upgrades = False
        self._head_bytes = 0
        self._read_bytes = 0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._trailers = self._trailer_bytes = 0
        self._pieces: list[bytes] = []
        self._chunks = 0
        self._framing_bytes = 0
        self.body_bytes = 0
        self._request: HttpRequest | None = None
        # the requests that were read, and their answers
        self._serving: HttpRequest | None = None
        self._answer: ClientAnswer | None = None
        self._task: asyncio.Task[None] | None = None
        self._pipelined: list[HttpRequest] = []
        self._unparsed: list[bytes] = []
        self._deaf = False  # whether no more bytes of this connection are parsed
        self._refusal: WarmfleetError | None = None  # the error to send after the answers to earlier requests
        self._last = False  # whether no further request is taken
        self._engines = True  # whether requests to engines are taken
        # time limits
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = math.inf
        self._body_until = 0.0
        self._body_seen = 0
        self._written = 0
        self._accepted = -1
        self._lingering = False

    # ------------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._state.connections.add(self)  # type: ignore[arg-type]
        self._shared.waiting[self] = None
        self._expect(self._shared.header_timeout_s)
        self._engines = self._shared.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the reason does not matter
        self.lost = self._deaf = True
        self._state.connections.discard(self)
        self._give_up_body()
        self._shared.closed(self)
        self._deadline = math.inf
        if self._timer is not None:
            self._timer.cancel()
        self._parser = None  # type: ignore[assignment]  # breaks a cycle that only a full garbage collection would free
        self._serving = None
        if self._answer is not None and self._task is not None:
            self._cancel(self._task)
        self.resume_writing()
        while self._pipelined:
            self._shared.body_bytes -= len(self._pipelined.pop(0).body)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        # Cancel again until the task ends: a library's wait_for may swallow a cancellation that comes with its result.
        if not task.done():
            task.cancel()
            self._loop.call_later(CANCEL_AGAIN_S, self._cancel, task)

    def pause_writing(self) -> None:
        self.writable = self._loop.create_future()
        self._accepted = self._written - self._transport.get_write_buffer_size()
        self._expect(self._shared.write_timeout_s)

    def resume_writing(self) -> None:
        if self.writable is not None:
            if not self.writable.done():
                self.writable.set_result(None)
            self.writable = None
            if self._answer is not None:
                self._deadline = math.inf

    def shutdown(self) -> None:
        """Close the connection once it has no request; called when the time of draining is over."""
        self._last = True
        if self._answer is None and not self._in_head and not self._in_body:
            self._close()

    def peer(self) -> str:
        """Return the client's address."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else "unknown"

    # ------------------------------------------------------------------ reading requests

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._answer is not None:  # bytes of a pipelined request wait unparsed
            self._unparsed.append(data)
            self._transport.pause_reading()
            return
        in_body, body_bytes, chunks = self._in_body, self.body_bytes, self._chunks
        self._read_bytes = len(data)
        try:
            self._feed(data)
        except WarmfleetError as error:
            self._target = self._target or data.partition(b" ")[2]  # the parser withholds a target with a wrong byte
            self.refuse(error, _reason(error))
            return
        if self._answer is not None or self._deaf:
            return
        if not self._in_body:
            self._check_head(len(data))
        elif in_body:
            self._check_chunks(len(data) - (self.body_bytes - body_bytes), self._chunks - chunks)
        else:
            self._upload_begins()

    def _feed(self, data: bytes) -> None:
        """Parse these bytes. Raises WarmfleetError if they are no request, or a request beyond a limit."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._feed(self._without_upgrade() + data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._deaf:  # these bytes follow the last request of the connection
                return
            if isinstance(error.__context__, WarmfleetError):
                raise error.__context__ from None
            if isinstance(error, httptools.HttpParserCallbackError):
                logger.exception("a request cannot be read")
                raise WarmfleetError(OUR_BUG) from None
            raise BadRequest(f"This is not HTTP/1.1: {error}.") from None

    def _without_upgrade(self) -> bytes:
        """Return the head without its Upgrade to another protocol, for a new parser. Raises BadRequest for CONNECT."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        if method == b"CONNECT":
            raise BadRequest("CONNECT is not served here.")
        lines = [b"%b %b HTTP/%b" % (method, self._target, version.encode())]
        for name, value in self._headers:
            if name == b"connection":
                lines += [b"connection: close"] * (b"close" in value.lower())
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        self._upgrades = False
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        if self._deaf:
            raise BadRequest("No request may follow the last one.")  # raised only to end the parsing
        self._in_head = True
        self._head_bytes = 0
        self._target = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))
            return
        self._trailers += 1  # trailers are not read
        self._trailer_bytes += len(name) + len(value)
        if self._trailers > MAX_TRAILERS or self._trailer_bytes > CHUNK_FRAMING_MAX_BYTES:
            raise HeadersTooLarge("The chunked body has too many trailers.")

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        self._upgrades = parser.should_upgrade()
        if self._upgrades:
            return
        if len(headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"The request has {len(headers)} headers; {MAX_HEADERS} are allowed.")
        if self._read_bytes > HEAD_MAX_BYTES and _size(headers) + len(self._target) > HEAD_MAX_BYTES:
            raise HeadersTooLarge(TOO_LARGE_HEAD)
        version = parser.get_http_version()
        told = framing(headers, version)
        if told.length > self._shared.max_body_bytes:
            raise TooLarge(f"The body has {told.length} bytes; {self._shared.max_body_bytes} are allowed.")
        keeps_open = version == "1.1" and parser.should_keep_alive()
        self._request = HttpRequest(parser.get_method(), self._target, version, headers, keeps_open)
        if told.coding:
            self._request.coding = told.coding
            self._request.decode = partial(decode, self._shared)
        self._in_head, self._in_body = False, True
        self._pieces = []
        self.body_bytes = self._chunks = self._framing_bytes = self._trailers = self._trailer_bytes = 0
        if told.expects and (told.length or told.chunked) and self._answer is None:
            self._transport.write(CONTINUE)

    def on_chunk_header(self) -> None:
        self._chunks += 1

    def on_body(self, piece: bytes) -> None:
        size = self.body_bytes + len(piece)
        if size > self._shared.max_body_bytes:
            raise TooLarge(f"The body has more than {self._shared.max_body_bytes} bytes.")
        self._pieces.append(piece)
        self.body_bytes = size
        self._shared.hold(len(piece), size)

    def on_message_complete(self) -> None:
        request = self._request
        if self._upgrades or request is None:
            return
        self._request = None
        self._in_body = False
        pieces = self._pieces
        request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        self.body_bytes = 0  # the request holds the bytes from here on
        request.received_at = time.perf_counter()
        if not request.keeps_open:
            self._deaf = True
        if self._answer is None:
            self._begin(request)
            return
        self._pipelined.append(request)
        if len(self._pipelined) >= MAX_PIPELINED:
            self._deaf = self._last = True

    def _check_head(self, size: int) -> None:
        """Check the size of the head, after a read that ended in a head or between two requests."""
        self._head_bytes += size
        if self._head_bytes > HEAD_MAX_BYTES:
            self.refuse(HeadersTooLarge(TOO_LARGE_HEAD), "head_size")
        elif self._in_head and self._head_bytes == size:
            self._expect(self._shared.header_timeout_s)

    def _check_chunks(self, framing_bytes: int, chunks: int) -> None:
        """Check the size of a body's framing. framing_bytes: of one read, which had ``chunks`` chunks."""
        if chunks:
            self._framing_bytes = 0
        self._framing_bytes += framing_bytes
        if self._framing_bytes > CHUNK_FRAMING_MAX_BYTES + CHUNK_LINE_BYTES * chunks:
            self.refuse(HeadersTooLarge("The chunked body has too long extensions or trailers."), "head_size")

    def _upload_begins(self) -> None:
        self._shared.waiting.pop(self, None)
        self._shared.uploading[self] = None
        self._body_until = self._loop.time() + self._shared.body_timeout_s
        self._body_seen = self.body_bytes
        self._expect(min(self._shared.body_look_s, self._shared.body_timeout_s))

    def _give_up_body(self) -> None:
        self._shared.uploading.pop(self, None)
        self._shared.body_bytes -= self.body_bytes
        self.body_bytes = 0
        self._pieces = []

    # ------------------------------------------------------------------ serving requests

    def _begin(self, request: HttpRequest) -> None:
        self._shared.waiting.pop(self, None)
        self._shared.uploading.pop(self, None)
        if self.writable is None:
            self._deadline = math.inf
        self._serving = request
        answer = ClientAnswer(self, bodiless=request.method == b"HEAD", chunks=request.version == "1.1")
        self._answer = answer
        self._task = task = self._loop.create_task(
            self._shared.application.serve(request, answer, engines=self._engines)
        )
        self._state.tasks.add(task)
        task.add_done_callback(partial(self._ended, request, answer))

    def _ended(self, request: HttpRequest, answer: ClientAnswer, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        self._shared.body_bytes -= len(request.body)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s %s failed", request.method.decode(), request.target[:200], exc_info=error)
        if answer.complete:
            return
        if not self.lost:
            self._close()  # so the client learns that its answer is cut off
        self._answer = self._task = None  # breaks a cycle that only a full garbage collection would free

    def write(self, data: bytes) -> None:
        """Send these bytes, unless the connection was lost."""
        if not self.lost:
            self._written += len(data)
            self._transport.write(data)

    def write_chunk(self, data: bytes) -> bool:
        """Send these bytes as a chunk; return False if the client must take the waiting bytes before more are sent."""
        if not self.lost:
            size = len(data)
            chunk = (CHUNK_LINES[size] if size < CHUNK_LINES_BELOW else b"%x\r\n" % size) + data + b"\r\n"
            self._written += len(chunk)
            self._transport.write(chunk)
        return self.writable is None

    def keeps_open(self) -> bool:
        """Whether the connection may take another request after the one that is being served."""
        if self._pipelined or self._refusal is not None:
            return True
        serving = self._serving
        return (
            serving is not None
            and serving.keeps_open
            and self._engines
            and not self._last
            and not self._shared.health.draining
        )

    def answered(self, *, keep: bool) -> None:
        """Go on to the next request after a complete answer. keep: whether the client may send another request."""
        self._state.total_requests += 1
        self._answer = self._task = self._serving = None
        if self.lost:
            return
        if self._pipelined:
            self._begin(self._pipelined.pop(0))
            return
        if self._refusal is not None:
            self._send_refusal(self._refusal)
            return
        if self._last or not keep:
            self._close()
            return
        self._accepted = -1
        self._shared.waiting[self] = None
        if self._in_body:
            self._upload_begins()
        else:
            self._expect(self._shared.header_timeout_s if self._in_head else self._shared.keepalive_s)
        if self._unparsed:
            self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        """Parse the bytes that came while a request was served."""
        unparsed, self._unparsed = b"".join(self._unparsed), []
        if self._deaf or self._transport.is_closing():
            return
        self._transport.resume_reading()
        self.data_received(unparsed)

    # ------------------------------------------------------------------ ending

    def refuse(self, error: WarmfleetError, reason: str) -> None:
        """Answer the request that is being read with the error, after the answers to earlier requests; read no more."""
        if self.lost or self._lingering:
            return
        self._deaf = self._last = True
        self._in_head = self._in_body = False
        self._give_up_body()
        self._shared.waiting.pop(self, None)
        self._shared.fault(reason, error.message, self)
        if self._answer is None:
            self._send_refusal(error)
        else:
            self._refusal = error

    def _send_refusal(self, error: WarmfleetError) -> None:
        its_id = request_id(self._headers)
        body = error_body(error, self._target, its_id)
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= {"x-request-id": its_id} | error_headers(error)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._transport.write(first_lines(error.status) + lines.encode() + b"\r\n" + body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._lingering = True
            self._expect(LINGER_S)
        else:  # TLS cannot close one direction
            self._close()

    def drop(self, reason: str, why: str) -> None:
        """Close without an answer."""
        self._deaf = True
        self._shared.waiting.pop(self, None)
        self._give_up_body()
        self._shared.fault(reason, why, self)
        self._transport.abort()

    def _close(self) -> None:
        """Close once the client has taken all waiting bytes, or has taken none for ``write_timeout_s``."""
        self._deaf = True
        self._shared.waiting.pop(self, None)
        self._transport.close()
        if not self.lost:
            self._accepted = -1
            self._expect(self._shared.write_timeout_s)

    def _expect(self, seconds: float) -> None:
        """Set the deadline of the current state. A timer due earlier stays; when it fires, ``_tick`` sets it anew."""
        self._deadline = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= self._deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._deadline == math.inf:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._tick)
            return
        self._deadline = math.inf
        self._expired()

    def _expired(self) -> None:
        unsent = self._transport.get_write_buffer_size()
        if self._lingering:
            self._transport.abort()  # the client had its time to read the error
        elif unsent:
            accepted = self._written - unsent
            if accepted > self._accepted:
                self._accepted = accepted
                self._expect(self._shared.write_timeout_s)
            else:
                self.drop("slow_reader", f"it took no byte of its answer for {self._shared.write_timeout_s:g} s")
        elif self._in_body:
            self._body_expired()
        elif self._in_head:
            self.drop("head_time", f"its headers were not complete after {self._shared.header_timeout_s:g} s")
        else:
            self._close()

    def _body_expired(self) -> None:
        now, received = self._loop.time(), self.body_bytes - self._body_seen
        if now >= self._body_until:
            self.refuse(BadRequest(f"The body was not complete after {self._shared.body_timeout_s:g} s."), "body_time")
        elif received < BODY_LOOK_MIN_BYTES:
            error = BadRequest(f"The body came too slowly: {received} bytes in {self._shared.body_look_s:g} s.")
            self.refuse(error, "body_time")
        else:
            self._body_seen = self.body_bytes
            self._expect(min(self._shared.body_look_s, self._body_until - now))


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _reason(error: WarmfleetError) -> str:
    """Return the reason by which the metric counts a request that was refused while it was read."""
    if isinstance(error, TooLarge):
        return "body_size"
    if isinstance(error, UploadsFull):
        return "uploads"
    if isinstance(error, HeadersTooLarge):
        return "head_size"
    return "syntax" if isinstance(error, BadRequest) else "bug"
