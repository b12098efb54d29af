"""Folds repeated log lines: in a minute a few of a kind pass, and at its end one line counts the others."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, MutableSequence

WINDOW_S = 60.0  # length of a window, in which lines of one kind are folded
MAX_TEXTS = 8  # most different lines of one kind that pass in a window: enough to name a few engines with one fault
MAX_KINDS = 1_000  # most kinds that are remembered; with more, the window of the oldest ends early


class _Kind:
    """The lines of one kind since ``began`` (monotonic time): texts that passed, and the number of other lines.

    ``last_text``: of the last record, as it was when the line was logged.
    """

    __slots__ = ("began", "folded", "last", "last_text", "texts")

    def __init__(self, began: float, record: logging.LogRecord) -> None:
        self.began = began
        self.texts: set[str] = set()
        self.folded = 0
        self.last, self.last_text = record, ""


class Folding(logging.Filter):
    """Passes few lines of one kind, counts the rest. A kind: warnings or errors of one statement, or else equal lines.

    Lines with exceptions of different types are never of one kind, because one statement may log many different bugs.
    So the first line of a repeated fault passes at once, and a line with the number of folded lines follows once a
    minute (``ended``). Lines of debug level pass. Several threads may call the filter, also a signal handler that
    interrupts it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[Hashable, _Kind] = {}
        self._early: deque[logging.LogRecord] = deque(maxlen=MAX_KINDS)  # summaries of kinds whose window ended early
        self._lock = threading.RLock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record passes now, and count it if not."""
        if record.levelno < logging.INFO:
            return True
        text = record.getMessage()
        warns = record.levelno >= logging.WARNING
        raised = record.exc_info[0] if record.exc_info else None
        key = (record.name, record.levelno, raised, record.msg if warns and isinstance(record.msg, str) else text)
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                if len(self._kinds) >= MAX_KINDS:
                    self._end(next(iter(self._kinds)), self._early)
                kind = self._kinds[key] = _Kind(self._clock(), record)
            if text in kind.texts or len(kind.texts) >= MAX_TEXTS:
                kind.folded += 1
                kind.last, kind.last_text = record, text
                return False
            kind.texts.add(text)
            return True

    def ended(self) -> list[logging.LogRecord]:
        """Return a summary record for each kind with folded lines whose window is over."""
        return self._ended(self._clock() - WINDOW_S)

    def close(self) -> list[logging.LogRecord]:
        """Return the records of ``ended`` as if every window were over."""
        return self._ended(self._clock())

    def _ended(self, began_by: float) -> list[logging.LogRecord]:
        with self._lock:
            summaries = list(self._early)
            self._early.clear()
            for key in [key for key, kind in self._kinds.items() if kind.began <= began_by]:
                self._end(key, summaries)
        return summaries

    def _end(self, key: Hashable, summaries: MutableSequence[logging.LogRecord]) -> None:
        kind = self._kinds.pop(key, None)
        if kind is not None and kind.folded:
            summaries.append(_summary(kind, self._clock() - kind.began))


def _summary(kind: _Kind, seconds: float) -> logging.LogRecord:
    """Make the record that counts the folded lines, with the last line's exception, so that its traceback is logged."""
    last = kind.last
    text = f"... {kind.folded} more like it in {max(1.0, seconds):.0f} s, the last: {kind.last_text}"
    return logging.LogRecord(last.name, last.levelno, last.pathname, last.lineno, text, None, last.exc_info)
