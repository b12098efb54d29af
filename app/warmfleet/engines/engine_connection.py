"""An HTTP/1.1 connection to an engine, and the answer that comes back on it.

The bytes are parsed by llhttp (httptools) in its strict mode. Bounds hold for an engine as for any other sender: for
the size of headers and trailers, for the bytes that wait to be read, and for the characters of a header.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
from time import perf_counter
from typing import TYPE_CHECKING

import httptools

from warmfleet.errors import UpstreamError, UpstreamGone

if TYPE_CHECKING:
    from collections.abc import Callable

KEEPALIVE_S = 4.0  # longest time that an idle connection is kept; the router must close it before engines do, after 5 s
HEAD_MAX_BYTES = 65_536  # most bytes of an answer's status line and headers, with those of interim answers before it
TRAILERS_MAX_BYTES = 8_192  # most bytes of trailers, and of the line before a chunk with its extensions
FIELD_COST_BYTES = 32  # bytes counted for a header besides its text, so that many short ones are bounded as well
MAX_INTERIM_ANSWERS = 8  # most interim answers (status 1xx) before the final answer
LAST_WORD_BYTES = 64  # most bytes of the piece that ends a stream, such as [DONE]; a piece this short holds no usage
UNREAD_MAX_BYTES = 65_536  # most bytes that wait for a slow client before reading from the engine pauses
#: TCP notices after 25 s that a machine vanished. It does not notice a frozen process, whose kernel still answers, so
#: pools/stalled_requests.py ends the requests that wait for such a process.
TCP_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}  # s, s, probes, ms
#: The errors by which a connection ends if its engine died before it had read the whole request: the kernel sends RST.
#: If the engine had read the request, the kernel sends FIN, and the engine may have died of the request.
UNREAD = (ConnectionResetError, BrokenPipeError)
#: Before a kept connection is used, the kernel is asked whether the engine hung up, which the event loop notices later.
#: Otherwise an engine that had ended before it got a request would count as killed by that request.
HANG_UP: int = getattr(select, "POLLRDHUP", 0)  # event when the peer ends its sending; 0 if the system has none


class EngineResponse:
    """The answer of an engine to one request, from the moment at which the request is on its way.

    ``status``: 0 until the headers came. ``headers``: bytes as they came, but names in lower case. ``content_type``: in
    lower case, without parameters. ``received``: number of all bytes from the engine. ``unread``: number of body bytes
    that wait for the reader, in ``pieces``. ``began``: some of the body came. ``complete``: the whole answer came.
    ``chunks``: number of pieces into which the engine cut the body. ``gap_s``: longest silence between two reads that
    brought pieces. ``came_at``: time of the last such read (``time.perf_counter``). ``client_s``: time for which the
    reader waited for a slow client. ``tail``: the last piece that may hold the usage. The caller must ``close`` every
    response.
    """

    __slots__ = (
        "_connection", "_error", "_loop", "_take", "_waiter", "began", "came_at", "chunks", "client_s", "complete",
        "connecting", "content_type", "gap_s", "headers", "may_have_been_read", "on_stale", "pieces", "received",
        "request", "status", "tail", "unread", "without_body",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, request: tuple[bytes, ...] = (), *, without_body: bool = False
    ) -> None:
        """request: the bytes to send. without_body: an answer to HEAD has none, whatever its headers say."""
        self.request = request
        self.without_body = without_body
        self.on_stale: Callable[[EngineResponse], None] | None = None
        #: Whether a connection was lost after the engine had the whole request, which may have killed the engine.
        self.may_have_been_read = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_type = b""
        self.received = 0
        self._loop = loop
        self.pieces: list[bytes] = []
        self.unread = 0
        self.began = False
        self.complete = False
        self.chunks = 0
        self.gap_s = self.client_s = 0.0
        self.came_at = math.inf
        self.tail = b""
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        #: The function that gets the body while ``pass_on`` waits; None at other times, and once it has returned False.
        self._take: Callable[[bytes], bool] | None = None
        self._connection: Connection | None = None
        #: Makes a connection for this request, and is cancelled if the request is given up.
        self.connecting: asyncio.Task[None] | None = None

    # ------------------------------------------------ for the reader

    async def head(self) -> None:
        """Return when the status and the headers are here. Raises UpstreamGone or UpstreamError if they never come."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._arrival()

    async def read_any(self) -> bytes:
        """Wait for bytes of the body; return all that came since the last call, or none at the body's end.

        Raises UpstreamGone if the connection is lost before the end, UpstreamError if the answer cannot be read; but
        first returns all bytes that came before the error.
        """
        while not self.pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._arrival()
        return self._read()

    async def pass_on(self, take: Callable[[bytes], bool]) -> bool:
        """Give all bytes of the body to ``take`` as they come; return False as soon as ``take`` does.

        ``take`` is called while the bytes are received, without a switch of tasks. Returns True once the answer is
        complete; its last bytes are left for ``read_any``. Raises the errors of ``read_any``.
        """
        while not self.complete:
            if self.pieces:
                if not take(self._read()):
                    return False
            elif self._error is not None:
                raise self._error
            else:
                self._take = take
                try:
                    await self._arrival()
                    if self._take is None:
                        return False
                finally:
                    self._take = None
        return True

    @property
    def at_eof(self) -> bool:
        """Whether all of the body was read."""
        return self.complete and not self.pieces

    @property
    def waiting(self) -> bool:
        """Whether the reader waits for bytes of the engine now, and not for a slow client."""
        return self._waiter is not None

    def fail(self, error: UpstreamError) -> bool:
        """End the exchange, so that the reader gets ``error``. Returns False if the exchange is over already."""
        if self.complete or self._error is not None:
            return False
        self._error = error
        self._hang_up()
        self.wake()
        return True

    def close(self) -> None:
        """Give up the rest of the answer: the connection is closed at once, and the engine stops its work."""
        if not self.complete:  # in place of an error: its traceback would keep this object alive
            self._error = UpstreamError("The answer was closed before its end.")
        self._hang_up()
        self.pieces.clear()

    def _read(self) -> bytes:
        pieces = self.pieces
        piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if len(piece) > LAST_WORD_BYTES:
            self.tail = piece
        if self.unread > UNREAD_MAX_BYTES and self._connection is not None:
            self._connection.resume()
        self.unread = 0
        return piece

    async def _arrival(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _hang_up(self) -> None:
        connecting, self.connecting = self.connecting, None
        if connecting is not None:
            connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def waited_for_client(self, seconds: float) -> None:
        """Note for how long the client was slow to read. The engine was not silent in that time."""
        self.client_s += seconds
        self.came_at = math.inf

    # ------------------------------------------------ for the connection

    def sent_on(self, connection: Connection) -> None:
        self.connecting = None
        self._connection = connection

    def finish(self) -> None:
        """Note that the whole answer came, so its connection may now serve other requests."""
        self.complete = True
        self._connection = None

    def wake(self) -> None:
        """Wake the reader for the bytes that came. If it waits in ``pass_on``, give them to its ``take`` at once."""
        take = self._take
        if take is not None and not self.complete and self._error is None:
            pieces = self.pieces
            if not pieces:
                return
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self.unread = 0
            if len(piece) > LAST_WORD_BYTES:
                self.tail = piece
            if take(piece):
                return
            self._take = None
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class KeptConnections:
    """The idle connections to one engine, the youngest last."""

    __slots__ = ("_closed", "_idle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: list[Connection] = []
        self._closed = False

    def take(self) -> Connection | None:
        """Take out the youngest connection; return None if there is none that is young enough."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable(self._loop.time() - KEEPALIVE_S):
                return connection
            connection.abort()
        return None

    def keep(self, connection: Connection) -> None:
        """Keep ``connection`` for another request."""
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Forget ``connection``, which is lost; it may have been idle or in use."""
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self) -> None:
        """Close the connections that are idle for too long."""
        oldest = self._loop.time() - KEEPALIVE_S
        while self._idle and not self._idle[0].usable(oldest):
            self._idle.pop(0).abort()

    def close(self) -> None:
        """Close all idle connections, and from now on every connection that becomes idle."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


class MalformedError(Exception):
    """The engine sends no answer that can be passed on."""


class Connection(asyncio.Protocol):
    """A connection, for one request after the other. After each whole answer it goes back to ``kept``."""

    __slots__ = (
        "_answer", "_fields", "_fields_bytes", "_hang_up", "_interim", "_keep_alive", "_kept", "_parser", "_reused",
        "_since_body", "_transport", "_until_close", "idle_since",
    )  # fmt: skip

    def __init__(self, kept: KeptConnections) -> None:
        self._kept = kept
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        self._answer: EngineResponse | None = None
        self._reused = False
        self._hang_up: select.poll | None = None
        self.idle_since = 0.0

    def send(self, answer: EngineResponse) -> None:
        """Send the request of ``answer``, which gets all bytes that come back."""
        self._answer = answer
        self._fields: list[tuple[bytes, bytes]] = []
        self._fields_bytes = self._since_body = self._interim = 0
        self._keep_alive = self._until_close = False
        answer.sent_on(self)
        self._transport.writelines(answer.request)

    def usable(self, idle_since: float) -> bool:
        """Return whether the connection is open and became idle after ``idle_since``.

        The kernel is asked, because the event loop may not have seen the end yet. If the kernel knows of the engine's
        end before a request is sent, the engine has not died of that request, and counts as refusing it.
        """
        if self.idle_since <= idle_since or self._transport.is_closing():
            return False
        return self._hang_up is None or not self._hang_up.poll(0)

    def resume(self) -> None:
        self._transport.resume_reading()

    def abort(self) -> None:
        """Close the connection at once. The answer under way gets no error."""
        self._answer = None
        self._transport.abort()

    # ------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # asyncio's type is the base class
        made = transport.get_extra_info("socket")
        if HANG_UP:
            self._hang_up = select.poll()
            self._hang_up.register(made.fileno(), HANG_UP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in TCP_OPTIONS.items():
            if hasattr(socket, name):  # not every system has every option
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # bytes that no request asked for
            self.abort()
            return
        size = len(data)
        answer.received += size
        self._since_body += size
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            if not answer.complete:
                answer.fail(_unreadable(error.__context__ or error))
                return
        if answer.complete:
            self._give_back()
        elif self._since_body > (TRAILERS_MAX_BYTES if answer.status else HEAD_MAX_BYTES):
            answer.fail(_unreadable("too many bytes besides the body"))
            return
        if answer.began:
            now = perf_counter()
            if now - answer.came_at > answer.gap_s:
                answer.gap_s = now - answer.came_at
            answer.came_at = now
        answer.wake()
        if answer.unread > UNREAD_MAX_BYTES and not answer.complete:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._kept.forget(self)
        self._parser = None  # type: ignore[assignment]  # breaks a cycle that only a full garbage collection would free
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if self._until_close and exc is None:  # an answer without a length ends when the engine closes
            answer.finish()
            answer.wake()
            return
        if answer.received or not isinstance(exc, UNREAD):
            answer.may_have_been_read = True
        if self._reused and not answer.received and answer.on_stale is not None:
            answer.on_stale(answer)
        else:
            why = f"The worker closed the connection ({_name(exc)})."
            answer.fail(UpstreamGone(why, refused=not answer.may_have_been_read))

    def _give_back(self) -> None:
        """After a whole answer, keep the connection for another request if that is safe, else close it."""
        self._answer = None
        transport = self._transport
        # An engine may answer before it has read a whole request, and would take its unread rest for the next request.
        if self._keep_alive and not transport.get_write_buffer_size() and not transport.is_closing():
            self._reused = True
            self._kept.keep(self)
        else:
            transport.abort()

    # ------------------------------------------------ httptools

    def on_message_begin(self) -> None:
        if self._answer is None or self._answer.complete:
            raise MalformedError("bytes behind the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_bytes += len(name) + len(value) + FIELD_COST_BYTES
        if self._answer is not None and self._answer.status:  # a trailer, which is passed on to nobody
            if self._fields_bytes > TRAILERS_MAX_BYTES:
                raise MalformedError("too many trailers")
            return
        if self._fields_bytes > HEAD_MAX_BYTES:
            raise MalformedError("too many headers")
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None or status < 100 or status >= 600 or status == 101:
            raise MalformedError(f"status {status}")
        if status < 200:
            self._interim += 1
            if self._interim > MAX_INTERIM_ANSWERS:
                raise MalformedError("too many interim answers")
            self._fields.clear()
            return
        sized = status in (204, 304)
        for name, value in self._fields:
            if name == b"content-type":
                answer.content_type = value.partition(b";")[0].strip().lower()
            elif name == b"content-length":
                sized = True
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    raise MalformedError("a transfer encoding besides chunked")
                sized = True
        self._until_close = not sized
        self._keep_alive = self._parser.should_keep_alive()
        self._fields_bytes = self._since_body = 0
        answer.status, answer.headers = status, self._fields
        if answer.without_body:
            answer.finish()
            raise MalformedError("llhttp would wait for a body: this connection is not used again")

    def on_body(self, piece: bytes) -> None:
        self._since_body = 0
        answer = self._answer
        if answer is not None:
            answer.began = True
            answer.chunks += 1
            answer.pieces.append(piece)
            answer.unread += len(piece)

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status:  # not after an interim answer
            self._answer.finish()


def _unreadable(why: object) -> UpstreamError:
    return UpstreamError(f"The worker's answer cannot be read: {why}.")


def _name(error: Exception | None) -> str:
    return type(error).__name__ if error is not None else "without an error"
