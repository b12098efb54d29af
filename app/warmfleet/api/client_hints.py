"""Reads the headers by which a client gives the router hints about its request."""

from __future__ import annotations

import hmac
import math
from typing import TYPE_CHECKING

from warmfleet.errors import BadRequest, Unauthorized
from warmfleet.prompt.request import NO_LABELS
from warmfleet.protocol.labels import read_labels
from warmfleet.protocol.wire import WireError
from warmfleet.routing.call import NO_HINTS, Hints

if TYPE_CHECKING:
    from collections.abc import Mapping

SESSION, PREFIX, EXPLAIN = b"x-warmfleet-session", b"x-warmfleet-prefix-len", b"x-warmfleet-explain"
CONTINUE, CONVERSATION, LABELS = b"x-warmfleet-continue", b"x-warmfleet-conversation", b"x-warmfleet-labels"
NO = (b"0", b"false", b"no")
MAX_PREFIX_TOKENS = 2**22
MAX_DIGITS = 12


def read_hints(headers: Mapping[bytes, bytes], session_id: bytes, explain_key: str | None) -> Hints:
    """Read the hints in a request's headers. Raises BadRequest, Unauthorized.

    headers: the headers that begin with ``x-warmfleet-``. session_id: the value of X-Session-ID, empty if there is
    none. explain_key: the value of X-Warmfleet-Explain that gets an explanation; "": any value; None: no value.
    """
    session = headers.get(SESSION) or session_id
    if not headers:
        return Hints(session) if session else NO_HINTS
    explain = _explain(headers.get(EXPLAIN, b""), explain_key)
    return Hints(
        session,
        _prefix_tokens(headers.get(PREFIX, b"")),
        explain,
        _continues(headers.get(CONTINUE, b"")),
        _ended(headers.get(CONVERSATION, b"")),
        _labels(headers.get(LABELS, b"")),
    )


def operators_hints(raw: list[tuple[bytes, bytes]]) -> Hints:
    """Read the hints in an operator's request, from all of its headers. Raises BadRequest."""
    ours = {name: value for name, value in raw if name.startswith(b"x-warmfleet-")}
    return read_hints(ours, dict(raw).get(b"x-session-id", b""), "")


def patience_s(value: bytes | None) -> float:
    """Return the seconds for which the client lets its request wait for a worker with room; infinite by default.

    value: of the header X-Request-Timeout-Ms; None if the request lacks that header. Raises BadRequest.
    """
    if value is None:
        return math.inf
    value = value.strip()
    if not value.isdigit() or len(value) > MAX_DIGITS or int(value) == 0:
        why = "X-Request-Timeout-Ms must be a whole number of milliseconds, from 1 on."
        raise BadRequest(why, "X-Request-Timeout-Ms")
    return int(value) / 1_000


def _prefix_tokens(value: bytes) -> int:
    if not value:
        return 0
    if not value.isdigit() or not 0 < len(value) < 10 or int(value) > MAX_PREFIX_TOKENS:
        raise BadRequest(
            f"X-Warmfleet-Prefix-Len must be a number of tokens, 0 (all) to {MAX_PREFIX_TOKENS}.",
            "X-Warmfleet-Prefix-Len",
        )
    return int(value)


def _continues(value: bytes) -> bool | None:
    word = value.strip().lower()
    if not word:
        return None
    if word not in (*NO, b"1", b"true", b"yes"):
        raise BadRequest("X-Warmfleet-Continue must be 1 or 0.", "X-Warmfleet-Continue")
    return word not in NO


def _ended(value: bytes) -> bool:
    word = value.strip().lower()
    if word not in (b"", b"ended"):
        raise BadRequest("X-Warmfleet-Conversation must be ended, or absent.", "X-Warmfleet-Conversation")
    return bool(word)


def _labels(value: bytes) -> frozenset[str]:
    """Read the labels that the worker must have, each as ``name=value``."""
    if not value:
        return NO_LABELS
    try:
        return frozenset(f"{name}={text}" for name, text in read_labels(value.decode("latin-1")).items())
    except WireError as error:
        raise BadRequest(f"X-Warmfleet-Labels: {error}.", "X-Warmfleet-Labels") from error


def _explain(value: bytes, key: str | None) -> bool:
    """Whether the client asks for an explanation. value: of X-Warmfleet-Explain; to ask, the operator's key."""
    if value.strip().lower() in (b"", *NO):
        return False
    if key is None or (key and not hmac.compare_digest(value, key.encode())):
        raise Unauthorized("X-Warmfleet-Explain is the operator's: it takes WARMFLEET_ADMIN_KEY as its value.")
    return True
