"""Writes the answer to a client's connection as HTTP/1.1, and knows how much of the answer was sent."""

from __future__ import annotations

import http
import time
from email.utils import formatdate
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

BODILESS = (204, 304)  # statuses of answers without a body and a Content-Length


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


@lru_cache(maxsize=1)
def _date_line(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n".encode()


def first_lines(status: int) -> bytes:
    """Return the first lines of every answer's head: its status and its date."""
    return STATUS_LINES[status] + _date_line(int(time.time()))


class Connection(Protocol):
    """The connection that an answer is written to.

    ``lost``: the client hung up. ``writable``: a future that is done once the client has accepted enough of the bytes
    that wait for it; None while few wait.
    """

    lost: bool
    writable: asyncio.Future[None] | None

    def write(self, data: bytes) -> None:
        """Send these bytes; after the connection was lost, do nothing."""

    def write_chunk(self, data: bytes) -> bool:
        """Send these bytes as a chunk. Returns False if the client must accept what waits before more is sent."""

    def keeps_open(self) -> bool:
        """Return whether the connection may take another request after this one."""

    def answered(self, *, keep: bool) -> None:
        """Note that the answer is complete. keep: its head did not announce that the connection will be closed."""

    def peer(self) -> str:
        """Return the address at the other end, which may be a proxy's."""


class ClientAnswer:
    """Sends one answer. Only its own methods change ``started`` and ``complete``.

    ``added``: headers that this answer gets in any case. ``model``: the tag of the request's model, for the metrics;
    empty while it is not known. ``started``: the answer has a ``status`` (0 before), so no other answer can be
    given. ``complete``: the last piece was written.

    The head waits for the first piece of the body, so a small answer is one write. A client that hung up is sent
    nothing; this class raises no error for that, because the connection cancels the task that serves the client.
    """

    __slots__ = (
        *("_bodiless", "_chunked", "_connection", "_has_length", "_head", "_keep"),
        *("added", "complete", "model", "started", "status"),
    )

    def __init__(self, connection: Connection, *, bodiless: bool = False, chunks: bool = True) -> None:
        """bodiless: the client asked for the head alone (HEAD). chunks: the client understands chunked bodies."""
        self._connection = connection
        self.added: Sequence[tuple[bytes, bytes]] = ()
        self.model = ""
        self._bodiless = bodiless
        self._chunked = chunks
        self._has_length = False
        self._keep = True
        self._head = b""
        self.started = False
        self.complete = False
        self.status = 0

    @property
    def lost(self) -> bool:
        """Whether the client hung up, so that nobody can be answered."""
        return self._connection.lost

    def peer(self) -> str:
        """Return the address that the answer goes to, which may be a proxy's."""
        return self._connection.peer()

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Set the status and the headers, whose names are lower case."""
        self._set_head(status, headers)

    def _set_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status
        self._keep = self._connection.keeps_open()
        self._bodiless = self._bodiless or status in BODILESS
        self._has_length = self._bodiless
        lines = [first_lines(status)]
        for field in chain(headers, self.added) if self.added else headers:
            if field[0] == b"content-length":
                self._has_length = True
            elif field[0] == b"connection":
                self._keep = self._keep and field[1].lower() != b"close"
                continue
            lines.append(b": ".join(field))
            lines.append(b"\r\n")
        self._head = b"".join(lines)

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body; it is the last one unless there is ``more``.

        If there is more, the call waits until the client has accepted enough of the bytes written so far.
        """
        connection = self._connection
        piece = self._first(data, more=more) if self._head else self._later(data, more=more)
        if not more:
            self._finish(piece)
            return
        if piece:
            connection.write(piece)
        if connection.writable is not None:
            await connection.writable

    def _finish(self, piece: bytes) -> None:
        """Send the last piece, which may be empty."""
        self.complete = True
        connection = self._connection
        if piece:
            connection.write(piece)
        connection.answered(keep=self._keep)

    @property
    def pass_on(self) -> Callable[[bytes], bool]:
        """Return a function that sends a piece of the body between the first and the last.

        That function returns False if the client must accept bytes before more is sent; the next ``body`` waits for
        that. For a chunked body it is the connection's own method, to save a call for each chunk.
        """
        return self._connection.write_chunk if self._chunked else self._pass_on_bare

    def _pass_on_bare(self, data: bytes) -> bool:
        connection = self._connection
        connection.write(self._later(data, more=True))
        return connection.writable is None

    async def whole(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send an answer that is complete from the beginning."""
        self._set_head(status, headers)
        self._finish(self._first(body, more=False))

    def _first(self, data: bytes, *, more: bool) -> bytes:
        """Return the head with the first piece. The piece decides how the head marks the end of the body."""
        head, self._head = self._head, b""
        if self._has_length:
            self._chunked = False
        elif not more:
            self._chunked = False
            head += b"content-length: %d\r\n" % len(data)
        elif self._chunked:
            head += b"transfer-encoding: chunked\r\n"
        else:
            self._keep = False  # for a client of HTTP/1.0 the end of the connection is the end of the body
        if not self._keep:
            head += b"connection: close\r\n"
        if self._bodiless:
            return head + b"\r\n"
        return b"%b\r\n%b" % (head, self._later(data, more=more) if self._chunked else data)

    def _later(self, data: bytes, *, more: bool) -> bytes:
        if self._bodiless:
            return b""
        if not self._chunked:
            return data
        if more:
            return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
