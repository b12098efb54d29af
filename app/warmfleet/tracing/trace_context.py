"""The trace that a request belongs to, by the header ``traceparent`` (W3C Trace Context), and whether it is sampled."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

VERSION_0_LENGTH = 55  # characters of a traceparent of version 00; later versions may append to it
#: version, trace id, id of the caller's span, flags
_TRACEPARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
MAX_STATE_BYTES = 512  # most bytes of a tracestate that is kept; the standard allows dropping longer ones
SAMPLED = 1  # flag of a traceparent whose trace is kept


class TraceContext(NamedTuple):
    """The trace of a request. parent_id: the id of the caller's span; empty if the trace begins here.

    sampled: the spans of this replica are kept. state: the caller's tracestate, for the span; empty if it is too long.
    """

    trace_id: str
    parent_id: str
    sampled: bool
    state: bytes = b""


class Sampler:
    """Decides which traces are kept, for each trace id in the same way as all replicas and other OTel libraries."""

    def __init__(self, share: float, *, by_parent: bool) -> None:
        """share: 0 to 1. by_parent: if a caller began the trace, the caller's decision counts."""
        self._below = round(share * 2**64)  # a trace is kept if the lower half of its id is below this
        self._by_parent = by_parent

    def context(self, header: bytes, state: bytes = b"") -> TraceContext:
        """Return the trace of a request. header: its traceparent, empty if it has none. state: its tracestate.

        If the header is not valid, both are ignored and a new trace begins, as the standard asks.
        """
        found = _TRACEPARENT.fullmatch(header) if header else None
        if found is None or (found[1] == b"00" and len(header) != VERSION_0_LENGTH):
            trace_id = f"{random.getrandbits(128):032x}"
            return TraceContext(trace_id, "", self._keeps(trace_id))
        trace_id = found[2].decode()
        sampled = bool(int(found[4], 16) & SAMPLED) if self._by_parent else self._keeps(trace_id)
        return TraceContext(trace_id, found[3].decode(), sampled, state if len(state) <= MAX_STATE_BYTES else b"")

    def _keeps(self, trace_id: str) -> bool:
        return int(trace_id[16:], 16) < self._below


def new_span_id() -> str:
    return f"{random.getrandbits(64):016x}"


def traceparent(trace_id: str, span_id: str, *, sampled: bool) -> bytes:
    """Return the header's value for the next server, whose caller is this span."""
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}".encode()
