"""Hands log lines to a thread that writes them, so that a slow reader of the log delays no request."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, TextIO

from warmfleet.logs.folding import Folding
from warmfleet.logs.lines import JsonLines, TextLines, in_ascii, prepared

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from warmfleet.logs.lines import Line

MAX_WAITING = 10_000  # most lines that wait: a few MB, or some seconds of the fullest access log
FOLDED_LOOK_S = 5.0  # time between two looks whether a window of folded lines has ended
GATHERED_S = 0.05  # time for which the thread collects lines given to ``later``, before one write
CLOSE_S = 2.0  # longest time for writing the waiting lines when the process stops
LATER: Literal["later"] = "later"
FORMATS: dict[str, type[TextLines | JsonLines]] = {"text": TextLines, "json": JsonLines}


class LogOutput(logging.Handler):
    """The only log handler of the process while its ``with`` block runs. Drops lines while MAX_WAITING wait.

    ``on_drop`` is called for each line that is dropped, or cannot be written as it is. When the reader of the log goes
    on, a line says how many lines were dropped.
    """

    def __init__(self, level: str, form: str, replica: str = "", stream: TextIO | None = None) -> None:
        """level: a name of ``logging``, in lower case. form: one of FORMATS. replica: as in TextLines.

        stream: standard error by default.
        """
        super().__init__()
        self.on_drop: Callable[[], None] = lambda: None
        self._level_of_ours = getattr(logging, level.upper())
        self._stream = stream or sys.stderr
        # SimpleQueue may be used in a signal handler; the Queue of logging's QueueHandler may not.
        self._waiting: SimpleQueue[logging.LogRecord | threading.Event | Literal["later"] | None] = SimpleQueue()
        self._unmade: deque[tuple[Callable[[Any], Line], Any]] = deque()
        self._dropped = 0
        self._folding = Folding()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._lines = FORMATS[form](replica)
        self.setFormatter(self._lines)
        self.addFilter(self._folding.filter)

    def __enter__(self) -> LogOutput:
        root, ours = logging.getLogger(), logging.getLogger("warmfleet")
        self._before = (root.level, ours.level, root.handlers[:])
        root.handlers[:] = [self]
        root.setLevel(max(self._level_of_ours, logging.INFO))  # libraries log too much at debug level
        ours.setLevel(self._level_of_ours)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its lines about a start repeat the router's
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        root, ours = logging.getLogger(), logging.getLogger("warmfleet")
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        level, our_level, handlers = self._before
        root.handlers[:] = handlers
        root.setLevel(level)
        ours.setLevel(our_level)
        self.close()

    def flush(self) -> None:
        """Wait until the lines that wait now are written, for CLOSE_S at most."""
        written = threading.Event()
        self._waiting.put(written)
        if self._thread.is_alive():
            written.wait(CLOSE_S)

    def handle(self, record: logging.LogRecord) -> bool:
        """Queue the record for the thread, without a lock, so that a signal handler may log during another line."""
        try:
            passes = bool(self.filter(record))
            if passes:
                self.emit(record)
        except Exception:  # noqa: BLE001  wrong arguments lose this line, but must not fail the caller
            self.handleError(record)
            return False
        return passes

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the library's name
        """Log where a line could not be made, but neither its text nor its arguments. Call within ``except``."""
        kind = getattr(sys.exc_info()[0], "__name__", "")
        place = (record.pathname, record.lineno)
        text = "the log line of %s:%d cannot be made: %s"
        complaint = logging.LogRecord("warmfleet.logs", logging.ERROR, *place, text, (*place, kind), None)
        if self._folding.filter(complaint):
            self.emit(complaint)

    def emit(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= MAX_WAITING:
            self._drop()
            return
        self._waiting.put(prepared(record))

    def later(self, make: Callable[[Any], Line], subject: object) -> None:
        """Have the thread make a line of ``subject`` by ``make``, and write it. Such lines are never folded."""
        unmade = self._unmade
        if len(unmade) >= MAX_WAITING:
            self._drop()
            return
        unmade.append((make, subject))
        if len(unmade) == 1:
            self._waiting.put(LATER)

    def _drop(self, lines: int = 1) -> None:
        self._dropped += lines
        for _ in range(lines):
            self.on_drop()

    # ------------------------------------------------ the thread

    def _run(self) -> None:
        looked_at = time.monotonic()
        while True:
            try:
                record = self._waiting.get(timeout=FOLDED_LOOK_S)
                if record is None:
                    self._make_lines()
                    self._write_summaries(self._folding.close())
                    return
                if record == LATER:
                    time.sleep(GATHERED_S)
                    self._make_lines()
                elif isinstance(record, threading.Event):
                    self._make_lines()
                    record.set()
                else:
                    self._write(record)
            except Empty:
                pass
            if time.monotonic() - looked_at >= FOLDED_LOOK_S:
                looked_at = time.monotonic()
                self._write_summaries(self._folding.ended())

    def _make_lines(self) -> None:
        """Make the lines that wait to be made, and write them at once."""
        made, unmade = list[str](), self._unmade
        while unmade and len(made) < MAX_WAITING:
            make, subject = unmade.popleft()
            try:
                made.append(self._lines.line(make(subject)) + "\n")
            except Exception:  # noqa: BLE001  a bug in ``make`` loses this line, but must not end the thread
                self._drop()
        if made:
            self._put("".join(made), len(made))
        if unmade:  # lines were added meanwhile, and nothing else wakes the thread for them
            self._waiting.put(LATER)

    def _write_summaries(self, folded: list[logging.LogRecord]) -> None:
        """Write the records that count folded lines, and a line that counts the dropped ones."""
        for record in folded:
            self._write(prepared(record))
        if self._dropped and self._waiting.qsize() < MAX_WAITING // 2:
            dropped, self._dropped = self._dropped, 0
            text = f"{dropped} log lines were dropped: the reader of this log is too slow"
            self._write(logging.LogRecord("warmfleet.logs", logging.WARNING, "", 0, text, None, None))

    def _write(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001  JSON cannot have half characters, or integers beyond 64 bits
            self.on_drop()
            text = self.format(in_ascii(record))
        self._put(text + "\n", 1)

    def _put(self, text: str, lines: int) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except Exception:  # noqa: BLE001  nobody reads the log any more, so there is no place left to say so
            self._drop(lines)
