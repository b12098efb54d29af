"""The headers of a request to an engine, as bytes."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_REQUEST_ID = 128  # most characters of a client's id that are kept
#: Removed from a client's id: a space would split a log line, ``~`` would mark a last request (``wire.ENDED_MARK``).
_UNSAFE_ID = re.compile(rb"[^A-Za-z0-9._:=+@/,;|#-]")


def safe_request_id(client_id: bytes) -> str:
    """Return a client's id for its request without unsafe characters and not too long; a new id if nothing is left."""
    kept = _UNSAFE_ID.sub(b"", client_id)[:MAX_REQUEST_ID].decode() if client_id else ""
    return kept or os.urandom(12).hex()


def header_lines(headers: Collection[tuple[bytes, bytes]]) -> bytes:
    """Return the headers as lines of a request. Raises UpstreamError if a line break or NUL is in a header."""
    lines = b"".join(map(b"%b: %b\r\n".__mod__, headers))
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
        raise UpstreamError("A header for the worker has a line break in it.")
    return lines


def header_fields(lines: bytes, *names: str) -> dict[str, str]:
    """Return the headers of these names among ``header_lines``, for an HTTP client that takes names and values."""
    found = (line.partition(": ") for line in lines.decode("latin-1").split("\r\n"))
    return {name: value for name, _, value in found if name in names}


def header_value(text: str) -> bytes:
    """Encode a value for sending. A client's value was read as latin-1, so the result is the bytes that it sent.

    A value of the settings that latin-1 cannot hold is sent in UTF-8.
    """
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
