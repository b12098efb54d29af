"""One reading of a model's workers, with what the request path looks up often made ready."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from warmfleet.adapters import adapters_of, served

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.adapters import Adapter
    from warmfleet.blocks import Hasher
    from warmfleet.fleet import WorkerView
    from warmfleet.handoff import Ability
    from warmfleet.identity import Identity

MAX_SCHEMES = 4  # what decide accepts


@dataclass(frozen=True, slots=True)
class View:
    """One reading of the fleet's workers. text: some worker is matched by text, its tokenizer is not known.

    reference: a worker that brought what most of them brought; None: nobody did, or the settings name a tokenizer.
    handoff: what workers take token ids, by worker_id.
    """

    workers: tuple[WorkerView, ...] = ()
    identity: Identity | None = None
    hashers: tuple[Hasher, ...] = ()
    text: bool = False
    read_at: float = 0.0
    urls: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    reference: WorkerView | None = None
    handoff: Mapping[str, Ability] = field(default_factory=dict)


def view_of(
    workers: Sequence[WorkerView],
    known: Identity | None,
    hashers: Sequence[Hasher],
    *,
    text: bool,
    reference: WorkerView | None = None,
    handoff: Mapping[str, Ability] = MappingProxyType({}),
) -> View:
    """A View, with what the request path looks up often made ready."""
    adapters = adapters_of(workers)
    ranks = Counter(str(worker.record.get("server_id", "")) for worker in workers if worker.server)
    return View(
        workers=tuple(workers),
        identity=known,
        hashers=tuple(hashers)[:MAX_SCHEMES],
        text=text,
        reference=reference,
        read_at=time.monotonic(),
        handoff=handoff,
        urls={worker.worker_id: worker.url for worker in workers},
        # Only a server with several engine cores needs to be told which one: one of its own refuses the header.
        ranks={
            worker.worker_id: str(worker.record.get("rank", 0))
            for worker in workers
            if worker.server and ranks[str(worker.record.get("server_id", ""))] > 1
        },
        adapters=adapters,
        names=frozenset([*(name for worker in workers for name in worker.models), *adapters]),
        models=tuple(dict.fromkeys(name for worker in workers if worker.routable for name in served(worker))),
    )
