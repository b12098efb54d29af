"""Measures the cost of ``apply``: ``make -s bench NAME=apply`` prints one JSON object as its last line.

    make -s bench NAME=apply                       # blocks stored and removed per second of the server's CPU
    make -s bench NAME=apply ARGS="--follow"       # how much one core can follow (``apply_follow``)
    make -s bench NAME=apply ARGS="--sync"         # what keeping in sync costs decisions (``apply_sync``)

64 workers fill an index of 1 M (block, worker) entries through their own streams, half of the blocks held by two
workers. Then every worker stores, and later removes, batches of 128, applied by ``apply`` call by call. Rates are
blocks per second of CPU time of the server's main thread, without (and, in a key of its own, with) the XADDs.
longest_call_ms is CPU time of one call, from the scheduler's clock; longest_wall_ms is from SLOWLOG and includes the
turns of other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import struct
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from tests.bench import apply_follow, apply_sync
from tests.support.fleet.reporting_worker import SCHEME
from tests.support.redis.servers import server, valkey_binary

from warmfleet.fleet.script_loader import SCRIPT_KEYS, script_text
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PACE = Pace()
Batches = list[tuple[int, bytes]]  # (worker, packed hashes)


class Bench:
    """Writes streams as workers do and applies them as routers do, all over one connection."""

    def __init__(self, url: str, workers: int) -> None:
        self.client = redis.Redis.from_url(url)
        self.keys = wire.Keys("bench")
        self.names = [wire.worker_id_of(f"server-{number:03d}", 0) for number in range(workers)]
        self.numbers = [0] * workers
        self.calls_ms: list[float] = []  # CPU time of every measured call
        info: Any = self.client.info("server")
        self.schedstat = Path(f"/proc/{info['process_id']}/schedstat")  # of the main thread
        self.scripts = {name: str(self.client.script_load(script_text(name))) for name in ("apply", "apply_control")}

    def join(self, capacity: int) -> None:
        for worker, name in enumerate(self.names):
            announced = {"schema": wire.SCHEMA, "worker_id": name, "server_id": name[:-2], "rank": 0, "version": "1"}
            announced |= {"scheme": SCHEME.as_dict(), "scheme_id": SCHEME.scheme_id, "capacity_blocks": capacity}
            announced |= {"max_model_len": 4096, "closed": True}
            self.send([(worker, wire.dumps(announced).encode())], "join")
            self.client.evalsha(*self.call("apply_control", name, PACE.max_entries, PACE.ttl_ms))
            assert self.client.hexists(self.keys.load, name), f"{name} has not joined"

    def send(self, batches: Batches, operation: str) -> None:
        pipe = self.client.pipeline(transaction=False)
        for worker, data in batches:
            self.numbers[worker] += 1
            fields: Any = wire.entry("n", self.numbers[worker], operation, data)
            pipe.xadd(self.keys.events(self.names[worker]), fields)
        pipe.execute()

    def call(self, script: str, *args: Any) -> list[Any]:
        keys = [getattr(self.keys, key) for key in SCRIPT_KEYS[script]]
        return [self.scripts[script], len(keys), *keys, self.keys.prefix, *args]

    def apply(self, batches: Batches) -> int:
        """Apply batches in their order, one call for each; return the number of blocks."""
        applied = 0
        for worker, _ in batches:
            before = self.ran_ms()
            entries, blocks, *_ = self.client.evalsha(*self.call("apply", self.names[worker], PACE.max_blocks))
            self.calls_ms.append(self.ran_ms() - before)
            assert entries > 0
            applied += blocks
        return applied

    def ran_ms(self) -> float:
        """Return the CPU time of the server's main thread. The kernel updates it whenever the thread waits."""
        return int(self.schedstat.read_text().split()[0]) / 1e6

    def cpu_s(self) -> float:
        info: Any = self.client.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])

    def measure(self, batches: Batches, operation: str) -> tuple[float, float]:
        """Return blocks per CPU second, of apply alone and with the XADDs."""
        writing = spending(self.cpu_s, lambda: self.send(batches, operation))
        blocks = 0

        def applying() -> None:
            nonlocal blocks
            blocks = self.apply(batches)

        spent = spending(self.cpu_s, applying)
        assert blocks == sum(len(data) // 8 for _, data in batches), f"only {blocks} blocks were applied"
        return blocks / spent, blocks / (spent + writing)

    def entries(self) -> int:
        digests: Any = self.client.hvals(self.keys.digest)
        counts = [struct.unpack(">3I", raw)[0] for raw in digests]
        return sum(counts)


def spending(clock: Callable[[], float], work: Callable[[], object]) -> float:
    before = clock()
    work()
    return clock() - before


def batches_of(rng: random.Random, workers: int, each: int) -> Batches:
    """Return ``each`` full batches for every worker, in turn. The next worker holds half of the blocks, too."""
    half = 8 * wire.BATCH_BLOCKS // 2
    made: Batches = []
    for _ in range(each):
        shared = [rng.randbytes(half) for _ in range(workers)]
        made += [(worker, shared[worker] + shared[(worker + 1) % workers]) for worker in range(workers)]
    return made


def slices(batches: Batches, size: int = 2048) -> Iterable[Batches]:
    for start in range(0, len(batches), size):
        yield batches[start : start + size]


def run(url: str, workers: int, entries: int, rounds: int) -> dict[str, Any]:
    bench, rng = Bench(url, workers), random.Random(1)
    capacity = entries // workers
    bench.join(capacity)
    for part in slices(batches_of(rng, workers, -(-capacity // wire.BATCH_BLOCKS))):
        bench.send(part, "stored")
        bench.apply(part)
    bench.client.config_set("slowlog-log-slower-than", 300)
    bench.client.config_set("slowlog-max-len", 10_000)
    bench.client.slowlog_reset()
    bench.calls_ms.clear()
    held, results = bench.entries(), []
    for number in range(rounds + 1):
        batches = batches_of(rng, workers, 24)
        stored, removed = bench.measure(batches, "stored"), bench.measure(batches, "removed")
        rates = f"{stored[0]:,.0f} stored/s, {removed[0]:,.0f} removed/s"
        print(f"round {number}: {rates}, longest {max(bench.calls_ms):.2f} ms", file=sys.stderr, flush=True)
        if number == 0:  # Redis doubles its key table here, which otherwise happens rarely
            growing_ms = max(bench.calls_ms)
            bench.calls_ms.clear()
            bench.client.slowlog_reset()
        else:
            results.append((stored, removed))
    assert bench.entries() == held, "what was stored was not removed"
    slow: Any = bench.client.slowlog_get(10_000)
    walls = [call["duration"] / 1000 for call in slow if b"EVALSHA" in call["command"].upper()]
    stored, removed = max(rates for rates, _ in results), max(rates for _, rates in results)
    info: Any = bench.client.info("server")
    return {
        "stored_per_s": round(stored[0]),
        "removed_per_s": round(removed[0]),
        "stored_with_xadd_per_s": round(stored[1]),
        "longest_call_ms": round(max(bench.calls_ms), 3),
        "p999_call_ms": round(statistics.quantiles(bench.calls_ms, n=1000)[-1], 3),
        "longest_while_key_table_grows_ms": round(growing_ms, 3),
        "longest_wall_ms": max(walls, default=0.3),
        "calls": len(bench.calls_ms),
        "entries": held,
        "workers": workers,
        "server": info.get("valkey_version") or info["redis_version"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--follow", action="store_true", help="measure how much one core can follow instead")
    part.add_argument("--sync", action="store_true", help="measure decisions beside the sync instead")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--entries", type=int, default=1_000_000, help="(block, worker) pairs in the index")
    parser.add_argument("--rounds", type=int, default=3, help="the best counts")
    parser.add_argument("--server", default=os.environ.get("WARMFLEET_BENCH_SERVER"), help="path of redis or valkey")
    parser.add_argument("--quick", action="store_true", help="little data: shows that --follow or --sync works")
    options = parser.parse_args()
    started = partial(server, options.server or shutil.which("redis-server") or valkey_binary())
    if options.follow:
        found = apply_follow.run(started, (8,) if options.quick else apply_follow.WORKERS)
    elif options.sync:
        with started(*apply_sync.cores()) as url:
            found = apply_sync.run(url, quick=options.quick)
    else:
        with started() as url:
            found = run(url, options.workers, options.entries, options.rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
