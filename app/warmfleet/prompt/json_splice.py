"""Puts a key into a JSON object whose other bytes stay the same: a tenant's salt, a prompt's token ids. Pure.

If an object has a key twice, the last value counts: for orjson, which the router uses, and for Python's json, which
vLLM's server uses. So a key that is added at the end counts, even if the body has the same key already.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.prompt.request import Endpoint

MAX_MARKS = 4_096  # most brackets and strings that a search for the prompt passes in a body
MAX_LOOKS = 256  # most escaped quotes that are examined one by one, at 0.2 us each
MAX_SLASHES = 64  # most backslashes before a quote that are counted

_EMPTY = re.compile(rb"\s*\{\s*\}")
_NESTED = re.compile(rb'["{}\[\]]')
_VALUE_ENDS = re.compile(rb"[,}\s]")
_NOT_SPACE = re.compile(rb"\S")
_QUOTE, _BACKSLASH, _OPENING = ord('"'), ord("\\"), b"{["


def with_key(body: bytes, key: str, *value: bytes) -> bytes:
    """Return ``body`` with ``key`` and ``value`` at its end, at the cost of one copy.

    body: valid JSON of an object. key: a name that needs no escapes. value: the pieces of one JSON value.
    """
    end = body.rindex(b"}")
    separator = f'"{key}":' if _EMPTY.match(body) else f',"{key}":'
    return b"".join((memoryview(body)[:end], separator.encode(), *value, body[end:]))


def with_fields(body: bytes, fields: Mapping[str, bytes]) -> bytes:
    """Return ``body`` with these fields at its end, as ``with_key``. fields: at least one, with values in JSON."""
    first, *others = fields
    rest = [b',"%b":%b' % (name.encode(), fields[name]) for name in others]
    return with_key(body, first, fields[first], *rest)


def spliced(endpoint: Endpoint, raw: bytes, ids: Sequence[Sequence[bytes]], characters: int = 0) -> bytes | None:
    """Put token ids in place of the prompts in ``raw``; return None if the limits end the search for the prompts.

    raw: JSON of an object that was parsed before. ids: for each prompt a JSON list, in parts to be joined. characters:
    the length of the prompt if it is a single text.
    """
    if endpoint == "chat":
        return with_key(raw, "kv_transfer_params", b'{"prompt_token_ids":', *ids[0], b"}")
    span = value_span(raw, "prompt", characters)
    if span is None:
        return None
    start, end = span
    lists = [b"".join(parts) for parts in ids]
    value = lists[0] if raw[start] == _QUOTE else b"[%b]" % b",".join(lists)
    view = memoryview(raw)
    return b"".join((view[:start], value, view[end:]))


def value_span(raw: bytes, key: str, characters: int = 0) -> tuple[int, int] | None:
    """Return begin and end of the value of ``key`` in a JSON object; of the last value if the key comes twice.

    None if the object has no such key, or more than MAX_MARKS strings and brackets. characters: the length of the
    value if it is a string; the search then jumps to its end.
    """
    text = _Text(raw)
    found, at = None, raw.index(b"{") + 1
    for _ in range(MAX_MARKS):
        begin = text.raw.find(b'"', at)
        if begin < 0:
            return found
        end = text.string_end(begin)
        start = _position(_NOT_SPACE, raw, raw.index(b":", end) + 1)
        name = raw[begin:end]
        matches = (orjson.loads(name) if b"\\" in name else name[1:-1].decode()) == key
        if raw[start] == _QUOTE:
            at = (matches and text.far_end(start, characters)) or text.string_end(start)
        elif raw[start] in _OPENING:
            at = text.nested_end(start)
        else:
            at = _position(_VALUE_ENDS, raw, start)
        if at < 0:
            return None
        if matches:
            found = start, at
    return None


class _Text:
    """JSON that is known to be valid, searched with ``bytes.find``, which is fast."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._plain = False  # True once all escaped quotes are blanked out
        self._looks = MAX_LOOKS

    def far_end(self, start: int, characters: int) -> int:
        """Find in one step the end of a string of ``characters`` characters; return 0 if it has another length."""
        if characters < MAX_LOOKS:
            return 0
        try:
            end = self.string_end(start + characters)
            orjson.loads(self.raw[start:end])  # raises ValueError unless this is exactly one string
        except ValueError:  # an earlier value of the same key, which has another length than the parsed one
            return 0
        return end

    def string_end(self, start: int) -> int:
        """Return the position behind the string that begins at ``start``."""
        text, at = self.raw, start
        while self._looks:
            at = text.index(b'"', at + 1)
            if text[at - 1] != _BACKSLASH:
                return at + 1
            self._looks -= 1
            before = text[max(0, at - MAX_SLASHES) : at]
            slashes = len(before) - len(before.rstrip(b"\\"))
            if slashes % 2 == 0 and slashes < MAX_SLASHES:
                return at + 1
            if slashes == MAX_SLASHES:
                self._looks = 0
        if not self._plain:  # with many escapes it is cheaper to blank all of them out once
            self.raw = self.raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._plain = True
        return self.raw.index(b'"', start + 1) + 1

    def nested_end(self, start: int) -> int:
        """Return the position behind the object or list at ``start``; -1 if it has more than MAX_MARKS parts."""
        depth, at = 0, start
        for _ in range(MAX_MARKS):
            at = _position(_NESTED, self.raw, at)
            if self.raw[at] == _QUOTE:
                at = self.string_end(at)
                continue
            depth += 1 if self.raw[at] in _OPENING else -1
            at += 1
            if not depth:
                return at
        return -1


def _position(pattern: re.Pattern[bytes], text: bytes, start: int) -> int:
    match = pattern.search(text, start)
    if match is None:
        raise ValueError("not the JSON object that was parsed")
    return match.start()
