"""Finished spans as the bytes of an OTLP request (opentelemetry/proto/collector/trace/v1/trace_service.proto).

The numbers that the functions take are field numbers of protobuf messages. ``tests/app/tracing`` reads the bytes with
the official classes.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from warmfleet.tracing.spans import TrySpan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from warmfleet.tracing.request_record import Event, Failure, Value
    from warmfleet.tracing.spans import RequestSpan

SERVER, CLIENT = 2, 3  # kinds of spans
STATUS_ERROR = b"\x18\x02"  # the field with the status code of an error
LOCAL_PARENT, REMOTE_PARENT = 0x101, 0x301  # flags of a sampled span with a parent in this process; in another
SCOPE = "warmfleet"
KEYS = 256  # most names of attributes whose bytes are cached; a few dozen names are in use


def export_request(resource: Mapping[str, str], version: str, spans: Iterable[bytes]) -> bytes:
    """Return the body of a request to a collector. spans: of ``request_spans``. version: of this package."""
    described = b"".join(_attribute(1, name, value) for name, value in resource.items())
    scope = _message(1, _text(1, SCOPE) + _text(2, version))
    return _message(1, _message(1, described) + _message(2, scope + b"".join(spans)))


def request_spans(request: RequestSpan) -> bytes:
    """Return all spans of one request."""
    trace_id = bytes.fromhex(request.trace_id)
    state = _text(3, request.tracestate.decode("ascii", "replace")) if request.tracestate else b""
    first = _span(
        _message(1, trace_id)
        + _message(2, bytes.fromhex(request.span_id))
        + state
        + (_message(4, bytes.fromhex(request.parent_id)) if request.parent_id else b"")
        + _text(5, request.name)
        + _int(6, SERVER),
        request,
        request,
        REMOTE_PARENT if request.parent_id else LOCAL_PARENT,
    )
    parent = _message(4, bytes.fromhex(request.span_id))
    common = _message(1, trace_id) + state + parent + _text(5, "try") + _int(6, CLIENT)
    tries = [
        _span(common + _message(2, bytes.fromhex(attempt.span_id)), attempt, request, LOCAL_PARENT)
        for attempt in request.tries
        if isinstance(attempt, TrySpan)
    ]
    return b"".join((first, *tries))


def _span(head: bytes, span: RequestSpan | TrySpan, request: RequestSpan, flags: int) -> bytes:
    """Return a span as a field of ScopeSpans. A span that never ended ends with its request."""
    offset_ns = request.offset_ns
    parts = [
        head,
        _fixed64(7, _unix_ns(offset_ns, span.began_at)),
        _fixed64(8, _unix_ns(offset_ns, span.ended_at or request.ended_at)),
        *(_attribute(9, name, value) for name, value in span.attributes().items()),
        *(_event(offset_ns, event) for event in span.events()),
        _status(span.error),
        b"\x85\x01" + struct.pack("<I", flags),  # field 16
    ]
    return _message(2, b"".join(parts))


def _event(offset_ns: int, event: Event) -> bytes:
    attributes = b"".join(_attribute(3, name, value) for name, value in event.attributes.items())
    return _message(11, _fixed64(1, _unix_ns(offset_ns, event.at)) + _text(2, event.name) + attributes)


def _status(error: Failure | None) -> bytes:
    """Return the status of a span; empty, which a collector reads as unset, unless the span failed."""
    if error is None:
        return b""
    return _message(15, (_text(2, error.message) if error.message else b"") + STATUS_ERROR)


def _unix_ns(offset_ns: int, at_s: float) -> int:
    return offset_ns + round(at_s * 1e9)


def _attribute(number: int, name: str, value: Value) -> bytes:
    """Return a KeyValue."""
    return _message(number, _key(name) + _message(2, _value(value)))


@lru_cache(KEYS)
def _key(name: str) -> bytes:
    return _text(1, name)


def _value(value: Value) -> bytes:
    """Return an AnyValue. For Python a bool is an int as well, so bools come first."""
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return _int(3, value)
    return b"\x21" + struct.pack("<d", value)


def _text(number: int, text: str) -> bytes:
    return _message(number, text.encode("utf-8", "replace"))


def _message(number: int, data: bytes) -> bytes:
    """Return a field that begins with its length: a message, a string or bytes. number: below 16."""
    size = len(data)
    if size < 128:
        return b"%c%c%b" % (number << 3 | 2, size, data)
    return b"%c%b%b" % (number << 3 | 2, _varint(size), data)


def _int(number: int, value: int) -> bytes:
    return b"%c%b" % (number << 3, _varint(value % 2**64))


def _fixed64(number: int, value: int) -> bytes:
    return b"%c%b" % (number << 3 | 1, struct.pack("<Q", value))


def _varint(value: int) -> bytes:
    """Encode with seven bits in each byte, the lowest first; all bytes but the last have the highest bit set."""
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)
