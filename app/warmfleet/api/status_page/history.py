"""Figures of this replica's last quarter of an hour, one point every five seconds, for the plots of its status page.

The points are kept even while no page is open, because an operator who opens the page wants to see the past.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.fleet import LastMinute

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

EVERY_S = 5.0  # time between two points, the interval of heartbeats
SPAN_S = 900.0  # length of the history, long enough to see the causes of an alert
POINTS = int(SPAN_S / EVERY_S) + 1
RATE_S = 10.0  # time over which current rates are averaged; with less, the rate of one request a second would flicker
RATIO_S = 60.0  # time over which the hit ratio is computed; quantiles of times to first token cover 60 s, too

Number = int | float | None


class Point(NamedTuple):
    """The figures of a model at a moment. at: monotonic seconds.

    decided, fallbacks (without Redis), both ..._tokens: sums since start. p50_s, p90_s, p99_s: quantiles of the time
    to first token of the last minute's streams; None without streams. waiting: requests in this replica's queue.
    """

    at: float
    decided: int
    fallbacks: int
    prompt_tokens: int
    matched_tokens: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    waiting: int


class History:
    """The points of every model of one replica. ``look`` adds a point to each model."""

    def __init__(self, pools: Pools, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._pools = pools
        self._metrics = metrics
        self._clock = clock
        self._points = {pool.tag: deque([self.now(pool)], maxlen=POINTS) for pool in pools.all}

    async def look(self) -> None:
        """Add a point to every pool."""
        tags = {pool.tag for pool in self._pools.all}
        self._points = {tag: points for tag, points in self._points.items() if tag in tags}
        for pool in self._pools.all:
            self._of(pool).append(self.now(pool))

    def _of(self, pool: Pool) -> deque[Point]:
        """Return the points of a pool; a new pool gets its first point."""
        if pool.tag not in self._points:
            self._points[pool.tag] = deque([self.now(pool)], maxlen=POINTS)
        return self._points[pool.tag]

    def now(self, pool: Pool) -> Point:
        """Compute the pool's point of this moment."""
        recent, waits = pool.recent, pool.ttft
        p50_s, p90_s, p99_s = (waits.quantile(share) or None for share in (0.5, 0.9, 0.99))
        [gauge] = self._metrics.queued.labels(pool.tag).collect()
        sums = (recent.decided, recent.fallbacks, recent.prompt_tokens, recent.matched_tokens)
        return Point(self._clock(), *sums, p50_s, p90_s, p99_s, int(gauge.samples[0].value))

    def last_minute(self, pool: Pool) -> LastMinute:
        """Return this replica's figures of the last minute in the pool, which it announces to other replicas."""
        now = self.now(pool)
        before = _before([*self._of(pool), now], RATIO_S)
        return LastMinute(
            decided=now.decided - before.decided,
            fallbacks=now.fallbacks - before.fallbacks,
            prompt_tokens=now.prompt_tokens - before.prompt_tokens,
            matched_tokens=now.matched_tokens - before.matched_tokens,
            waits=pool.ttft.counts(),
        )

    def columns(self, pool: Pool) -> dict[str, list[Number]]:
        """Return the plotted curves, each a list with the oldest value first, and ``age_s`` of each value.

        None is an unknown value, such as a hit ratio without requests. The lists end at the last point and not now,
        because a rate since the last point could cover only a few milliseconds.
        """
        return columns([*self._of(pool)])

    def lately(self, pool: Pool) -> dict[str, Number]:
        """Return ``decisions_per_s`` and ``fallbacks_per_s`` of now, and ``hit_ratio`` of the last minute."""
        points = [*self._of(pool), self.now(pool)]
        short, long = (_between(_before(points, span_s), points[-1]) for span_s in (RATE_S, RATIO_S))
        return {
            "decisions_per_s": short["decisions_per_s"],
            "fallbacks_per_s": short["fallbacks_per_s"],
            "hit_ratio": long["hit_ratio"],
        }


def columns(points: Sequence[Point]) -> dict[str, list[Number]]:
    """Compute the plotted curves from one or more points; each point but the first gives a value.

    Ages are seconds before the last point.
    """
    rows = [_between(before, after) for before, after in pairwise(points)]
    times = [(point.p50_s, point.p90_s, point.p99_s, point.waiting) for point in points[1:]]
    names = ("decisions_per_s", "fallbacks_per_s", "hit_ratio")
    found: dict[str, list[Number]] = {"age_s": [round(points[-1].at - point.at, 1) for point in points[1:]]}
    found |= {name: [row[name] for row in rows] for name in names}
    for place, name in enumerate(("p50_s", "p90_s", "p99_s", "waiting")):
        found[name] = [_rounded(row[place]) for row in times]
    return found


def _before(points: Sequence[Point], seconds: float) -> Point:
    """Return the youngest point that is at least ``seconds`` older than the last point; if none is, the oldest."""
    until = points[-1].at - seconds
    return next((point for point in reversed(points) if point.at <= until), points[0])


def _between(before: Point, after: Point) -> dict[str, Number]:
    seconds, prompt = after.at - before.at, after.prompt_tokens - before.prompt_tokens
    matched = after.matched_tokens - before.matched_tokens
    return {
        "decisions_per_s": _rounded((after.decided - before.decided) / seconds if seconds > 0 else 0.0),
        "fallbacks_per_s": _rounded((after.fallbacks - before.fallbacks) / seconds if seconds > 0 else 0.0),
        "hit_ratio": _rounded(matched / prompt) if prompt > 0 else None,
    }


def _rounded(value: Number) -> Number:
    """Round to four significant digits, so that the page's data stay small."""
    return None if value is None else float(f"{value:.4g}")
