"""Keeps the last decisions of one model in this replica, and sums over all its decisions, for the status page.

Only the fields that a decision returns anyway are kept: no prompt, no block hash, no client. While a status page is
open, one decision in a second also returns all its candidates (``wanted``).
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from warmfleet.fleet import Decision

KEPT = 50  # number of last decisions, as many as a page shows; with the candidates of 64 workers about a megabyte
TOLD = 10  # number of last decisions with all candidates, kept apart, because the last KEPT may include none


class Recent(NamedTuple):
    """A decision as the status page shows it.

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
    """The last KEPT decisions, the last TOLD with all candidates, and the sums of all since this replica's start.

    ``decided``: the number of all decisions. ``fallbacks``: how many of them were made without Redis. The sums of
    tokens leave fallbacks out, whose match is unknown. ``wanted``: the next decision shall return all candidates; the
    code that asks for that decision clears ``wanted``.
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
        """Count and keep a decision. Every request pays for this call, so it does nothing else."""
        self.decided += 1
        if fallback:
            self.fallbacks += 1
        else:
            self.prompt_tokens += decision.prompt_tokens
            self.matched_tokens += decision.reused_tokens
        recent = Recent(self.decided, time.time(), request_id, endpoint, kind, policy, fallback, decision)
        self._last.append(recent)
        if decision.seen is not None:
            self._told.append(recent)

    def newest(self) -> list[Recent]:
        """Return the kept decisions, the newest first: at most KEPT + TOLD."""
        since = self._last[0].number if self._last else 0
        return [*reversed(self._last), *(told for told in reversed(self._told) if told.number < since)]
