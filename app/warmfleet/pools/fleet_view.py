"""One reading of a model's workers, with what the request path looks up often made ready."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from warmfleet.pools.lora_adapters import adapters_of, served
from warmfleet.prompt.request import MAX_MODEL_LEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.pools.capabilities import TokenCapability
    from warmfleet.pools.lora_adapters import Adapter
    from warmfleet.prompt.block_hashes import Hasher
    from warmfleet.prompt.prompt_identity import Identity

MAX_SCHEMES = 4  # what decide accepts


@dataclass(frozen=True, slots=True)
class View:
    """One reading of the fleet's workers. text: some worker is matched by text, its tokenizer is not known.

    reference: a worker that brought what most of them brought; None: nobody did, or the settings name a tokenizer.
    handoff: what workers take token ids, by worker_id. max_model_len: what the routable one that takes most takes;
    limits: what each takes, where they differ.
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
    handoff: Mapping[str, TokenCapability] = field(default_factory=dict)
    max_model_len: int = MAX_MODEL_LEN
    limits: Mapping[str, int] = field(default_factory=dict)
    ids: tuple[str, ...] = ()

    def barred(self, model: str, tokens: int) -> tuple[str, ...]:
        """Who cannot serve a request for ``model`` that needs so many: lacks the adapter, or takes fewer.

        If all that have the adapter take fewer, they are not barred: one of them is to tell the client.
        """
        adapter = self.adapters.get(model)
        lacking = adapter.lacking if adapter else ()
        able = [worker for worker in self.limits if worker not in lacking]
        short = [worker for worker in able if self.limits[worker] < tokens]
        return (*lacking, *short) if len(short) < len(able) else lacking


def view_of(
    workers: Sequence[WorkerView],
    known: Identity | None,
    hashers: Sequence[Hasher],
    *,
    text: bool,
    reference: WorkerView | None = None,
    handoff: Mapping[str, TokenCapability] = MappingProxyType({}),
) -> View:
    """A View, with what the request path looks up often made ready."""
    adapters = adapters_of(workers)
    limits = {one.worker_id: _limit(one) for one in workers if one.routable}
    ranks = Counter(str(worker.record.get("server_id", "")) for worker in workers if worker.server)
    return View(
        workers=tuple(workers),
        identity=known,
        hashers=tuple(hashers)[:MAX_SCHEMES],
        text=text,
        reference=reference,
        read_at=time.monotonic(),
        handoff=handoff,
        ids=tuple(worker.worker_id for worker in workers),
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
        max_model_len=max(limits.values(), default=MAX_MODEL_LEN),
        limits=limits if len(set(limits.values())) > 1 else {},
    )


def _limit(worker: WorkerView) -> int:
    limit = worker.record.get("max_model_len")
    return min(limit, MAX_MODEL_LEN) if isinstance(limit, int) and limit > 0 else MAX_MODEL_LEN
