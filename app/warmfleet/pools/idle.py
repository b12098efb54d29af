"""Tells whether a pool is idle: no request has come to this replica for a while, and workers sent only heartbeats.

Heartbeats of an idle pool may be applied late, so a replica with many idle pools need not wake often for each.
"""

from __future__ import annotations

import asyncio
import time

AFTER_S = 10.0  # time with only heartbeats until a pool is idle, enough for joins, probes and a request's last events


class Idle:
    """Measures how long a pool has been idle. Every request calls ``wake``, so it must cost next to nothing."""

    __slots__ = ("_after_s", "_since", "_waiting", "_woken")

    def __init__(self, after_s: float = AFTER_S) -> None:
        self._after_s = after_s
        self._since = 0.0  # monotonic seconds
        self._woken = True
        self._waiting: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """End idleness, and a ``wait`` under way, as a request came, or a worker sent more than a heartbeat."""
        self._woken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def lasts(self) -> bool:
        """Whether nothing has woken the pool for ``after_s``."""
        if self._woken:
            self._woken, self._since = False, time.monotonic()
        return time.monotonic() - self._since >= self._after_s

    async def wait(self, seconds: float) -> None:
        """Return after ``seconds``, or when something wakes the pool."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        timer = loop.call_later(seconds, _end_wait, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self._waiting = None


def _end_wait(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
