"""The headers of an answer that tell the client which worker was chosen, and why if the client asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import Candidate, Decision, Question, Weights
    from warmfleet.routing.attempt import Attempt

EXPLAINED = 16  # most candidates in the header, because load balancers accept 8 kB of headers in all


def answer_headers(request_id: str, attempt: Attempt, decision: Decision, which: str) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer. which: ``all``, or ``request_id`` for the request id alone.

    The explanation is added in either case if the client asked for one.
    """
    headers = [(b"x-request-id", request_id.encode())]
    if attempt.chosen.explanation:
        explained, held = attempt.chosen.explanation, attempt.record.held_facts(0.0)
        headers.append((b"x-warmfleet-explain", with_more(explained, held) if held else explained))
    if which != "request_id":
        headers += (
            (b"x-warmfleet-worker", decision.worker_id.encode()),
            (b"x-warmfleet-matched-tokens", b"%d" % decision.reused_tokens),
            (b"x-warmfleet-prompt-tokens", b"%d" % decision.prompt_tokens),
            (b"x-warmfleet-reservation", attempt.chosen.reservation_word.encode()),
        )
        if decision.prefill is not None:
            headers.append((b"x-warmfleet-prefill-worker", decision.prefill.worker_id.encode()))
        if attempt.record.pool:
            headers.append((b"x-warmfleet-pool", attempt.record.pool.encode()))
    return headers


def explanation(question: Question, weights: Weights, decision: Decision) -> bytes:
    """Return compact JSON: policy, reason (``why``), weights, and the candidates with their loads and costs.

    ``terms`` are the terms of the cost that are not 0, in seconds.
    """
    rows = cheapest(decision)
    candidates = [
        {
            "worker": row.worker_id,
            "matched": row.matched_tokens,
            "wait": row.prefill_tokens + row.foreign_prefill_tokens,
            "in_flight": row.in_flight,
            "speed": row.speed_tps,
            "cost": row.cost_s,
            "terms": terms_of(row),
        }
        | ({"tier": row.tier, "tier_tokens": row.tier_tokens, "tier_s": row.tier_s} if row.tier_tokens else {})
        for row in rows
    ]
    head = {
        "policy": question.policy,
        "why": decision.why,
        "prompt": question.prompt_tokens,
        "weights": asdict(weights),
    }
    return orjson.dumps(head | {"of": len(decision.seen.rows) if decision.seen else 0, "candidates": candidates})


def cheapest(decision: Decision) -> list[Candidate]:
    """Return the chosen worker, then the others by cost, EXPLAINED at most; none if the decision has no explanation."""
    seen = decision.seen.candidates if decision.seen is not None else []
    return sorted(seen, key=lambda row: (row.worker_id != decision.worker_id, row.cost_s))[:EXPLAINED]


def terms_of(row: Candidate) -> dict[str, float]:
    """Return the terms of a cost that are not 0, by name."""
    return {name.removesuffix("_s"): seconds for name, seconds in asdict(row.terms).items() if seconds}


def with_more(explained: bytes, more: Mapping[str, object]) -> bytes:
    """Return the explanation with more fields put in front."""
    return orjson.dumps(more)[:-1] + b"," + explained[1:]
