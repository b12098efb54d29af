"""Counts how long a model's clients wait for their first byte (TTFT), and derives the TTFT that decisions aim at.

Waits are counted in buckets that are 9 % wide. So a quantile is at most 4.5 % wrong for any distribution, a request
costs one addition, and the size is fixed. Waits older than the window are forgotten, a twelfth of the window at a time.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

WINDOW_S = 60.0
SLICES = 12
LEAST_S = 1e-4  # shortest wait in seconds; a shorter one counts as this long
PER_OCTAVE = 8  # number of buckets between a wait and the double of it
BUCKETS = 24 * PER_OCTAVE  # number of buckets; the last one ends at 1,677 s
MET = 0.9  # the quantile of the waits that must meet the objective (app/docs/decisions/013)
FOLLOWED = 0.5  # quantile of the waits above which ``in_force_s`` never is
ENOUGH = 50  # fewest waits in the window for an objective in force: a quantile of fewer waits is chance
SHOWN = (0.5, 0.9, 0.99)
_SCALE = PER_OCTAVE / math.log(2)
_OFFSET = math.log(LEAST_S) * _SCALE


class TtftWindow:
    """The waits of the last minute. objective_s: the time to first token that the operator wants; 0 = none."""

    def __init__(self, objective_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.objective_s = objective_s
        self.count = 0
        self._clock = clock
        self._slice_s = WINDOW_S / SLICES
        self._slices = [[0] * BUCKETS for _ in range(SLICES)]
        self._total = [0] * BUCKETS
        self._now = int(clock() / self._slice_s)
        self._in_force_s: float | None = None  # computed once per slice; None: not yet in this slice

    def observe(self, seconds: float) -> None:
        """Count one request's wait."""
        self._turn()
        bucket = int(math.log(seconds) * _SCALE - _OFFSET) if seconds > LEAST_S else 0
        bucket = min(bucket, BUCKETS - 1)
        self._slices[self._now % SLICES][bucket] += 1
        self._total[bucket] += 1
        self.count += 1

    def quantile(self, share: float) -> float:
        """Return the seconds that the fraction ``share`` of the waits did not exceed, to 4.5 %; 0 without waits."""
        self._turn()
        return _quantile(enumerate(self._total), self.count, share)

    def counts(self) -> dict[int, int]:
        """Return the number of waits by bucket, without empty buckets."""
        self._turn()
        return {bucket: count for bucket, count in enumerate(self._total) if count}

    @property
    def in_force_s(self) -> float:
        """The time to first token, in seconds, that decisions aim at now; 0 if they aim at none.

        While more than 10 % of the requests wait longer than the objective, decisions aim at the objective, or at the
        median wait if that is shorter. Otherwise they aim at none.
        """
        if not self.objective_s:
            return 0.0
        self._turn()
        if self._in_force_s is None:
            missed = self.count >= ENOUGH and self.quantile(MET) > self.objective_s
            self._in_force_s = min(self.objective_s, self.quantile(FOLLOWED)) if missed else 0.0
        return self._in_force_s

    def figures(self) -> dict[str, float]:
        """Return the number of waits, and in seconds P50, P90, P99, the objective, and the objective in force."""
        shares = {f"p{round(100 * share)}_s": self.quantile(share) for share in SHOWN}
        return {"requests": self.count, **shares, "objective_s": self.objective_s, "in_force_s": self.in_force_s}

    def _turn(self) -> None:
        """Forget the slices whose time is over."""
        now = int(self._clock() / self._slice_s)
        if now == self._now:
            return
        for time_slice in range(max(self._now, now - SLICES) + 1, now + 1):
            old = self._slices[time_slice % SLICES]
            for bucket, count in enumerate(old):
                if count:
                    self._total[bucket] -= count
                    self.count -= count
                    old[bucket] = 0
        self._now, self._in_force_s = now, None


def quantiles(counts: Iterable[Mapping[int, int]]) -> dict[str, float]:
    """Return P50, P90 and P99 in seconds over several windows' ``counts``, named as in ``figures``; 0 without waits."""
    total = Counter[int]()
    for window in counts:
        total.update(window)
    of_all = sorted(total.items())
    return {f"p{round(100 * share)}_s": _quantile(of_all, total.total(), share) for share in SHOWN}


def _quantile(counts: Iterable[tuple[int, int]], of_all: int, share: float) -> float:
    rank, seen = max(1, math.ceil(share * of_all)), 0
    for bucket, count in counts:
        seen += count
        if seen >= rank:
            return LEAST_S * math.exp2((bucket + 0.5) / PER_OCTAVE)
    return 0.0
