"""Whether a model is at rest in this replica: no request has come for a while, and workers tell only that they live.

Then their heartbeats need not be applied at once, and a replica of many models wakes a few times a second for all.
"""

from __future__ import annotations

import asyncio
import time

AFTER_S = 10.0  # without anything but heartbeats: joins, probes and a request's last events are over by then


class Rest:
    """``stir`` ends the rest, and a wait that is under way; a request calls it, so it costs next to nothing."""

    __slots__ = ("_since", "_stirred", "_waiting")

    def __init__(self) -> None:
        self._since = 0.0  # monotonic seconds
        self._stirred = True
        self._waiting: asyncio.Future[None] | None = None

    def stir(self) -> None:
        """A request has come, or a worker has told more than that it lives."""
        self._stirred = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def lasts(self) -> bool:
        """Whether nothing has stirred for AFTER_S."""
        if self._stirred:
            self._stirred, self._since = False, time.monotonic()
        return time.monotonic() - self._since >= AFTER_S

    async def wait(self, seconds: float) -> None:
        """Return after so many seconds, or when something stirs."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        timer = loop.call_later(seconds, _wake, waiting)
        try:
            await waiting
        finally:
            timer.cancel()
            self._waiting = None


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
