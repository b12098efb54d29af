"""For the tests of the publisher: a running publisher, an engine's changes, a router's upkeep."""

from __future__ import annotations

import asyncio
import json
import os
import random
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import redis
from tests.support.polling import poll

from warmfleet.background.supervisor import stop
from warmfleet.errors import FleetUnavailable
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from warmfleet.fleet import Fleet
    from warmfleet_worker.tracker import Tracker

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)
WORKER = "w1.0"


def config(redis_url: str, model: str, capacity_blocks: int = 100_000) -> PublisherConfig:
    return PublisherConfig(redis_url, model, WORKER, "w1", 0, SCHEME, capacity_blocks, 32_768, "test-1")


def hashes(count: int) -> list[bytes]:
    return [os.urandom(8) for _ in range(count)]


def churn(tracker: Tracker, steps: int, seed: int = 0) -> None:
    """Change the table as an engine does: store prompts and evict older blocks."""
    rng, held = random.Random(seed), list(tracker.table)
    for _ in range(steps):
        fresh = [rng.randbytes(8) for _ in range(rng.randrange(1, 200))]
        tracker.stored(fresh)
        held += fresh
        rng.shuffle(held)
        gone, held = held[: len(held) // 3], held[len(held) // 3 :]
        tracker.removed(gone)


@contextmanager
def publishing(redis_url: str, model: str, tracker: Tracker, **more: Any) -> Iterator[WorkerPublisher]:
    """Publish until the block ends. announced: of the further sets (``sets``), by default nothing."""
    sets = more.pop("announced", None) or {kind: {} for kind in more.get("sets", {})}
    publisher = WorkerPublisher(replace(config(redis_url, model), sets=sets), tracker, **more)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.stop(5)


@asynccontextmanager
async def upkeep(fleet: Fleet) -> AsyncIterator[None]:
    """Run a router's upkeep while the block runs. It goes on after a Redis outage."""

    async def loop() -> None:
        while True:
            with suppress(FleetUnavailable):  # some tests take Redis away
                await fleet.upkeep.step()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        await stop([task])


async def record(fleet: Fleet) -> dict[str, Any]:
    raw = await fleet.redis.hget(fleet.keys.workers, WORKER)
    return dict(json.loads(raw)) if raw else {}


async def stream(fleet: Fleet) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The entries that the worker has written and no router has applied yet."""
    return cast("list[tuple[bytes, dict[bytes, bytes]]]", await fleet.redis.xrange(fleet.keys.events(WORKER)))


async def indexed(fleet: Fleet, tracker: Tracker) -> bool:
    """Whether the index lists the blocks of the table and no others, in both directions. No, if Redis is away."""
    table = set(tracker.table)
    with suppress(FleetUnavailable, redis.ConnectionError, redis.TimeoutError):
        slot = (await record(fleet)).get("slot", 0)
        if not slot or await fleet.redis.smembers(fleet.keys.slot(slot)) != table:
            return False
        async with fleet.redis.pipeline(transaction=False) as pipe:
            for block in list(table)[:500]:
                pipe.sismember(fleet.keys.block(block), str(slot))
            return all(await pipe.execute())
    return False


async def equal(fleet: Fleet, tracker: Tracker, deadline_s: float = 20.0) -> None:
    """Wait until the index equals the tracker's table. Redis may be away meanwhile."""
    await poll(lambda: indexed(fleet, tracker), deadline_s, "the index equals the table")
