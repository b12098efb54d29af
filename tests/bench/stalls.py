"""Times at which a core stood still, so that a latency measured then says nothing about the software.

A host lends a virtual machine its cores. One process of highest priority watches each core and does nothing but sleep.
If the process wakes late, no process of this machine held it up: the host stopped the core, and every other process
lost that time, too. Without the right to the highest priority no stall is noticed, and ``watching`` is false.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Self

PERIOD_S = 0.001
NOTICED_S = 0.0005
AFTERMATH = 2.0  # times the length of a stall: at two thirds of full load, the backlog is gone after twice the time


@dataclass
class Stalls:
    """A ``with`` block in which the cores are watched. Afterwards ``begins`` and ``ends`` list the stalls.

    ``lost`` tells whether an interval met a stall or its aftermath. Times are ``time.perf_counter`` seconds, the same
    clock in all processes.
    """

    watchers: list[subprocess.Popen[str]] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # with their aftermath; stalls never overlap
    watching: bool = False

    def __enter__(self) -> Self:
        for core in sorted(os.sched_getaffinity(os.getpid())):
            command = [sys.executable, "-m", "tests.bench.stalls", str(core)]
            self.watchers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return self

    def __exit__(self, *_: object) -> None:
        seen: list[tuple[float, float]] = []
        for watcher in self.watchers:
            watcher.terminate()
        texts = [watcher.communicate()[0] for watcher in self.watchers]
        answers = [json.loads(text or "null") for text in texts]  # no output: it ended before it could watch
        self.watching = bool(answers) and all(answer is not None for answer in answers)
        for answer in answers:
            seen += [(begin, end + AFTERMATH * (end - begin)) for begin, end in answer or ()]
        self.begins, self.ends = [], []
        for begin, end in sorted(seen):
            if self.ends and begin <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.begins.append(begin)
                self.ends.append(end)

    def lost(self, begin: float, end: float) -> bool:
        last = bisect_right(self.begins, end) - 1
        return last >= 0 and self.ends[last] >= begin


def watch(core: int) -> list[tuple[float, float]] | None:
    """Watch ``core`` until SIGTERM or Ctrl-C; return its stalls: (due time of waking, actual time)."""
    found: list[tuple[float, float]] = []
    stopped: list[int] = []
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda number, _: stopped.append(number))
    try:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    except PermissionError:
        return None
    while not stopped:
        due = time.perf_counter() + PERIOD_S
        time.sleep(PERIOD_S)
        now = time.perf_counter()
        if now - due > NOTICED_S:
            found.append((due, now))
    return found


if __name__ == "__main__":
    print(json.dumps(watch(int(sys.argv[1]))))
