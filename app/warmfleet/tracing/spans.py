"""The spans of one sampled request: one for the request itself, and one for each try at a worker.

While the request runs they only keep times and references. The names that a collector gets are made afterwards, by
``attributes`` and ``events``, in the exporter's thread. All times are by ``time.perf_counter``, 0 = it did not happen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from warmfleet.tracing.trace_context import new_span_id, traceparent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet import Decision
    from warmfleet.fleet.reservations import Outcome
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.tracing.trace_context import TraceContext

MAX_ERROR_CHARACTERS = 300
MAX_PATH_CHARACTERS = 256
MAX_EVENTS = 16  # of a request: it has at most four tries, one second worker and one continuation
OPERATIONS = {"completions": "text_completion", "chat": "chat", "messages": "chat", "responses": "chat"}

Value = str | bool | int | float
Attributes = dict[str, Value]


class Event(NamedTuple):
    """Something that happened at one moment of a span."""

    at: float
    name: str
    attributes: Attributes


class Failure(NamedTuple):
    """Why a span failed. word: of few, for queries, such as the code of an error."""

    word: str
    message: str


class PromptFacts(NamedTuple):
    """How the prompt of a request was identified. kind, reason: see ``IdentifiedPrompt``."""

    model: str
    kind: str
    reason: str
    tokens: int
    streams: bool


def _failure(error: WarmfleetError) -> Failure:
    return Failure(error.code, error.message[:MAX_ERROR_CHARACTERS])


class TrySpan:
    """One try at a worker, from before the decision until everything is given back.

    ``policy``: that chose; empty if Redis did not choose, and then ``fallback`` says why not. ``pool``: the tag of the
    chosen one; empty where the model has one pool. ``engine_request_id``: the X-Request-Id that the engine got last.
    """

    __slots__ = (
        *("began_at", "decided_at", "decision", "ended_at", "engine_request_id", "failure", "fallback"),
        *("first_byte_at", "outcome", "policy", "pool", "queued_at", "sent_at", "sent_ids", "span_id", "status"),
        "trace_id",
    )

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.span_id = new_span_id()
        self.began_at = time.perf_counter()
        self.queued_at = self.decided_at = self.sent_at = self.first_byte_at = self.ended_at = 0.0
        self.decision: Decision | None = None
        self.policy = self.fallback = self.pool = ""
        self.engine_request_id = ""
        self.sent_ids = False
        self.status = 0
        self.outcome: Outcome = "cancelled"
        self.failure: Failure | None = None

    def queued(self) -> None:
        """The request waits for its worker. The first time counts: a decision is asked for again and again."""
        self.queued_at = self.queued_at or time.perf_counter()

    def decided(self, decision: Decision, policy: str, fallback: str = "") -> None:
        """A worker was chosen. fallback: why Redis did not choose it."""
        self.decided_at = time.perf_counter()
        self.decision, self.policy, self.fallback = decision, policy, fallback

    def sent(self, request_id: str, *, ids: bool) -> bytes:
        """The request is sent to the worker; returns the line of its traceparent. ids: token ids in place of text."""
        self.sent_at = time.perf_counter()
        self.engine_request_id, self.sent_ids = request_id, ids
        return b"traceparent: %b\r\n" % traceparent(self.trace_id, self.span_id, sampled=True)

    def first_byte(self, status: int) -> None:
        """The first byte of the worker's answer came, and will be passed on."""
        self.first_byte_at, self.status = time.perf_counter(), status

    def failed(self, error: WarmfleetError) -> None:
        """The worker failed, or its answer broke off."""
        self.failure = _failure(error)

    def end(self, outcome: Outcome) -> None:
        """Everything was given back."""
        self.ended_at, self.outcome = time.perf_counter(), outcome

    def attributes(self) -> Attributes:
        """What the span tells."""
        told: Attributes = {"warmfleet.outcome": self.outcome}
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


class RequestSpan:
    """One request of a client, from when its body was complete until its answer ended.

    ``name``: one of few, so that it lacks a path that only a pattern of the operator covers. ``offset_ns``: what makes
    the time of this span's clock Unix time. ``tracestate``: as the client sent it.
    """

    __slots__ = (
        *("_events", "began_at", "ended_at", "failure", "identified_at", "method", "name", "offset_ns", "operation"),
        *("parent_id", "path", "prompt", "request_id", "span_id", "status", "trace_id", "tracestate", "tries"),
    )

    def __init__(self, context: TraceContext, path: EnginePath, method: str, request_id: str, began_at: float) -> None:
        self.trace_id, self.parent_id, _, self.tracestate = context
        self.span_id = new_span_id()
        self.method, self.request_id, self.began_at = method, request_id, began_at
        self.path = path.path[:MAX_PATH_CHARACTERS]
        self.name = method if path.name == "other" else f"{method} {path.path}"
        self.operation = "embeddings" if path.name == "embeddings" else OPERATIONS.get(path.form)
        self.offset_ns = time.time_ns() - time.perf_counter_ns()
        self.identified_at = self.ended_at = 0.0
        self.prompt: PromptFacts | None = None
        self.status = 0
        self.failure: Failure | None = None
        self.tries: list[TrySpan] = []
        self._events: list[Event] = []

    def begin_try(self) -> TrySpan:
        """The span of a new try at a worker."""
        made = TrySpan(self.trace_id)
        self.tries.append(made)
        return made

    def identified(self, prompt: PromptFacts) -> None:
        """The prompt was identified."""
        self.prompt, self.identified_at = prompt, time.perf_counter()

    def event(self, name: str, **attributes: Value) -> None:
        """Something that happened between two tries. The first MAX_EVENTS are kept."""
        if len(self._events) < MAX_EVENTS:
            self._events.append(Event(time.perf_counter(), name, attributes))

    def refused(self, error: WarmfleetError) -> None:
        """The client got this error as its answer, or as the end of its answer."""
        self.failure, self.status = _failure(error), error.status

    def hung_up(self) -> None:
        """The client hung up before its answer was complete."""
        self.failure = Failure("client_hung_up", "The client hung up before its answer was complete.")

    def end(self) -> None:
        """The answer is complete, or will never be."""
        self.ended_at = time.perf_counter()

    @property
    def answered(self) -> int:
        """The status that the client got; 0: none."""
        return self.status or next((one.status for one in self.tries if one.status), 0)

    @property
    def error(self) -> Failure | None:
        """Why this request failed by the fleet's fault, or None.

        An error that is the client's own is none here, and neither is a client that hangs up. An answer that another
        worker completed did not fail.
        """
        if self.failure is not None:
            return self.failure if self.status >= 500 else None
        if any(one.outcome == "finished" for one in self.tries):
            return None
        return next((one.failure for one in reversed(self.tries) if one.failure is not None), None)

    def attributes(self) -> Attributes:
        """What the span tells."""
        told: Attributes = {
            "http.request.method": self.method,
            "url.path": self.path,
            "warmfleet.request_id": self.request_id,
            "warmfleet.tries": len(self.tries),
        }
        if self.operation is not None:
            told["gen_ai.operation.name"] = self.operation
        if self.prompt is not None:
            told |= {
                "gen_ai.request.model": self.prompt.model,
                "gen_ai.usage.input_tokens": self.prompt.tokens,
                "warmfleet.stream": self.prompt.streams,
                "warmfleet.identity": self.prompt.kind,
                "warmfleet.identify_seconds": self.identified_at - self.began_at,
            }
            if self.prompt.reason:
                told["warmfleet.identity_reason"] = self.prompt.reason
        if self.answered:
            told["http.response.status_code"] = self.answered
        first = min((one.first_byte_at for one in self.tries if one.first_byte_at), default=0.0)
        if first:
            told["warmfleet.first_byte_seconds"] = first - self.began_at
        failed = self.failure or self.error
        if failed is not None:
            told["error.type"] = failed.word
        return told

    def events(self) -> Iterator[Event]:
        """The moments of this request that belong to no single try."""
        if self.identified_at:
            yield Event(self.identified_at, "identified", {})
        yield from self._events


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
