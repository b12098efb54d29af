"""A gRPC call on an HTTP/2 stream: messages in, messages out within the peer's windows, and one end."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from warmfleet.errors import UploadsFull, WarmfleetError
from warmfleet.picker import frames
from warmfleet.picker.frames import Status
from warmfleet.picker.limits import UNSENT_END_MAX_S, UNSENT_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.picker.memory import Memory


class Sender(Protocol):
    """The connection of a call. ``window``: bytes that the peer takes now, of all calls together. ``message_bytes``:
    the longest message that is read. ``memory``: for what calls hold. ``choked``: the socket takes no more now.
    """

    window: int
    message_bytes: int
    memory: Memory
    choked: bool

    def put(self, data: bytes) -> None:
        """Send frames."""

    def pump(self, stream: Stream) -> None:
        """Send what waits in a stream, as far as the windows allow it."""

    def end(self, stream: Stream, trailers: bytes, before: bytes = b"") -> None:
        """End a stream with these headers. before: frames that go out with them, in one write."""

    def cut(self, stream: Stream) -> None:
        """Reset a stream."""


class Handler(Protocol):
    """Serves a call. None of its methods may wait. After ``lost``, or once the stream is ``over``, none is called."""

    def message(self, data: bytes) -> None:
        """Take the peer's next message."""

    def too_long(self) -> None:
        """Note that the peer begins a message above the limit: the call is to end, as none of its messages is read."""

    def ended(self) -> None:
        """Note that the peer sends no more."""

    def lost(self) -> None:
        """Note that the call has no further messages: its peer gave it up, or broke a rule or a limit, or is gone."""

    def give_up_body(self, error: WarmfleetError) -> None:
        """End the call: there is no memory for the message that comes."""


class Stream:
    """A call; a ``Holder`` of memory. ``over``: this side has ended it. ``peer_done``: the peer sends no more.
    ``answered``: anything was sent but acknowledgements, so that the peer's reset does not look like a flood.

    ``window``: bytes that the peer takes now. ``credit``: bytes that the peer may still send; ``read``: bytes that were
    read since the credit was last renewed. ``until``: time (``time.monotonic``) at which the call is reset.
    """

    __slots__ = (
        *("_buffer", "_connection", "_deaf", "_end", "_left", "_need", "_pending", "_started"),
        *("answered", "credit", "handler", "held", "number", "over", "peer_done", "read", "unsent", "until", "window"),
    )

    handler: Handler

    def __init__(self, connection: Sender, number: int, window: int, credit: int) -> None:
        self._connection = connection
        self.number, self.window, self.credit = number, window, credit
        self.read = self.unsent = self.held = self._need = 0
        self.until = math.inf
        self._buffer = bytearray()  # the begin of a message
        self._pending: deque[bytes] = deque()
        self._end: bytes | None = None
        self._left: Callable[[], None] | None = None
        self.over = self.peer_done = self.answered = self._deaf = self._started = False

    # ------------------------------------------------ in

    def feed(self, data: bytes) -> None:
        """Read bytes of messages; whole ones go to the handler."""
        if self._deaf:
            return
        self._left = None
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._need:
                self._count()
                return
            data, self._buffer = bytes(self._buffer), bytearray()
            self._release()
        at, end, need = 0, len(data), frames.PREFIX_BYTES
        while end - at >= frames.PREFIX_BYTES:
            need = frames.PREFIX_BYTES + int.from_bytes(data[at + 1 : at + frames.PREFIX_BYTES], "big")
            if data[at]:
                self._break_off(Status.UNIMPLEMENTED, "compressed messages are not read here")
                return
            if need > self._connection.message_bytes:
                self._deaf = True
                self.handler.too_long()
                self._break_off(Status.RESOURCE_EXHAUSTED, "a message is too long")
                return
            if end - at < need:
                break
            self.handler.message(data[at + frames.PREFIX_BYTES : at + need])
            if self._deaf:
                return
            at += need
            need = frames.PREFIX_BYTES
        if at < end:
            self._buffer, self._need = bytearray(memoryview(data)[at:]), need
            self._count()

    # ------------------------------------------------ out

    def send(self, messages: bytes, *, answers: bool = True) -> None:
        """Send messages that have their prefixes, as soon as the peer takes them.

        answers: False for an acknowledgement, after which the peer still waits for the answer.
        """
        if self.over:
            return
        if answers:
            self.answered = True
        frame = self._frame_of(messages)
        if frame:
            self._connection.put(frame)
        else:
            self._send_slowly(messages)

    def send_last(self, messages: bytes, left: Callable[[], None]) -> None:
        """Send messages and end the call without an error behind them; ``left`` is called once the end is out.

        The end goes out in one write with the last message: a peer that reads the message first acts on it, and what it
        then sends here is lost. If the messages wait for the peer's windows, and the peer sends more before all are
        out, the call goes on, and ``left`` is not called.
        """
        if self.over:
            return
        self.answered = True
        frame = self._frame_of(messages)
        if frame:
            self._end_with(frame, left)
        else:
            self._left = left
            self._send_slowly(messages)

    def _frame_of(self, messages: bytes) -> bytes:
        """Return the frames that send the messages now; empty if they must wait, or do not fit into one frame."""
        size, connection = len(messages), self._connection
        fits = size <= self.window and size <= connection.window and size <= frames.MAX_FRAME
        if not fits or self.unsent or connection.choked:
            return b""
        self.window -= size
        connection.window -= size
        head = frames.HEAD.pack(size >> 8, size & 0xFF, frames.DATA, 0, self.number)
        return b"%b%b%b" % (self._begin(), head, messages)

    def _begin(self) -> bytes:
        """Return the frame with which the answer begins; empty if it was sent."""
        if self._started:
            return b""
        self._started = True
        return frames.frame(frames.HEADERS, frames.END_HEADERS, self.number, frames.OK_HEADERS)

    def _send_slowly(self, messages: bytes) -> None:
        begin = self._begin()
        if begin:
            self._connection.put(begin)
        self._pending.append(messages)
        self.unsent += len(messages)
        self._connection.pump(self)
        self._count()

    def _end_with(self, frame: bytes, left: Callable[[], None]) -> None:
        """End the call, whose last frame is this one."""
        self._left = None
        self._deaf = self.over = True
        self._buffer = bytearray()
        self._release()
        self._connection.end(self, frames.OK_TRAILERS, frame)
        left()

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
        self._release()
        frame = frames.frame(frames.DATA, 0, self.number, b"".join(taken))
        if self._end is not None and not self.unsent:
            self._connection.end(self, self._end, frame)
        elif self._left is not None and not self.unsent:
            self._end_with(frame, self._left)
        else:
            self._connection.put(frame)
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
        self._deaf = self.over = self.answered = True
        self._left = None
        self._buffer = bytearray()
        self._release()
        if not self._started:
            self._started = True
            trailers = frames.OK_HEADERS + trailers
        if self.unsent:
            self._end = trailers
            self.until = time.monotonic() + UNSENT_END_MAX_S
        else:
            self._connection.end(self, trailers)

    def _break_off(self, status: Status, why: str) -> None:
        """End the call for a fault of the peer, of which its handler knows no end yet."""
        if not self.over:
            self.fail(status, why)
            self.handler.lost()

    def reset(self) -> None:
        """End the call at once, without what waits for the peer."""
        was_over, self.over = self.over, True
        self.drop()
        self._connection.cut(self)
        if not was_over:  # later, because the handler may be sending
            asyncio.get_running_loop().call_soon(self.handler.lost)

    # ------------------------------------------------ memory

    def _count(self) -> None:
        """Count the bytes that were added; without memory for them, a call ends."""
        more = len(self._buffer) + self.unsent - self.held
        if more > 0:
            try:
                self._connection.memory.hold(self, more)
            except UploadsFull as error:
                self.give_up_body(error)

    def _release(self) -> None:
        """Give back the memory of bytes that are gone."""
        less = self.held - len(self._buffer) - self.unsent
        if less > 0:
            self._connection.memory.free(self, less)

    def drop(self) -> None:
        """Forget all bytes that came or wait."""
        self._deaf = True
        self._left = None
        self._buffer = bytearray()
        self._pending.clear()
        self.unsent = 0
        self._release()

    def give_up_body(self, error: WarmfleetError) -> None:
        """End the call, whose messages take more memory than any other call's."""
        if self.unsent:
            self.reset()
            return
        self.drop()
        self.handler.give_up_body(error)
        self._break_off(Status.RESOURCE_EXHAUSTED, error.message)
