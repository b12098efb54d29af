"""Limits that uvicorn lacks: of time and size for request headers, and of open connections."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

HEAD_MAX_BYTES = 65_536
HEADER_TIMEOUT_S = 10.0  # headers fit into a packet or two: a slower client holds a connection for nothing


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection whose request headers are not complete in time, or are larger than HEAD_MAX_BYTES.

    A timer runs from the connection, or from the first byte of a later request, until the headers are complete.
    """

    header_timeout_s = HEADER_TIMEOUT_S
    max_connections = 4_096

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.close()  # no answer: under a flood even a 503 costs too much
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_MAX_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arm()

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._timer is None:
            self._head_bytes = 0
            self._timer = self.loop.call_later(self.header_timeout_s, self._expired)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def limited_protocol(header_timeout_s: float, max_connections: int) -> type[HttpToolsProtocol]:
    """A protocol class with these limits, for uvicorn's ``http=``."""
    limits = {"header_timeout_s": header_timeout_s, "max_connections": max_connections}
    return type("LimitedProtocol", (LimitedProtocol,), limits)
