"""The entries of /v1/models, with the fields that engines show in their own /v1/models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import WorkerView
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools


class ListedPool:
    """The facts of one pool's routable workers that its models' entries in /v1/models show.

    ``names``: served names. ``created``: Unix time at which the first worker started (or joined); 0: not known.
    """

    def __init__(self, pool: Pool) -> None:
        self._name = pool.name
        self._view = pool.view
        self.names = frozenset(pool.view.names.routable)
        workers = [worker for worker in pool.view.workers if worker.routable]
        self._limits = {worker.worker_id: limit for worker in workers if (limit := worker.record.get("max_model_len"))}
        self._longest = max(self._limits.values(), default=None)
        self._parents = dict[str, str]()
        for worker in workers:
            self._parents |= worker.record.get("parents") or {}
        self.created = min(filter(None, map(_since, workers)), default=0)

    def max_model_len(self, name: str) -> int | None:
        """Return the longest context, in tokens, of a worker that serves this name."""
        lacking = frozenset(self._view.names.lacking(name))
        if not lacking or not self._view.limits:
            return self._longest
        return max((limit for worker, limit in self._limits.items() if worker not in lacking), default=None)

    def parent(self, name: str) -> str | None:
        """Return the base model of the LoRA adapter with this name; None if no adapter has this name."""
        served = self._view.names
        if name not in served.paths:
            return self._parents.get(name)
        names = [name for name in served.routable if name not in served.paths]
        return self._name if self._name in names or not names else names[0]


def entries(pools: Pools, since: int) -> list[dict[str, Any]]:
    """Return an entry for every name that a routable worker serves; a model without workers is listed by its own name.

    since: the Unix time that is shown in entries whose workers report none.
    """
    listed: Mapping[str, list[ListedPool]] = {
        model.name: [ListedPool(pool) for pool in model.pools] for model in pools.served.values()
    }
    return [_entry(name, pool.name, listed[pool.name], since) for name, pool in pools.names().items()]


def _entry(name: str, root: str, of_model: list[ListedPool], since: int) -> dict[str, Any]:
    pools = [pool for pool in of_model if name in pool.names]
    return {
        "id": name,
        "object": "model",
        "created": min((pool.created for pool in pools if pool.created), default=since),
        "owned_by": "warmfleet",
        "root": root,
        "parent": next((parent for pool in pools if (parent := pool.parent(name))), None),
        "max_model_len": max((limit for pool in pools if (limit := pool.max_model_len(name))), default=None),
    }


def _since(worker: WorkerView) -> int:
    record = worker.record
    return int(record.get("started") or record.get("joined", 0) / 1_000)
