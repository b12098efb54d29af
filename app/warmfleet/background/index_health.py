"""Copies the figures of the index (entries, lag, divergences, snapshots) from Redis into the gauges of /metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from warmfleet.fleet import Truth
from warmfleet.fleet.worker.state import heard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import WorkerTruth
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

RESYNC = "resync_"  # prefix of the counters of finished snapshots (all blocks of a worker, sent anew), by cause


class IndexHealthWatch:
    """Sets the metrics of the index: sums over all workers, values of the worst worker, and the lag of each worker."""

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self._pools = pools
        self._metrics = metrics
        self._last: dict[str, Truth] = {}
        self._told: dict[tuple[str, str], tuple[int, float]] = {}  # (tag, worker_id) -> lag in batches, lag in seconds

    async def look(self) -> None:
        """Read every model's index once. Raises FleetUnavailable if an index cannot be read; its last figures stay."""
        try:
            await self._pools.each(self._read)
        finally:
            self._last = {pool.tag: self._last[pool.tag] for pool in self._pools.all if pool.tag in self._last}
            self._set_totals(list(self._last.values()))
            alive = [_alive(pool, self._last.get(pool.tag, Truth())) for pool in self._pools.all]
            self._set_worst([worker for workers in alive for worker in workers])
            self._set_each()

    async def _read(self, pool: Pool) -> None:
        self._last[pool.tag] = await pool.fleet.index.truth(pool.view.workers)

    def _set_totals(self, truths: Sequence[Truth]) -> None:
        metrics, counts = self._metrics, Counter[str]()
        for truth in truths:
            counts.update(truth.counts)
        metrics.index_entries.set(sum(truth.entries for truth in truths))
        metrics.retired_slots.set(sum(truth.retired_slots for truth in truths))
        metrics.resyncs.clear()  # counters that vanished with an emptied Redis must not stay
        metrics.index_events.clear()
        for name, count in counts.items():
            if name.startswith(RESYNC):
                metrics.resyncs.labels(name.removeprefix(RESYNC)).set(count)
            else:
                metrics.index_events.labels(name).set(count)
        every = [worker for truth in truths for worker in truth.workers.values()]
        metrics.divergences.labels("found").set(sum(worker.found for worker in every))
        metrics.divergences.labels("healed").set(sum(worker.healed for worker in every))

    def _set_worst(self, alive: Sequence[WorkerTruth]) -> None:
        """Set the largest lag and age of a digest (checksum of a worker's blocks), without those of dead workers."""
        metrics = self._metrics
        metrics.apply_lag_batches.set(max((worker.lag_batches for worker in alive), default=0))
        metrics.apply_lag_seconds.set(max((worker.lag_s for worker in alive), default=0.0))
        metrics.digest_age_seconds.set(max((worker.digest_age_s or 0.0 for worker in alive), default=0.0))
        metrics.diverged_workers.set(sum(worker.diverged for worker in alive))

    def _set_each(self) -> None:
        """Set the lag of each worker if it changed since the last look: most lags stay 0."""
        batches, seconds = self._metrics.worker_lag_batches, self._metrics.worker_lag_seconds
        before, self._told = (
            self._told,
            {
                (tag, worker_id): (worker.lag_batches, worker.lag_s)
                for tag, truth in self._last.items()
                for worker_id, worker in truth.workers.items()
            },
        )
        for left in before.keys() - self._told.keys():
            batches.remove(*left)
            seconds.remove(*left)
        for name, lag in self._told.items():
            if before.get(name) != lag:
                batches.labels(*name).set(lag[0])
                seconds.labels(*name).set(lag[1])


def _alive(pool: Pool, truth: Truth) -> list[WorkerTruth]:
    """Return the workers whose heartbeats are heard, or whose events still wait to be applied."""
    ages = {worker.worker_id: worker.heartbeat_age_s for worker in pool.view.workers}
    return [
        worker
        for worker_id, worker in truth.workers.items()
        if (age := ages.get(worker_id)) is not None and (heard(age) or worker.lag_batches)
    ]
