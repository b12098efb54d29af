"""Explains in a sentence why a request went to its worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.pools.reasons import OF_A_TIE, fallback_in_words, in_words, reason_of

if TYPE_CHECKING:
    from warmfleet.fleet import Decision


def why_in_words(policy: str, decision: Decision, fallback: str) -> str:
    """Say why a request went to its worker. fallback: why Redis did not choose the worker; "" if it did."""
    if fallback:
        return fallback_in_words(fallback)
    if decision.seen is not None:
        return in_words(policy, decision.why, decision.seen)
    tie = decision.why in OF_A_TIE and decision.why != "seed"  # without candidates, only that there was a tie is known
    return f"{'tie: ' if tie else ''}{reason_of(policy, decision.why)}"
