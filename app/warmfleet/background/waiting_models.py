"""Logs why a model cannot serve requests yet, and when it can."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

logger = logging.getLogger("warmfleet.background.waiting_models")

NAMED = 4  # most workers that a line names
NO_ENGINE = (
    "%s waits for its first engine: start vLLM with the plugin and WARMFLEET_REDIS_URL, or name engines in "
    "WARMFLEET_STATIC_WORKERS; `warmfleet doctor` says what is missing"
)
EMPTY = (
    "%s has no engine, other pools of its model have: an engine that starts joins the pool with the least capacity, "
    "and `warmfleet pools drain POOL --move` sends those of another pool"
)
MOVED = "%s has no engine left: all have moved to other pools"
NONE_ROUTABLE = "%s waits for its engines: none of %d takes requests yet (%s); `warmfleet doctor` says why"
NO_TOKENIZER = "%s waits for the tokenizer of its engines: %d of %d engines take requests, which go by load until then"
UNTOLD = (
    "%s is served, but texts go by load, as no engine announces a tokenizer: %d of %d engines take requests. To match "
    "texts, set WARMFLEET_TOKENIZER, or give `warmfleet bridge` a --tokenizer"
)
SERVED = "%s is served: %d of %d engines take requests"


class Waiting:
    """Compares each reading of the fleet with the last logged one, and logs the pools whose state changed."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._told: dict[str, tuple[str, int, int]] = {}

    def look(self) -> None:
        """Log a line for each pool whose state has changed, unless the pool is leaving."""
        for pool in self._pools.all:
            if not pool.contacted or pool in self._pools.leaving:
                continue
            workers = pool.view.workers
            routable = sum(worker.routable for worker in workers)
            text = _text(pool) if routable else self._nobody(pool)
            now, before = (text, routable, len(workers)), self._told.get(pool.tag)
            if now != before:
                self._told[pool.tag] = now
                elsewhere = text == MOVED and self._beside(pool)
                lost = before is not None and before[0] == SERVED and text != SERVED and not elsewhere
                logger.log(logging.WARNING if lost else logging.INFO, text, *_figures(pool, text, routable))

    def _nobody(self, pool: Pool) -> str:
        """Return the line about a pool of which no worker takes requests."""
        workers = pool.view.workers
        if not workers:
            return EMPTY if self._beside(pool) else NO_ENGINE
        return MOVED if len(self._pools.moved(pool, workers)) == len(workers) else NONE_ROUTABLE

    def _beside(self, pool: Pool) -> bool:
        """Whether a pool of its model has a worker that takes requests."""
        return any(worker.routable for other in self._pools.named(pool.name) for worker in other.view.workers)


def _text(pool: Pool) -> str:
    """Return the line about a pool of which some worker takes requests."""
    if pool.usable:
        return SERVED
    announced = any(worker.server and worker.server.get("artifacts") for worker in pool.view.workers)
    return NO_TOKENIZER if announced else UNTOLD


def _figures(pool: Pool, text: str, routable: int) -> tuple[object, ...]:
    workers = pool.view.workers
    if text in (NO_ENGINE, EMPTY, MOVED):
        return (pool.tag,)
    if text == NONE_ROUTABLE:
        named = ", ".join(f"{worker.worker_id}: {worker.state}" for worker in workers[:NAMED])
        return pool.tag, len(workers), named + (", ..." if len(workers) > NAMED else "")
    return pool.tag, routable, len(workers)
