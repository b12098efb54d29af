"""The spans of a sampled request: one for the request itself, and one for each try at a worker.

A span is the record of a request or try, with the ids of a trace. The names for the collector are made later, by
``attributes`` and ``events``, in the exporter's thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from warmfleet.tracing.request_record import Event, Failure, RequestRecord, TryRecord
from warmfleet.tracing.trace_context import new_span_id, traceparent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.tracing.request_record import Attributes
    from warmfleet.tracing.trace_context import TraceContext

MAX_PATH_CHARACTERS = 256
OPERATIONS = {"completions": "text_completion", "chat": "chat", "messages": "chat", "responses": "chat"}


class TrySpan(TryRecord):
    """The span of a try at a worker."""

    def __init__(self, trace_id: str, reservation: str = "") -> None:
        super().__init__(reservation)
        self.trace_id = trace_id
        self.span_id = new_span_id()
        # Makes this span the parent of the engine's own span.
        self.headers = b"traceparent: %b\r\n" % traceparent(trace_id, self.span_id, sampled=True)

    def attributes(self) -> Attributes:
        """Return the names and values that the collector gets."""
        found: Attributes = {"warmfleet.outcome": self.outcome or "cancelled"}
        decision = self.decision
        if decision is not None:
            found |= {
                "warmfleet.worker": decision.worker_id,
                "warmfleet.reservation": decision.reservation,
                "warmfleet.decide_seconds": self.decided_at - self.began_at,
                "warmfleet.prompt_tokens": decision.prompt_tokens,
                "warmfleet.matched_tokens": decision.reused_tokens,
                "warmfleet.approximate": decision.approximate,
            }
            found |= _address(decision.url)
            if decision.prefill is not None:
                found["warmfleet.prefill_worker"] = decision.prefill.worker_id
            if self.pool:
                found["warmfleet.pool"] = self.pool
        if decision is not None and self.policy:
            found |= {
                "warmfleet.policy": self.policy,
                "warmfleet.why": decision.why,
                "warmfleet.cost_seconds": decision.cost_s,
                "warmfleet.wait_tokens": decision.wait_tokens,
            }
        if self.fallback:
            found["warmfleet.fallback"] = self.fallback
        if self.queued_at:
            found["warmfleet.queue_seconds"] = (self.decided_at or self.ended_at) - self.queued_at
        if self.hold is not None:
            found["warmfleet.held_seconds"] = self.held_s
        if self.sent_at:
            found |= {"warmfleet.engine_request_id": self.engine_request_id, "warmfleet.token_ids": self.sent_ids}
        if self.status:
            found["http.response.status_code"] = self.status
        if self.error is not None:
            found["error.type"] = self.error.word
        return found

    @property
    def error(self) -> Failure | None:
        """Why this try failed; None if it did not. An answer of 400 or more is a failure of a client span."""
        if self.failure is None and self.status >= 400:
            return Failure(str(self.status), "")
        return self.failure

    def events(self) -> Iterator[Event]:
        """Yield the steps of this try, with their times."""
        for at, name in (
            (self.queued_at, "queued"),
            (self.decided_at, "decided"),
            (self.sent_at, "sent"),
            (self.first_byte_at, "first_byte"),
        ):
            if at:
                yield Event(at, name, {})


class RequestSpan(RequestRecord):
    """The span of a client's request.

    ``name``: method and path; the method alone if only an operator's pattern allows the path, so that names are few.
    ``offset_ns``: Unix time minus the time of ``perf_counter``. ``tracestate``: as the client sent it.
    """

    def __init__(self, context: TraceContext, path: EnginePath, method: str, request_id: str, began_at: float) -> None:
        super().__init__(request_id, path, method, began_at)
        self.trace_id, self.parent_id, _, self.tracestate = context
        self.span_id = new_span_id()
        self.name = method if path.name == "other" else f"{method} {path.path}"
        self.offset_ns = time.time_ns() - time.perf_counter_ns()

    def begin_try(self, reservation: str = "") -> TryRecord:
        made = TrySpan(self.trace_id, reservation)
        self.tries.append(made)
        if self.log_step is not None:
            self._log_try(made, self.log_step)
        return made

    @property
    def error(self) -> Failure | None:
        """Why this request failed through the fleet's fault, or None.

        A client's own error or hang-up is no such failure, nor is a failed try if another worker served the request.
        """
        if self.failure is not None:
            return self.failure if self.error_status >= 500 else None
        if any(attempt.outcome == "finished" for attempt in self.tries):
            return None
        return next((attempt.failure for attempt in reversed(self.tries) if attempt.failure is not None), None)

    def attributes(self) -> Attributes:
        """Return the names and values that the collector gets."""
        found: Attributes = {
            "http.request.method": self.method,
            "url.path": self.path.path[:MAX_PATH_CHARACTERS],
            "warmfleet.request_id": self.request_id,
            "warmfleet.tries": len(self.tries),
        }
        operation = "embeddings" if self.path.name == "embeddings" else OPERATIONS.get(self.path.form)
        if operation is not None:
            found["gen_ai.operation.name"] = operation
        if self.identified_at:
            found |= {
                "gen_ai.request.model": self.model,
                "gen_ai.usage.input_tokens": self.prompt_tokens,
                "warmfleet.stream": self.streams,
                "warmfleet.identity": self.kind,
                "warmfleet.identify_seconds": self.identified_at - self.began_at,
            }
            if self.reason:
                found["warmfleet.identity_reason"] = self.reason
        if self.status:
            found["http.response.status_code"] = self.status
        if self.first_byte_at:
            found["warmfleet.first_byte_seconds"] = self.first_byte_at - self.began_at
        failed = self.failure or self.error
        if failed is not None:
            found["error.type"] = failed.word
        return found

    def events(self) -> Iterator[Event]:
        """Yield the steps of this request that belong to no single try, with their times."""
        if self.identified_at:
            yield Event(self.identified_at, "identified", {})
        yield from self.happened


def _address(url: str) -> Attributes:
    """Return host and port of an engine, without user and password."""
    try:
        parts = urlsplit(url)
        return {"server.address": parts.hostname or ""} | ({"server.port": parts.port} if parts.port else {})
    except ValueError:
        return {}
