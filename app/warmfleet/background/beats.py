"""The moments at which the tasks of a replica wake.

Whatever a process does after a rest costs more than the work itself: caches are cold, and on some virtual machines the
host has to map its memory again. So tasks that wait for the same period wake at the same moment, also if they began at
different ones.
"""

from __future__ import annotations

import asyncio

EARLY = 1 / 16  # of a period: a timer may fire a little early, and then the next beat is that of the next period


class Beats:
    """Beats of any period, counted from the making of this object in the running event loop."""

    __slots__ = ("_began", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def until(self, period_s: float, share: float = 0.0) -> float:
        """Seconds until the next beat of a period, at least EARLY of the period.

        share: by which part of the period these beats come after the others of the same period, from 0 to below 1.
        """
        wait_s = period_s - (self._loop.time() - self._began - share * period_s) % period_s
        return wait_s if wait_s > period_s * EARLY else wait_s + period_s
