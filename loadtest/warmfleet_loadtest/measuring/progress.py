"""A line on standard error that shows how many requests of a run are answered."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REDRAW_S = 0.5
STEPS = 10  # number of lines in all if standard error is no terminal
WIDTH = 24


class Progress:
    """Call ``tick`` for each answer. A terminal shows one line that is redrawn, a file gets ten lines in all.

    events: called after so many answers.
    """

    def __init__(self, label: str, total: int, events: Mapping[int, Callable[[], object]] | None = None) -> None:
        self._events = events or {}
        self._label = label
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._began = self._drawn = time.monotonic()
        self._shown = 0
        self.done = self.errors = 0

    def tick(self, *, failed: bool) -> None:
        self.done += 1
        self.errors += failed
        if event := self._events.get(self.done):
            event()
        if self._terminal:
            if time.monotonic() - self._drawn >= REDRAW_S or self.done == self._total:
                self._drawn = time.monotonic()
                print(f"\r{self.text()}", end="\n" if self.done == self._total else "", file=sys.stderr, flush=True)
        elif self.done * STEPS // self._total > self._shown:
            self._shown = self.done * STEPS // self._total
            print(self.text(), file=sys.stderr, flush=True)

    def text(self) -> str:
        left = (time.monotonic() - self._began) / max(1, self.done) * (self._total - self.done)
        bar = "#" * (WIDTH * self.done // self._total)
        return f"{self._label} [{bar:<{WIDTH}}] {self.done}/{self._total}, errors {self.errors}, ETA {left:.0f} s "
