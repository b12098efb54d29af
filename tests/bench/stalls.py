"""When a core stood still for everybody: what a latency that was measured then says nothing about.

A virtual machine is given its cores by a host. What stops a process that goes before all others, and does nothing but
sleep, is not on this machine; whoever was working then lost that time, too. One such process watches each core. Where
going first is not allowed, nothing is noticed, and ``watching`` is false.
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
AFTERMATH = 2.0  # times its length: at two thirds of full load what piled up is worked off in twice the time


@dataclass
class Stalls:
    """A ``with`` block in which the cores are watched; after it ``begins`` and ``ends`` have what was seen.

    ``lost`` tells whether an interval (``time.perf_counter`` seconds, the same clock in all processes) met a stall or
    its aftermath.
    """

    watchers: list[subprocess.Popen[str]] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # aftermath included; never overlapping
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
        answers = [json.loads(text or "null") for text in texts]  # nothing: ended before it could watch
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
    """Stalls of ``core`` until SIGTERM or Ctrl-C: (when it should have woken, when it did)."""
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
