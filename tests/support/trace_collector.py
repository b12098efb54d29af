"""A collector of traces in the test's own event loop: it reads OTLP over HTTP with the official classes."""

from __future__ import annotations

import asyncio
import gzip
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.support.polling import poll

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

SERVER, CLIENT = 2, 3
ERROR = 2  # a status


@dataclass
class Span:
    """A span as the collector read it. Times are in ns of Unix time. resource: attributes of its process."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    began_ns: int
    ended_ns: int
    status: int
    message: str
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any]
    flags: int = 0

    @property
    def event_names(self) -> list[str]:
        return [name for name, _, _ in self.events]


@dataclass
class Collector:
    """A collector. ``statuses``: of its next answers; then 200. ``busy``: no answer comes before it is set."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        await self.open.wait()
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.spans += read(body)
        return web.Response(status=status, text="" if status == 200 else "not now")

    async def requests(self, count: int = 1) -> list[Span]:
        """The spans of requests, once ``count`` came."""
        await poll(lambda: len(self._of(SERVER)) >= count, what=f"{count} traces")
        return self._of(SERVER)

    def tries(self, request: Span) -> list[Span]:
        """The tries of a request, in their order."""
        found = [span for span in self._of(CLIENT) if span.parent_id == request.span_id]
        return sorted(found, key=lambda span: span.began_ns)

    def _of(self, kind: int) -> list[Span]:
        return [span for span in self.spans if span.kind == kind]


def read(body: bytes) -> list[Span]:
    """The spans of an OTLP request."""
    message = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    return [
        Span(
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            state=span.trace_state,
            began_ns=span.start_time_unix_nano,
            ended_ns=span.end_time_unix_nano,
            status=span.status.code,
            message=span.status.message,
            attributes=attributes(span.attributes),
            events=[(event.name, event.time_unix_nano, attributes(event.attributes)) for event in span.events],
            resource=attributes(described.resource.attributes),
            flags=span.flags,
        )
        for described in message.resource_spans
        for scope in described.scope_spans
        for span in scope.spans
    ]


def attributes(pairs: Any) -> dict[str, Any]:
    """The attributes as Python values."""
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    return getattr(pair.value, str(pair.value.WhichOneof("value")))


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    """A collector on a free loopback port, open from the beginning."""
    made = Collector()
    made.open.set()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        made.open.set()
        await runner.cleanup()
