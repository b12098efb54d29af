"""The messages of Envoy's ext_proc (envoy.service.ext_proc.v3) as bytes, written and read by hand. Pure.

A protobuf library takes as long for a message as the whole picker; a piece of an answer must cost microseconds. Only
the fields that a picker uses are read; all others are passed over.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from warmfleet.picker.limits import MESSAGE_MARGIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Metadata = dict[str, dict[str, object]]

#: Numbers of the fields of a ProcessingRequest.
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY, REQUEST_TRAILERS, RESPONSE_TRAILERS = range(2, 8)
METADATA, ATTRIBUTES, PROTOCOL = 8, 9, 11
#: Modes in which a gateway sends a body (``ProcessingMode.BodySendMode``).
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
PIECE_BYTES: Final = 62_000  # longest piece of a body in one message: gateways refuse longer ones
DEPTH = 16  # most values within each other in metadata
ENDPOINT: Final = b"x-gateway-destination-endpoint"
RESPONSE_BODY_BYTE: Final = bytes((RESPONSE_BODY << 3 | 2,))
_DOUBLE = Struct("<d")
_BODY_TAG, _END_TAG, _VARINT, _BYTES = 1 << 3 | 2, 2 << 3, 0, 2


_ANY_BODY, _BODY = bytes((REQUEST_BODY << 3 | 2, RESPONSE_BODY << 3 | 2)), bytes((_BODY_TAG,))


class MessageError(ValueError):
    """The bytes are no message of ext_proc."""


class Modes(NamedTuple):
    """How a gateway sends the bodies of requests and answers. A gateway that does not tell must take FULL_DUPLEX."""

    request: int = FULL_DUPLEX
    response: int = FULL_DUPLEX


class Message(NamedTuple):
    """A ProcessingRequest. kind: the number of its field; 0: none that is known. content: the bytes of that field.

    metadata, attributes: as bytes, empty without any. modes: None except in the first message of a call.
    """

    kind: int
    content: bytes
    metadata: bytes = b""
    attributes: tuple[bytes, ...] = ()
    modes: Modes | None = None


class Headers(NamedTuple):
    """Headers, with lower case names. ends: there is no body."""

    fields: list[tuple[bytes, bytes]]
    ends: bool


# ---------------------------------------------------------------- reading


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a number; return it, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise MessageError("a number is too long")


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Read the fields of a message: number, value of a varint, bytes of any other kind.

    Raises MessageError.
    """
    at, end = 0, len(data)
    try:
        while at < end:
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == _BYTES:
                size, at = _varint(data, at)
                if at + size > end:
                    raise MessageError("a field is longer than its message")
                yield tag >> 3, 0, data[at : at + size]
                at += size
            elif kind == _VARINT:
                value, at = _varint(data, at)
                yield tag >> 3, value, b""
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
                if at + size > end:
                    raise MessageError("a field is longer than its message")
                yield tag >> 3, 0, data[at : at + size]
                at += size
            else:
                raise MessageError("a field of a kind that does not exist")
    except IndexError:
        raise MessageError("a message is cut off") from None


def _check_length(data: bytes, tags: bytes) -> None:
    """Refuse a long message that is more than a body, as its many small fields would take seconds to read.

    tags: of the body, with which each long message begins, as fields are written in the order of their numbers.
    """
    rest = len(data)
    if rest > MESSAGE_MARGIN and data[0] in tags:
        size, at = _varint(data, 1)
        rest -= at + size
    if rest > MESSAGE_MARGIN:
        raise MessageError("a message is too long without its body")


def read(data: bytes) -> Message:
    """Read a ProcessingRequest. Raises MessageError."""
    _check_length(data, _ANY_BODY)
    kind, content, metadata, modes = 0, b"", b"", None
    attributes: list[bytes] = []
    for number, _, value in _fields(data):
        if REQUEST_HEADERS <= number <= RESPONSE_TRAILERS:
            kind, content = number, value
        elif number == METADATA:
            metadata = value
        elif number == ATTRIBUTES:
            attributes.append(value)
        elif number == PROTOCOL:
            told = {number: mode for number, mode, _ in _fields(value)}
            modes = Modes(told.get(1, NONE), told.get(2, NONE))
    return Message(kind, content, metadata, tuple(attributes), modes)


def read_headers(content: bytes) -> Headers:
    """Read HttpHeaders. Raises MessageError."""
    fields: list[tuple[bytes, bytes]] = []
    ends = False
    for number, flag, told in _fields(content):
        if number == 1:
            fields += [_header(entry) for at, _, entry in _fields(told) if at == 1]
        elif number == 3:
            ends = bool(flag)
    return Headers(fields, ends)


def _header(entry: bytes) -> tuple[bytes, bytes]:
    """Read a HeaderValue: key 1, and value 2 or raw_value 3."""
    size = entry[1] if len(entry) > 1 else 0
    at = 2 + size
    if entry[:1] == b"\n" and size < 0x80 and len(entry) > at + 1 and entry[at] in (0x12, 0x1A):
        length = entry[at + 1]
        if length < 0x80 and len(entry) == at + 2 + length:  # the usual form, in one step
            return entry[2:at], entry[at + 2 :]
    key = value = b""
    for number, _, text in _fields(entry):
        if number == 1:
            key = text
        elif number in (2, 3):
            value = text or value
    return key.lower(), value


def read_body(content: bytes) -> tuple[bytes, bool]:
    """Read HttpBody; return its bytes, and whether it ends the body. Raises MessageError."""
    _check_length(content, _BODY)
    body, ends = b"", False
    for number, flag, piece in _fields(content):
        if number == 1:
            body = piece
        elif number in (2, 3) and flag:  # 3: it ended without a piece of its own
            ends = True
    return body, ends


def read_piece(data: bytes) -> tuple[bytes, bool] | None:
    """Read a message that begins with a piece of an answer, in the form in which gateways write it: the piece's bytes,
    and whether it ends the answer. None for any other message, which ``read`` reads.

    Every token of every answer passes here, so this takes a fifth of the time of ``read``.
    """
    if data[:1] != RESPONSE_BODY_BYTE:
        return None
    try:
        size, at = _varint(data, 1)
        end, body = at + size, b""
        if at < end and data[at] == _BODY_TAG:
            length, at = _varint(data, at + 1)
            body, at = data[at : at + length], at + length
        ends = False
        if at < end and data[at] == _END_TAG:
            ends, at = data[at + 1] == 1, at + 2
    except IndexError:
        return None
    return (body, ends) if at == end <= len(data) else None


def read_metadata(content: bytes) -> Metadata:
    """Read the filter_metadata of a Metadata: values by name, by namespace. Raises MessageError."""
    return {name: _struct(value) for name, value in _entries(content)}


def read_attributes(entries: Iterable[bytes]) -> Metadata:
    """Read the attributes of a message: values by name, by filter. Raises MessageError."""
    return {name: _struct(value) for name, value in map(_entry, entries)}


def _entries(content: bytes) -> list[tuple[str, bytes]]:
    return [_entry(entry) for number, _, entry in _fields(content) if number == 1]


def _entry(entry: bytes) -> tuple[str, bytes]:
    key = value = b""
    for number, _, told in _fields(entry):
        if number == 1:
            key = told
        elif number == 2:
            value = told
    return key.decode("utf-8", "replace"), value


def _struct(content: bytes, depth: int = 0) -> dict[str, object]:
    if depth > DEPTH:
        raise MessageError("values are nested too deep")
    return {name: _value(value, depth) for name, value in _entries(content)}


def _value(content: bytes, depth: int) -> object:
    found: object = None
    for number, flag, told in _fields(content):
        if number == 2 and len(told) == 8:
            found = _DOUBLE.unpack(told)[0]
        elif number == 3:
            found = told.decode("utf-8", "replace")
        elif number == 4:
            found = bool(flag)
        elif number == 5:
            found = _struct(told, depth + 1)
        elif number == 6:
            if depth > DEPTH:
                raise MessageError("values are nested too deep")
            found = [_value(value, depth + 1) for at, _, value in _fields(told) if at == 1]
    return found


# ---------------------------------------------------------------- writing


def _number(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _field(number: int, data: bytes) -> bytes:
    size = len(data)
    if size < 0x80:
        return b"%c%c%b" % (number << 3 | 2, size, data)
    return b"%c%b%b" % (number << 3 | 2, _number(size), data)


class Change(NamedTuple):
    """What a gateway is to do to a request or an answer.

    endpoint: where the request goes, as ``ip:port``; empty: not told. headers: to be set in place of all of their
    names. removed: names of headers to be removed. body: None: it stays as it is.
    """

    endpoint: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    removed: tuple[bytes, ...] = ()
    body: bytes | None = None


NO_CHANGE = Change()


def _mutation(change: Change) -> bytes:
    """Return a HeaderMutation. append_action 2: OVERWRITE_IF_EXISTS_OR_ADD, so that no client's own value remains."""
    headers = change.headers
    if change.endpoint:
        headers = ((ENDPOINT, change.endpoint), *headers)
    made = [_field(1, _field(1, _field(1, name) + _field(3, value)) + b"\x18\x02") for name, value in headers]
    return b"".join([*made, *(_field(2, name) for name in change.removed)])


def _common(change: Change) -> bytes:
    """Return a CommonResponse: the headers, a whole body, and that a changed header may mean another route."""
    mutation = _mutation(change)
    made = _field(2, mutation) if mutation else b""
    if change.body is not None:
        made += _field(3, _field(1, change.body))
    return made + b"\x28\x01" if change.endpoint else made


def _metadata(change: Change) -> bytes:
    """Return the dynamic metadata that names the endpoint: envoy.lb / x-gateway-destination-endpoint."""
    if not change.endpoint:
        return b""
    named = _field(1, _field(1, ENDPOINT) + _field(2, _field(3, change.endpoint)))
    return _field(8, _field(1, _field(1, b"envoy.lb") + _field(2, _field(5, named))))


def request_headers(change: Change = NO_CHANGE) -> bytes:
    """Answer the headers of a request. If the answer names no endpoint, the client's own name for one is removed: a
    gateway whose next message is not the body sends the request on by the headers that it has then.
    """
    if not change.endpoint:
        change = change._replace(removed=(*change.removed, ENDPOINT))
    return _field(1, _field(1, _common(change))) + _metadata(change)


def response_headers(change: Change = NO_CHANGE) -> bytes:
    """Answer the headers of an answer."""
    return _field(2, _field(1, _common(change)))


def request_body(change: Change = NO_CHANGE) -> bytes:
    """Answer the whole body of a request, or a piece that passes unchanged."""
    return _field(3, _field(1, _common(change))) + _metadata(change)


def request_pieces(body: bytes, *, ends: bool) -> list[bytes]:
    """Give a request another body, in pieces (FULL_DUPLEX). ends: no trailers follow."""
    return _pieces(3, body, ends=ends)


def response_pieces(body: bytes, *, ends: bool) -> list[bytes]:
    """Pass on a piece of an answer (FULL_DUPLEX)."""
    return [_piece(4, body, ends=ends)] if len(body) <= PIECE_BYTES else _pieces(4, body, ends=ends)


def _pieces(number: int, body: bytes, *, ends: bool) -> list[bytes]:
    pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
    last = len(pieces) - 1
    return [_piece(number, piece, ends=ends and at == last) for at, piece in enumerate(pieces)]


def _piece(number: int, body: bytes, *, ends: bool) -> bytes:
    """Return a message that has a piece of a body: {number: {response: {body_mutation: {streamed_response: …}}}}."""
    size = len(body)
    if 0x80 <= size < 0x3F00 and not ends:  # the usual piece: all lengths take two bytes
        a, b, c, d = size + 3, size + 6, size + 9, size + 12
        return b"%c%c%c\n%c%c\x1a%c%c\x1a%c%c\n%c%c%b" % (
            *(number << 3 | 2, d & 0x7F | 0x80, d >> 7, c & 0x7F | 0x80, c >> 7),
            *(b & 0x7F | 0x80, b >> 7, a & 0x7F | 0x80, a >> 7, size & 0x7F | 0x80, size >> 7, body),
        )
    piece = _field(1, body) if body else b""
    if ends:
        piece += b"\x10\x01"
    return _field(number, _field(1, _field(3, _field(3, piece))))


RESPONSE_CONTINUES: Final = _field(4, _field(1, b""))  # a piece of an answer passes unchanged
REQUEST_TRAILERS_CONTINUE: Final = _field(5, b"")
RESPONSE_TRAILERS_CONTINUE: Final = _field(6, b"")


def immediate(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, details: bytes) -> bytes:
    """Answer the client in place of an engine. details: for the gateway's log."""
    mutation = _mutation(Change(headers=tuple(headers)))
    content = _field(1, b"\x08" + _number(status)) + _field(2, mutation) + _field(3, body) + _field(5, details)
    return _field(7, content)


def more_time(seconds: float) -> bytes:
    """Ask the gateway to wait longer for the answer to its message."""
    whole = int(seconds)
    nanos = int((seconds - whole) * 1e9)
    return _field(10, b"\x08" + _number(whole) + (b"\x10" + _number(nanos) if nanos else b""))
