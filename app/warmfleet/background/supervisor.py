"""Runs a replica's background tasks. A failed round is counted, logged and tried again; it ends no other task."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from warmfleet.errors import WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from warmfleet.metrics import Metrics

logger = logging.getLogger("warmfleet.background.supervisor")

BACKOFF_S = 0.2, 5.0
LOG_EVERY_S = 10.0
STOP_AGAIN_S = 0.2


async def supervise(name: str, interval_s: float, work: Callable[[], Awaitable[object]], metrics: Metrics) -> None:
    """Run ``work`` every ``interval_s``, for ever; after a failure wait longer, up to 5 s."""
    backoff, logged_at = BACKOFF_S[0], -LOG_EVERY_S
    while True:
        try:
            await work()
        except Exception as error:  # a background task must outlive whatever one of its rounds meets
            metrics.task_failures.labels(name).inc()
            if time.monotonic() - logged_at >= LOG_EVERY_S:
                logged_at = time.monotonic()
                known = isinstance(error, WarmfleetError)
                logger.warning("%s failed, again in %.1f s: %s", name, backoff, error, exc_info=not known)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, BACKOFF_S[1])
        else:
            backoff = BACKOFF_S[0]
            await asyncio.sleep(interval_s)


async def stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and return when all have ended. One cancellation may get lost inside a library's wait_for."""
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=STOP_AGAIN_S)
