"""Reads the whole body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from warmfleet.errors import BadRequest, TooLarge

if TYPE_CHECKING:
    from warmfleet.settings import Settings

BODY_TIMEOUT_S = 60.0  # the largest body at 4.5 Mbit/s; a slower client would hold memory of the router for longer

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class HungUp(Exception):  # noqa: N818  a condition, not an error
    """The client closed its connection."""


async def read_body(receive: Receive, length: int, settings: Settings) -> bytes:
    """The body. length: its bytes by the Content-Length header, 0 without that header.

    Raises TooLarge; BadRequest if the body takes longer than BODY_TIMEOUT_S; HungUp.
    """
    limit = settings.body_max_bytes
    if length > limit:
        raise TooLarge(f"The body has {length} bytes; {limit} are allowed.")
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HungUp
                piece = message.get("body", b"")
                size += len(piece)
                if size > limit:
                    raise TooLarge(f"The body has more than {limit} bytes.")
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError as error:
        raise BadRequest(f"The body was not complete after {BODY_TIMEOUT_S} s.") from error
