"""The moments at which the tasks of a replica wake.

To wake a process often costs more than the work after it: caches are cold, and on some virtual machines the host has
to map its memory again. So tasks that wait for the same period wake at the same moment, whenever they began.
"""

from __future__ import annotations

import asyncio

#: A timer may fire early, so a beat counts as reached if it is less than EARLY of a period and EARLY_S seconds away.
EARLY, EARLY_S = 1 / 16, 0.01


class Clock:
    """Gives the moments (beats) at which all tasks of one period wake, counted from the creation of this object."""

    __slots__ = ("_began", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def until(self, period_s: float, share: float = 0.0) -> float:
        """Return the seconds until the next beat of a period.

        share: fraction of the period, below 1, by which the beats are delayed, so that not all tasks wake together.
        """
        wait_s = period_s - (self._loop.time() - self._began - share * period_s) % period_s
        return wait_s if wait_s > min(period_s * EARLY, EARLY_S) else wait_s + period_s
