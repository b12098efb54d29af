"""The figures of a run, in trace seconds, and their means over several seeds with 95 % intervals.

A trace second is a second of the trace's own time; a replay at speed 6 plays six of them per second.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.measuring.sampling import spent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from warmfleet_loadtest.measuring.client import Reply
    from warmfleet_loadtest.measuring.sampling import Sample

#: Student's t, two-sided 95 %, by degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
COUNTS = {"failed", "cut", "undecided", "requests"}
LATE_SHARE, CPU_SHARE = 0.05, 0.8  # above these the client is the limit: p99 lateness / mean TTFT, CPU of one core


def figures(replies: Sequence[Reply], samples: Sequence[Sample], speed: float, skip: float) -> dict[str, Any]:
    """Return the figures of one run. TTFT counts from when a request was due.

    speed: trace seconds per second. skip: the first share of the requests, which warms up; of these only failures and
    requests without a routing decision count. The engines' counters include the warm-up.
    """
    counted = after_warm_up(replies, skip)
    ttft = due_ttft(counted, speed)
    failed, examples = failures(replies)
    computed = [whole - hit for whole, hit in zip(spent(samples, "prompt"), spent(samples, "cached"), strict=True)]
    evicted = spent(samples, "evicted")
    return {
        "mean_ttft": statistics.fmean(ttft) if ttft else 0.0,
        **{f"p{q}_ttft": quantile(ttft, q / 100) for q in (50, 90, 99)},
        "hit_ratio": hit_ratio(counted),
        "imbalance": over_mean(computed),
        "failed": failed,
        "cut": sum(reply.error is not None and reply.ttft_s > 0 for reply in replies),
        "error_examples": examples,
        "requests": len(counted),
        "computed_tokens": round(sum(computed)),
        "busy": statistics.fmean(spent(samples, "busy_s")) / samples[-1].at_s,
        "evictions_over_mean": over_mean(evicted),
        "undecided": sum(reply.reservation not in ("", "booked") for reply in replies),
    }


def after_warm_up(replies: Sequence[Reply], skip: float) -> Sequence[Reply]:
    """Return the replies without the first ``skip`` (a share, 0 to 1) of them."""
    return replies[int(skip * len(replies)) :]


def hit_ratio(replies: Iterable[Reply]) -> float:
    """Return the share of all prompt tokens that engines found in their caches; 0 without any tokens."""
    tokens = [(reply.prompt_tokens, reply.cached_tokens) for reply in replies]
    prompt = sum(whole for whole, _ in tokens)
    return sum(cached for _, cached in tokens) / prompt if prompt else 0.0


def failures(replies: Iterable[Reply]) -> tuple[int, list[str]]:
    """Return (number of failed requests, the three most frequent errors)."""
    errors = Counter(reply.error for reply in replies if reply.error is not None)
    return sum(errors.values()), [text for text, _ in errors.most_common(3)]


def due_ttft(replies: Sequence[Reply], speed: float) -> list[float]:
    """Return the sorted TTFT of all answered requests, in trace seconds from when each was due."""
    return sorted(speed * (reply.ttft_s + reply.late_s) for reply in replies if reply.error is None)


def health(
    replies: Sequence[Reply], watch: dict[str, float], speed: float, cpu_s: dict[str, float], wall_s: float
) -> dict[str, Any]:
    """Return the client's own health, and CPU time by kind of process. Lateness is in trace seconds, as TTFT is."""
    late = sorted(speed * reply.late_s for reply in replies)
    ttft = due_ttft(replies, speed)
    late_p99, mean = quantile(late, 0.99), statistics.fmean(ttft) if ttft else 0.0
    return {
        "cpu_s": {kind: round(seconds, 2) for kind, seconds in cpu_s.items()},
        "cores_used": round(sum(cpu_s.values()) / wall_s, 2),
        "wall_s": round(wall_s, 1),
        "client": {**watch, "late_p50": round(quantile(late, 0.5), 4), "late_p99": round(late_p99, 4)},
        "client_was_the_bottleneck": watch["cpu_share"] > CPU_SHARE or late_p99 > LATE_SHARE * mean,
    }


def over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each figure of the runs that is a number, as its mean over the runs.

    The figures of COUNTS are sums over the runs instead. With several runs ``ci95`` has, by name, half the width of the
    95 % interval of the mean per run, also for these counts.
    """
    names = [name for name, value in runs[0].items() if isinstance(value, int | float) and not isinstance(value, bool)]
    result: dict[str, Any] = {name: round(statistics.fmean(run[name] for run in runs), 4) for name in names}
    for name in COUNTS & runs[0].keys():
        result[name] = sum(run[name] for run in runs)
    if len(runs) > 1:
        result["ci95"] = {name: round(half_width([run[name] for run in runs]), 4) for name in names}
    return result


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of a mean, from at least two values (Student's t)."""
    freedom = len(values) - 1
    factor = T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.7 / freedom  # approximation, at most 0.01 too large
    return factor * statistics.stdev(values) / math.sqrt(len(values))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile of sorted values; 0 without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def over_mean(values: Sequence[float], nothing: float = 0.0) -> float:
    """Return the largest value over the mean; ``nothing`` if the values sum up to 0."""
    return max(values) * len(values) / sum(values) if sum(values) else nothing


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
