"""The objective of T-LRU: how many tokens a request may compute before its first token is late.

T-LRU calls this number ξ. A conversation whose next request computes fewer tokens than ξ gains nothing from a longer
cached prefix, so the last blocks of that prefix may be given up first.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

ADAPTIVE = "auto"  # the target that asks for the adaptive objective
TAIL = 0.9  # quantile of the requests' uncached tokens that the adaptive objective follows
TAIL_SHARE = 0.6  # ξ (see Objective) / that quantile; if larger, the P95 TTFT is shorter, the P90 longer
MEMORY_REQUESTS = 256  # number of latest requests from which the quantile is taken
EVERY_REQUESTS = 16  # number of requests after which ξ is computed anew; before the first 16 ξ is None


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has its first token. uncached_tokens: prompt tokens that the engine had to compute."""

    prompt_tokens: int
    uncached_tokens: int


class Objective(Protocol):
    """Sets ξ, how many uncached tokens a request may have. Its methods run on the engine's thread, so none waits."""

    def xi_tokens(self) -> int | None:
        """Return ξ, the tokens that a request may compute in time; None or 0: blocks are evicted as by plain LRU."""
        ...

    def note(self, served: Served) -> None:
        """Learn from a request."""
        ...


class FixedObjective:
    """The objective with a fixed target: ξ is a time to first token, turned into tokens by the measured speed."""

    def __init__(self, target_s: float, speed_tps: Callable[[], int]) -> None:
        self._target_s = target_s
        self._speed_tps = speed_tps  # prefill tokens per second; 0 = not measured yet

    def xi_tokens(self) -> int | None:
        speed = self._speed_tps()
        return int(self._target_s * speed) if speed else None

    def note(self, served: Served) -> None:
        """Do nothing, because a fixed objective learns nothing."""


class AdaptiveObjective:
    """The objective that follows the engine's own slowest requests, where nobody knows the right TTFT.

    ξ is TAIL_SHARE times Q, the number of uncached tokens that one request in ten exceeds. With a ξ far below Q, T-LRU
    changes nothing; with one far above it, T-LRU makes fast requests slow. As T-LRU works, Q falls, and so does ξ.
    A roomy cache needs no rule here: there, blocks of conversations that have probably ended are evicted before any
    block that T-LRU has tagged (``TailEviction.is_silent``).
    """

    def __init__(self) -> None:
        self._uncached: deque[int] = deque(maxlen=MEMORY_REQUESTS)
        self._noted = 0
        self._xi_tokens: int | None = None

    def xi_tokens(self) -> int | None:
        return self._xi_tokens

    def note(self, served: Served) -> None:
        self._uncached.append(served.uncached_tokens)
        self._noted += 1
        if self._noted % EVERY_REQUESTS == 0:
            ordered = sorted(self._uncached)
            self._xi_tokens = int(TAIL_SHARE * ordered[int(TAIL * len(ordered))])


def objective_of(target: str, speed_tps: Callable[[], int]) -> Objective:
    """Make the objective that ``target`` (WARMFLEET_TTFT_TARGET_S) asks for: seconds, 0 or more, or ``auto``.

    Raises ValueError for anything else. speed_tps: returns the measured prefill speed, 0 = not measured yet.
    """
    if target.strip().lower() == ADAPTIVE:
        return AdaptiveObjective()
    try:
        seconds = float(target)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        wanted = f"a number of seconds, 0 or more, or {ADAPTIVE}"
        raise ValueError(f"WARMFLEET_TTFT_TARGET_S must be {wanted}, not {target[:40]!r}")
    return FixedObjective(seconds, speed_tps)
