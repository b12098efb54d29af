"""The metrics of each worker, set for each call of /metrics, so that no worker that left the fleet stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Gauge, Metrics
    from warmfleet.pools.served_models import Pools

MAX_VERSION = 64  # most characters shown of an engine's version, which comes from its record


def set_worker_gauges(pools: Pools, metrics: Metrics) -> None:
    """Set the gauges of each worker by the last reading of the fleet."""
    told: tuple[tuple[Gauge, Callable[[WorkerView], float | None]], ...] = (
        (metrics.worker_routable, lambda worker: worker.routable),
        (metrics.worker_requests, lambda worker: worker.load.in_flight),
        (metrics.worker_prefill_tokens, lambda worker: worker.load.prefill_tokens + worker.load.foreign_prefill_tokens),
        (metrics.worker_decode_tokens, lambda worker: worker.load.decode_tokens + worker.load.foreign_decode_tokens),
        (metrics.worker_speed, lambda worker: worker.load.speed_tps),
        (metrics.worker_held_blocks, lambda worker: worker.load.blocks),
        (metrics.worker_cache_blocks, lambda worker: worker.load.capacity_blocks),
        (metrics.worker_heartbeat_age, lambda worker: worker.heartbeat_age_s),
    )
    for gauge in (metrics.worker_info, *(gauge for gauge, _ in told)):
        gauge.clear()
    for pool in pools.all:
        for worker in pool.view.workers:
            version = str(worker.record.get("version", ""))[:MAX_VERSION]
            metrics.worker_info.labels(pool.tag, worker.worker_id, worker.state, worker.proof, version).set(1)
            for gauge, of in told:
                value = of(worker)
                if value is not None:
                    gauge.labels(pool.tag, worker.worker_id).set(value)
