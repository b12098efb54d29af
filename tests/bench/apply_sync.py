"""Measures the cost of resynchronisation for decisions: ``make -s bench NAME=apply ARGS="--sync"``.

64 workers hold 100,000 blocks each. In every phase a separate process (``sync_load``) asks for 500 decisions a second
at random moments, each for 10,000 tokens, and settles them half a second later. Two phases take turns:

- ``none``: 20,000 blocks a second appear and as many vanish, in entries flushed every 100 ms and applied; no digests.
- ``resync``: the same, with every worker's heartbeat and digest every 5 s, and every 5 s one worker sends its whole
  table, which is taken over by slots.

p50, p99 and p99.9 of a decision count from the moment it was due, in all rounds together. ``p99_over_none``: of
``resync`` over ``none``, the median of the rounds; on a virtual machine whose host stops its cores, rounds differ much.
If the generator sent late or used much of a core, ``generator_was_the_bottleneck`` names the phase. longest_ms is the
wall time of one call by SLOWLOG; other work on the machine adds to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
from tests.bench.output import say
from tests.bench.sync_data import Data
from tests.bench.sync_fleet import Sync, Worker, send
from tests.support.redis.servers import PATIENT

from warmfleet.fleet import SCRIPT_KEYS, Flag, Fleet, LoadRow, connect
from warmfleet.fleet.script_loader import script_text
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = "bench"
MODES = ("none", "resync")
SLOW_US = 300
LATE_SHARE = 0.2  # share of p99; with a larger lag the generator was the bottleneck


@dataclass(frozen=True, slots=True)
class Size:
    """entries: blocks that a worker holds. transitions: blocks stored a second, and as many removed."""

    workers: int = 64
    entries: int = 100_000
    transitions: int = 20_000
    decides_per_s: float = 500.0
    seconds: float = 15.0
    rounds: int = 4


QUICK = Size(4, 2_000, 2_000, 50.0, 2.0, 1)


@dataclass
class Phase:
    """The measurements of one mode, in µs where no unit is named. rounds: the p99 of each round."""

    latencies: list[int] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    slowest: Counter[str] = field(default_factory=Counter)  # by script
    over_1ms: int = 0
    call_p999_ms: float = 0.0  # all scripts, by the server's own clock
    redis_busy: list[float] = field(default_factory=list)
    generator_busy: list[float] = field(default_factory=list)

    def quantiles(self) -> tuple[float, float, float]:
        """Return p50, p99 and p99.9 in ms."""
        return quantiles_ms(self.latencies)

    def lag_ms(self) -> float:
        return statistics.quantiles(self.lags, n=100)[98] / 1000

    def generator_was_late(self) -> bool:
        return self.lag_ms() > LATE_SHARE * self.quantiles()[1] or max(self.generator_busy) > 0.8

    def figures(self, mode: str) -> dict[str, Any]:
        p50, p99, p999 = self.quantiles()
        return {
            f"p50_ms_{mode}": round(p50, 3),
            f"p99_ms_{mode}": round(p99, 3),
            f"p99.9_ms_{mode}": round(p999, 3),
            f"p99_ms_by_round_{mode}": [round(value, 2) for value in self.rounds],
            f"lag_p99_ms_{mode}": round(self.lag_ms(), 3),
            f"redis_busy_{mode}": round(statistics.mean(self.redis_busy), 3),
            f"longest_ms_{mode}": max(self.slowest.values(), default=SLOW_US) / 1000,
            f"calls_over_1ms_{mode}": self.over_1ms,
            f"call_p99.9_ms_{mode}": round(self.call_p999_ms, 3),
        }


def quantiles_ms(latencies_us: Sequence[int]) -> tuple[float, float, float]:
    cuts = statistics.quantiles(latencies_us, n=1000)
    return cuts[499] / 1000, cuts[989] / 1000, cuts[998] / 1000


class Bench:
    """A server and a fleet, with the load generator in a process of its own."""

    def __init__(self, url: str, size: Size) -> None:
        self.size = size
        self.store: Any = redis.Redis.from_url(url)
        self.fleet = Fleet(connect(url, timeout_s=5), MODEL, timeouts=PATIENT)
        data = Data(size.workers, size.entries)
        self.workers = [Worker(self.fleet, data, number) for number in range(size.workers)]
        self.sync = Sync(self.fleet, self.workers, size.transitions)
        self.phases = {mode: Phase() for mode in MODES}
        self.names = {str(self.store.script_load(script_text(name))).encode(): name for name in SCRIPT_KEYS}

    async def fill(self) -> None:
        """Let every worker join, prove it, and store its table through its stream."""
        begun = time.perf_counter()
        for worker in self.workers:
            await send(self.fleet, [worker.join()])
            await self._store_all(worker)
        for worker in self.workers:
            key, flags = self.fleet.keys.load, Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED
            packed = bytearray(self.store.hget(key, worker.worker_id))
            packed[20:22] = int(flags).to_bytes(2, "big")
            self.store.hset(key, worker.worker_id, bytes(packed))
            self.store.zadd(self.fleet.keys.alive_servers, {worker.worker_id[:-2]: time.time() * 1000 + 7.2e6})
        self.check()
        used = self.store.info("memory")["used_memory"]
        say(f"filled in {time.perf_counter() - begun:.0f} s, {used / 2**20:.0f} MB")

    async def _store_all(self, worker: Worker) -> None:
        await self.fleet.upkeep.apply(worker.worker_id)
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

    def bytes_per_period(self) -> dict[str, float]:
        """Return the bytes on the wire, both ways, of a heartbeat with its digest, and with the next command's read."""
        worker, count, found = self.workers[0], 200, {}
        for name, reads in (("bytes_per_check", False), ("bytes_per_period", True)):
            before = self._net()
            for _ in range(count):
                self.store.execute_command(*worker.heartbeat())
                if reads:
                    self.store.get(self.fleet.keys.command(worker.worker_id))
            found[name] = self._net() - before
        before = self._net()
        looking = self._net() - before
        return {name: round((sent - looking) / count, 1) for name, sent in found.items()}

    def _net(self) -> int:
        stats = self.store.info("stats")
        return int(stats["total_net_input_bytes"] + stats["total_net_output_bytes"])

    async def phase(self, mode: str, generator: asyncio.subprocess.Process) -> None:
        """Measure one mode once."""
        phase, now = self.phases[mode], time.time() * 1000
        self.store.zadd(self.fleet.keys.alive, {worker.worker_id: now + 3.6e6 for worker in self.workers})
        self.store.config_set("slowlog-log-slower-than", SLOW_US)
        self.store.config_set("slowlog-max-len", 100_000)
        self.store.slowlog_reset()
        self.store.config_resetstat()
        before, begun, done = self._cpu_s(), time.perf_counter(), asyncio.Event()
        running = asyncio.create_task(self.sync.run(mode, done))
        assert generator.stdin is not None
        assert generator.stdout is not None
        job = {"rate": self.size.decides_per_s, "seconds": self.size.seconds}
        generator.stdin.write(json.dumps(job).encode() + b"\n")
        line = await generator.stdout.readline()
        phase.redis_busy.append((self._cpu_s() - before) / (time.perf_counter() - begun))
        done.set()
        await running
        self._note(phase, json.loads(line))
        await self.sync.quiet()
        self.check()
        say(f"{mode:7} p99 {phase.rounds[-1]:.2f} ms, lag p99 {phase.lag_ms():.2f}, slowest {dict(phase.slowest)} us")

    def _note(self, phase: Phase, found: dict[str, Any]) -> None:
        assert found["refused"] == 0, "decisions were refused"
        phase.latencies += found["latencies_us"]
        phase.rounds.append(quantiles_ms(found["latencies_us"])[1])
        phase.lags += found["lags_us"]
        phase.generator_busy.append(found["busy"])
        calls = self.store.info("latencystats")["latency_percentiles_usec_evalsha"]
        phase.call_p999_ms = max(phase.call_p999_ms, float(calls["p99.9"]) / 1000)
        for call in self.store.slowlog_get(100_000):
            words = call["command"].split()
            if words[0].upper() == b"EVALSHA":  # SLOWLOG lists the calls inside a script, too
                name = self.names.get(words[1], "other")
                phase.slowest[name] = max(phase.slowest[name], call["duration"])
                phase.over_1ms += call["duration"] > 1000

    def _cpu_s(self) -> float:
        info: Any = self.store.info("cpu")
        return float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])

    def result(self) -> dict[str, Any]:
        none, resync = (self.phases[mode].rounds for mode in MODES)
        snapshots = [seconds for worker in self.workers for seconds in worker.snapshots]
        found = {"p99_over_none": round(statistics.median(b / a for a, b in zip(none, resync, strict=True)), 2)}
        for mode, phase in self.phases.items():
            found |= phase.figures(mode)
        return found | {
            "snapshot_s": round(statistics.median(snapshots), 2) if snapshots else None,
            "generator_was_the_bottleneck": [mode for mode, phase in self.phases.items() if phase.generator_was_late()],
            "counts": {key.decode(): int(value) for key, value in self.store.hgetall(self.fleet.keys.counts).items()},
            "memory_mb": round(self.store.info("memory")["used_memory"] / 2**20),
        }


async def _measured(url: str, size: Size) -> dict[str, Any]:
    bench = Bench(url, size)
    await bench.fill()
    found = bench.bytes_per_period()
    await bench.sync.quiet()
    command = [sys.executable, "-m", "tests.bench.sync_load", url.removeprefix("unix://"), MODEL]
    generator = await asyncio.create_subprocess_exec(
        *command,
        str(size.workers),
        str(size.entries),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**26,
    )
    os.nice(5)  # lower priority than the generator, which shares a core with this process
    try:
        for number in range(size.rounds):
            say(f"round {number + 1} of {size.rounds}")
            for mode in MODES:
                await bench.phase(mode, generator)
    finally:
        generator.kill()
        await generator.wait()
    return found | bench.result()


def run(url: str, *, quick: bool) -> dict[str, Any]:
    return asyncio.run(_measured(url, QUICK if quick else Size()))


def cores() -> list[str]:
    """Give the server a core of its own, as in production, so that waiting for a core lengthens no call."""
    *others, last = sorted(os.sched_getaffinity(0))
    if not others:
        return []
    os.sched_setaffinity(0, others)
    return ["--server_cpulist", str(last), "--bio_cpulist", ",".join(map(str, others))]
