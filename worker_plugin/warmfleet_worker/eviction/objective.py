"""The objective of T-LRU: how many tokens a request may compute before its first token is late.

T-LRU calls this number ξ. A conversation whose next request computes fewer tokens than ξ gains nothing from a longer
cached prefix, so blocks beyond that may be given up first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Served:
    """A request whose first token is there.

    at: monotonic seconds. uncached_tokens: of the prompt, as the engine computed them. ttft_s: seconds from the
    request's arrival to its first token, the wait in the engine's queue included; None where that is not known.
    """

    at: float
    prompt_tokens: int
    uncached_tokens: int
    ttft_s: float | None = None


class Objective(Protocol):
    """Every method runs on the engine's thread: no wait, no loop without a small bound."""

    def xi_tokens(self, now: float) -> int | None:
        """ξ at ``now`` (monotonic seconds); None or 0: nothing is given up before its turn, as with plain LRU."""
        ...

    def note(self, served: Served) -> None:
        """Learn from a request."""
        ...


class FixedObjective:
    """ξ is a time to first token, turned into tokens by the engine's measured speed."""

    def __init__(self, target_s: float, speed_tps: Callable[[], int]) -> None:
        self._target_s = target_s
        self._speed_tps = speed_tps  # prefill tokens per second; 0 = not measured yet

    def xi_tokens(self, now: float) -> int | None:  # noqa: ARG002 - a fixed objective knows no time
        speed = self._speed_tps()
        return int(self._target_s * speed) if speed else None

    def note(self, served: Served) -> None:
        """A fixed objective learns nothing."""


def objective_of(target: str, speed_tps: Callable[[], int]) -> Objective:
    """The objective that ``target`` (WARMFLEET_TTFT_TARGET_S) asks for: a number of seconds, 0 or more.

    Raises ValueError for anything else. speed_tps: returns the measured prefill speed, 0 = not measured yet.
    """
    try:
        seconds = float(target)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(f"WARMFLEET_TTFT_TARGET_S must be a number of seconds, 0 or more, not {target[:40]!r}")
    return FixedObjective(seconds, speed_tps)
