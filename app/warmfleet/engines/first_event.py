"""The first event of a stream, which may be an error: an engine sends its status before it knows how a request ends.

Engines and APIs write an error in several forms. All are recognized, on every path: an ``error`` with something in it
(vLLM, SGLang, OpenAI), ``"type": "error"`` (Anthropic, Responses), ``"object": "error"`` (older vLLM and SGLang),
``response.failed``, and an event with the name ``error``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Most bytes at the beginning of a stream that are searched for an error; a longer first event counts as no error.
MAX_BYTES = 16_384
FAILED = frozenset({500, 502, 503, 504})  # statuses of errors that are the engine's own
OVERLOADED = 529  # status of an overloaded server in Anthropic's API only
#: Fields of a choice that it has only with a token, or at its end.
TELLING = ("text", "token_ids", "logprobs", "finish_reason")
#: An unfinished first event of at least this length counts as no error, unless it contains a word of an error.
TELLING_BYTES = 256
_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_BOM = b"\xef\xbb\xbf"
#: Word in the type or code of an error without a number -> status. The first word that occurs counts.
_WORDS = {
    "rate_limit": 429,
    "overloaded": 503,
    "unavailable": 503,
    "timeout": 504,
    "invalid": 400,
    "context_length": 400,
    "badrequest": 400,
    "bad_request": 400,
    "unprocessable": 422,
    "too_large": 413,
    "not_found": 404,
    "notfound": 404,
    "permission": 403,
    "authentication": 401,
}


class Event(NamedTuple):
    """An event of a stream: its name, empty if it has none, and its data."""

    name: bytes
    data: bytes


class StreamError(NamedTuple):
    """An error by which an engine begins a stream. status: the HTTP status that fits this error."""

    status: int
    message: str


def is_plain(piece: bytes) -> bool:
    """Return whether this first piece of a stream surely begins with a whole event that is no error."""
    begins = piece.startswith((b"data: {", b"event: ")) and not piece.startswith(b"event: ping")
    return begins and b"\n\n" in piece and not _has_word(piece)


def is_open(piece: bytes) -> bool:
    """Return whether more of the stream is needed to know whether its first event is an error. piece: its beginning."""
    if len(piece) > MAX_BYTES or read(piece) is not None:
        return False
    begun = _EVENT_END.split(piece)[-1]
    return len(begun) < TELLING_BYTES or _has_word(begun)


def read(piece: bytes, *, ended: bool = False) -> Event | None:
    """Return the first event of a stream that is neither a comment nor a ping; None while it is not whole.

    ended: nothing follows the piece, so an event without an empty line is whole.
    """
    return next(_events(piece, ended=ended), None)


def telling(piece: bytes, *, ended: bool = False) -> Event | None:
    """Return the first event of a stream of completions or chats that has a token, an error or its end; None while
    there is none. The event with which chats begin only names the role. ended: as in ``read``.
    """
    return next((event for event in _events(piece, ended=ended) if _tells(event)), None)


def _tells(event: Event) -> bool:
    try:
        choices = orjson.loads(event.data)["choices"]
        return not choices or any(
            any(map(choice.get, TELLING)) or _has_more(choice.get("delta") or {}) for choice in choices
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return True


def _has_more(delta: dict[str, Any]) -> bool:
    return any(value for name, value in delta.items() if name != "role")


def _events(piece: bytes, *, ended: bool) -> Iterator[Event]:
    if not ended and b"\n" not in piece and b"\r" not in piece:
        return  # a long event comes in many pieces
    name, data = b"", list[bytes]()
    *lines, unended = _LINE_END.split(piece.removeprefix(_BOM))
    for line in [*lines, unended, b""] if ended else lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
        elif not line:
            if (data or name == b"error") and name != b"ping":
                yield Event(name, b"\n".join(data))
            name, data = b"", []


def _has_word(piece: bytes) -> bool:
    return b"rror" in piece or b"failed" in piece


def error_of(event: Event) -> StreamError | None:
    """Return the error in an event; None if it has none."""
    try:
        data = orjson.loads(event.data)
    except ValueError:
        data = None
    error = _error_in(data) if isinstance(data, dict) else None
    if error is None and event.name == b"error":
        error = data or event.data.decode("utf-8", "replace")
    if error is None:
        return None
    fields = error if isinstance(error, dict) else {"message": error}
    message = fields.get("message") or error or "it does not say which"
    return StreamError(_status(fields), str(message)[:200])


def _error_in(data: dict[str, Any]) -> Any:
    if data.get("error"):
        return data["error"]
    if data.get("type") == "error" or data.get("object") == "error":
        return data
    if data.get("type") != "response.failed":
        return None
    response = data.get("response")
    return (response.get("error") if isinstance(response, dict) else None) or data


def _status(fields: dict[str, Any]) -> int:
    """Return the status of an error with these fields; 500 if they name none."""
    for name in ("code", "status", "status_code"):
        value = fields.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit():
            value = int(value[:4])
        if isinstance(value, int) and 400 <= value < 600:
            return _known(value)
    words = f"{fields.get('code')} {fields.get('type')}".lower()
    return next((status for word, status in _WORDS.items() if word in words), 500)


def _known(status: int) -> int:
    if status == OVERLOADED:
        return 503
    return status if status < 500 or status == 501 or status in FAILED else 500
