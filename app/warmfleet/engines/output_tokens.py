"""Counts the tokens of an answer as it passes, for a client with limits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.engines.followed_stream import Sink

_TOLD = re.compile(rb'"(?:completion|output)_tokens" ?: ?(\d{1,9})')  # in a text of the answer, \" is not "
_EVENT = b"\ndata: {"
_KEPT = 40  # bytes of a piece that are looked at again with the next one: as long as the longest of both


class OutputTokens:
    """The tokens of one answer: as many as its ``usage`` tells; without that, its events.

    An engine sends an event for every token, or for several if they are made at once. The body stays as it is.
    """

    def __init__(self, body: bytes = b"") -> None:
        """body: of an answer that came whole."""
        self._told = 0
        self._events = 0
        self._tail = b"\n"
        self.see(body)

    def see(self, piece: bytes) -> None:
        """Count what this piece of the body has."""
        seen = self._tail + piece
        self._events += seen.count(_EVENT) - self._tail.count(_EVENT)
        if b"_tokens" in seen:
            for told in _TOLD.finditer(seen):
                self._told = int(told[1])
        self._tail = seen[-_KEPT:]

    @property
    def count(self) -> int:
        return self._told or self._events

    def counted(self, client: Sink) -> Sink:
        """``client``, with every piece that it gets seen here first."""
        return Watched(self.see, client)


class Watched:
    """A client whose pieces of an answer are shown to ``see`` first."""

    def __init__(self, see: Callable[[bytes], None], client: Sink) -> None:
        self._see = see
        self._client = client

    def pass_on(self, data: bytes) -> bool:
        self._see(data)
        return self._client.pass_on(data)

    async def body(self, data: bytes, *, more: bool) -> None:
        self._see(data)
        await self._client.body(data, more=more)
