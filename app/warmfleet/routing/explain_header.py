"""What of a decision is told to whom asked for it: to the client in headers of the answer, to the decision log."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import orjson

from warmfleet.routing.decision_log import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import Ask, Decision, Weights
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Call
    from warmfleet.routing.decision_log import DecisionLog

EXPLAINED = 16  # candidates, the cheapest: balancers take headers of 8 kB in all


def told_of(log: DecisionLog, call: Call, pool: Pool, ask: Ask, decision: Decision) -> None:
    """What the choice saw, for whom it was asked: the log, the client."""
    if call.rings is not None:
        log.note(record(pool.tag, ask, pool.fleet.weights, decision, call.rings))
    if call.hints.explain:
        call.explained = explained(ask, pool.fleet.weights, decision)


def answer_headers(call: Call, decision: Decision, word: str, which: str) -> Mapping[bytes, bytes]:
    """``which``: all, or request_id. ``word``: of the reservation. What was asked for is told anyway."""
    headers = {b"x-request-id": call.request_id.encode()}
    if call.explained:
        headers[b"x-warmfleet-explain"] = call.explained
    if which != "request_id":
        headers |= {
            b"x-warmfleet-worker": decision.worker_id.encode(),
            b"x-warmfleet-matched-tokens": b"%d" % decision.matched_tokens,
            b"x-warmfleet-prompt-tokens": b"%d" % decision.prompt_tokens,
            b"x-warmfleet-reservation": word.encode(),
        }
    return headers


def explained(ask: Ask, weights: Weights, decision: Decision) -> bytes:
    """Compact JSON: policy, why, weights, and of each candidate what the choice weighed; the chosen one is first."""
    seen = decision.seen.candidates if decision.seen is not None else []
    rows = sorted(seen, key=lambda one: (one.worker_id != decision.worker_id, one.cost_s))
    candidates = [
        {
            "worker": one.worker_id,
            "matched": one.matched_tokens,
            "wait": one.prefill_tokens + one.foreign_prefill_tokens,
            "in_flight": one.in_flight,
            "speed": one.speed_tps,
            "cost": one.cost_s,
        }
        for one in rows[:EXPLAINED]
    ]
    told = {"policy": ask.policy, "why": decision.why, "prompt": ask.prompt_tokens, "weights": asdict(weights)}
    return orjson.dumps(told | {"of": len(rows), "candidates": candidates})
