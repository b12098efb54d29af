"""The headers of an answer that tell the client which worker was chosen, and why if the client asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from warmfleet.fleet import Ask, Decision, Weights
    from warmfleet.routing.attempt import Attempt

EXPLAINED = 16  # the cheapest candidates: balancers accept 8 kB of headers in all


def answer_headers(request_id: str, attempt: Attempt, decision: Decision, which: str) -> list[tuple[bytes, bytes]]:
    """The headers of an answer. which: ``all``, or ``request_id`` for the request id alone.

    The explanation is added in either case if the client asked for one.
    """
    headers = [(b"x-request-id", request_id.encode())]
    if attempt.explanation:
        headers.append((b"x-warmfleet-explain", attempt.explanation))
    if which != "request_id":
        headers += (
            (b"x-warmfleet-worker", decision.worker_id.encode()),
            (b"x-warmfleet-matched-tokens", b"%d" % decision.matched_tokens),
            (b"x-warmfleet-prompt-tokens", b"%d" % decision.prompt_tokens),
            (b"x-warmfleet-reservation", attempt.reservation_word.encode()),
        )
    return headers


def explanation(ask: Ask, weights: Weights, decision: Decision) -> bytes:
    """Compact JSON: the policy, the rule that chose, the weights, and the candidates with the figures of the choice.

    The chosen worker is the first candidate; the other candidates follow by cost.
    """
    seen = decision.seen.candidates if decision.seen is not None else []
    rows = sorted(seen, key=lambda row: (row.worker_id != decision.worker_id, row.cost_s))
    candidates = [
        {
            "worker": row.worker_id,
            "matched": row.matched_tokens,
            "wait": row.prefill_tokens + row.foreign_prefill_tokens,
            "in_flight": row.in_flight,
            "speed": row.speed_tps,
            "cost": row.cost_s,
        }
        for row in rows[:EXPLAINED]
    ]
    head = {"policy": ask.policy, "why": decision.why, "prompt": ask.prompt_tokens, "weights": asdict(weights)}
    return orjson.dumps(head | {"of": len(rows), "candidates": candidates})
