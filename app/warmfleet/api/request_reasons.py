"""Explains the time of a request in sentences: the largest part first, and a remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from warmfleet.api.request_facts import (
    cached_tokens,
    facts,
    ms,
    output_tokens,
    predicted_s,
    served_by,
    started_at,
)
from warmfleet.pools.reasons import fallback_in_words
from warmfleet.tracing.request_record import HUNG_UP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.tracing.request_record import RequestRecord, TryRecord

MATTERS_S, MATTERING_SHARE = 0.002, 0.02  # shortest part of a request's time to mention: seconds, share of all
MUCH_S, MUCH_TIMES = 0.1, 1.5  # a first byte is late beyond MUCH_TIMES its predicted time + MUCH_S
FEW_TOKENS = 64  # if fewer tokens of a prompt than this were cached less than predicted, no sentence says so
SLOW_S, SLOW_DECISION_S = 0.3, 0.05  # shortest part that gets advice; longest decision that is not called slow
SILENCE_S = 1.0  # shortest silence in the middle of an answer that is mentioned
SO_FAR = " so far"
FAILED_BY_FLEET = 500  # lowest status for which the fleet is at fault and not the client

BUSY = "`warmfleet workers` shows how busy each engine is: more engines shorten the queue"
HELD = "`warmfleet workers` shows the sessions of agents: more engines, or larger caches, have room for more of them"
SLOWER = "`warmfleet workers` tells the state of {0}, and its own log what it did; `warmfleet doctor` asks it"
NO_ANSWER = "{0} may be stopped or asleep: `warmfleet workers` tells its state, `warmfleet doctor` what to do"
AHEAD = "other prompts were ahead of it at {0}: more engines, or a lower WARMFLEET_MAX_ENGINE_WAIT_S, shorten that"
LONG = "no engine held more of this prompt: prompts that share their beginning are computed once (`warmfleet explain`)"
EVICTED = "the cache of {0} lost what was believed to be there: `warmfleet workers` shows how full it is"
FAILED = "`warmfleet doctor` says what is wrong with {0}"
REDIS = "`warmfleet doctor` looks at Redis"
IDENTIFY = "app/docs/identity.md tells what makes prompts slow to identify"
CLIENT = "the fleet was not slow: the client was slow to read"
PRESSED = "the log of {0} tells what it did then: a long prompt of another request, or a preemption"


class Part(NamedTuple):
    """A part of the time that a request took. remedy: the advice if this is the largest part."""

    seconds: float
    text: str
    remedy: str = ""


def told(record: RequestRecord, now: float) -> dict[str, Any]:
    """Return all about a request: its facts, its tries, sentences and remedy. now: by ``time.perf_counter``."""
    found = parts(record, now)
    return facts(record, now) | {
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "at": round(started_at(record), 3),
        "running": not record.ended_at,
        "because": in_words(record, found, now),
        "remedy": next((part.remedy for part in found if part.remedy and part.seconds >= SLOW_S), ""),
        "attempts": [_attempt(attempt, record.ended_at or now) for attempt in record.tries],
    }


def _attempt(attempt: TryRecord, ended_at: float) -> dict[str, Any]:
    decision = attempt.decision
    until = attempt.first_byte_at or attempt.ended_at or ended_at
    return {
        "reservation": attempt.reservation,
        "engine_request_id": attempt.engine_request_id,
        "worker": decision.worker_id if decision is not None else None,
        "outcome": attempt.outcome,
        "error": attempt.failure.message if attempt.failure is not None else None,
        "cost_ms": ms(decision.cost_s) if decision is not None and attempt.policy else None,
        "queue_ms": ms((attempt.decided_at or until) - attempt.queued_at) if attempt.queued_at else 0.0,
        "engine_ms": ms(until - attempt.sent_at) if attempt.sent_at else None,
    }


def in_words(record: RequestRecord, found: list[Part], now: float) -> str:
    """Explain the request in sentences. found: the parts of its time."""
    because = "; ".join(part.text for part in found)
    sentences = [_head(record, now) + (f": {because}." if because else "."), *_after(record, now)]
    return " ".join(sentences)


def _head(record: RequestRecord, now: float) -> str:
    """Return the beginning of the first sentence: the outcome of the request, and its time."""
    took_s = (record.ended_at or now) - record.began_at
    first_at, failure = record.first_byte_at, record.failure
    if failure is not None and failure.word == HUNG_UP:
        return f"The client hung up after {shown(took_s)}"
    if failure is not None and not first_at:
        message = f": {failure.message.rstrip('.')}" if record.error_status >= FAILED_BY_FLEET else ""
        return f"Refused with {record.error_status} ({failure.word}{message}) after {shown(took_s)}"
    if not record.ended_at and not first_at:
        return f"Under way for {shown(took_s)}"
    if record.placed:
        return f"{shown(took_s)} until a worker was booked for a gateway"
    if not first_at:
        return f"{shown(took_s)} without an answer"
    return f"{shown(first_at - record.began_at)} {'to the first token' if record.streams else 'to the answer'}"


# ---------------------------------------------------------------- until the first byte


def parts(record: RequestRecord, now: float) -> list[Part]:
    """Return the parts of the time until the first byte, or until now, the largest first."""
    until = record.first_byte_at or record.ended_at or now
    whole_s = until - record.began_at
    found = [*_identifying(record, until)]
    for attempt in record.tries:
        if attempt.began_at <= until:
            found += _of_try(attempt, record, until)
    rest_s = whole_s - sum(part.seconds for part in found)
    if rest_s > max(MUCH_S, MATTERING_SHARE * whole_s):
        found.append(Part(rest_s, f"{shown(rest_s)} in this replica besides, between two tries or because it was busy"))
    matters_s = max(MATTERS_S, MATTERING_SHARE * whole_s)
    found.sort(key=lambda part: -part.seconds)
    return found[:1] + [part for part in found[1:] if part.seconds >= matters_s]


def _identifying(record: RequestRecord, until: float) -> Iterator[Part]:
    if not record.tries and not record.identified_at and record.failure is not None:
        return  # the body was refused, so no prompt was identified
    seconds = (record.identified_at or until) - record.began_at
    how = {"engine": ", for whose token ids an engine was asked"}.get(record.kind, "")
    yield Part(seconds, f"{shown(seconds)} to identify the prompt{how}", IDENTIFY)


def _of_try(attempt: TryRecord, record: RequestRecord, until: float) -> Iterator[Part]:
    """Yield the parts of a try. until: when the first byte of the answer came, else the end, else now."""
    ended_at = min(attempt.ended_at or until, until)
    if attempt.hold is not None:
        seconds = float(attempt.held_facts(ended_at)["held_ms"]) / 1_000
        was = "it had lost its place" if attempt.hold.paused else f"it was new, {attempt.hold.ahead} sessions before it"
        so_far = SO_FAR if attempt.held_at else ""
        yield Part(seconds, f"{shown(seconds)} held{so_far} until the caches have room for its session ({was})", HELD)
    if attempt.queued_at:
        seconds = max(0.0, (attempt.decided_at or ended_at) - attempt.queued_at)
        several = attempt.waiting > 1
        line = f" ({attempt.waiting} waited then, with {attempt.work_s:.1f} s of work for the fleet)" if several else ""
        so_far = "" if attempt.decided_at or attempt.ended_at else SO_FAR
        yield Part(seconds, f"{shown(seconds)} in the queue{so_far}: the engines that suit it were busy{line}", BUSY)
    if attempt.fallback or (attempt.decided_at and attempt.asked_at):
        seconds = attempt.decided_at - (attempt.asked_at or attempt.began_at)
        without = f": {fallback_in_words(attempt.fallback)}" if attempt.fallback else ""
        slow = ", as Redis or this replica was slow" if seconds > SLOW_DECISION_S and not without else ""
        yield Part(seconds, f"{shown(seconds)} to choose a worker{slow}{without}", REDIS if slow or without else "")
    decision = attempt.decision
    if decision is not None and decision.prefill is not None and attempt.decided_at:
        seconds = max(0.0, (attempt.sent_at or ended_at) - attempt.decided_at)
        prefill = decision.prefill.worker_id
        at = f"{shown(seconds)} at {prefill}, which computes the prompt for {decision.worker_id}"
        yield Part(seconds, at, NO_ANSWER.format(prefill) if not attempt.sent_at else "")
    if attempt.sent_at and decision is not None:
        yield _at_engine(attempt, record, until)


def _at_engine(attempt: TryRecord, record: RequestRecord, until: float) -> Part:
    """Return the time at the engine until its first byte, or until it failed."""
    decision = attempt.decision
    worker = decision.worker_id if decision is not None else ""
    answered = 0 < attempt.first_byte_at <= until
    seconds = max(0.0, min(attempt.first_byte_at or attempt.ended_at or until, until) - attempt.sent_at)
    at = f"{shown(seconds)} at {worker}"
    if attempt.failure is not None and not answered:
        prefill = attempt.failure.prefill
        failed = f"whose prefill engine {prefill} failed" if prefill else "which failed"
        return Part(seconds, f"{at}, {failed}: {attempt.failure.message.rstrip('.')}", FAILED.format(prefill or worker))
    if record.first_byte_at and not answered:
        return Part(0.0, f"{at}, which was asked, too, and was later")
    predicted = predicted_s(attempt)
    if not answered:
        expected = "" if predicted is None else f"; predicted {shown(predicted)} to the first token"
        silent = f"{at} without a byte{'' if record.ended_at else SO_FAR}{expected}"
        late = predicted is None or seconds > MUCH_TIMES * predicted + MUCH_S
        return Part(seconds, silent, NO_ANSWER.format(worker) if late else "")
    text, remedy = _compared(attempt, record, seconds, predicted)
    return Part(seconds, f"{at} {text}", remedy.format(worker))


def _compared(attempt: TryRecord, record: RequestRecord, seconds: float, predicted: float | None) -> tuple[str, str]:
    """Compare an engine's time with the predicted one; return the text and the remedy."""
    decision, to = attempt.decision, "to its first byte" if record.streams else "to its whole answer"
    if decision is None or predicted is None:
        why = "it was chosen without Redis" if attempt.fallback else "its speed is not known yet"
        return f"{to} (nothing was predicted: {why})", SLOWER
    if decision.prefill is not None:
        return f"{to}, the blocks of the prompt included", ""
    held = cached_tokens(attempt)
    lost = 0 if held is None else decision.matched_tokens - held
    token = f"predicted {shown(predicted)} to the first token"
    if lost > FEW_TOKENS:
        believed = f"{decision.matched_tokens:,} of {decision.prompt_tokens:,} tokens were expected in its cache"
        return f"{to}, {token}: {believed}, it had {held:,}: it computed {lost:,} more, evicted meanwhile", EVICTED
    if not record.streams:
        return f"{to}, {token}", ""
    if seconds > MUCH_TIMES * predicted + MUCH_S:
        why = "it was slower than its measured speed, or had work that no router knew of"
        return f"{to}, {token}: {why}", SLOWER
    ahead_s, own_s = attempt.token_s * decision.wait_tokens, attempt.token_s * decision.prefill_tokens
    ahead = f"{shown(ahead_s)} for {decision.wait_tokens:,} tokens ahead of it"
    own = f"{shown(own_s)} for {decision.prompt_tokens - decision.matched_tokens:,} of its own"
    if decision.tier_tokens:
        own += f" and {decision.tier_tokens:,} to load"
    return f"{to}, {token} ({ahead}, {own})", AHEAD if ahead_s > own_s else LONG


# ---------------------------------------------------------------- after the first byte


def _after(record: RequestRecord, now: float) -> Iterator[str]:
    """Yield sentences about the time after the first byte."""
    first_at, served = record.first_byte_at, served_by(record)
    if not first_at or served is None:
        return
    took_s = (record.ended_at or now) - first_at
    tokens = output_tokens(record.tries[-1])
    chunks = sum(attempt.chunks for attempt in record.tries)
    if record.streams and took_s > MATTERS_S:
        count = f"{tokens} tokens" if tokens is not None else f"{chunks} chunks" if chunks else "the answer"
        so_far = "" if record.ended_at else SO_FAR
        yield f"Then {shown(took_s)} for {count}{so_far}."
    worst = max(record.tries, key=lambda attempt: attempt.gap_s)
    if record.streams and worst.gap_s >= SILENCE_S and worst.decision is not None:
        worker = worst.decision.worker_id
        yield f"In its middle {worker} sent nothing for {shown(worst.gap_s)}: {PRESSED.format(worker)}."
    client_s = sum(attempt.client_s for attempt in record.tries)
    if client_s >= SILENCE_S:
        yield f"For {shown(client_s)} the client read nothing: {CLIENT}."
    for place, attempt in enumerate(record.tries):
        if attempt.failure is not None and attempt.first_byte_at and attempt.decision is not None:
            cut = f"The answer of {attempt.decision.worker_id} broke off ({attempt.failure.message.rstrip('.')})"
            yield f"{cut}; {'another worker was asked to go on' if record.tries[place + 1 :] else 'nobody went on'}."
    if record.failure is not None and record.failure.word != HUNG_UP:
        yield f"The answer ended with an error: {record.failure.word}."


def shown(seconds: float) -> str:
    """Format a time with its unit."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1_000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1_000 * seconds:.1f} ms"
