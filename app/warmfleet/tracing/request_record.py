"""The record of a request and of its tries at workers: times, sizes and results.

A record begins when the request's body is complete, and ends with the answer. Every request has a record, so each step
only notes a time or a reference. Texts for people are made when somebody asks (``api/request_reasons``) or in the log's
thread. Of prompt and answer a record holds only the sizes. All times are by ``time.perf_counter``; 0: it did not
happen.

A field that was not set has the value of the class, which saves time, because most requests set few fields.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from warmfleet.engines.reported_usage import TAIL_BYTES
from warmfleet.errors import UpstreamGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet import Decision, Hold
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.prompt.engine_paths import EnginePath

    #: Logs a step of the request; None unless the log is at debug level.
    LogStep = Callable[[str], None]

MAX_ERROR_CHARACTERS = 300  # most characters kept of an error's message
MAX_MODEL_CHARACTERS = 200  # most characters kept of a model's name, as the client wrote it
MAX_EVENTS = 16  # most events of a request, which has at most four tries, one second worker and one continuation
HUNG_UP = "client_hung_up"
USAGE = b'"usage"'
LONGEST_OPENING = len(USAGE) + len(" : {")

Value = str | bool | int | float
Attributes = dict[str, Value]


class EndedAnswer(Protocol):
    """An engine's answer that has ended. ``chunks``, ``gap_s``, ``client_s``: see ``TryRecord``. ``tail``: its last
    bytes.
    """

    @property
    def chunks(self) -> int: ...
    @property
    def gap_s(self) -> float: ...
    @property
    def client_s(self) -> float: ...
    @property
    def tail(self) -> bytes: ...


class Event(NamedTuple):
    """An event at one moment of a request."""

    at: float
    name: str
    attributes: Attributes


class Failure(NamedTuple):
    """The reason why a request or a try failed. word: one of few, for queries, such as the code of an error. prefill:
    the engine that failed, if it was the one that computed the prompt for the chosen worker.
    """

    word: str
    message: str
    prefill: str = ""


def _failure(error: WarmfleetError, prefill: str = "") -> Failure:
    """Return the failure without the text of an engine (behind a colon), because it may quote the request."""
    answered = isinstance(error, UpstreamGone) and error.answered
    message = error.message.partition(": ")[0] if answered else error.message
    return Failure(error.code, message[:MAX_ERROR_CHARACTERS], prefill)


class TryRecord:
    """A try at a worker, from before the decision until everything is given back.

    ``asked_at``: when Redis was asked for the decision that chose the worker. ``waiting``, ``work_s``: requests and
    seconds of prefill in the queue when this request joined it. ``held_at``: since when it is held until the caches
    have room for its session, 0 unless it is held now; ``held_s``: the seconds of earlier holds; ``hold``: its place at
    first; None if it was never held. ``policy``: the policy that chose; empty if Redis did not choose, and then
    ``fallback`` says why not. ``token_s``: seconds of prefill of a token at the worker, 0 while no speed is known.
    ``pool``: the tag of the chosen pool; empty if the model has one pool. ``engine_request_id``: the X-Request-Id that
    the engine got last. ``headers``: header lines that only this try's request to the engine has. ``chunks``: number of
    pieces of the engine's answer. ``gap_s``: the longest silence between two pieces. ``usage``: the JSON of the
    engine's usage field. ``cached_tokens``: of the prompt, as the plugin reported them; None before. ``client_s``:
    seconds for which the engine's answer waited for the client.
    """

    asked_at = queued_at = held_at = decided_at = sent_at = first_byte_at = ended_at = 0.0
    decision: Decision | None = None
    hold: Hold | None = None
    policy = fallback = pool = engine_request_id = ""
    token_s = work_s = held_s = gap_s = client_s = 0.0
    waiting = status = chunks = 0
    sent_ids = False
    usage = b""
    headers = b""
    cached_tokens: int | None = None
    outcome: Outcome | None = None
    failure: Failure | None = None
    log_step: LogStep | None = None

    def __init__(self, reservation: str = "") -> None:
        self.reservation = reservation
        self.began_at = time.perf_counter()

    def queued(self, waiting: int, work_s: float) -> None:
        """Note that the request waits in the queue. Of repeated calls only the first counts."""
        if not self.queued_at:
            self.queued_at = time.perf_counter()
            self.waiting, self.work_s = waiting, work_s
            if self.log_step is not None:
                self.log_step(f"queued: {waiting} requests wait, {work_s:.2f} s of work")

    def held(self, hold: Hold) -> None:
        """Note that the request is held. Of repeated holds the first tells the place in the line."""
        self.held_at = time.perf_counter()
        if self.hold is None:
            self.hold = hold
            if self.log_step is not None:
                why = "paused" if hold.paused else "new"
                self.log_step(f"held ({why}): {hold.ahead} sessions before it, {hold.predicted_s:.2f} s predicted")

    def held_facts(self, now: float) -> dict[str, Value]:
        """Return for how long the request was held until ``now``, why, and its place in the line at first."""
        if self.hold is None:
            return {}
        seconds = self.held_s + (now - self.held_at if self.held_at else 0.0)
        why = "paused" if self.hold.paused else "new"
        return {"held_ms": 10_000 * seconds // 1 / 10, "held": why, "ahead": self.hold.ahead}

    def let_go(self) -> None:
        """Note the end of a hold. A hold within a wait in the queue does not count for that wait."""
        seconds, self.held_at = time.perf_counter() - self.held_at, 0.0
        self.held_s += seconds
        if self.queued_at:
            self.queued_at += seconds

    def decided(self, decision: Decision, policy: str, asked_at: float, token_s: float, fallback: str = "") -> None:
        """Note the chosen worker. fallback: why Redis did not choose it."""
        self.decided_at = time.perf_counter()
        self.decision, self.policy, self.asked_at, self.token_s = decision, policy, asked_at, token_s
        if fallback:
            self.fallback = fallback
        if self.log_step is not None:
            by = f"by {policy}, {decision.why}" if policy else f"without Redis ({fallback})"
            held = f"{decision.matched_tokens} of {decision.prompt_tokens} tokens held"
            self.log_step(f"decided: {decision.worker_id} {by}, cost {decision.cost_s:.4f} s, {held}")

    def sent(self, engine_request_id: str, *, with_ids: bool) -> None:
        """Note that the request is sent to the worker. with_ids: with token ids in place of the text."""
        self.sent_at, self.engine_request_id, self.sent_ids = time.perf_counter(), engine_request_id, with_ids
        if self.log_step is not None:
            self.log_step(f"sent as {engine_request_id}" + (", with token ids" if with_ids else ""))

    def first_byte(self, status: int, at: float) -> None:
        """Note that the first byte of the worker's answer came, and will be passed on."""
        self.first_byte_at, self.status = at, status
        if self.log_step is not None:
            self.log_step(f"first byte, status {status}, {1_000 * (at - self.sent_at):.1f} ms after it was sent")

    def came(self, answer: EndedAnswer) -> None:
        """Note the sizes and times of an answer that has ended, complete or not."""
        self.chunks, self.gap_s, self.client_s = answer.chunks, answer.gap_s, answer.client_s
        tail = answer.tail
        begins = tail.rfind(USAGE, -TAIL_BYTES)
        if begins >= 0 and tail.find(b"{", begins, begins + LONGEST_OPENING) > 0:  # usage is an object, not null
            ends = tail.find(b"}", begins) + 1
            if tail[ends : ends + 1] == b"," and tail.count(b"{", begins, ends) > 1:  # only an inner object ended
                ends = tail.find(b"}", ends) + 1
            self.usage = tail[begins:ends]

    def failed(self, error: WarmfleetError, prefill: str = "") -> None:
        """Note that the worker failed, or that its answer broke off. prefill: see ``Failure``."""
        self.failure = _failure(error, prefill)
        if self.log_step is not None:
            self.log_step(f"failed: {self.failure.message}")

    def end(self, outcome: Outcome) -> None:
        """Note that all that was booked for this try was given back."""
        self.ended_at, self.outcome = time.perf_counter(), outcome
        if self.decision is not None and self.decision.seen is not None:
            self.decision = replace(self.decision, seen=None)  # ``seen`` has all workers, too much for a stored record
        if self.log_step is not None:
            self.log_step(f"settled: {outcome}")


class RequestRecord:
    """A request of a client, from when its body was complete until its answer ended.

    ``kind``, ``reason``: how the prompt was identified, see ``IdentifiedPrompt``. ``status``: of the client's answer, 0
    if none was sent. ``error_status``: of the error that ended the request, even if the answer had begun with another
    status. ``complete``: the answer did not break off. ``placed``: the router only chose the worker; a gateway sends
    the request. ``kept``: ``LastRequests`` has the record.
    """

    model = kind = reason = trace_id = ""
    prompt_tokens = status = error_status = 0
    streams = complete = placed = kept = False
    identified_at = ended_at = 0.0
    failure: Failure | None = None
    log_step: LogStep | None = None
    happened: tuple[Event, ...] = ()

    def __init__(self, request_id: str, path: EnginePath, method: str, began_at: float) -> None:
        self.request_id, self.path, self.method, self.began_at = request_id, path, method, began_at
        self.tries: list[TryRecord] = []

    def begin_try(self, reservation: str) -> TryRecord:
        """Add and return the record of a new try at a worker."""
        made = TryRecord(reservation)
        self.tries.append(made)
        if self.log_step is not None:
            self._log_try(made, self.log_step)
        return made

    def _log_try(self, made: TryRecord, log_step: LogStep) -> None:
        made.log_step = log_step
        log_step(f"try {len(self.tries)}, reservation {made.reservation}")

    def identified(self, model: str, kind: str, reason: str, tokens: int, *, streams: bool) -> None:
        """Note that the prompt was identified."""
        self.identified_at = time.perf_counter()
        self.model = model if len(model) <= MAX_MODEL_CHARACTERS else model[:MAX_MODEL_CHARACTERS]
        self.kind, self.reason, self.prompt_tokens, self.streams = kind, reason, tokens, streams
        if self.log_step is not None:
            why = f" ({reason})" if reason else ""
            self.log_step(f"identified: {kind}{why}, {tokens} tokens for {self.model}")

    def event(self, name: str, **attributes: Value) -> None:
        """Note an event between two tries. The first MAX_EVENTS are kept."""
        if len(self.happened) < MAX_EVENTS:
            self.happened = (*self.happened, Event(time.perf_counter(), name, attributes))
        if self.log_step is not None:
            values = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in attributes.items())
            self.log_step(f"{name}: {values}")

    def refused(self, error: WarmfleetError) -> None:
        """Note the error that the client got as its answer, or as the end of its answer."""
        self.failure, self.error_status = _failure(error), error.status
        if self.log_step is not None:
            self.log_step(f"refused: {error.status} {error.code}")

    def hung_up(self) -> None:
        """Note that the client hung up before its answer was complete."""
        self.failure = Failure(HUNG_UP, "The client hung up before its answer was complete.")

    def end(self, status: int, *, complete: bool) -> None:
        """Note the end: the answer is complete, or will never be."""
        self.ended_at, self.status, self.complete = time.perf_counter(), status, complete

    @property
    def first_byte_at(self) -> float:
        """When the first byte of the answer came from a worker."""
        return min([attempt.first_byte_at for attempt in self.tries if attempt.first_byte_at], default=0.0)
