"""An engine's answer → the client, as its bytes come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, Protocol

import orjson

from warmfleet.engines.upstream import upstream_errors
from warmfleet.errors import Stopping, UpstreamError, UpstreamGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import aiohttp

    from warmfleet.errors import WarmfleetError

#: Of a plain answer, read before its headers go out: an engine that dies until then is a 502 and no broken answer.
BUFFER_MAX_BYTES = 1_048_576
#: Headers of an engine that reach the client. All others are about the connection, or ours.
PASSED_BACK = ("Content-Type", "Retry-After", "Cache-Control")


class FirstByte(Protocol):
    """Called when the first byte of a good answer is there. streams: more will follow over time."""

    def __call__(self, *, streams: bool) -> None: ...


class Answer:
    """What is to be relayed, and to whom. ``cut_off``: the engine died after the first byte had gone out."""

    def __init__(
        self,
        upstream: aiohttp.ClientResponse,
        send: Callable[[dict[str, Any]], Awaitable[None]],
        headers: Mapping[bytes, bytes],
    ) -> None:
        self.upstream = upstream
        self.status = upstream.status
        self.send = send
        self.cut_off = False
        given = upstream.headers
        self.headers = [(name.lower().encode(), given[name].encode()) for name in PASSED_BACK if name in given]
        self.headers += headers.items()

    @property
    def streams(self) -> bool:
        return self.upstream.content_type == "text/event-stream"

    async def start(self, length: int | None = None) -> None:
        if length is not None:
            self.headers.append((b"content-length", b"%d" % length))
        await self.send({"type": "http.response.start", "status": self.status, "headers": self.headers})

    async def body(self, data: bytes, *, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def end(self, error: WarmfleetError) -> None:
        """Say in the stream why it ends here: whatever was cut within an event, empty lines end it, or are nothing."""
        await self.body(b"\n\ndata: " + orjson.dumps(error.as_dict()) + b"\n\n", more=False)


async def relay(answer: Answer, first_byte: FirstByte, complete: Callable[[], None]) -> Literal["finished", "failed"]:
    """Pass the answer on; says how it ended. ``complete`` is called just before the last piece goes out.

    Raises UpstreamGone if the engine died before the first byte of its answer's body (nothing was sent: another may be
    tried), UpstreamError if a plain answer broke off before any of it was sent.
    """
    good: Literal["finished", "failed"] = "finished" if answer.status < 400 else "failed"
    if answer.streams:
        return await _stream(answer, await _first_piece(answer), first_byte, complete, good)
    try:
        with upstream_errors():
            body, whole = await _read(answer.upstream.content, BUFFER_MAX_BYTES)
    except UpstreamGone as error:  # its answer had begun, so the work was done once: not again elsewhere
        raise UpstreamError(error.message) from error
    if not whole:
        return await _stream(answer, body, first_byte, complete, good)
    first_byte(streams=False)
    await answer.start(len(body))
    complete()
    await answer.body(body, more=False)
    return good


async def _first_piece(answer: Answer) -> bytes:
    """Headers wait for it: until it is there, a dead engine can be replaced without the client seeing anything."""
    try:
        with upstream_errors():
            return await answer.upstream.content.readany()
    except UpstreamGone:
        raise
    except UpstreamError as error:  # the body broke off before it began
        raise UpstreamGone(error.message) from error


async def _read(content: aiohttp.StreamReader, limit: int) -> tuple[bytes, bool]:
    """The whole body, or as much of it as ``limit`` bytes and one piece more; and whether it is the whole."""
    piece = await content.readany()
    if content.at_eof():
        return piece, True
    pieces, size = [piece], len(piece)
    while size < limit:
        piece = await content.readany()
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False


async def _stream(
    answer: Answer,
    piece: bytes,
    first_byte: FirstByte,
    complete: Callable[[], None],
    good: Literal["finished", "failed"],
) -> Literal["finished", "failed"]:
    read, body = answer.upstream.content.readany, answer.body
    first_byte(streams=True)
    await answer.start()
    try:
        while piece:
            await body(piece, more=True)
            with upstream_errors():
                piece = await read()
    except UpstreamError as error:
        answer.cut_off = True
        if not answer.streams:
            raise  # part of a plain answer is out: closing the connection is all that can still be said
        complete()
        await answer.end(error)
        return "failed"
    except asyncio.CancelledError:  # the client is gone, and this goes nowhere; or this replica waits no longer
        if answer.streams:
            complete()
            await answer.end(Stopping())
        raise
    complete()
    await body(b"", more=False)
    return good
