"""A progress line about a step that takes time: on standard error, so that it never mixes with a command's output."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TYPE_CHECKING, Self, TextIO

from warmfleet.cli.terminal.output import printable

if TYPE_CHECKING:
    from collections.abc import Callable

DRAW_S = 0.2  # time between two drawings of the line at a terminal
SHOWN_FROM_S = 0.5  # time after which a step gets a line; a quicker step needs none
PLAIN_S = 10.0  # time between two lines if the output is no terminal, such as the log of a CI job
BAR = 24  # length of the bar in characters


class Progress:
    """Shows the running step: at a terminal by a line with seconds, and a bar if the end is known; else every PLAIN_S.

    A thread draws the line, also while the command waits. The end of the ``with`` block removes the line.
    """

    def __init__(
        self, out: TextIO | None = None, *, plain_s: float = PLAIN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._plain_s, self._clock = plain_s, clock
        self._text, self._done, self._of, self._detail = "", 0, 0, ""
        self._began = self._said = clock()
        self._drawn = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.step("")

    def step(self, text: str, done: int = 0, of: int = 0, detail: str = "") -> None:
        """Show a step with this text; empty: hide it. done, of: finished parts and all parts; of 0: not known.

        detail: a text that may change during the step. The seconds count from the first call with the same ``text``.
        """
        with self._lock:
            if printable(text) != self._text:
                self._began = self._said = self._clock()
            self._text, self._done, self._of, self._detail = printable(text), done, of, printable(detail)
            if not text:
                self._clear()

    def say(self, line: str, out: TextIO | None = None) -> None:
        """Print a line above the progress line, at once: on standard output, unless ``out`` is another stream."""
        with self._lock:
            self._clear()
            print(line, file=out or sys.stdout, flush=True)

    def tick(self) -> None:
        """Draw the progress line if it is due."""
        with self._lock:
            now = self._clock()
            if not self._text:
                return
            line = f"{self._text} ...{_bar(self._done, self._of)} {now - self._began:.0f} s{self._detail}"
            if self._terminal and now - self._began >= SHOWN_FROM_S:
                self._out.write(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}")
                self._out.flush()
                self._drawn = True
            elif not self._terminal and now - self._said >= self._plain_s:
                self._said = now
                print(line, file=self._out, flush=True)

    def _clear(self) -> None:
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._drawn = False

    def _run(self) -> None:
        while not self._ended.wait(DRAW_S):
            self.tick()


def _bar(done: int, of: int) -> str:
    if not of:
        return ""
    filled = BAR * min(done, of) // of
    return f" [{'#' * filled}{'.' * (BAR - filled)}] {done} of {of},"
