"""The spans of one sampled request: one for the request itself, and one for each try at a worker.

They are the records that every request has, with the ids of a trace. The names that a collector gets are made
afterwards, by ``attributes`` and ``events``, in the exporter's thread.
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
    """One try at a worker, from before the decision until everything is given back."""

    def __init__(self, trace_id: str, reservation: str = "") -> None:
        super().__init__(reservation)
        self.trace_id = trace_id
        self.span_id = new_span_id()
        # The engine's own span belongs to this one.
        self.headers = b"traceparent: %b\r\n" % traceparent(trace_id, self.span_id, sampled=True)

    def attributes(self) -> Attributes:
        """What the span tells."""
        told: Attributes = {"warmfleet.outcome": self.outcome or "cancelled"}
        decision = self.decision
        if decision is not None:
            told |= {
                "warmfleet.worker": decision.worker_id,
                "warmfleet.reservation": decision.reservation,
                "warmfleet.decide_seconds": self.decided_at - self.began_at,
                "warmfleet.prompt_tokens": decision.prompt_tokens,
                "warmfleet.matched_tokens": decision.matched_tokens,
                "warmfleet.approximate": decision.approximate,
            }
            told |= _address(decision.url)
            if self.pool:
                told["warmfleet.pool"] = self.pool
        if decision is not None and self.policy:
            told |= {
                "warmfleet.policy": self.policy,
                "warmfleet.why": decision.why,
                "warmfleet.cost_seconds": decision.cost_s,
                "warmfleet.wait_tokens": decision.wait_tokens,
            }
        if self.fallback:
            told["warmfleet.fallback"] = self.fallback
        if self.queued_at:
            told["warmfleet.queue_seconds"] = (self.decided_at or self.ended_at) - self.queued_at
        if self.sent_at:
            told |= {"warmfleet.engine_request_id": self.engine_request_id, "warmfleet.token_ids": self.sent_ids}
        if self.status:
            told["http.response.status_code"] = self.status
        if self.error is not None:
            told["error.type"] = self.error.word
        return told

    @property
    def error(self) -> Failure | None:
        """Why this try failed; None if it did not. For the side that asks, an answer of 400 is a failure, too."""
        if self.failure is None and self.status >= 400:
            return Failure(str(self.status), "")
        return self.failure

    def events(self) -> Iterator[Event]:
        """The moments of this try."""
        for at, name in (
            (self.queued_at, "queued"),
            (self.decided_at, "decided"),
            (self.sent_at, "sent"),
            (self.first_byte_at, "first_byte"),
        ):
            if at:
                yield Event(at, name, {})


class RequestSpan(RequestRecord):
    """One request of a client, from when its body was complete until its answer ended.

    ``name``: one of few, so that it lacks a path that only a pattern of the operator covers. ``offset_ns``: what makes
    the time of this span's clock Unix time. ``tracestate``: as the client sent it.
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
        """Why this request failed by the fleet's fault, or None.

        An error that is the client's own is none here, and neither is a client that hangs up. An answer that another
        worker completed did not fail.
        """
        if self.failure is not None:
            return self.failure if self.error_status >= 500 else None
        if any(one.outcome == "finished" for one in self.tries):
            return None
        return next((one.failure for one in reversed(self.tries) if one.failure is not None), None)

    def attributes(self) -> Attributes:
        """What the span tells."""
        told: Attributes = {
            "http.request.method": self.method,
            "url.path": self.path.path[:MAX_PATH_CHARACTERS],
            "warmfleet.request_id": self.request_id,
            "warmfleet.tries": len(self.tries),
        }
        operation = "embeddings" if self.path.name == "embeddings" else OPERATIONS.get(self.path.form)
        if operation is not None:
            told["gen_ai.operation.name"] = operation
        if self.identified_at:
            told |= {
                "gen_ai.request.model": self.model,
                "gen_ai.usage.input_tokens": self.prompt_tokens,
                "warmfleet.stream": self.streams,
                "warmfleet.identity": self.kind,
                "warmfleet.identify_seconds": self.identified_at - self.began_at,
            }
            if self.reason:
                told["warmfleet.identity_reason"] = self.reason
        if self.status:
            told["http.response.status_code"] = self.status
        if self.first_byte_at:
            told["warmfleet.first_byte_seconds"] = self.first_byte_at - self.began_at
        failed = self.failure or self.error
        if failed is not None:
            told["error.type"] = failed.word
        return told

    def events(self) -> Iterator[Event]:
        """The moments of this request that belong to no single try."""
        if self.identified_at:
            yield Event(self.identified_at, "identified", {})
        yield from self.happened


def _address(url: str) -> Attributes:
    """Host and port of an engine, without user and password."""
    try:
        parts = urlsplit(url)
        told: Attributes = {"server.address": parts.hostname or ""}
        if parts.port:
            told["server.port"] = parts.port
    except ValueError:
        return {}
    return told
