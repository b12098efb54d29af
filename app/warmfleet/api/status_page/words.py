"""Sentences for people: why a request went where it went, and what decided while Redis was away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.pools.reasons import OF_A_TIE, in_words, reason_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import Decision

#: By the reason that warmfleet_fallback_requests_total counts; other reasons are codes of errors, as REFUSED tells.
FALLBACK: Mapping[str, str] = {
    "away": "Redis did not answer in time",
    "open": "Redis did not answer a moment ago",
    "no_worker": "Redis knows no worker that takes requests",
}
REFUSED = "Redis refused the decision ({}; the log tells more)"


def why_in_words(policy: str, decision: Decision, fallback: str) -> str:
    """Why a request went to its worker. fallback: why Redis did not choose; "" if it did."""
    if fallback:
        reason = FALLBACK.get(fallback, REFUSED.format(fallback))
        return f"{reason}: by a hash of the prompt among the workers known last"
    if decision.seen is not None:
        return in_words(policy, decision.why, decision.seen)
    tie = decision.why in OF_A_TIE and decision.why != "seed"  # ``in_words`` says more of one that told what it saw
    return f"{'tie: ' if tie else ''}{reason_of(policy, decision.why)}"
