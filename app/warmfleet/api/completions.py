"""Serves the paths whose requests go to engines."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.api.client_hints import patience_s, read_hints
from warmfleet.api.error_answers import OUR_BUG, send_error
from warmfleet.engines.request_headers import header_lines, header_value, safe_request_id
from warmfleet.errors import BadRequest, MethodNotAllowed, Stopping, WarmfleetError
from warmfleet.logs.lines import log_request_id
from warmfleet.routing.call import Call
from warmfleet.tracing.exporter import unsampled
from warmfleet.tracing.request_record import RequestRecord
from warmfleet.tracing.spans import RequestSpan

if TYPE_CHECKING:
    from warmfleet.api.access.client_keys import ClientKey, ClientKeys
    from warmfleet.api.access_log import AccessLog
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.metrics import Metrics
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.routing.router import Router
    from warmfleet.settings import Settings
    from warmfleet.tracing.exporter import Tracing
    from warmfleet.tracing.last_requests import LastRequests

logger = logging.getLogger("warmfleet.api.completions")
steps = logging.getLogger("warmfleet.steps")

_QUERY = re.compile(rb"[!-~]*")
Field = tuple[bytes, bytes]

JSON: Field = (b"Content-Type", b"application/json")
NOTHING: Field = (b"", b"")
#: Headers of a client that reach the engine; Authorization only if the settings have neither a key for workers nor a
#: file of clients' keys.
PASSED_ON = {
    b"accept": b"Accept",
    b"authorization": b"Authorization",
    b"content-type": b"Content-Type",
    b"traceparent": b"traceparent",
    b"tracestate": b"tracestate",
    b"user-agent": b"User-Agent",
    b"x-api-key": b"X-Api-Key",
    b"x-session-id": b"X-Session-ID",
}


class Noting(NamedTuple):
    """The receivers of requests' records: ``/why`` and, if set, the collector of traces and the access log."""

    last: LastRequests
    tracing: Tracing | None = None
    access_log: AccessLog | None = None


class CompletionsProxy:
    """Serves one path. The task of a request is cancelled when its client hangs up, at whatever step it is."""

    def __init__(
        self,
        path: EnginePath,
        router: Router,
        keys: ClientKeys,
        settings: Settings,
        metrics: Metrics,
        noting: Noting,
    ) -> None:
        self._path = path
        self._last, self._tracing, self._access_log = noting
        self._keys = keys
        self._methods = {method.encode(): method for method in path.methods}
        self._router = router
        self._explain_key = settings.explain_key
        key = settings.worker_api_key
        self._worker_authorization = (b"Authorization", header_value(f"Bearer {key}")) if key else None
        self._metrics = metrics

    async def serve(self, request: HttpRequest, answer: ClientAnswer) -> None:
        """Answer one request; an error becomes an answer, too."""
        passed_on, for_router = self._read_headers(request.headers)
        request_id = safe_request_id(for_router.get(b"x-request-id", b""))
        record = self._record(request, request_id, passed_on)
        log_request_id(request_id, record.trace_id)
        self._metrics.in_flight.inc()
        try:
            client = self._keys.client(request.headers)
            if request.method not in self._methods:
                takes = ", ".join(self._path.methods)
                raise MethodNotAllowed(f"This endpoint takes {takes}.", takes)  # noqa: TRY301  one place answers errors
            self._last.begun(record)
            if request.coding:
                await request.decode(request)
            call = self._call(request, record, client, passed_on, for_router)
            await self._router.serve(call, answer)
        except asyncio.CancelledError:
            if answer.lost:
                record.hung_up()
            # The client hung up, or the time after a stop signal is over. If part of a plain answer was sent, only
            # closing the connection can tell the client that the answer is cut off.
            if answer.lost or (answer.started and not answer.complete):
                raise
            if not answer.complete:
                await self._refuse(answer, record, Stopping())
        except WarmfleetError as error:
            await self._refuse(answer, record, error)
        except Exception:  # a bug
            logger.exception("request %s failed", request_id)
            await self._refuse(answer, record, WarmfleetError(OUR_BUG))
        finally:
            self._metrics.in_flight.dec()
            self._end(record, answer)

    def _end(self, record: RequestRecord, answer: ClientAnswer) -> None:
        """Pass the finished request's record to ``/why``, the access log and the collector of traces."""
        ended_by_error = record.failure is not None and record.first_byte_at > 0  # an error ended the started answer
        record.end(answer.status, complete=answer.complete and not ended_by_error)
        self._last.ended(record)
        if self._access_log is not None:
            self._access_log.engines(record)
        if self._tracing is not None and isinstance(record, RequestSpan):
            self._tracing.end(record)

    def _record(self, request: HttpRequest, request_id: str, passed_on: dict[bytes, Field]) -> RequestRecord:
        """Begin the record of a request; a sampled request's record is a span."""
        method = self._methods.get(request.method) or request.method.decode("ascii", "replace")
        record: RequestRecord | None = None
        if self._tracing is not None:
            record = self._span(self._tracing, request, request_id, method, passed_on)
        if record is None:
            record = RequestRecord(request_id, self._path, method, request.received_at)
        if steps.isEnabledFor(logging.DEBUG):
            record.log_step = partial(_log_step, request_id)
            record.log_step(f"{record.method} {self._path.path}, {len(request.body)} bytes")
        return record

    def _span(
        self, tracing: Tracing, request: HttpRequest, request_id: str, method: str, passed_on: dict[bytes, Field]
    ) -> RequestSpan | None:
        """Begin the span of a sampled request, and drop the traceparent from the engine's headers, because each
        try makes its own. For any other request, return None, and tell the engine that it is not sampled.
        """
        given = passed_on.pop(b"traceparent", NOTHING)[1]
        context = tracing.context(given, passed_on.get(b"tracestate", NOTHING)[1])
        if not context.parent_id:
            passed_on.pop(b"tracestate", None)  # a tracestate belongs to a traceparent
        if not context.sampled:
            passed_on[b"traceparent"] = (b"traceparent", unsampled(context))
            return None
        return RequestSpan(context, self._path, method, request_id, request.received_at)

    def _call(
        self,
        request: HttpRequest,
        record: RequestRecord,
        client: ClientKey,
        passed_on: dict[bytes, Field],
        for_router: dict[bytes, bytes],
    ) -> Call:
        """Build the call from the request and its headers. Raises BadRequest, Unauthorized."""
        query = request.target.partition(b"?")[2]
        if query and not _QUERY.fullmatch(query):
            raise BadRequest("The query of the URL must be ASCII, with every other byte written as %XX.")
        return Call(
            self._path,
            request.body,
            record,
            header_lines(passed_on.values()),
            *self._router.tenancy.of(request.headers, client.name),
            patience_s(for_router.get(b"x-request-timeout-ms")) if for_router else math.inf,
            request.received_at,
            read_hints(for_router, passed_on.get(b"x-session-id", NOTHING)[1], self._explain_key),
            self._methods[request.method],
            f"{self._path.path}?{query.decode()}" if query else self._path.path,
            client.models,
            client.limits,
            passed_on[b"content-type"][1],
            b"x-request-id" in for_router,
        )

    def _read_headers(self, raw: list[tuple[bytes, bytes]]) -> tuple[dict[bytes, Field], dict[bytes, bytes]]:
        """Return the headers for the engine and those for the router; of two headers with one name the last counts."""
        passed_on, for_router = {b"content-type": JSON}, dict[bytes, bytes]()
        for name, value in raw:
            spelled = PASSED_ON.get(name)
            if spelled is not None:
                passed_on[name] = (spelled, value)
            elif name.startswith((b"x-warmfleet-", b"x-request-")):
                for_router[name] = value
        anthropic_key = passed_on.pop(b"x-api-key", None)  # vLLM takes a key in Authorization only
        if anthropic_key is not None:
            passed_on.setdefault(b"authorization", (b"Authorization", b"Bearer " + anthropic_key[1]))
        if self._worker_authorization:
            passed_on[b"authorization"] = self._worker_authorization
        elif self._keys.required:  # an engine must not learn a key that routers accept
            passed_on.pop(b"authorization", None)
        return passed_on, for_router

    async def _refuse(self, answer: ClientAnswer, record: RequestRecord, error: WarmfleetError) -> None:
        """Answer with the error; if part of another answer was sent, that answer stays cut off."""
        record.refused(error)
        self._metrics.requests.labels(self._path.name, str(error.status), "none", answer.model).inc()
        if not answer.started:
            await send_error(answer, error, self._path.path.encode(), record.request_id)


def _log_step(request_id: str, step: str) -> None:
    """Log a step of a request under the request's id, also from a task other than the request's own."""
    steps.debug("%s", step, extra={"request_id": request_id})
