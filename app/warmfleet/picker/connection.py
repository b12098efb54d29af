"""The server's side of an HTTP/2 connection, as gateways open it for gRPC. Reads without a task, writes without a copy.

The header table of the peer is set to 0, so that each call's header block means the same wherever it stands, and blocks
that came before are looked up. Until the peer has accepted that, and has shrunk its table, blocks are read in order.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hpack import Decoder, HPACKError

from warmfleet.picker import frames
from warmfleet.picker.frames import Code, ConnectionFault, Status
from warmfleet.picker.limits import (
    CONNECTION_WINDOW,
    CONTINUATIONS,
    EARLY_RESETS,
    EARLY_RESETS_PER_S,
    HEADER_BYTES,
    IDLE_FRAMES,
    IDLE_FRAMES_PER_S,
    SETTINGS_MAX,
    STREAM_WINDOW,
    Budget,
)
from warmfleet.picker.port import Head
from warmfleet.picker.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.picker.port import Port

logger = logging.getLogger("warmfleet.picker.connection")

GOODBYE = b"goodbye!"  # of the PING behind the first GOAWAY: its answer tells that the peer has read that
GOODBYE_MAX_S = 1.0  # longest wait for that answer
BUG = "the picker has a bug: see its log"
KEPT_HEAD_BYTES = 4_096  # longest header block that is remembered
UNSENT_HIGH = 1_048_576  # bytes that wait for the socket from which on no more is read
#: Seconds after which the kernel asks a silent peer whether it lives, between two questions, and their number.
ALIVE_AFTER_S, ALIVE_EVERY_S, ALIVE_TIMES = 30, 10, 3


class Block(NamedTuple):
    """A header block whose end has not come yet."""

    stream: int
    ends: bool
    parts: list[bytes]


class Http2Connection(asyncio.Protocol):
    """A connection; a ``Sender``."""

    _transport: asyncio.Transport

    def __init__(self, port: Port, opened: set[Any]) -> None:
        self.port = port
        self.message_bytes = port.limits.message_bytes
        self.memory = port.memory
        self.choked = False
        self._opened = opened
        self.window = self._first_window = frames.FIRST_WINDOW
        self.streams: dict[int, Stream] = {}
        self._loop = asyncio.get_running_loop()
        self._rest = b""
        self._out: list[bytes] = []
        self._greeted = self._settled = self._reading = self._stateless = self._leaving = False
        self._last = self._read = 0
        self._served_to = frames.MAX_WINDOW  # the last stream that is served while the connection ends
        self._decoder = Decoder(max_header_list_size=HEADER_BYTES)
        self._block: Block | None = None
        self._blocked: dict[Stream, None] = {}  # have messages that wait for the connection's window
        now = self._loop.time()
        self._idle = Budget(IDLE_FRAMES, IDLE_FRAMES_PER_S, now)
        self._resets = Budget(EARLY_RESETS, EARLY_RESETS_PER_S, now)
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------ asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # a stream's, as create_server makes it
        if not self.port.opened(self):
            self._transport.abort()
            return
        self._opened.add(self)
        self._transport.set_write_buffer_limits(high=UNSENT_HIGH)
        _prepare(transport.get_extra_info("socket"))
        self._timer = self._loop.call_later(self.port.limits.preface_s, self._give_up)
        ours = {
            frames.HEADER_TABLE_SIZE: 0,
            frames.MAX_STREAMS: self.port.limits.streams,
            frames.INITIAL_WINDOW: STREAM_WINDOW,
            frames.MAX_HEADER_LIST: HEADER_BYTES,
        }
        more = frames.number(CONNECTION_WINDOW - frames.FIRST_WINDOW)
        self._transport.write(frames.settings(ours) + frames.frame(frames.WINDOW_UPDATE, 0, 0, more))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the base class's signature
        self.port.closed(self)
        self._opened.discard(self)
        self._stop_timer()
        self._rest, self._out, self._block = b"", [], None
        streams, self.streams = [*self.streams.values()], {}
        self._blocked.clear()
        for stream in streams:
            self._lose(stream)

    def pause_writing(self) -> None:
        self.choked = True
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.choked = False
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._pump_blocked()

    def eof_received(self) -> None:
        """Close; gateways half-close no connections."""

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        self._reading = True
        try:
            self._rest = self._read_frames(data)
        except ConnectionFault as fault:
            self._end_by(fault)
        finally:
            self._reading = False
            if self._out:
                self._flush()

    def peer(self) -> str:
        """Return the address of the other end."""
        address = self._transport.get_extra_info("peername")
        return str(address[0]) if isinstance(address, tuple) else "?"

    # ------------------------------------------------ out

    def put(self, data: bytes) -> None:
        """Send bytes; those that are put while messages are read go out in one write."""
        if self._reading:
            self._out.append(data)
        elif not self._transport.is_closing():
            self._transport.write(data)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if not self._transport.is_closing():
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])

    def pump(self, stream: Stream) -> None:
        """Send what waits in a stream, as far as the windows allow it."""
        while self.window > 0 and not self.choked and (size := stream.step(self.window)):
            self.window -= size
        if stream.unsent and (self.window <= 0 or self.choked):
            self._blocked[stream] = None
        elif stream.read and not stream.slow:
            self._renew(stream)

    def end(self, stream: Stream, trailers: bytes, before: bytes = b"") -> None:
        """End a stream. The peer is told not to send the rest, if it has not ended its side. before: frames that go out
        in the same write.
        """
        number = stream.number
        if not self._forget(stream):
            return
        end = before + frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number, trailers)
        if not stream.peer_done:
            end += frames.frame(frames.RST_STREAM, 0, number, frames.number(Code.NO_ERROR))
        self.put(end)
        self._close_if_done()

    def cut(self, stream: Stream) -> None:
        """Reset a stream."""
        if self._forget(stream):
            self._reset(stream.number, Code.ENHANCE_YOUR_CALM)
            self._close_if_done()

    def _forget(self, stream: Stream) -> bool:
        """Count a stream as ended; return False if it was before."""
        if self.streams.pop(stream.number, None) is None:
            return False
        self._blocked.pop(stream, None)
        self.port.streams -= 1
        return True

    def _reset(self, number: int, code: Code) -> None:
        self.put(frames.frame(frames.RST_STREAM, 0, number, frames.number(code)))

    # ------------------------------------------------ ending

    def shutdown(self) -> None:
        """Let the peer open no more streams here, and close once all have ended."""
        if self._leaving:
            return
        self._leaving = True
        ping = frames.frame(frames.PING, 0, 0, GOODBYE)
        self.put(frames.goaway(frames.MAX_WINDOW, Code.NO_ERROR) + ping)
        if not self._greeted:
            self._transport.close()
            return
        self._stop_timer()
        self._timer = self._loop.call_later(GOODBYE_MAX_S, self._serve_no_more)

    def _serve_no_more(self) -> None:
        """Serve no streams but those that are known, and close once these have ended."""
        self._stop_timer()
        if self._served_to == frames.MAX_WINDOW and not self._transport.is_closing():
            self._served_to = self._last
            self.put(frames.goaway(self._last, Code.NO_ERROR))
            self._close_if_done()

    def give_way(self) -> None:
        """Close, because another connection needs the place; has no streams."""
        self.put(frames.goaway(self._last, Code.NO_ERROR))
        self._transport.close()

    def _close_if_done(self) -> None:
        if self._leaving and self._served_to < frames.MAX_WINDOW and not self.streams:
            if self._out:
                self._flush()
            self._transport.close()

    def _end_by(self, fault: ConnectionFault) -> None:
        self.port.fault(fault.code.name.lower(), str(fault), self)
        self._rest, self._block = b"", None
        self._out.append(frames.goaway(self._last, fault.code, str(fault)))
        self._flush()
        self._transport.close()

    def _give_up(self) -> None:
        self._timer = None
        if not self._settled:
            self.port.fault("head_time", "it sent no settings in time", self)
            self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lose(self, stream: Stream) -> None:
        """Tell a stream's handler that the peer is gone."""
        self.port.streams -= 1
        was_over, stream.over = stream.over, True
        stream.drop()
        if not was_over:
            self._tell_lost(stream)

    # ------------------------------------------------ frames

    def _read_frames(self, data: bytes) -> bytes:
        """Read the whole frames; return the rest."""
        at, end = 0, len(data)
        if not self._greeted:
            if not frames.PREFACE.startswith(data[: len(frames.PREFACE)]):
                raise ConnectionFault(Code.PROTOCOL_ERROR, "this is not HTTP/2")
            if end < len(frames.PREFACE):
                return data
            self._greeted, at = True, len(frames.PREFACE)
        unpack = frames.HEAD.unpack_from
        while end - at >= frames.HEAD_BYTES:
            high, low, kind, flags, number = unpack(data, at)
            size = high << 8 | low
            if size > frames.MAX_FRAME:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame is too long")
            stop = at + frames.HEAD_BYTES + size
            if stop > end:
                break
            payload = data[at + frames.HEAD_BYTES : stop]
            if kind == frames.DATA and self._block is None and self._settled:
                self._on_data(flags, number & frames.MAX_WINDOW, payload)
            else:
                self._on_frame(kind, flags, number & frames.MAX_WINDOW, payload)
            if self._transport.is_closing():
                return b""
            at = stop
        return data[at:] if at else data

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None:
            if kind != frames.CONTINUATION or number != self._block.stream:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block was interrupted")
            self._on_continuation(self._block, flags, payload)
        elif not self._settled and kind != frames.SETTINGS:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame is no SETTINGS")
        elif kind == frames.HEADERS:
            self._on_headers(flags, number, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._on_window(number, payload)
        elif kind == frames.RST_STREAM:
            self._on_reset(number, payload)
        elif kind == frames.SETTINGS:
            self._on_settings(flags, number, payload)
        elif kind == frames.PING:
            self._on_ping(flags, number, payload)
        elif kind in (frames.PUSH_PROMISE, frames.CONTINUATION):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a client sends no such frame here")
        elif kind != frames.GOAWAY:  # PRIORITY, and kinds that are not known
            self._idle_frame()

    def _idle_frame(self) -> None:
        if not self._idle.spend(self._loop.time()):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames without a use")

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._read += size
        if self._read >= CONNECTION_WINDOW // 2:
            self.put(frames.frame(frames.WINDOW_UPDATE, 0, 0, frames.number(self._read)))
            self._read = 0
        stream = self.streams.get(number)
        if stream is None or stream.peer_done:
            self._on_late_data(number)
            return
        if flags & frames.PADDED:
            payload = _unpadded(payload)
        stream.credit -= size
        if stream.credit < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a stream sent more than its window")
        stream.read += size
        if flags & frames.END_STREAM:
            stream.peer_done = True
        elif not payload:
            self._idle_frame()
        self._deliver(stream, payload)
        if stream.read >= STREAM_WINDOW // 2 and not stream.slow:
            self._renew(stream)

    def _on_late_data(self, number: int) -> None:
        """Drop bytes of a stream that has ended here. The peer may send them until it has read of the end."""
        if number == 0 or number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "DATA of a stream that was never opened")

    def _renew(self, stream: Stream) -> None:
        if not stream.peer_done and stream.number in self.streams and stream.read >= STREAM_WINDOW // 2:
            self.put(frames.frame(frames.WINDOW_UPDATE, 0, stream.number, frames.number(stream.read)))
            stream.credit += stream.read
            stream.read = 0

    def _deliver(self, stream: Stream, payload: bytes = b"") -> None:
        """Give a call its bytes and its end. A bug ends this call; the connection's other calls go on."""
        try:
            if payload:
                stream.feed(payload)
            if stream.peer_done and not stream.over:
                stream.handler.ended()
        except Exception:
            logger.exception("a call failed")
            was_over = stream.over
            stream.fail(Status.INTERNAL, BUG)
            if not was_over:
                self._tell_lost(stream)

    def _tell_lost(self, stream: Stream) -> None:
        try:
            stream.handler.lost()
        except Exception:
            logger.exception("the end of a call failed")

    # ------------------------------------------------ headers

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        size, at, pad = len(payload), 0, 0
        if flags & frames.PADDED:
            pad, at = payload[0] if size else 1, 1
        if flags & frames.HAS_PRIORITY:
            at += 5
        if at + pad > size:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header frame is padded beyond its end")
        if number % 2 == 0:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a client opens streams with odd numbers")
        block = Block(number, bool(flags & frames.END_STREAM), [payload[at : size - pad]])
        if flags & frames.END_HEADERS:
            self._on_block(block)
        else:
            self._block = block

    def _on_continuation(self, block: Block, flags: int, payload: bytes) -> None:
        block.parts.append(payload)
        if len(block.parts) > CONTINUATIONS + 1 or sum(map(len, block.parts)) > HEADER_BYTES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(block)

    def _on_block(self, block: Block) -> None:
        number = block.stream
        head = self._head(b"".join(block.parts) if len(block.parts) > 1 else block.parts[0])
        if number <= self._last:
            self._on_trailers(block)
            return
        self._last = number
        beyond = number > self._served_to or len(self.streams) >= self.port.limits.streams
        if beyond or self.port.full:
            if beyond and not self._resets.spend(self._loop.time()):  # that others fill the port is no fault of it
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many calls beyond the limit")
            self._reset(number, Code.REFUSED_STREAM)
            return
        if head.method != b"POST" or not head.content_type.startswith(b"application/grpc"):
            ends = frames.END_HEADERS | frames.END_STREAM
            self.put(frames.frame(frames.HEADERS, ends, number, frames.NOT_GRPC))
            if not block.ends:
                self._reset(number, Code.NO_ERROR)
            return
        self._open(number, head, ends=block.ends)

    def _open(self, number: int, head: Head, *, ends: bool) -> None:
        stream = Stream(self, number, self._first_window, STREAM_WINDOW)
        stream.peer_done = ends
        self.streams[number] = stream
        self.port.streams += 1
        begin = self.port.routes.get(head.path)
        if begin is None:
            stream.fail(Status.UNIMPLEMENTED, "this method is not served here")
            return
        stream.handler = begin(stream)
        if ends:
            self._deliver(stream)

    def _on_trailers(self, block: Block) -> None:
        stream = self.streams.get(block.stream)
        if stream is None:  # ended here; the peer may not have read of that
            self._idle_frame()
            return
        if not block.ends or stream.peer_done:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "headers in the middle of a stream")
        stream.peer_done = True
        self._deliver(stream)

    def _head(self, block: bytes) -> Head:
        """Read a header block. Blocks that do not depend on earlier ones are remembered."""
        known = self.port.heads.get(block) if self._stateless else None
        if known is not None:
            return known
        try:
            fields = dict(_plain(self._decoder.decode(block, raw=True)))
        except (HPACKError, ValueError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"{type(error).__name__} in a header block") from error
        head = Head(fields.get(b":method", b""), fields.get(b":path", b""), fields.get(b"content-type", b""))
        self._stateless = self._decoder.max_allowed_table_size == 0 and self._decoder.header_table_size == 0
        if self._stateless and len(block) <= KEPT_HEAD_BYTES:
            self.port.remember(block, head)
        return head

    # ------------------------------------------------ the connection

    def _on_window(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a WINDOW_UPDATE has 4 bytes")
        more = int.from_bytes(payload, "big") & frames.MAX_WINDOW
        if not more:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a WINDOW_UPDATE of nothing")
        if not number:
            self.window += more
            self._check(self.window)
            self._pump_blocked()
            return
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "a window of a stream that was never opened")
            return
        stream.window += more
        self._check(stream.window)
        if stream.unsent:
            self.pump(stream)

    def _check(self, window: int) -> None:
        if window > frames.MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window is too large")

    def _pump_blocked(self) -> None:
        """Share the connection's window among the streams that wait for it: a frame each, in turn."""
        while self._blocked and self.window > 0 and not self.choked:
            stream = next(iter(self._blocked))
            del self._blocked[stream]
            size = stream.step(self.window)
            self.window -= size
            if stream.unsent and size:
                self._blocked[stream] = None
            elif not stream.unsent and stream.read and not stream.slow:
                self._renew(stream)

    def _on_reset(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an RST_STREAM has 4 bytes")
        if number == 0 or number > self._last:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a reset of a stream that was never opened")
        stream = self.streams.pop(number, None)
        if stream is None:
            return
        self._blocked.pop(stream, None)
        early = not stream.answered
        self._lose(stream)
        self._close_if_done()
        if early and not self._resets.spend(self._loop.time()):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many calls were reset")

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) % 6 or (flags & frames.ACK and payload):
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS are misshapen")
        if flags & frames.ACK:
            self._decoder.max_allowed_table_size = 0
            return
        if self._settled:
            self._idle_frame()
        else:
            self._settled = True
            self._stop_timer()
        if len(payload) > 6 * SETTINGS_MAX:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many settings at once")
        window = self._first_window
        for at in range(0, len(payload), 6):
            key, value = int.from_bytes(payload[at : at + 2], "big"), int.from_bytes(payload[at + 2 : at + 6], "big")
            if key == frames.INITIAL_WINDOW:
                self._check(value)
                window = value  # only the last counts, because each takes a look at all streams
            elif key == frames.MAX_FRAME_SIZE and not frames.MAX_FRAME <= value < 2**24:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "frames of this size are not allowed")
        self._change_windows(window)
        self.put(frames.frame(frames.SETTINGS, frames.ACK, 0))
        for stream in [stream for stream in self.streams.values() if stream.unsent]:
            self.pump(stream)

    def _change_windows(self, first: int) -> None:
        change, self._first_window = first - self._first_window, first
        for stream in self.streams.values() if change else ():
            stream.window += change
            self._check(stream.window)

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a PING has 8 bytes")
        if not flags & frames.ACK:
            self._idle_frame()
            self.put(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == GOODBYE and self._leaving:
            self._serve_no_more()


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ConnectionFault(Code.PROTOCOL_ERROR, "a frame is padded beyond its end")
    return payload[1 : len(payload) - payload[0]]


def _plain(fields: Iterable[Any]) -> list[tuple[bytes, bytes]]:
    return [(bytes(name), bytes(value)) for name, value in fields]


def _prepare(sock: socket.socket | None) -> None:
    """Let the kernel send small messages at once, and find out when the peer is gone without a word."""
    if sock is None or sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only for sockets made by name
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", ALIVE_AFTER_S),
        ("TCP_KEEPINTVL", ALIVE_EVERY_S),
        ("TCP_KEEPCNT", ALIVE_TIMES),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
