"""The headers of a request to an engine, as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.errors import UpstreamError

if TYPE_CHECKING:
    from collections.abc import Mapping


def header_lines(headers: Mapping[str, str]) -> bytes:
    """The headers as they stand in a request. Raises UpstreamError if one of them would end its line too early."""
    lines = b"".join([b"%b: %b\r\n" % (name.encode("ascii"), header_value(headers[name])) for name in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
        raise UpstreamError("A header for the worker has a line break in it.")
    return lines


def header_value(text: str) -> bytes:
    """A value as it is sent: a client's was read as latin-1, so these are the bytes that the client sent.

    A value of the settings that latin-1 cannot hold is sent in UTF-8.
    """
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape")
