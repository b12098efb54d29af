"""What /metrics says of the index: the figures of all models together, read once in a while by each replica."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from warmfleet.fleet import Truth
from warmfleet.fleet.worker.state import heard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import WorkerTruth
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools

RESYNC = "resync_"  # prefix of the counters of snapshots taken over


class TruthWatch:
    """Nothing here is on a request's way, and nothing is labelled by worker: /workers has the single ones."""

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self._pools = pools
        self._metrics = metrics
        self._last: dict[str, Truth] = {}

    async def look(self) -> None:
        """One reading of every model. Raises FleetUnavailable; what was known of that model then stays."""
        try:
            await self._pools.each(self._read)
        finally:
            self._fleet(list(self._last.values()))
            self._workers([of for pool in self._pools.all for of in _alive(pool, self._last.get(pool.tag, Truth()))])

    async def _read(self, pool: Pool) -> None:
        self._last[pool.tag] = await pool.fleet.truth(pool.view.workers)

    def _fleet(self, truths: Sequence[Truth]) -> None:
        metrics, counts = self._metrics, Counter[str]()
        for truth in truths:
            counts.update(truth.counts)
        metrics.index_entries.set(sum(truth.entries for truth in truths))
        metrics.retired_slots.set(sum(truth.retired_slots for truth in truths))
        metrics.resyncs.clear()  # Redis may have come back empty
        metrics.index_events.clear()
        for name, count in counts.items():
            if name.startswith(RESYNC):
                metrics.resyncs.labels(name.removeprefix(RESYNC)).set(count)
            else:
                metrics.index_events.labels(name).set(count)
        every = [worker for truth in truths for worker in truth.workers.values()]
        metrics.divergences.labels("found").set(sum(worker.found for worker in every))
        metrics.divergences.labels("healed").set(sum(worker.healed for worker in every))

    def _workers(self, alive: Sequence[WorkerTruth]) -> None:
        """Of the living only: nobody waits for the entries of the dead, and their digests grow old."""
        metrics = self._metrics
        metrics.apply_lag_batches.set(max((worker.lag_batches for worker in alive), default=0))
        metrics.apply_lag_seconds.set(max((worker.lag_s for worker in alive), default=0.0))
        metrics.digest_age_seconds.set(max((worker.digest_age_s or 0.0 for worker in alive), default=0.0))
        metrics.diverged_workers.set(sum(worker.diverged for worker in alive))


def _alive(pool: Pool, truth: Truth) -> list[WorkerTruth]:
    ages = {worker.worker_id: worker.heartbeat_age_s for worker in pool.view.workers}
    return [
        worker
        for worker_id, worker in truth.workers.items()
        if (age := ages.get(worker_id)) is not None and (heard(age) or worker.lag_batches)
    ]
