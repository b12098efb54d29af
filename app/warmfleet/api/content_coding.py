"""Decodes bodies that clients compressed (Content-Encoding), within the limits for bodies; engines decode none."""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import TYPE_CHECKING, Protocol

from warmfleet.api.http_request import as_it_is
from warmfleet.errors import BadRequest, TooLarge, UnsupportedCoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from warmfleet.api.connections import Connections
    from warmfleet.api.http_request import HttpRequest

OFFERED = "gzip, deflate, zstd"
MAX_CODINGS = 2  # most compressions of one body, each applied to the result of the one before
MAX_MEMBERS = 1_024  # most compressed streams in a row in one body; without a bound, empty streams would cost much time
PIECE_BYTES = 1_048_576  # most bytes that are decoded, and counted in the memory for bodies, at a time
INPUT_BYTES = 65_536
WINDOW_LOG = 23  # 8 MiB, the largest window that RFC 9659 allows senders of zstd


class Stream(Protocol):
    """Decompresses a stream, piece by piece."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def _gzip(_body: bytes) -> Stream:
    return zlib.decompressobj(wbits=31)


def _deflate(body: bytes) -> Stream:
    """Open a zlib stream, or the bare deflate stream of some senders; the first two bytes tell which one it is."""
    framed = len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    return zlib.decompressobj(wbits=15 if framed else -15)


def _zstd(_body: bytes) -> Stream:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})


STREAMS: dict[str, Callable[[bytes], Stream]] = {"gzip": _gzip, "x-gzip": _gzip, "deflate": _deflate, "zstd": _zstd}


def codings(header: bytes) -> list[str]:
    """Return the codings of a Content-Encoding header in decoding order, the last first. Raises UnsupportedCoding."""
    names = [name.strip().lower() for name in header.decode("latin-1").split(",")]
    found = [name for name in reversed(names) if name and name != "identity"]
    if len(found) > MAX_CODINGS or not STREAMS.keys() >= {*found}:
        text = (
            f"Content-Encoding {', '.join(names)[:80]!r} is not read here, but {OFFERED}, up to {MAX_CODINGS} of them."
        )
        raise UnsupportedCoding(text, OFFERED)
    return found


async def decode(shared: Connections, request: HttpRequest) -> None:
    """Replace the request's body by the decoded body; a second call does nothing. Decoding runs in a thread.

    The memory for bodies counts each decoded piece. Raises BadRequest, UnsupportedCoding, TooLarge, UploadsFull.
    """
    header, request.coding, request.decode = request.coding, b"", as_it_is
    for coding in codings(header) if request.body else ():
        held, pieces = 0, list[bytes]()
        try:
            decoding = _pieces(coding, request.body)
            while piece := await asyncio.to_thread(next, decoding, b""):
                held += len(piece)
                shared.hold(len(piece), held)
                if held > shared.max_body_bytes:
                    raise TooLarge(f"The decoded body has more than {shared.max_body_bytes} bytes.")  # noqa: TRY301
                pieces.append(piece)
        except BaseException:
            shared.body_bytes -= held
            raise
        shared.body_bytes -= len(request.body)
        request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pieces(coding: str, body: bytes) -> Generator[bytes, None, None]:
    """Yield the decoded body in pieces that are not empty. Raises BadRequest."""
    at = 0
    try:
        for _ in range(MAX_MEMBERS):
            stream = STREAMS[coding](body[at : at + 2])
            while not stream.eof:
                given = body[at : at + INPUT_BYTES] if getattr(stream, "needs_input", True) else b""
                piece = stream.decompress(given, PIECE_BYTES)
                at += len(given) - len(stream.unused_data) - len(getattr(stream, "unconsumed_tail", b""))
                if piece:
                    yield piece
                elif not given and not stream.eof:
                    raise BadRequest(f"The body ends within its {coding} (Content-Encoding).", "Content-Encoding")
            if at == len(body):
                return
    except (zlib.error, zstd.ZstdError) as error:
        raise BadRequest(f"The body is not {coding} (Content-Encoding): {error}", "Content-Encoding") from error
    raise BadRequest(f"The body has more than {MAX_MEMBERS} streams of {coding}.", "Content-Encoding")
