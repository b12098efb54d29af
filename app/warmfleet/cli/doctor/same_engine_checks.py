"""Checks whether one engine is one worker: by its plugin and by a URL of the list, or by two URLs."""

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
    """By what the engine at each URL is known again."""
    room = asyncio.Semaphore(ASKED_AT_ONCE)

    async def key(url: str) -> EngineKey:
        async with room:
            return EngineKey(await identity_at(client, url) or "", await client.place(url))

    asked = list(dict.fromkeys(urls))
    return dict(zip(asked, await asyncio.gather(*map(key, asked)), strict=True))


def booked_twice(workers: Sequence[WorkerView], keys: Mapping[str, EngineKey]) -> list[Finding]:
    """Workers known by their URL whose engine is another worker, too. workers: of all pools."""
    serving = [worker for worker in workers if worker.routable and worker.url in keys]
    found = []
    for at, worker in enumerate(serving):
        for other in serving[at + 1 :]:
            listed = [one for one in (worker, other) if one.approximate]
            if listed and keys[worker.url].same(keys[other.url]):
                text = (
                    f"{worker.worker_id} and {other.worker_id} are one engine, which gets twice its share of requests"
                )
                url = without_userinfo(listed[-1].url)
                remedy = f"wait for the next check; if it stays so, take {url} off WARMFLEET_STATIC_WORKERS"
                found.append(fault("address", text, remedy))
    return found


def worker_of(url: str, workers: Sequence[WorkerView], keys: Mapping[str, EngineKey]) -> Finding | None:
    """Under which name an engine of the list is booked that is a worker under another URL or by its plugin."""
    same = [one for one in workers if one.heard and one.url in keys and url in keys and keys[url].same(keys[one.url])]
    exact = [worker for worker in same if not worker.approximate]
    for worker in exact:
        how = "has joined by itself, or by a bridge"
        return ok("listed", f"{without_userinfo(url)} is the worker {worker.worker_id} ({worker.state}), which {how}")
    for worker in same:
        if worker.url != url:
            text = f"{without_userinfo(url)} is the worker {worker.worker_id} ({worker.state}), which"
            return ok("listed", f"{text} is listed as {without_userinfo(worker.url)}, too")
    return None
