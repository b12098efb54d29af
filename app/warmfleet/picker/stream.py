"""A gRPC call on an HTTP/2 stream: messages in, messages out within the peer's windows, and one end."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from warmfleet.picker import frames
from warmfleet.picker.frames import Status
from warmfleet.picker.limits import UNSENT_MAX


class Sender(Protocol):
    """The connection of a call. ``window``: bytes that the peer takes now, of all calls together. ``message_bytes``:
    the longest message that is read.
    """

    window: int
    message_bytes: int

    def put(self, data: bytes) -> None:
        """Send frames."""

    def pump(self, stream: Stream) -> None:
        """Send what waits in a stream, as far as the windows allow it."""

    def end(self, stream: Stream, trailers: bytes) -> None:
        """End a stream with these headers."""


class Handler(Protocol):
    """Serves a call. None of its methods may wait. After ``lost``, or once the stream is ``over``, none is called."""

    def message(self, data: bytes) -> None:
        """Take the peer's next message."""

    def too_long(self) -> None:
        """Note that the peer begins a message above the limit: the call is to end, as none of its messages is read."""

    def ended(self) -> None:
        """Note that the peer sends no more."""

    def lost(self) -> None:
        """Note that the peer gave the call up, or that the connection was lost."""


class Stream:
    """A call. ``over``: this side has ended it. ``peer_done``: the peer sends no more.

    ``window``: bytes that the peer takes now. ``credit``: bytes that the peer may still send; ``read``: bytes that were
    read since the credit was last renewed.
    """

    __slots__ = (
        *("_connection", "_deaf", "_end", "_have", "_need", "_parts", "_pending", "_started"),
        *("credit", "handler", "number", "over", "peer_done", "read", "unsent", "window"),
    )

    handler: Handler

    def __init__(self, connection: Sender, number: int, window: int, credit: int) -> None:
        self._connection = connection
        self.number, self.window, self.credit = number, window, credit
        self.read = self.unsent = self._have = self._need = 0
        self._parts: list[bytes] = []
        self._pending: deque[bytes] = deque()
        self._end: bytes | None = None
        self.over = self.peer_done = self._deaf = self._started = False

    @property
    def answered(self) -> bool:
        """Whether anything was sent."""
        return self._started

    # ------------------------------------------------ in

    def feed(self, data: bytes) -> None:
        """Read bytes of messages; whole ones go to the handler."""
        if self._deaf:
            return
        if self._have:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
            self._parts, self._have = [], 0
        at, end, need = 0, len(data), frames.PREFIX_BYTES
        while end - at >= frames.PREFIX_BYTES:
            need = frames.PREFIX_BYTES + int.from_bytes(data[at + 1 : at + frames.PREFIX_BYTES], "big")
            if data[at]:
                self.fail(Status.UNIMPLEMENTED, "compressed messages are not read here")
                return
            if need > self._connection.message_bytes:
                self._deaf = True
                self.handler.too_long()
                return
            if end - at < need:
                break
            self.handler.message(data[at + frames.PREFIX_BYTES : at + need])
            if self._deaf:
                return
            at += need
            need = frames.PREFIX_BYTES
        if at < end:
            self._parts, self._have, self._need = [data[at:] if at else data], end - at, need

    # ------------------------------------------------ out

    def send(self, messages: bytes) -> None:
        """Send messages that have their prefixes, as soon as the peer takes them."""
        if self.over:
            return
        if not self._started:
            self._started = True
            self._connection.put(frames.frame(frames.HEADERS, frames.END_HEADERS, self.number, frames.OK_HEADERS))
        size, connection = len(messages), self._connection
        if not self.unsent and size <= self.window and size <= connection.window and size <= frames.MAX_FRAME:
            self.window -= size
            connection.window -= size
            connection.put(frames.HEAD.pack(size >> 8, size & 0xFF, frames.DATA, 0, self.number) + messages)
            return
        self._pending.append(messages)
        self.unsent += size
        connection.pump(self)

    def step(self, room: int) -> int:
        """Send one frame of what waits, if the peer's window allows it; return its size. room: of the connection."""
        size = min(room, self.window, frames.MAX_FRAME, self.unsent)
        if size <= 0:
            return 0
        taken, missing = [], size
        while missing:
            piece = self._pending.popleft()
            if len(piece) > missing:
                self._pending.appendleft(piece[missing:])
                piece = piece[:missing]
            taken.append(piece)
            missing -= len(piece)
        self.window -= size
        self.unsent -= size
        self._connection.put(frames.frame(frames.DATA, 0, self.number, b"".join(taken)))
        if self._end is not None and not self.unsent:
            self._connection.end(self, self._end)
        return size

    @property
    def slow(self) -> bool:
        """Whether so much waits for the peer that no more of its messages should come."""
        return self.unsent > UNSENT_MAX

    def finish(self) -> None:
        """End the call without an error, behind all messages. A further end does nothing."""
        self._finish(frames.OK_TRAILERS)

    def fail(self, status: Status, why: str) -> None:
        """End the call with an error, behind all messages. A further end does nothing."""
        self._finish(frames.trailers(status, why))

    def _finish(self, trailers: bytes) -> None:
        if self.over:
            return
        self._deaf = self.over = True
        self._parts = []
        if not self._started:
            self._started = True
            trailers = frames.OK_HEADERS + trailers
        if self.unsent:
            self._end = trailers
        else:
            self._connection.end(self, trailers)
