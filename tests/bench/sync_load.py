"""The load generator of ``apply_sync``, in a process of its own. It decides at random moments.

It is an open loop over one connection: a request is sent when it is due, even while earlier ones wait, and its latency
counts from that moment. ``lag`` is how late it was sent; if it is not small, this process was the bottleneck.
It prints one JSON object: latencies and lags in microseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import hiredis
import redis
from tests.bench.sync_data import Data
from tests.support.fleet.reporting_worker import SCHEME
from tests.support.redis.packed_commands import arguments_of

from warmfleet.fleet import SCRIPT_KEYS, Fleet, Question, connect
from warmfleet.fleet.script_loader import script_text
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WARM_UP_S = 1.0
ANSWER_S = 0.5  # from a decision to its settle
CHAINS = 2_000


class Load:
    """Sends the requests that are due and reads the answers that are there, and never waits for one."""

    def __init__(self, path: str, model: str, data: Data, seed: int) -> None:
        self.fleet = Fleet(connect(f"unix://{path}"), model)
        with redis.Redis(unix_socket_path=path) as client:
            self.shas = {name: str(client.script_load(script_text(name))) for name in ("decide", "settle")}
        self.rng, self.seed = random.Random(seed), seed
        self.asks = [self._ask(data.chain(self.rng)) for _ in range(CHAINS)]
        self.asked = 0
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.reader = hiredis.Reader()
        self.waiting: deque[tuple[float, str]] = deque()  # (due time, reservation), the latter empty for a settle
        self.settles: deque[tuple[float, str]] = deque()
        self.latencies: list[float] = []
        self.lags: list[float] = []
        self.refused = 0

    def run(self, rate: float, seconds: float) -> dict[str, Any]:
        begin = time.perf_counter()
        due, counts_from, end = begin, begin + WARM_UP_S, begin + WARM_UP_S + seconds
        while due < end or self.waiting:
            now = time.perf_counter()
            while due <= now and due < end:
                self._decide(due)
                if due >= counts_from:
                    self.lags.append(time.perf_counter() - due)
                due += self.rng.expovariate(rate)
            while self.settles and self.settles[0][0] <= now:
                settle = (self.fleet.scripts.prefix, self.settles.popleft()[1], "finished", 60_000, 500)
                self._send(self._words("settle", settle), "", now)
            pause = min(due if due < end else end + 1, self.settles[0][0] if self.settles else end + 1)
            readable, _, _ = select.select([self.socket], [], [], max(0.0, pause - time.perf_counter()))
            if readable:
                self._read(counts_from)
        busy = time.process_time() / (time.perf_counter() - begin)
        times = {"latencies_us": _micros(self.latencies), "lags_us": _micros(self.lags)}
        return times | {"busy": round(busy, 3), "refused": self.refused}

    def _ask(self, chain: bytes) -> list[str | bytes]:
        """Make the arguments of a decision, without its reservation, before it is due: later work would add latency."""
        prompt = len(chain) * 2 + 5
        ask = Question(
            "?", (Chain(SCHEME.scheme_id, 16, chain),), prompt, prompt + 300, seed=self.rng.randrange(1, 2**31)
        )
        return self._words("decide", arguments_of(self.fleet.bookings.decide_command(ask, in_turn=False)))

    def _decide(self, due: float) -> None:
        words, self.asked = self.rng.choice(self.asks), self.asked + 1
        words[words.index(b"?")] = reservation = f"wf-{self.seed}-{self.asked}"
        self._send(words, reservation, due)
        words[words.index(reservation)] = b"?"

    def _words(self, script: str, args: Iterable[Any]) -> list[str | bytes]:
        keys = [getattr(self.fleet.keys, key) for key in SCRIPT_KEYS[script]]
        texts = [arg if isinstance(arg, bytes) else str(arg) for arg in args]
        return ["EVALSHA", self.shas[script], str(len(keys)), *keys, *texts]

    def _send(self, words: list[str | bytes], reservation: str, due: float) -> None:
        self.socket.sendall(hiredis.pack_command(tuple(words)))  # type: ignore[arg-type]
        self.waiting.append((due, reservation))

    def _read(self, counts_from: float) -> None:
        self.reader.feed(self.socket.recv(262_144))
        now = time.perf_counter()
        while (answer := self.reader.gets()) is not False:
            due, reservation = self.waiting.popleft()
            if not reservation:
                continue
            if isinstance(answer, Exception):
                self.refused += 1
                continue
            self.settles.append((now + ANSWER_S, reservation))
            if due >= counts_from:
                self.latencies.append(now - due)


def _micros(values: list[float]) -> list[int]:
    return [round(value * 1e6) for value in values]


def lines() -> Iterator[dict[str, Any]]:
    """Read the jobs, one a line, from standard input."""
    for line in sys.stdin:
        yield json.loads(line)


def first() -> None:
    """Give this process the highest priority, where that is allowed.

    It shares its core with the writers, and waiting for the core would count as the time of Redis."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        print("not allowed to go first: latencies may count turns of the writers", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="of the server's socket")
    parser.add_argument("model")
    parser.add_argument("workers", type=int)
    parser.add_argument("entries", type=int)
    options = parser.parse_args()
    data = Data(options.workers, options.entries)
    first()
    for number, job in enumerate(lines()):
        load = Load(options.path, options.model, data, number)
        print(json.dumps(load.run(job["rate"], job["seconds"])), flush=True)


if __name__ == "__main__":
    main()
