"""What keeping in sync costs the read path: ``python -m tests.bench.bench_sync`` prints one JSON object as last line.

64 workers hold 100,000 blocks each. In every phase a separate process (``sync_load``) asks for 500 decisions a second
at random moments, each for 10,000 tokens, and settles them half a second later. The phases, in turn:
  alone    nothing else happens
  none     20,000 blocks a second appear and as many vanish, in entries flushed every 100 ms; applied; no digests
  digest   the same, and every worker's heartbeat with its digest every 5 s
  resync   the same, and every 5 s one worker sends its whole table, which is taken over by slots
  naive    as digest, and every 5 s one worker's entries are deleted and written again in one call
p50, p99 and p99.9 of decide count from the moment a decision was due, in all rounds together. If the generator sent
late or used much of a core, ``generator_was_the_bottleneck`` says so. undisturbed: only decisions that were due while
every core ran (``stalls``: a host lends a virtual machine its cores). quiet: only the undisturbed decisions of rounds
with at most 5 % of others, which show the software alone.
longest_call_ms is the wall time of one call by SLOWLOG, in all phases but naive. Other work on the machine adds to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import redis
from tests.bench.stalls import Stalls
from tests.bench.sync_data import Data
from tests.bench.sync_fleet import Sync, Worker, send
from tests.support.redis.servers import PATIENT, server, valkey_binary

from warmfleet.fleet import SCRIPT_KEYS, Flag, Fleet, LoadRow, connect
from warmfleet.fleet.script_loader import script_text
from warmfleet_worker.protocol import wire

MODEL = "bench"
MODES = ("alone", "none", "digest", "resync", "naive")
SLOW_US = 300
CLEAR_S = 0.005  # a decision is undisturbed if no core stands still for so long after it was due
QUIET = 0.05  # the largest share of disturbed decisions in a quiet round
LATE_SHARE = 0.2  # share of p99; with a larger lag the generator was the bottleneck


@dataclass
class Phase:
    """The measurements of one mode, in all rounds."""

    latencies: list[int] = field(default_factory=list)
    undisturbed: list[int] = field(default_factory=list)  # the latencies of undisturbed decisions
    by_round: list[tuple[float, float]] = field(
        default_factory=list
    )  # p99 of undisturbed decisions in ms, share of disturbed ones
    lags: list[int] = field(default_factory=list)
    slowest: Counter[str] = field(default_factory=Counter)  # script -> µs
    over_1ms: int = 0
    call_p999_ms: float = 0.0  # all scripts, by the server's own clock
    redis_busy: list[float] = field(default_factory=list)
    generator_busy: list[float] = field(default_factory=list)
    matched: float = 0.0
    late_ms: float = 0.0  # how late this process flushed

    def quantiles(self, latencies: list[int] | None = None) -> tuple[float, float, float]:
        """Return p50, p99 and p99.9 in ms, of all latencies or of the given ones."""
        cuts = statistics.quantiles(self.latencies if latencies is None else latencies, n=1000)
        return cuts[499] / 1000, cuts[989] / 1000, cuts[998] / 1000

    def lag_ms(self) -> float:
        return statistics.quantiles(self.lags, n=100)[98] / 1000


class Bench:
    """One server and one fleet, with the generator in a process of its own."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url, self.options = url, options
        self.store: Any = redis.Redis.from_url(url)
        self.fleet = Fleet(connect(url, timeout_s=5), MODEL, timeouts=PATIENT)
        data = Data(options.workers, options.entries)
        self.workers = [Worker(self.fleet, data, number) for number in range(options.workers)]
        self.sync = Sync(self.fleet, self.workers, options.transitions)
        self.phases = {mode: Phase() for mode in MODES}
        names = {name: str(self.store.script_load(script_text(name))) for name in SCRIPT_KEYS}
        self.names = {sha.encode(): name for name, sha in names.items()} | {self.sync.naive.sha.encode(): "naive"}

    async def fill(self) -> None:
        """Let every worker join, prove it, and store its table through its stream."""
        begun = time.perf_counter()
        for worker in self.workers:
            await send(self.fleet, [worker.join()])
            await self.store_all(worker)
        for worker in self.workers:
            key, flags = self.fleet.keys.load, Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
            packed = bytearray(self.store.hget(key, worker.worker_id))
            packed[20:22] = int(flags).to_bytes(2, "big")
            self.store.hset(key, worker.worker_id, bytes(packed))
            self.store.zadd(self.fleet.keys.alive_servers, {worker.worker_id[:-2]: time.time() * 1000 + 7.2e6})
        self.check()
        used = self.store.info("memory")["used_memory"]
        say(f"filled in {time.perf_counter() - begun:.0f} s, {used / 2**20:.0f} MB")

    async def store_all(self, worker: Worker) -> None:
        await self.fleet.apply(worker.worker_id)
        sha = next(sha for sha, name in self.names.items() if name == "apply")
        keys = [getattr(self.fleet.keys, key) for key in SCRIPT_KEYS["apply"]]
        call = ("EVALSHA", sha, len(keys), *keys, self.fleet.keys.prefix, worker.worker_id, wire.BATCH_BLOCKS)
        entries = worker.fill()
        for start in range(0, len(entries), 256):
            part = entries[start : start + 256]
            await send(self.fleet, [*part, *[call] * len(part)])

    def check(self) -> None:
        """Fail unless the index holds each written block once."""
        for worker in self.workers:
            row = LoadRow.unpack(self.store.hget(self.fleet.keys.load, worker.worker_id))
            held = self.store.scard(self.fleet.keys.slot(row.slot))
            assert held == worker.digest.count, f"{worker.worker_id} has {held} blocks, not {worker.digest.count}"

    def bytes_per_check(self) -> tuple[float, float]:
        """Return the bytes on the wire, both ways, of a heartbeat with its digest and of reading the next command."""
        worker, count = self.workers[0], 200
        digest, whole = Counter[str](), Counter[str]()
        for total, also in ((digest, False), (whole, True)):
            before = self._net()
            for _ in range(count):
                self.store.execute_command(*worker.heartbeat())
                if also:
                    self.store.get(self.fleet.keys.command(worker.worker_id))
            total["bytes"] = self._net() - before
        info = self._net()
        empty = self._net() - info
        return (digest["bytes"] - empty) / count, (whole["bytes"] - empty) / count

    def _net(self) -> int:
        stats = self.store.info("stats")
        return int(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])

    # ------------------------------------------------ phases

    async def phase(self, mode: str, generator: asyncio.subprocess.Process) -> None:
        phase, options = self.phases[mode], self.options
        self._alive_for_an_hour()
        self.store.config_set("slowlog-log-slower-than", SLOW_US)
        self.store.config_set("slowlog-max-len", 100_000)
        self.store.slowlog_reset()
        self.store.config_resetstat()
        self.sync.late_s.clear()
        before, begun, done = self._cpu_s(), time.perf_counter(), asyncio.Event()
        running = asyncio.create_task(self.sync.run(mode, done))
        assert generator.stdin is not None
        assert generator.stdout is not None
        job = {"rate": options.decides, "seconds": options.seconds}
        with Stalls() as stalls:
            generator.stdin.write(json.dumps(job).encode() + b"\n")
            line = await generator.stdout.readline()
            phase.redis_busy.append((self._cpu_s() - before) / (time.perf_counter() - begun))
        done.set()
        await running
        self._note(phase, json.loads(line), stalls)
        await self.sync.quiet()
        self.check()
        p50, p99, p999 = phase.quantiles()
        clear = "undisturbed {:.2f}, but for {:.1%}".format(*phase.by_round[-1]) if phase.by_round else ""
        say(f"{mode:7} p50 {p50:.2f} p99 {p99:.2f} p99.9 {p999:.2f} ms ({clear}), lag p99 {phase.lag_ms():.2f} ms,"
            f" redis {phase.redis_busy[-1]:.0%}, late flush {phase.late_ms:.0f} ms, {dict(phase.slowest)}")  # fmt: skip

    def _note(self, phase: Phase, found: dict[str, Any], stalls: Stalls) -> None:
        assert found["refused"] == 0, "decisions were refused"
        phase.latencies += found["latencies_us"]
        if stalls.watching:
            each = zip(found["dues_s"], found["latencies_us"], strict=True)
            clear = [latency for due, latency in each if not stalls.lost(due, due + CLEAR_S)]
            phase.undisturbed += clear
            share = 1 - len(clear) / len(found["latencies_us"])
            phase.by_round.append((round(phase.quantiles(clear)[1], 2), round(share, 3)))
        phase.lags += found["lags_us"]
        phase.generator_busy.append(found["busy"])
        phase.matched = found["matched_share"]
        phase.late_ms = max(phase.late_ms, max(self.sync.late_s, default=0.0) * 1000)
        calls = self.store.info("latencystats")["latency_percentiles_usec_evalsha"]
        phase.call_p999_ms = max(phase.call_p999_ms, float(calls["p99.9"]) / 1000)
        for call in self.store.slowlog_get(100_000):
            words = call["command"].split()
            if words[0].upper() != b"EVALSHA":
                continue  # SLOWLOG lists the calls inside a script, too
            name = self.names.get(words[1], "other")
            phase.slowest[name] = max(phase.slowest[name], call["duration"])
            phase.over_1ms += call["duration"] > 1000

    def _alive_for_an_hour(self) -> None:
        """Keep the workers alive in phases without heartbeats."""
        now = time.time() * 1000
        self.store.zadd(self.fleet.keys.alive, {worker.worker_id: now + 3.6e6 for worker in self.workers})

    def _cpu_s(self) -> float:
        info: Any = self.store.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])

    # ------------------------------------------------ the result

    def result(self, checks: tuple[float, float]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for mode, phase in self.phases.items():
            for name, value in zip(("p50", "p99", "p99.9"), phase.quantiles(), strict=True):
                found[f"{name}_ms_{mode}"] = round(value, 3)
            found[f"p99_ms_{mode}_undisturbed"] = phase.undisturbed and round(phase.quantiles(phase.undisturbed)[1], 3)
            found[f"p99_ms_and_disturbed_share_by_round_{mode}"] = phase.by_round
            quiet = [p99 for p99, disturbed in phase.by_round if disturbed <= QUIET]
            found[f"p99_ms_{mode}_quiet"] = round(statistics.mean(quiet), 3) if quiet else None
            found[f"lag_p99_ms_{mode}"] = round(phase.lag_ms(), 3)
            found[f"redis_busy_{mode}"] = round(statistics.mean(phase.redis_busy), 3)
            found[f"longest_ms_{mode}"] = max(phase.slowest.values(), default=SLOW_US) / 1000
            found[f"calls_over_1ms_{mode}"] = phase.over_1ms
            found[f"call_p99.9_ms_{mode}"] = round(phase.call_p999_ms, 3)
        ours = [mode for mode in MODES if mode != "naive"]
        snapshots = [seconds for worker in self.workers for seconds in worker.snapshots]
        return found | {
            "bytes_per_check": round(checks[0], 1),
            "bytes_per_period": round(checks[1], 1),
            "longest_call_ms": max(found[f"longest_ms_{mode}"] for mode in ours),
            "snapshot_s": round(statistics.median(snapshots), 2) if snapshots else None,
            "snapshots": len(snapshots),
            "generator_was_the_bottleneck": [mode for mode in MODES if self._bottleneck(self.phases[mode])],
            "counts": {key.decode(): int(value) for key, value in self.store.hgetall(self.fleet.keys.counts).items()},
            "workers": self.options.workers,
            "entries": self.options.entries,
            "seconds": self.options.seconds * self.options.rounds,
            "server": self.store.info("server")["redis_version"],
        }

    def _bottleneck(self, phase: Phase) -> bool:
        return phase.lag_ms() > LATE_SHARE * phase.quantiles()[1] or max(phase.generator_busy) > 0.8


def say(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


async def run(url: str, options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(url, options)
    await bench.fill()
    checks = bench.bytes_per_check()
    await bench.sync.quiet()
    command = [sys.executable, "-m", "tests.bench.sync_load", url.removeprefix("unix://"), MODEL]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": 2**26}
    generator = await asyncio.create_subprocess_exec(
        *command,
        str(options.workers),
        str(options.entries),
        **pipes,  # type: ignore[arg-type]
    )
    os.nice(5)  # lower priority than the generator, which shares a core with this process
    try:
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            for mode in MODES:
                await bench.phase(mode, generator)
    finally:
        generator.kill()
        await generator.wait()
    return bench.result(checks)


def cores() -> list[str]:
    """Give the server a core of its own, as in production, so that waiting for a core lengthens no call."""
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        return []
    os.sched_setaffinity(0, others)
    return ["--server_cpulist", str(last), "--bio_cpulist", ",".join(map(str, others))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--entries", type=int, default=100_000, help="blocks that a worker holds")
    parser.add_argument("--transitions", type=int, default=20_000, help="blocks stored a second, and as many removed")
    parser.add_argument("--decides", type=float, default=500.0, help="per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one phase in one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--server", default=os.environ.get("WARMFLEET_BENCH_SERVER"), help="path of redis or valkey")
    options = parser.parse_args()
    with server(options.server or shutil.which("redis-server") or valkey_binary(), *cores()) as url:
        print(json.dumps(asyncio.run(run(url, options))))


if __name__ == "__main__":
    main()
