"""Counts the tokens of an answer as it passes, for a client with limits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.engines.followed_stream import Sink

REPORTED = re.compile(rb'"(?:completion|output)_tokens" ?: ?(\d{1,9})')  # never in a text, whose quotes are \"
_EVENT = b"\ndata: {"
_KEPT = 40  # bytes of a piece that are searched again with the next: more than the longest match of both patterns


class OutputTokens:
    """The tokens of an answer: the number in its ``usage``, or the number of its events if it has none.

    An engine sends an event for every token, or for several if they are made at once. The body stays as it is.
    """

    def __init__(self, body: bytes = b"") -> None:
        """body: the body of an answer that came whole."""
        self._reported = 0
        self._events = 0
        self._tail = b"\n"
        self.add(body)

    def add(self, piece: bytes) -> None:
        """Count the tokens in the next piece of the body."""
        text = self._tail + piece
        self._events += text.count(_EVENT) - self._tail.count(_EVENT)
        if b"_tokens" in text:
            for usage in REPORTED.finditer(text):
                self._reported = int(usage[1])
        self._tail = text[-_KEPT:]

    @property
    def count(self) -> int:
        return self._reported or self._events


class WatchedClient:
    """Passes the pieces of an answer on to ``client``, each after ``watch`` got it."""

    def __init__(self, watch: Callable[[bytes], None], client: Sink) -> None:
        self._watch = watch
        self._client = client

    def pass_on(self, data: bytes) -> bool:
        self._watch(data)
        return self._client.pass_on(data)

    async def body(self, data: bytes, *, more: bool) -> None:
        self._watch(data)
        await self._client.body(data, more=more)
