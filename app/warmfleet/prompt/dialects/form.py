"""Fields of a form, as python-multipart and Starlette read them for vLLM's server. Pure.

The library's own parser takes a step for every piece of a file that looks like a boundary; here the number of steps is
bounded. Of a malformed or too large form the fields before the fault are returned; the engine refuses such a form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote_plus

from python_multipart.multipart import parse_options_header

if TYPE_CHECKING:
    from collections.abc import Iterator

URL_ENCODED, MULTIPART = b"application/x-www-form-urlencoded", b"multipart/form-data"
MAX_FIELDS = 2_000  # most parts of a form; Starlette takes 1,000 fields and 1,000 files
MAX_LOOKS = 8_000  # most searches for a boundary, of some microseconds each
MAX_HEAD_BYTES = 8_192  # most bytes of the headers of a part
MAX_OPTIONS_BYTES = 1_024  # most bytes of a header whose options are read
MAX_VALUE_BYTES = 8_192  # most bytes of a field that is read: those that routing needs are short


def is_form(content_type: bytes) -> bool:
    """Return whether a body of this Content-Type is a form."""
    return b"form" in content_type.lower() and _options(content_type)[0] in (URL_ENCODED, MULTIPART)


def fields(content_type: bytes, body: bytes) -> dict[str, str]:
    """Return the fields of a form by their names, without files. If two have one name, the last counts."""
    kind, options = _options(content_type)
    if kind == URL_ENCODED:
        pieces = body.split(b"&", MAX_FIELDS)[:MAX_FIELDS]
        return dict(_unquoted(piece) for piece in pieces if piece)
    boundary = options.get(b"boundary")
    if boundary is None:
        return {}
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    found = dict[str, str]()
    for head, value in _parts(body, b"\r\n--" + boundary):
        part_options = _options(_disposition(head))[1]
        if b"name" not in part_options:
            break
        name = _decoded(part_options[b"name"], charset)
        if b"filename" in part_options:
            found.pop(name, None)
        else:
            found[name] = _decoded(value[:MAX_VALUE_BYTES], charset)
    return found


def _parts(body: bytes, line: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the head and the content of each part that is complete. line: begins and ends with the boundary."""
    at = max(body.find(b"-"), 0) if body[:1] in (b"\r", b"\n") else 0
    begin = line[2:] + b"\r\n"
    if not body.startswith(begin, at):
        return
    at += len(begin)
    looks = MAX_LOOKS
    for _ in range(MAX_FIELDS):
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        if head_end < 0:
            return
        content = end = head_end + 4
        after = b""
        while not after:
            end, looks = body.find(line, end), looks - 1
            if end < 0 or not looks:
                return
            end += len(line)
            after = _after(body, end)
        yield body[at:head_end], body[content : end - len(line)]
        if after == b"--":
            return
        at = body.find(b"\n", end) + 1


def _after(body: bytes, at: int) -> bytes:
    """Return the mark at ``at`` behind a boundary: a line end, or ``--`` behind the last one; empty if neither."""
    if body.startswith(b"--", at):
        return b"--"
    behind = body[at : at + MAX_OPTIONS_BYTES].lstrip(b" \t")
    return b"\r\n" if behind.startswith(b"\r\n") else b""


def _disposition(head: bytes) -> bytes:
    found = b""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-disposition":
            found = value.lstrip(b" ")
    return found


def _options(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    return parse_options_header(header[:MAX_OPTIONS_BYTES])


def _unquoted(piece: bytes) -> tuple[str, str]:
    name, _, value = piece[: MAX_OPTIONS_BYTES + MAX_VALUE_BYTES].decode("latin-1").partition("=")
    return unquote_plus(name), unquote_plus(value)


def _decoded(text: bytes, charset: str) -> str:
    try:
        return text.decode(charset)
    except (UnicodeDecodeError, LookupError):
        return text.decode("latin-1")
