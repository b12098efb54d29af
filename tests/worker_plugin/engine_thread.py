"""An engine in a process of its own. Its thread changes the block table without pause and times every change.

Run as ``python -m tests.worker_plugin.engine_thread URL MODEL LIMIT``. Each line on standard input is answered by one
line of JSON: ``look`` by the figures since the last look, ``freeze`` by the table, which does not change from then on.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from queue import Empty, SimpleQueue

import psutil
from tests.support.fleet.publishing import config

from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

HELD = 2_000
STEP_BLOCKS = 8
STEP_SECONDS = 0.001


class Engine:
    """An engine whose ``step`` makes some blocks appear and as many disappear, as a scheduler step does."""

    def __init__(self, url: str, model: str, limit: int) -> None:
        self.tracker = Tracker(limit)
        self.publisher = WorkerPublisher(config(url, model), self.tracker)
        self._rng = random.Random(1)
        self._held: list[bytes] = []
        self._seconds: list[float] = []
        self._queued = self._pending = 0

    def step(self) -> None:
        fresh = [self._rng.randbytes(8) for _ in range(STEP_BLOCKS)]
        self._held += fresh
        gone, self._held = self._held[:-HELD], self._held[-HELD:]
        for call, hashes in ((self.tracker.stored, fresh), (self.tracker.removed, gone)):
            begun = time.perf_counter()
            call(hashes)
            self._seconds.append(time.perf_counter() - begun)
        self._queued = max(self._queued, len(self.tracker))
        self._pending = max(self._pending, self.publisher._stream.pending)

    def look(self) -> dict[str, float]:
        state, seconds = self.publisher.state, sorted(self._seconds)
        said = {
            "calls": len(seconds),
            "p50_ms": 1e3 * seconds[len(seconds) // 2],
            "p99_ms": 1e3 * seconds[len(seconds) * 99 // 100],
            "longest_ms": 1e3 * seconds[-1],
            "queued": self._queued,
            "pending": self._pending,
            "memory_mb": psutil.Process().memory_info().rss / 2**20,
            "dropped": state.dropped,
            "errors": state.errors,
            "joins": state.joins,
        }
        self._seconds, self._queued, self._pending = [], 0, 0
        return said


def _read(asked: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        asked.put(line.strip())


def main(url: str, model: str, limit: int) -> None:
    engine, asked = Engine(url, model, limit), SimpleQueue[str]()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    engine.publisher.start()
    frozen = False
    while True:
        if not frozen:
            engine.step()
        time.sleep(STEP_SECONDS)
        try:
            question = asked.get_nowait()
        except Empty:
            continue
        frozen = frozen or question == "freeze"
        answer = [key.hex() for key in engine.tracker.table] if question == "freeze" else engine.look()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
