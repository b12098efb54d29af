"""The answer that a client gets, and how much of it was sent already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.errors import WarmfleetError

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientAnswer:
    """Sends one answer over ASGI. Only its own methods change ``started`` and ``complete``.

    ``started``: the status is on its way, so no other answer can be given. ``complete``: the last piece is on its way.
    Both are set before the piece is sent, because the client may hang up while it is being sent.
    """

    __slots__ = ("_send", "complete", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.complete = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Send the status and the headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of the body; it is the last one unless there is ``more``."""
        if not more:
            self.complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Send an answer that is complete from the beginning."""
        self.complete = True
        await self.start(status, headers)
        await self.body(body, more=False)

    async def end_stream(self, error: WarmfleetError) -> None:
        """End a stream of events with an event that tells the error.

        An empty line goes first: it ends an event that was cut off, and after a whole event it means nothing.
        """
        await self.body(b"\n\ndata: " + orjson.dumps(error.as_dict()) + b"\n\n", more=False)
