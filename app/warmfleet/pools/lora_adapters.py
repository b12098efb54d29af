"""Collects the LoRA adapters of a model: which workers serve each, and its path, which block hashes contain. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import WorkerView


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that some worker serves. lacking: ids of the workers that do not serve it from this path."""

    path: str
    lacking: tuple[str, ...] = ()


def adapters_of(workers: Sequence[WorkerView]) -> dict[str, Adapter]:
    """Every adapter by its name, with the path from which most of its workers loaded it.

    A worker that loaded it from another path makes other block hashes, so it counts as lacking the adapter.
    """
    groups: dict[frozenset[tuple[str, str]], list[WorkerView]] = {}
    for worker in workers:
        groups.setdefault(frozenset(_loras(worker).items()), []).append(worker)
    paths: dict[str, Counter[str]] = {}
    for loras, holders in groups.items():
        for name, path in loras:
            paths.setdefault(name, Counter())[path] += len(holders)
    adapters = {}
    for name, counts in sorted(paths.items()):
        path = max(sorted(counts), key=counts.__getitem__)
        others = [worker for loras, some in groups.items() if (name, path) not in loras for worker in some]
        adapters[name] = Adapter(path, tuple(other.worker_id for other in others if name not in other.models))
    return adapters


def _loras(worker: WorkerView) -> dict[str, str]:
    """Name and path of the adapters that its server announced."""
    loras = ((worker.server or {}).get("facts") or {}).get("loras") or {}
    return {name: path for name, path in loras.items() if name not in worker.models}


def served(worker: WorkerView) -> list[str]:
    """Every name that this worker's server answers to."""
    return [*worker.models, *_loras(worker)]
