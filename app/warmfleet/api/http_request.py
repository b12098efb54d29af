"""An HTTP request as it came from its connection, and the checks of its head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import httptools

from warmfleet.engines.request_headers import safe_request_id
from warmfleet.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

MODELS_BELOW = b"/v1/models/"  # prefix of paths that end in the name of a model, whose slashes may be written as %2F
_ESCAPED_SLASH = re.compile(rb"%2f", re.IGNORECASE)
_MODEL_BY_PATH = re.compile(rb"/v1/models/%2f", re.IGNORECASE)  # vLLM by default names a model by its folder, "/..."
#: Spellings of a path that a proxy may read as another path than this replica does: an empty segment, ``.``, ``..``, a
#: backslash, a fragment, a byte that is no character of a URL; escapes of characters that need no escape, of a slash,
#: a backslash or a control character; and a ``%`` without two hex digits.
_AMBIGUOUS = re.compile(
    rb"//|/\.\.?(?:/|$)|[\\#\x00-\x20\x7f-\xff]|"
    rb"%(?:2[def]|3[0-9]|4[1-9a-f]|5[0-9acf]|6[1-9a-f]|7[0-9aef]|[01][0-9a-f]|(?![0-9a-f]{2}))",
    re.IGNORECASE,
)
#: Headers that decide where a request goes, where its body ends, how the body is compressed, or whether the client
#: waits for an answer (100 Continue) before it sends the body.
_FRAMING = frozenset((b"host", b"content-length", b"transfer-encoding", b"content-encoding", b"expect"))


class Framing(NamedTuple):
    """The framing of a request's body. ``length``: in bytes, 0 if not known. ``expects``: the client awaits status 100.

    ``coding``: the values of Content-Encoding.
    """

    length: int
    coding: bytes
    chunked: bool
    expects: bool


async def as_it_is(_request: HttpRequest) -> None:
    """Leave a body that is not compressed as it is; stands in for a decoder."""


@dataclass(slots=True)
class HttpRequest:
    """A whole request. Names of headers are lower case; ``received_at`` is by ``time.perf_counter``.

    ``keeps_open``: the client lets the connection stay open after its answer. ``coding``: the compression of the body,
    which ``decode`` undoes.
    """

    method: bytes
    target: bytes
    version: str
    headers: list[tuple[bytes, bytes]]
    keeps_open: bool
    body: bytes = b""
    coding: bytes = b""
    decode: Callable[[HttpRequest], Awaitable[None]] = as_it_is
    received_at: float = 0.0

    def url(self) -> tuple[str, bytes, bytes]:
        """Return the decoded path, the path as it was sent, and the query string. Raises BadRequest."""
        if self.target == b"*":  # OPTIONS * asks about the server as a whole
            return "*", b"*", b""
        try:
            parsed = httptools.parse_url(self.target)
        except httptools.HttpParserInvalidURLError as error:
            raise BadRequest("The request's path cannot be read.") from error
        path = parsed.path or b"/"
        judged = path
        if path.startswith(MODELS_BELOW):
            named = _MODEL_BY_PATH.match(path)
            judged = MODELS_BELOW + _ESCAPED_SLASH.sub(b"/", path[named.end() if named else len(MODELS_BELOW) :])
        if parsed.fragment is not None or _AMBIGUOUS.search(judged):
            raise BadRequest("The request's path is written so that a proxy in front could read another one.")
        return unquote(path.decode("ascii")), path, parsed.query or b""


def framing(headers: Sequence[tuple[bytes, bytes]], version: str) -> Framing:
    """Read the framing from these headers. Raises BadRequest if two servers might read the headers differently.

    The parser has refused already: two lengths, a length that is no number, a length beside a transfer coding, bare
    line ends, folded lines, spaces before a colon, control characters.
    """
    hosts, length, chunked, expects, coding = 0, 0, False, False, b""
    for name, value in headers:
        if name not in _FRAMING:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked" or version != "1.1":
                raise BadRequest("Transfer-Encoding must be chunked, once, in HTTP/1.1.", "Transfer-Encoding")
            chunked = True
        elif name == b"content-encoding":
            coding = coding + b"," + value if coding else value
        else:
            expects = value.lower() == b"100-continue"
    if hosts > 1 or (not hosts and version == "1.1"):
        raise BadRequest(f"A request must have one Host header; this one has {hosts}.", "Host")
    return Framing(length, coding, chunked, expects)


def request_id(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """Return the id of a request by its headers, or a new id."""
    return safe_request_id(next((value for name, value in headers if name == b"x-request-id"), b""))
