"""A fleet that ticks at every call."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.fleet.reporting_worker import ReportingWorker
from tests.support.polling import poll

from warmfleet.fleet import Fleet, Tick
from warmfleet.fleet.upkeep import Pace

if TYPE_CHECKING:
    import redis.asyncio as aioredis

EVERY = Pace(min_gap_ms=0)


async def ticking(store: aioredis.Redis, model: str) -> Fleet:
    """A fleet that ticks at every call, past the grace of a first tick."""
    fleet = Fleet(store, model)
    fleet.upkeep.pace = EVERY
    await store.set(fleet.keys.tick, f"{now_ms()} 0 0")
    return fleet


def now_ms() -> int:
    return int(time.time() * 1000)


async def slow_tick(fleet: Fleet, *, grace_ms: int = 0) -> Tick:
    """A tick that does the work of once a second."""
    await poll(lambda: now_ms() % 1000 < 900)
    await fleet.redis.set(fleet.keys.tick, f"{now_ms() // 1000 * 1000 - 1} {now_ms() + grace_ms if grace_ms else 0} 0")
    return await fleet.upkeep.tick()


async def worker(store: aioredis.Redis, fleet: Fleet, server_id: str = "s") -> ReportingWorker:
    reporter = ReportingWorker(store, fleet, server_id)
    await reporter.join()
    await reporter.applied()
    return reporter
