"""Measures how many block changes a Redis core can apply: ``make -s bench NAME=apply ARGS="--follow"``.

64, 256 and 1,024 workers flush the changes of 100 ms. Their engines have full caches, so each block that is stored
comes with a block that is removed. Flushes are written and then applied to the end. The figures are CPU time of the
server's main thread, which other work on the machine hardly changes.

``live``: each flush is applied by itself. ``behind``: ten flushes of a worker are applied together, as they are when
applying lags by a second. ``share_...``: the share of a core, with the XADDs, by blocks stored per second and worker.
``flush_us``: the cost of a flush without its blocks. ``pair_us``: the cost of one block stored and one removed, which
stand for the prefill of one block. ``prefill_tokens_per_s``: how much all engines together may compute, by block size,
until a core does nothing but follow. Applying is paced to 30 % of a core, and to twice that while much is waiting.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.bench.sync_data import Data
from tests.bench.sync_fleet import Worker, send
from tests.support.redis.servers import PATIENT

from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

WORKERS = (64, 256, 1_024)
BLOCK_TOKENS = (16, 32, 64, 128, 256)
RATES = (250, 2_000)  # blocks that each worker stores per second
FLUSHES = 10  # of each worker
TOGETHER = {"live": 1, "behind": FLUSHES}
ENTRIES = 6_000  # blocks that a worker holds; the cost depends little on it


class Rounds:
    """A fleet of ``workers`` workers on a server of its own."""

    def __init__(self, url: str, workers: int) -> None:
        self.fleet = Fleet(connect(url, timeout_s=30), "bench", timeouts=PATIENT)
        self.fleet.upkeep.pace = replace(Pace(), min_gap_ms=0, share_permille=1000, applies=10_000)
        data = Data(workers, ENTRIES)
        self.workers = [Worker(self.fleet, data, number) for number in range(workers)]

    async def fill(self) -> None:
        for worker in self.workers:
            await send(self.fleet, [worker.join(), *worker.fill()])
            while (await self.fleet.upkeep.apply(worker.worker_id)).more:
                pass

    async def cost_s(self, rate: int, together: int) -> float:
        """CPU seconds of the server for one flush of all at ``rate`` blocks stored a second and worker."""
        before = await self._cpu_s()
        for _ in range(FLUSHES // together):
            for _ in range(together):
                for worker in self.workers:
                    await send(self.fleet, worker.slide(round(rate * wire.FLUSH_SECONDS)))
            await self._apply()
        return (await self._cpu_s() - before) / FLUSHES

    async def _apply(self) -> None:
        """Apply until every stream is empty, and stop then, so that idle ticks are not measured."""
        looked = 0
        while looked < len(self.workers):
            tick = await self.fleet.upkeep.tick()
            looked = 0 if tick.backlog or tick.snapshots else looked + self.fleet.upkeep.pace.max_streams
            await self.fleet.upkeep._drain(replace(tick, granted_us=10**9))

    async def _cpu_s(self) -> float:
        info: Any = await self.fleet.redis.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])

    async def check(self) -> None:
        """Fail unless each index has the digest that its worker published and no protocol event was counted."""
        views = await self.fleet.workers.read()
        assert len(views) == len(self.workers)
        for view in views:
            number = int(view.worker_id.split("-")[1].split(".")[0])
            assert view.load.blocks == self.workers[number].digest.count, view.worker_id
        assert await self.fleet.index.counts() == {}


async def measure(url: str, workers: int) -> dict[str, Any]:
    rounds = Rounds(url, workers)
    await rounds.fill()
    found: dict[str, Any] = {}
    for name, together in TOGETHER.items():
        costs = {rate: await rounds.cost_s(rate, together) for rate in RATES}
        found[name] = summary(workers, costs)
    for worker in rounds.workers:
        await send(rounds.fleet, [worker.heartbeat()])
    await rounds._apply()
    await rounds.check()
    await rounds.fleet.close()
    return found


def summary(workers: int, costs: dict[int, float]) -> dict[str, Any]:
    """Return the figures. costs: rate -> CPU seconds of one flush of all workers; ten of them happen each second."""
    low, high = RATES
    pair_s = (costs[high] - costs[low]) / (workers * (high - low) * wire.FLUSH_SECONDS)
    flush_s = costs[low] / workers - low * wire.FLUSH_SECONDS * pair_s
    most = max(0.0, 1 - workers * flush_s / wire.FLUSH_SECONDS) / pair_s
    found: dict[str, Any] = {f"share_{rate}": round(costs[rate] / wire.FLUSH_SECONDS, 3) for rate in RATES}
    found |= {"flush_us": round(flush_s * 1e6, 1), "pair_us": round(pair_s * 1e6, 2)}
    return found | {"prefill_tokens_per_s": {size: round(most * size) for size in BLOCK_TOKENS}}


def run(started: Callable[[], AbstractContextManager[str]], workers: tuple[int, ...] = WORKERS) -> dict[str, Any]:
    """Return the figures by number of workers, each on a server of its own."""
    found: dict[str, Any] = {}
    for count in workers:
        with started() as url:
            found[str(count)] = asyncio.run(measure(url, count))
        print(count, "workers:", found[str(count)], file=sys.stderr, flush=True)
    return found
