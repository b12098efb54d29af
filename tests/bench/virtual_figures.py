"""Makes the figures of one run on the virtual clock."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from warmfleet_loadtest.measuring.figures import over_mean, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.virtual_fleet import Played

    from warmfleet_loadtest.simulator.virtual_clock import Answered


def figures(played: Played, skip: float = 0.1) -> dict[str, float]:
    """Return the figures of the fleet's own requests but the first ``skip``. Seconds are virtual."""
    cluster = played.cluster
    own = sorted(
        (request for request in played.served if request.session not in cluster.plan.direct),
        key=lambda request: request.at_s,
    )
    counted = own[int(skip * len(own)) :]
    prompt, cached = (
        sum(request.prompt_tokens for request in counted),
        sum(request.cached_tokens for request in counted),
    )
    engines = [worker.engine for worker in cluster.workers]
    mean_s = statistics.fmean(request.ttft_s for request in counted)
    busy = [engine.busy_s for engine in engines]
    evicted = [engine.scheduler.pool.evicted for engine in engines]
    off = [abs(cluster.predicted[request] - request.cached_tokens) for _, _, request in cluster.routed]
    return {
        "requests": len(own),
        "hit_ratio": cached / prompt,
        "ttft_mean_s": mean_s,
        "ttft_mean_trace_s": mean_s * cluster.plan.speed,
        **tails(counted),
        "busy": statistics.fmean(busy) / max(request.at_s for request in played.served),
        "busy_max_over_mean": over_mean(busy),
        "work_max_over_mean": over_mean([engine.work_tokens for engine in engines]),
        "evicted_max_over_mean": over_mean(evicted, nothing=1.0),
        "evicted": statistics.fmean(evicted),
        "foreseen": sum(error == 0 for error in off) / len(off),
        "corrections": cluster.corrections,
        "cpu_s": played.cpu_s,
        "requests_per_cpu_s": len(played.served) / played.cpu_s,
    }


def tails(served: Sequence[Answered]) -> dict[str, float]:
    """Return the quantiles of the TTFT in virtual seconds, or 0 without requests."""
    ttft = sorted(request.ttft_s for request in served)
    return {f"ttft_p{q}_s": quantile(ttft, q / 100) for q in (50, 90, 99)}
