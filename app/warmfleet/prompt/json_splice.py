"""Keys put into a JSON object that stays the same bytes otherwise: a tenant's salt, a prompt's token ids. Pure.

Of a key that comes twice the last one counts: for orjson, which we read with, and for Python's json, which vLLM's
server reads with. So a key at the end is the effective one whatever the body held before.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.prompt.request import Endpoint

MAX_MARKS = 4_096  # brackets and strings that are looked at to find the prompt in a body
MAX_LOOKS = 256  # at escaped quotes, one by one: 0.2 us each
MAX_SLASHES = 64  # before a quote

_EMPTY = re.compile(rb"\s*\{\s*\}")
_NESTED = re.compile(rb'["{}\[\]]')
_VALUE_ENDS = re.compile(rb"[,}\s]")
_NOT_SPACE = re.compile(rb"\S")
_QUOTE, _BACKSLASH, _OPENING = ord('"'), ord("\\"), b"{["


def with_key(body: bytes, key: str, *value: bytes) -> bytes:
    """``body``, valid JSON of an object, with ``key`` at its end; ``value`` is JSON, in pieces.

    Nothing before it needs to be looked at: the cost is one copy. ``key`` must need no escapes.
    """
    end, view = body.rindex(b"}"), memoryview(body)
    comma = b"" if _EMPTY.match(body) else b","
    return b"".join((view[:end], comma, b'"%b":' % key.encode(), *value, view[end:]))


def spliced(endpoint: Endpoint, raw: bytes, ids: Sequence[bytes], characters: int = 0) -> bytes | None:
    """``raw`` (JSON that was parsed before, an object) with the ids in it, a JSON list for each prompt.

    None if it is too odd to find the place. characters: of the prompt, if it is one text.
    """
    if endpoint == "chat":
        return with_key(raw, "kv_transfer_params", b'{"prompt_token_ids":', ids[0], b"}")
    span = value_span(raw, "prompt", characters)
    if span is None:
        return None
    start, end = span
    value = ids[0] if raw[start] == _QUOTE else b"[%b]" % b",".join(ids)
    view = memoryview(raw)
    return b"".join((view[:start], value, view[end:]))


def value_span(raw: bytes, key: str, characters: int = 0) -> tuple[int, int] | None:
    """Where the value of ``key`` begins and ends in a JSON object: of the last one that is not nested, which counts.

    None if there is none, or if more than MAX_MARKS strings and brackets would have to be looked at. characters: of
    that value, if it is a string: so much need not be looked at.
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
        ours = (orjson.loads(name) if b"\\" in name else name[1:-1].decode()) == key
        if raw[start] == _QUOTE:
            at = (ours and text.far_end(start, characters)) or text.string_end(start)
        elif raw[start] in _OPENING:
            at = text.nested_end(start)
        else:
            at = _position(_VALUE_ENDS, raw, start)
        if at < 0:
            return None
        if ours:
            found = start, at
    return None


class _Text:
    """JSON that is known to be valid, read at the speed of ``find``."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._plain = False  # no escaped quote is left in it
        self._looks = MAX_LOOKS

    def far_end(self, start: int, characters: int) -> int:
        """What ``string_end`` says, found at once if the string has so many characters; 0 if not."""
        if characters < MAX_LOOKS:
            return 0
        try:
            end = self.string_end(start + characters)
            orjson.loads(self.raw[start:end])  # one whole string: then it ends nowhere else
        except ValueError:  # not the one that was parsed, but an earlier one of the same name
            return 0
        return end

    def string_end(self, start: int) -> int:
        """After the quote that ends the string which begins at ``start``."""
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
        if not self._plain:  # many escapes: cheaper to blank them out, once, than to look at each
            self.raw = self.raw.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._plain = True
        return self.raw.index(b'"', start + 1) + 1

    def nested_end(self, start: int) -> int:
        """The end of the object or list that begins at ``start``; -1 if it has too much in it."""
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
