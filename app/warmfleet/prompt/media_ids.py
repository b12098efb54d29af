"""Finds the ids by which a body names media in an engine's cache, and puts other ids in their places. Pure.

vLLM caches processed images, audio and video. A content part with a ``uuid`` and no data stands for the cached media of
that id; if a part has both, its data is cached under the id. ``features.mm_hashes`` of /inference/v1/generate name
media in the same cache. Every other byte of the body stays. A key named ``uuid`` elsewhere, as in the arguments of a
tool, is part of the prompt: it stays, too.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from warmfleet.errors import BadRequest, TooLarge
from warmfleet.prompt.request import decoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Json = dict[str, Any]

MAX_IDS = 4_096  # most keys ``uuid`` and ``mm_hashes`` in a body, because replacing an id takes 3 us
#: Fields of a body that hold messages, or other objects with content parts: an object, a list, or a list of lists.
HOLDERS = (
    *("messages", "input", "inputs", "query", "queries", "documents", "items"),
    *("data_1", "data_2", "text_1", "text_2"),
)
#: Fields of such an object that hold its parts. A part may hold parts of its own: those of a tool's result.
PARTS = ("content", "output")


def _spelled(name: str) -> bytes:
    """Return a pattern of the string ``name``, any character of which may be written as an escape."""
    return b"".join([b"(?:%b|\\\\u(?i:%04x))" % (re.escape(letter.encode()), ord(letter)) for letter in name])


_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_LIST = rb"%(s)b\s*+:\s*+\[\s*+(?:%(s)b\s*+(?:,\s*+%(s)b\s*+)*+)?\]\s*+" % {b"s": _STRING}
# In valid JSON a key begins where a quote with no backslash before it is followed by such a name, a quote and a colon.
_BEGIN = rb'"(?=[um\\])(?<!\\")(?:(?P<uuid>%b)|%b)"\s*+:' % (_spelled("uuid"), _spelled("mm_hashes"))
_KEY = re.compile(_BEGIN)
_NAMED = re.compile(
    rb"%b\s*+(?P<value>%b|\{\s*+(?:%b(?:,\s*+%b)*+)?\}|[^\s,\"\[\]{}]++)" % (_BEGIN, _STRING, _LIST, _LIST), re.DOTALL
)
_STRINGS = re.compile(_STRING + rb"(\s*+:)?", re.DOTALL)


class Place(NamedTuple):
    """The place of an id. field: ``uuid`` or ``mm_hashes``. start, end: of the id's JSON value in the body."""

    field: str
    start: int
    end: int


def renamed(body: bytes, rename: Callable[[str], str]) -> bytes:
    """Put ``rename(id)`` in place of every id in ``body``. rename: returns characters that JSON does not escape.

    Raises BadRequest for an id that cannot be read, TooLarge for more than MAX_IDS.
    """
    ids = places(body)
    if not ids:
        return body
    view, pieces, at = memoryview(body), list[bytes | memoryview](), 0
    for _, start, end in ids:
        raw = body[start:end]
        # vLLM makes a text of every other value, so an id that is a number means the same as its digits.
        name = json.loads(raw) if raw.startswith(b'"') else raw.decode()
        pieces += view[at:start], b'"%b"' % rename(name).encode()
        at = end
    return b"".join((*pieces, view[at:]))


def places(body: bytes) -> list[Place]:
    """Return the places of all ids, in their order. body: as ``request.decoded`` takes it, or a form, which has none.

    Raises BadRequest for an id that cannot be read, TooLarge for more than MAX_IDS.
    """
    if _KEY.search(body) is None:  # takes 0.5 ns a byte of text, 3 ns a byte of JSON that is all keys
        return []
    values: list[Place] = []
    for count, match in enumerate(_NAMED.finditer(body)):
        if count == MAX_IDS:
            raise _too_many()
        field = "mm_hashes" if match["uuid"] is None else "uuid"
        if match["value"] != b"null" and (field == "mm_hashes" or not match["value"].startswith(b"{")):
            values.append(Place(field, *match.span("value")))
    # Each value is replaced by its index in ``values``. The parser then finds the indexes in places where ids may be.
    pieces, at = list[bytes](), 0
    for number, place in enumerate(values):
        pieces += body[at : place.start], b"%d" % number
        at = place.end
    try:
        data = decoded(b"".join((*pieces, body[at:])))
    except BadRequest:  # the body is a form, where no engine finds ids
        return []
    ids = [place for number in sorted(_numbers(data)) for place in _ids_in(body, values[number])]
    if len(ids) > MAX_IDS:
        raise _too_many()
    return ids


def _ids_in(body: bytes, place: Place) -> list[Place]:
    """Return the place itself if it holds one id, or the places of all ids in its lists."""
    if place.field == "uuid":
        return [place]
    strings = _STRINGS.finditer(body, place.start, place.end)
    return [Place(place.field, *match.span()) for match in strings if match[1] is None]


def _numbers(data: Json) -> Iterator[int]:
    """Yield the numbers that stand in the places of ids. Raises BadRequest for an id whose type no engine takes."""
    for part in _parts(data):
        if (number := _number(part, "uuid")) is not None:
            yield number
    features = data.get("features")
    if isinstance(features, dict) and (number := _number(features, "mm_hashes")) is not None:
        yield number


def _number(value: Json, field: str) -> int | None:
    number = value.get(field)
    if number is not None and type(number) is not int:
        kind = "a string" if field == "uuid" else "lists of strings by modality"
        raise BadRequest(f"{field} must be {kind}.", field)
    return number


def _parts(data: Json) -> Iterator[Json]:
    """Yield every content part of a body."""
    waiting: list[Any] = [data.get(name) for name in HOLDERS]
    waiting.append({"content": data.get("content_parts")})
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, list):
            waiting += [member for member in holder if isinstance(member, list | dict)]
        elif isinstance(holder, dict):
            for name in PARTS:
                parts = holder.get(name)
                for part in parts if isinstance(parts, list) else (parts,):
                    if isinstance(part, dict):
                        yield part
                        waiting.append(part)


def _too_many() -> TooLarge:
    return TooLarge(f"The body has more than {MAX_IDS} fields named uuid or mm_hashes.")
