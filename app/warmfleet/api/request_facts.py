"""The facts of a request as values for JSON, the same for the access log, ``/why`` and the status page."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from warmfleet.engines.output_tokens import REPORTED
from warmfleet.pools.reasons import where_held

if TYPE_CHECKING:
    from warmfleet.tracing.request_record import RequestRecord, TryRecord

HUNG_UP_STATUS = 499  # status that is logged, as by nginx, if the client hung up before it was answered
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)" ?: ?(\d{1,9})')
_CLOCK_OFFSET_S = time.time() - time.perf_counter()


def ms(seconds: float) -> float:
    """Return milliseconds with one decimal, rounded down, because ``round`` takes five times as long."""
    return 10_000 * seconds // 1 / 10


def started_at(record: RequestRecord) -> float:
    """Return the Unix time at which the whole request had come, by the system's clock as of this process's start."""
    return record.began_at + _CLOCK_OFFSET_S


def served_by(record: RequestRecord) -> TryRecord | None:
    """Return the try whose answer the client got first, else the last try; None if there was none."""
    tries = record.tries
    if len(tries) < 2:
        return tries[0] if tries else None
    return next((attempt for attempt in tries if attempt.first_byte_at), tries[-1])


def facts(record: RequestRecord, now: float = 0.0) -> dict[str, Any]:
    """Return the facts of a request, as the table in app/docs/operate.md names them; None for unknown ones.

    now: by ``time.perf_counter``, for a request still under way. Keep this fast: each line of the access log calls it.
    """
    ended_at, began_at, served = record.ended_at or now, record.began_at, served_by(record)
    told: dict[str, Any] = {
        "method": record.method,
        "path": record.path.path,
        "status": record.status or (HUNG_UP_STATUS if record.ended_at and not record.placed else None),
        "complete": record.complete,
        "ms": 10_000 * (ended_at - began_at) // 1 / 10,
        "error": record.failure.word if record.failure is not None else None,
    }
    if served is None or not record.identified_at:
        return told
    first_at, sent_at, asked_at, several = served.first_byte_at, served.sent_at, served.asked_at, len(record.tries) > 1
    told |= {
        "model": record.model,
        "stream": record.streams,
        "identity": record.kind,
        "identify_ms": 10_000 * (record.identified_at - began_at) // 1 / 10,
        "queue_ms": ms(queue_s(record, ended_at)) if several or served.queued_at else 0.0,
        "decide_ms": 10_000 * (served.decided_at - asked_at) // 1 / 10 if served.decided_at and asked_at else None,
        "engine_ms": 10_000 * ((first_at or served.ended_at or ended_at) - sent_at) // 1 / 10 if sent_at else None,
        "first_ms": 10_000 * (first_at - began_at) // 1 / 10 if first_at else None,
        "tries": len(record.tries),
        "chunks": sum([attempt.chunks for attempt in record.tries]) if several else served.chunks,
        "gap_ms": 10_000 * (max([attempt.gap_s for attempt in record.tries]) if several else served.gap_s) // 1 / 10,
    }
    decision = served.decision
    if decision is not None:
        predicted = predicted_s(served)
        told |= {
            "worker": decision.worker_id,
            "policy": served.policy or served.fallback,
            "why": decision.why,
            "predicted_ms": None if predicted is None else 10_000 * predicted // 1 / 10,
            "prompt_tokens": decision.prompt_tokens,
            "matched_tokens": decision.reused_tokens,
            "cached_tokens": cached_tokens(served),
            "tokens": output_tokens(record.tries[-1]),
        }
        if decision.prefill is not None:
            told["prefill_worker"] = decision.prefill.worker_id
        if decision.tier_tokens:
            held = decision.matched_tokens, decision.tier_tokens, decision.tier_s, decision.tier
            told["where_held"] = where_held(*held)
    if served.pool:
        told["pool"] = served.pool
    for attempt in record.tries:
        if attempt.hold is not None:
            told |= attempt.held_facts(ended_at)
    return told


def queue_s(record: RequestRecord, ended_at: float) -> float:
    """Add up the seconds that a request waited in the queue, over all its tries. ended_at: the time up to which a try
    without a decision has waited."""
    return sum(
        (attempt.decided_at or attempt.ended_at or ended_at) - attempt.queued_at
        for attempt in record.tries
        if attempt.queued_at
    )


def predicted_s(attempt: TryRecord) -> float | None:
    """Predict the seconds from the engine's receipt of a request to its first token: the prefill of requests ahead and
    of the prompt's uncached part, at the engine's measured speed, with loads from tiers. None without a decision of
    Redis or a known speed."""
    if attempt.decision is None or not attempt.policy or not attempt.token_s or attempt.decision.outcome == "known":
        return None
    decision = attempt.decision
    return attempt.token_s * (decision.wait_tokens + decision.prefill_tokens)


def cached_tokens(attempt: TryRecord) -> int | None:
    """Return how many of the prompt's tokens the engine had cached, by its plugin or answer; None if neither tells."""
    return attempt.cached_tokens if attempt.cached_tokens is not None else _number(_CACHED.search(attempt.usage))


def output_tokens(attempt: TryRecord) -> int | None:
    """Return the number of the answer's tokens, as the engine counted them; None if it reported none."""
    return _number(REPORTED.search(attempt.usage))


def _number(found: re.Match[bytes] | None) -> int | None:
    return None if found is None else int(found[1])
