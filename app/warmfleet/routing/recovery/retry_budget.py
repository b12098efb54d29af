"""How often the requests of one replica may be tried again."""

from __future__ import annotations

BUDGET_SHARE = 0.2  # further tries that a replica's requests may have on average, each
BUDGET_MOST = 128.0  # tries saved up: as many requests as may be under way at a worker that dies


class RetryBudget:
    """Bounds the further tries of one replica, so that a fleet that fails is not asked several times as much.

    A try after a refused connection is free: it did not cost the worker anything.
    """

    def __init__(self) -> None:
        self._left = BUDGET_MOST

    def earn(self) -> None:
        """A request came."""
        self._left = min(self._left + BUDGET_SHARE, BUDGET_MOST)

    @property
    def empty(self) -> bool:
        return self._left < 1.0

    def spend(self) -> None:
        """A request is tried again."""
        self._left -= 1.0
