"""The moments at which the tasks of a replica wake.

To wake a process often costs more than the work after it: caches are cold, and on some virtual machines the host has
to map its memory again. So tasks that wait for the same period wake at the same moment, whenever they began.
"""

from __future__ import annotations

import asyncio

#: A timer may fire a little early: a beat counts as reached if it is due within EARLY periods, and within EARLY_S.
EARLY, EARLY_S = 1 / 16, 0.01


class Clock:
    """The moments (beats) at which tasks of any period wake, counted from the creation of this object."""

    __slots__ = ("_began", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def until(self, period_s: float, share: float = 0.0) -> float:
        """Return the seconds until the next beat of a period.

        share: part of the period, below 1, by which these beats come later than the beats with share 0.
        """
        wait_s = period_s - (self._loop.time() - self._began - share * period_s) % period_s
        return wait_s if wait_s > min(period_s * EARLY, EARLY_S) else wait_s + period_s
