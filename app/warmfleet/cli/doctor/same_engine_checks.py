"""Checks that an engine is a single worker, whether it joined by its plugin or is listed by a URL or two."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from warmfleet.background.stock.known_engines import EngineKey, identity_at
from warmfleet.cli.doctor.finding import Finding, fault, ok
from warmfleet.settings import without_userinfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView

ASKED_AT_ONCE = 32


async def keys_of(client: EngineClient, urls: Iterable[str]) -> dict[str, EngineKey]:
    """Ask each URL for its engine's ``EngineKey``, by which another URL of the same engine is recognised."""
    room = asyncio.Semaphore(ASKED_AT_ONCE)

    async def key(url: str) -> EngineKey:
        async with room:
            return EngineKey(await identity_at(client, url) or "", await client.place(url))

    distinct = list(dict.fromkeys(urls))
    return dict(zip(distinct, await asyncio.gather(*map(key, distinct)), strict=True))


def booked_twice(workers: Sequence[WorkerView], keys: Mapping[str, EngineKey]) -> list[Finding]:
    """Find engines of WARMFLEET_STATIC_WORKERS known as two workers, with a double share. workers: of all pools."""
    serving = [worker for worker in workers if worker.routable and worker.url in keys]
    found = []
    for at, worker in enumerate(serving):
        for other in serving[at + 1 :]:
            listed = [either for either in (worker, other) if either.approximate]
            if listed and keys[worker.url].same(keys[other.url]):
                pair = f"{worker.worker_id} and {other.worker_id}"
                url = without_userinfo(listed[-1].url)
                remedy = f"wait for the next check; if it stays so, take {url} off WARMFLEET_STATIC_WORKERS"
                found.append(fault("address", f"{pair} are one engine, which gets twice its share of requests", remedy))
    return found


def worker_of(url: str, workers: Sequence[WorkerView], keys: Mapping[str, EngineKey]) -> Finding | None:
    """Make the finding about an engine of WARMFLEET_STATIC_WORKERS that is a worker by its plugin or another URL."""
    known = [worker for worker in workers if worker.heard and worker.url in keys and url in keys]
    same = [worker for worker in known if keys[url].same(keys[worker.url])]
    for worker in sorted(same, key=lambda worker: worker.approximate):
        text = f"{without_userinfo(url)} is the worker {worker.worker_id} ({worker.state}), which"
        if not worker.approximate:
            return ok("listed", f"{text} has joined by itself, or by a bridge")
        if worker.url != url:
            return ok("listed", f"{text} is listed as {without_userinfo(worker.url)}, too")
    return None
