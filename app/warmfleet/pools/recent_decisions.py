"""Keeps the last decisions of one model in this replica, for people who look at its status page, and their sums.

Only what a decision returns anyway is kept: no prompt, no block hash, no client. While somebody looks, one decision in
a second is asked to tell all that it sees (``wanted``); while nobody does, none is.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from warmfleet.fleet import Decision

KEPT = 50  # as many as a page shows; with all candidates of a fleet of 64 workers they take about a megabyte
TOLD = 10  # of a busy replica, whose last KEPT decisions are over before the page asks again


class Recent(NamedTuple):
    """One decision.

    number: counts decisions of this model from 1 on. at: Unix time. endpoint: the path's label in the metrics. kind:
    how the prompt was identified. fallback: why Redis did not choose; "" if it did.
    """

    number: int
    at: float
    request_id: str
    endpoint: str
    kind: str
    policy: str
    fallback: str
    decision: Decision


class RecentDecisions:
    """The last KEPT decisions, the last TOLD that told what they saw, and the sums of all since this replica's start.

    ``decided``: their number. ``fallbacks``: how many of them Redis did not make. The tokens are those of the others:
    nobody knows what the worker of a fallback held. ``wanted``: the next decision shall tell all that it sees; who asks
    for that decision takes the wish back.
    """

    __slots__ = ("_last", "_told", "decided", "fallbacks", "matched_tokens", "prompt_tokens", "wanted")

    def __init__(self) -> None:
        self.decided = 0
        self.fallbacks = 0
        self.prompt_tokens = 0
        self.matched_tokens = 0
        self.wanted = False
        self._last: deque[Recent] = deque(maxlen=KEPT)
        self._told: deque[Recent] = deque(maxlen=TOLD)

    def note(
        self, request_id: str, endpoint: str, kind: str, policy: str, decision: Decision, fallback: str = ""
    ) -> None:
        """Count and keep a decision. Every request pays for this, so it does no more than that."""
        self.decided += 1
        if fallback:
            self.fallbacks += 1
        else:
            self.prompt_tokens += decision.prompt_tokens
            self.matched_tokens += decision.matched_tokens
        recent = Recent(self.decided, time.time(), request_id, endpoint, kind, policy, fallback, decision)
        self._last.append(recent)
        if decision.seen is not None:
            self._told.append(recent)

    def newest(self) -> list[Recent]:
        """The kept decisions, the newest first: at most KEPT + TOLD."""
        since = self._last[0].number if self._last else 0
        return [*reversed(self._last), *(told for told in reversed(self._told) if told.number < since)]
