"""Samples requests, and sends the spans of sampled requests to a collector, from a thread of its own.

No request waits for the export: a finished request is put into a bounded queue. If the queue is full, its spans are
dropped and counted.
"""

from __future__ import annotations

import gzip
import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import httpx

from warmfleet.errors import BadArgument
from warmfleet.tracing.options import tracing_options
from warmfleet.tracing.otlp import export_request, request_spans
from warmfleet.tracing.trace_context import Sampler, new_span_id, traceparent
from warmfleet.version import version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.metrics import Metrics
    from warmfleet.timing import Timing
    from warmfleet.tracing.options import TracingOptions
    from warmfleet.tracing.spans import RequestSpan
    from warmfleet.tracing.trace_context import TraceContext

logger = logging.getLogger("warmfleet.tracing")

MAX_WAITING = 4_096  # most requests that wait to be sent; each takes about 2 kB until then
MAX_BATCH = 256  # most requests in one message, which then has about 300 kB
RETRYABLE = frozenset({429, 502, 503, 504})  # statuses after which the standard lets a message be sent again
MAX_REFUSAL_BYTES = 200  # most bytes of a collector's refusal that are logged
CLOSE_S = 2.0  # longest time for sending the waiting spans when the replica stops


class Tracing:
    """The traces of one replica: ``open`` starts the thread, ``close`` sends the waiting spans."""

    def __init__(self, options: TracingOptions, timing: Timing, metrics: Metrics) -> None:
        """Raises BadArgument if a certificate cannot be used."""
        self._options = options
        self._timing = timing
        self.context = Sampler(options.share, by_parent=options.by_parent).context
        # Only one thread may increment a counter: ``dropped`` is the event loop's, the other two are the exporter's.
        self._dropped, self._exported, self._failed = map(metrics.traces.labels, ("dropped", "exported", "failed"))
        self._tls = _tls(options)
        self._waiting: deque[RequestSpan] = deque()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._resource = {
            "service.version": version(),
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "telemetry.sdk.name": "warmfleet",
            "telemetry.sdk.language": "python",
        } | options.resource

    # ------------------------------------------------ in the event loop

    def end(self, request: RequestSpan) -> None:
        """Queue the spans of a finished request for the next round; returns at once."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped.inc()
            return
        self._waiting.append(request)

    # ------------------------------------------------ the thread

    def open(self) -> None:
        """Start the thread that sends."""
        share, own = self._options.share, "" if self._options.by_parent else ", whatever callers decided"
        logger.info("traces of %g %% of the requests go to %s%s", 100 * share, self._options.endpoint, own)
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send the waiting spans, unless that takes longer than ``timeout_s``."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with httpx.HTTPTransport(verify=self._tls or False) as transport:  # a client of httpx would log each request
            while not self._stopping.wait(self._timing.traces_interval_s):
                self._round(transport)
            self._round(transport)

    def _round(self, transport: httpx.HTTPTransport) -> None:
        """Send the spans that wait now, in batches."""
        for _ in range(len(self._waiting) // MAX_BATCH + 1):
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
            if not batch:
                return
            try:
                refusal = self._send(transport, batch)
            except Exception:  # a bug here loses a batch, but must not end the thread
                self._failed.inc(len(batch))
                logger.exception("traces are lost")
                continue
            if not refusal:
                self._exported.inc(len(batch))
                continue
            self._failed.inc(len(batch))
            # The line does not name the number of requests, so that equal lines are folded. The metric has the number.
            logger.warning("traces are lost: the collector %s does not take them: %s", self._options.endpoint, refusal)

    def _send(self, transport: httpx.HTTPTransport, batch: list[RequestSpan]) -> str:
        """Send a batch, in several tries if need be. Returns why the collector did not take it; empty if it did."""
        spans = []
        for finished in batch:
            spans.append(request_spans(finished))
            time.sleep(0)  # lets the event loop go on, because making all spans of a batch may take 20 ms
        body = export_request(self._resource, self._resource["service.version"], spans)
        headers = {"Content-Type": "application/x-protobuf", **self._options.headers}
        if self._options.gzip:
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        limits = {"timeout": httpx.Timeout(self._options.timeout_s).as_dict()}
        request = httpx.Request("POST", self._options.endpoint, content=body, headers=headers, extensions=limits)
        for wait_s in (*self._timing.traces_retry_s, 0.0):
            refusal, may_help = _exchange(transport, request)
            if not may_help or not wait_s or self._stopping.wait(wait_s):
                break
        return refusal


def tracing_of(environment: Mapping[str, str], timing: Timing, metrics: Metrics) -> Tracing | None:
    """Return the tracing that these variables ask for; None if it is off. Raises BadArgument."""
    options = tracing_options(environment)
    return None if options is None else Tracing(options, timing, metrics)


def unsampled(context: TraceContext) -> bytes:
    """Return the traceparent for an engine of a trace that is not sampled, so that the engine does not sample it."""
    return traceparent(context.trace_id, new_span_id(), sampled=False)


def _exchange(transport: httpx.HTTPTransport, request: httpx.Request) -> tuple[str, bool]:
    """Send a request; return why the collector did not take it (empty if it did), and whether trying again may help."""
    try:
        answer = transport.handle_request(request)
        try:
            text = answer.read()[:MAX_REFUSAL_BYTES].decode("utf-8", "replace")
        finally:
            answer.close()
    except httpx.LocalProtocolError as error:  # its text may show a header's secret value
        return type(error).__name__, False
    except (httpx.HTTPError, OSError) as error:
        return f"{type(error).__name__}: {error}", True
    if answer.is_success:
        return "", False
    return f"it answered {answer.status_code} {text}".strip(), answer.status_code in RETRYABLE


def _tls(options: TracingOptions) -> ssl.SSLContext | None:
    """Return the context for an endpoint with TLS; None without. Raises BadArgument."""
    if not options.endpoint.startswith("https:"):
        return None
    try:
        context = ssl.create_default_context(cafile=options.certificate or None)
        if options.client_certificate:
            context.load_cert_chain(options.client_certificate, options.client_key or None)
    except (OSError, ssl.SSLError) as error:
        raise BadArgument(f"OTEL_EXPORTER_OTLP_CERTIFICATE, or that of the client, cannot be used: {error}") from error
    return context
