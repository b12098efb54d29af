"""The names that the workers of one model serve: served names, aliases and LoRA adapters, as last announced. Pure.

A worker serves the names that its API server announces or lists. A request goes only to a worker that serves its name.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.fleet import Flag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import WorkerView

SHOWN_NAMES = 4  # most names of a worker that a sentence shows
SHOWN_CHARACTERS = 80  # most characters of each shown name


class _Group(NamedTuple):
    """Workers with equal names. models: names and aliases. loras: path by name. proved: a probe reached the workers."""

    models: frozenset[str]
    loras: Mapping[str, str]
    proved: bool
    ids: list[str]

    def serves(self, name: str, path: str | None) -> bool:
        """Return whether the group serves the name. path: of an adapter; must be equal, as it is in block hashes."""
        return name in self.models or (path is not None and self.loras.get(name) == path)


class ServedNames:
    """The names that the workers of one reading serve, and the workers that lack some of them.

    ``counts``: how many proved workers serve each name. ``routable``: the names that routable workers serve, in order.
    ``paths``: by the name of an adapter, the path from which most of its workers loaded it, which block hashes contain.
    ``differ``: some worker lacks a name that another worker serves.
    """

    def __init__(self, workers: Sequence[WorkerView] = ()) -> None:
        groups: dict[tuple[frozenset[str], frozenset[tuple[str, str]], bool, bool], _Group] = {}
        routable: dict[str, None] = {}
        for worker in workers:
            # A worker whose identity was not verified adds no name: it could draw another model's requests.
            proved = worker.routable or worker.load.flags & (Flag.URL | Flag.MISNAMED) == Flag.URL
            loras = worker.loras
            key = frozenset(worker.models), frozenset(loras.items()), proved, worker.routable
            if key not in groups:
                groups[key] = _Group(key[0], loras, proved, [])
                if worker.routable:
                    routable |= dict.fromkeys([*worker.models, *loras])
            groups[key].ids.append(worker.worker_id)
        self._groups = tuple(groups.values())
        self.routable = tuple(routable)
        self.paths = _paths(self._groups)
        self.counts: Mapping[str, int] = self._counted()
        self.differ = len({key[:2] for key in groups}) > 1
        self._lacking: dict[str, tuple[str, ...]] = {}

    def _counted(self) -> Counter[str]:
        counts = Counter[str]()
        for group in self._groups:
            if group.proved:
                counts.update(dict.fromkeys(group.models | group.loras.keys(), len(group.ids)))
        return counts

    def lacking(self, name: str) -> tuple[str, ...]:
        """Return the ids of workers that lack this name though others serve it; empty for a name that nobody serves."""
        if not self.differ or name not in self.counts:
            return ()
        if name not in self._lacking:
            path = self.paths.get(name)
            self._lacking[name] = tuple(
                worker for group in self._groups if not group.serves(name, path) for worker in group.ids
            )
        return self._lacking[name]

    def others(self, name: str, worker_id: str) -> bool:
        """Return whether a worker other than this one serves the name."""
        path, lacking = self.paths.get(name), {worker_id, *self.lacking(name)}
        serving = [group.ids for group in self._groups if group.proved and group.serves(name, path)]
        return any(worker not in lacking for ids in serving for worker in ids)

    def told(self, worker_id: str) -> object:
        """Return the names that the worker announced, as a value to be compared; None for an unknown worker."""
        return next(((group.models, group.loras) for group in self._groups if worker_id in group.ids), None)

    def remembered(self) -> ServedNames:
        """Return a copy for a later time without routable workers: ``routable`` is empty, all else stays."""
        changed = copy.copy(self)
        changed.routable = ()
        return changed

    def without(self, worker_id: str, name: str) -> ServedNames:
        """Return these names, less a name that this worker refused because its names have changed since the reading."""
        lacking = self.lacking(name)
        if worker_id in lacking:
            return self
        changed = copy.copy(self)
        changed.differ, changed._lacking = True, {**self._lacking, name: (*lacking, worker_id)}  # noqa: SLF001  its own class
        return changed


def _paths(groups: Sequence[_Group]) -> dict[str, str]:
    paths: dict[str, Counter[str]] = {}
    for group in groups:
        for name, path in group.loras.items() if group.proved else ():
            paths.setdefault(name, Counter())[path] += len(group.ids)
    return {name: max(sorted(counts), key=counts.__getitem__) for name, counts in sorted(paths.items())}


def misnamed(worker: WorkerView, model: str) -> str:
    """Return why a worker whose names lack its pool's takes no requests, and the remedy. model: the pool's name."""
    names = worker.names
    shown = ", ".join(name[:SHOWN_CHARACTERS] for name in names[:SHOWN_NAMES]) or "nothing"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"it serves {shown}{more}, not {model}: --served-model-name {model}"
