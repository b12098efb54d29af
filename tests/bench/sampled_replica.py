"""A replica that samples its own stack: ``python -m tests.bench.sampled_replica FILE serve ...``.

At each tick of the process's CPU time the main thread's stack is counted. SIGUSR1 writes the counts to FILE as JSON
(``[place, module, samples]`` rows) and begins anew. A row's place is where the CPU time was spent: a module of
warmfleet, another package, or ``event loop`` (uvloop and the kernel below it). Its module is the module of warmfleet
that was at work there or had called; it is empty if there was none.
"""

from __future__ import annotations

import dis
import json
import signal
import sys
from collections import Counter
from functools import cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from warmfleet.__main__ import main

if TYPE_CHECKING:
    from types import FrameType

TICK_S = 0.001
RESUME = dis.opmap["RESUME"]
LOOP = "event loop"
OURS = "warmfleet/"
RUNS_THE_LOOP = "asyncio/runners.py"  # the last frame below the event loop


@cache
def place(file: str) -> str:
    """``warmfleet/room/module``, the name of a package, or ``standard library``."""
    parts = PurePath(file).with_suffix("").parts
    if "warmfleet" in parts:
        return "/".join(parts[parts.index("warmfleet") :])
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1]
    return "asyncio" if "asyncio" in parts else "standard library"


class Sampler:
    """Counts the places where CPU time is spent."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen: Counter[tuple[str, str]] = Counter()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self.tick)
        signal.signal(signal.SIGUSR1, self.write)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)

    def tick(self, _number: int, frame: FrameType | None) -> None:
        """Count one sample.

        Python calls this between two instructions. At the first instruction of a function the time was spent before
        it: in the Python function that called it, else in the event loop.
        """
        if frame is not None and frame.f_code.co_code[frame.f_lasti] == RESUME:
            frame = frame.f_back
        places = list[str]()
        while frame is not None and not frame.f_code.co_filename.endswith(RUNS_THE_LOOP):
            places.append(place(frame.f_code.co_filename))
            frame = frame.f_back
        module = next((place for place in places if place.startswith(OURS)), "")
        self._seen[places[0] if places else LOOP, module] += 1

    def write(self, _number: int, _frame: FrameType | None) -> None:
        rows = [[*key, count] for key, count in self._seen.most_common()]
        self._seen.clear()
        made = self._file.with_suffix(".new")
        made.write_text(json.dumps(rows))
        made.replace(self._file)


if __name__ == "__main__":
    Sampler(Path(sys.argv.pop(1))).start()
    sys.exit(main(sys.argv[1:]))
