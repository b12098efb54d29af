"""Folds lines that repeat: within a minute a few of a kind pass, and one line at its end counts the others."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

WINDOW_S = 60.0
SOME = 8  # warnings of one kind that differ pass in a window: a few engines with the same fault are all named
MAX_KINDS = 1_000  # that are remembered; beyond, the oldest is forgotten before its window ends


class _Kind:
    """Lines alike since ``began`` (monotonic time): the texts that passed, and how many more there were."""

    __slots__ = ("began", "folded", "last", "texts")

    def __init__(self, began: float, record: logging.LogRecord) -> None:
        self.began = began
        self.texts: set[str] = set()
        self.folded = 0
        self.last = record


class Folding(logging.Filter):
    """A filter for handlers. Warnings and errors are of one kind if one statement made them; others if they are equal.

    So of a fault that repeats the first line is told at once, and its number once a minute (``ended``). Lines of debug
    level pass. It may be called by several threads, and by a signal's handler in the middle of itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[Hashable, _Kind] = {}
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is told now; else it is counted."""
        if record.levelno < logging.INFO:
            return True
        text = record.getMessage()
        warns = record.levelno >= logging.WARNING
        key = (record.name, record.levelno, record.msg if warns else text)
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= MAX_KINDS:
                    self._kinds.pop(next(iter(self._kinds)))
                kind = self._kinds[key] = _Kind(self._clock(), record)
            if text in kind.texts or len(kind.texts) >= SOME:
                kind.folded += 1
                kind.last = record
                return False
            kind.texts.add(text)
            return True

    def ended(self) -> list[logging.LogRecord]:
        """A record for each kind whose window is over and that had more lines than were told; it begins anew then."""
        told = []
        with self._lock:
            over = self._clock() - WINDOW_S
            for key in [key for key, kind in self._kinds.items() if kind.began <= over]:
                kind = self._kinds.pop(key)
                if kind.folded:
                    told.append(_summary(kind))
        return told


def _summary(kind: _Kind) -> logging.LogRecord:
    last = kind.last
    text = f"... {kind.folded} more like it in {WINDOW_S:.0f} s, the last: {last.getMessage()}"
    return logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, None, None)
