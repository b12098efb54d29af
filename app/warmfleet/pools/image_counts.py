"""Compares the tokens of images that a request was predicted to have with those that its answer reports.

If the engines of a pool report other numbers several times in a row, the announced rule is wrong, or engines differ:
this replica then knows the pool's prompts up to their first image only, and tries again after a while.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG_IN_A_ROW = 3  # one alone may come from an engine that began anew with other settings
DOUBT_S = 600.0  # the time between two probes


class ImageCounts:
    """The comparisons of one pool's answers, and whether its rule for images is in doubt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong = 0
        self._doubted_until = 0.0

    @property
    def doubted(self) -> bool:
        """Whether prompts count as known up to their first image only."""
        return self._clock() < self._doubted_until

    def compare(self, predicted: int, reported: int, *, named: bool = False) -> str:
        """Take an answer's report; return its label in the metrics.

        named: a client named an image by an id of its own. Such answers raise and end no doubt, because a client may
        give one id to several images.
        """
        if not named:
            self._wrong = 0 if predicted == reported else self._wrong + 1
            if self._wrong >= WRONG_IN_A_ROW:
                self._wrong, self._doubted_until = 0, self._clock() + DOUBT_S
        return "as_predicted" if predicted == reported else "more" if reported > predicted else "fewer"
