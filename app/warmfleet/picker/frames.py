"""HTTP/2 frames (RFC 9113) and gRPC's framing within them, as bytes. Pure."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD: Final = Struct(">HBBBL")  # length in 16 + 8 bits, kind, flags, stream
HEAD_BYTES: Final = 9
MAX_FRAME: Final = 16_384  # longest frame that is read: the protocol's default, which every peer keeps to
MAX_WINDOW: Final = 2**31 - 1
FIRST_WINDOW: Final = 65_535  # window of connections and streams until settings or updates change it

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME_SIZE, MAX_HEADER_LIST = range(1, 7)

PREFIX_BYTES: Final = 5  # of a gRPC message: a flag for compression, and its length
#: The head of every answer, and its end without an error, in HPACK without a table.
OK_HEADERS: Final = b"\x88\x0f\x10\x10application/grpc"
OK_TRAILERS: Final = b"\x00\x0bgrpc-status\x010"
NOT_GRPC: Final = b"\x08\x03415"  # :status 415


class Code(IntEnum):
    """Error codes of HTTP/2."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Status(IntEnum):
    """Statuses of gRPC."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class ConnectionFault(Exception):  # noqa: N818  a fault of the peer
    """The peer broke the protocol or a limit, so that the connection has to end."""

    def __init__(self, code: Code, why: str) -> None:
        super().__init__(why)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def number(value: int) -> bytes:
    """Return 32 bits, as windows and codes are written."""
    return value.to_bytes(4, "big")


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(key.to_bytes(2, "big") + number(value) for key, value in values.items()))


def goaway(last: int, code: Code, why: str = "") -> bytes:
    """Return a GOAWAY frame. last: the last stream that was, or will be, served."""
    return frame(GOAWAY, 0, 0, number(last) + number(code) + why.encode("ascii", "replace"))


def message(data: bytes) -> bytes:
    """Return a gRPC message with its prefix."""
    return b"\0%b%b" % (len(data).to_bytes(4, "big"), data)


def trailers(status: Status, why: str = "") -> bytes:
    """Return the block of the headers that end a call."""
    if status is Status.OK:
        return OK_TRAILERS
    code, text = b"%d" % status, _percent(why)
    block = b"\x00\x0bgrpc-status" + bytes((len(code),)) + code
    return block + b"\x00\x0cgrpc-message" + bytes((len(text),)) + text if text else block


def _percent(text: str) -> bytes:
    """Return a text as gRPC writes it in a header, cut so that its length fits into a byte of HPACK."""
    made = bytearray()
    for byte in text.encode():
        made += bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte
        if len(made) > 115:
            break
    return bytes(made)
