"""Measures the cost of a fleet without requests: ``make -s bench NAME=rest``.

Engines that send only heartbeats (``resting_engines.py``) rest in pools of one store, and replicas that serve all
pools rest beside them. A share is CPU time (all threads, user and system) over time. Each pool is a model of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import redis
from tests.bench.output import report, say
from tests.bench.proxy_profile import samples, shares, show
from tests.bench.proxy_routers import REPLICA, Router, cpu_s, sources
from tests.bench.resting_engines import READY
from tests.bench.waking_cost import waking_cost

from warmfleet import main as replica_main
from warmfleet_loadtest.stacks.processes import Processes, free_ports, replica_ready, start_store
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

SETTLE_S = 20.0  # after the start: the tokenizer is loaded, and every pool has been at rest for a while
SHAPES = "1x8,1x64,4x64,16x64,64x16"
PAGES = 5  # requests of /metrics that are timed
ASKED, TRIES = "warmfleet_health_checks_total", 4
HURRIED_ENGINES, MOST_TIMES = 4_096, 100  # all hurried engines send as much as this many at normal pace
LEAST_PACE = 0.95


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a fleet: the number of pools, and of engines in each."""

    pools: int
    each: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """``4x64``: four pools with 64 engines each. Raises ValueError."""
        pools, each = text.split("x")
        return cls(int(pools), int(each))

    @property
    def engines(self) -> int:
        return self.pools * self.each

    @property
    def key(self) -> str:
        return f"{self.pools}x{self.each}"

    @property
    def tags(self) -> list[str]:
        return [f"rest-{number:02d}" for number in range(self.pools)]


class Resting:
    """A fleet at rest. Raises StackError if a process of it ends."""

    def __init__(
        self, processes: Processes, shape: Shape, replicas: int, *, sampled: bool = False, times: int = 1
    ) -> None:
        """sampled: with one more replica, which samples itself. times: how fast time runs."""
        self.processes, self.shape = processes, shape
        self.store_url = start_store(processes)
        program = [sys.executable, "-m", "tests.bench.resting_engines", "--redis", self.store_url]
        argv = [*program, "--pools", ",".join(shape.tags), "--each", str(shape.each), "--times", str(times)]
        processes.spawn("engines", "engines", argv, sources())
        processes.wait("engines", lambda: READY in processes.log("engines"))
        self.file = processes.folder / "samples.json"
        self.ready_s: list[float] = []
        hurried = ("tests.bench.hurried_replica", str(times)) if times > 1 else ()
        self.replicas = [self._replica(f"replica-{number}", hurried) for number in range(replicas)]
        if sampled:
            self.replicas.append(self._replica("sampled", ("tests.bench.sampled_replica", str(self.file))))

    def _replica(self, name: str, program: Sequence[str]) -> Router:
        [port] = free_ports(1)
        argv = [sys.executable, "-m", *(program or ("warmfleet",)), "serve", "--port", str(port)]
        more = {"WARMFLEET_REDIS_URL": self.store_url, "WARMFLEET_MODELS": ",".join(self.shape.tags)}
        started = time.perf_counter()
        process = self.processes.spawn("replicas", name, argv, {**sources(), **REPLICA, **more})
        self.processes.wait(name, partial(replica_ready, f"http://127.0.0.1:{port}", self.shape.engines))
        self.ready_s.append(time.perf_counter() - started)
        return Router(name, port, (process.pid,))

    def watch(self, seconds: float) -> dict[str, float]:
        """Shares of a core over ``seconds``: of a replica (``replica``: the median), of Redis.

        Where the machine is so busy that nobody ticks for 2.5 s, replicas ask engines whether they live, which is no
        rest: it is measured again, a few times.
        """
        for _ in range(TRIES):
            asked = self.asked()
            used = self._shares(seconds)
            disturbed = self.asked() != asked
            if not disturbed:
                break
            say("somebody did not rest: again ...")
        return used | {"disturbed": float(disturbed)}

    def asked(self) -> list[str]:
        """The number of health checks that replicas have sent to engines."""
        pages = [self._page(replica.port).decode() for replica in self.replicas]
        return [line for page in pages for line in page.splitlines() if line.startswith(ASKED)]

    def _shares(self, seconds: float) -> dict[str, float]:
        pids = {replica.name: replica.pids for replica in self.replicas} | {"redis": (self.processes.pid("store"),)}
        before, began = {name: cpu_s(some) for name, some in pids.items()}, time.perf_counter()
        time.sleep(seconds)
        lasted = time.perf_counter() - began
        used = {name: round((cpu_s(some) - before[name]) / lasted, 5) for name, some in pids.items()}
        self.processes.check()
        plain = [share for name, share in used.items() if name.startswith("replica")]
        return used | {"replica": round(statistics.median(plain), 5)}

    def profile(self, seconds: float) -> dict[str, Any]:
        """The share of the sampled replica, in millionths of a core, by place and by module."""
        sampled = self.replicas[-1]
        samples(sampled, self.file)
        share = self._shares(seconds)[sampled.name]  # without the page that ``watch`` asks for
        found = shares(samples(sampled, self.file), share * 1e6)
        show(f"{self.shape.key}, in millionths of a core", found)
        return found

    def page(self) -> dict[str, float]:
        """The page /metrics of a replica: its bytes, and the CPU ms that it takes."""
        replica, spent, size = self.replicas[0], [], 0
        for _ in range(PAGES):
            before = cpu_s(replica.pids)
            size = len(self._page(replica.port))
            spent.append((cpu_s(replica.pids) - before) * 1e3)
        return {"bytes": size, "cpu_ms": round(statistics.median(spent), 1)}

    @staticmethod
    def _page(port: int) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            page: bytes = answer.read()
        return page

    def calls(self) -> dict[str, int]:
        """The number of calls of Redis so far, by command."""
        with redis.Redis.from_url(self.store_url) as store:
            told: dict[str, dict[str, int]] = store.info("commandstats")
        return {name.removeprefix("cmdstat_"): counts["calls"] for name, counts in told.items()}

    def memory_mb(self) -> float:
        """Resident memory of a replica."""
        return round(psutil.Process(self.replicas[0].pids[0]).memory_info().rss / 1e6, 1)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the options ask for, as the JSON object has it. Raises StackError."""
    found: dict[str, Any] = {}
    for text in options.shapes.split(","):
        shape = Shape.of(text)
        for count in options.replicas:
            say(f"{shape.engines} engines in {shape.pools} pools, {count} replicas at rest ...")
            with tempfile.TemporaryDirectory(prefix="rest-") as folder, Processes(Path(folder)) as processes:
                resting = Resting(processes, shape, count, sampled=options.profile)
                time.sleep(options.settle)
                key = shape.key if count == 1 else f"{shape.key}_{count}_replicas"
                found[key] = one = dict[str, Any](resting.watch(options.seconds))
                one |= {"ready_s": round(resting.ready_s[0], 1), "memory_mb": resting.memory_mb()}
                one["metrics_page"] = resting.page()
                one |= waking_cost()
                if options.profile:
                    one["profile"] = resting.profile(options.seconds)
            if count == 1:
                one |= work(shape, options)
            say(json.dumps({name: value for name, value in one.items() if name != "profile"}))
    return found | totals(found) | {"load_average": round(os.getloadavg()[1], 1)}


def work(shape: Shape, options: argparse.Namespace) -> dict[str, float]:
    """``work``: the share of a replica with time running ``times`` as fast, divided by that.

    kept_pace: heartbeats and rounds that came over those that were due, the lesser of both; below .95 ``work`` is too
    low. hurried_disturbed: as ``disturbed``.
    """
    times = max(1, min(MOST_TIMES, HURRIED_ENGINES // shape.engines))
    say(f"the same with time running {times} times as fast ...")
    with tempfile.TemporaryDirectory(prefix="rest-") as folder, Processes(Path(folder)) as processes:
        hurried = Resting(processes, shape, 1, times=times)
        time.sleep(options.settle)
        before, began = hurried.calls(), time.perf_counter()
        used = hurried.watch(options.seconds)
        lasted_s, after = (time.perf_counter() - began) * times, hurried.calls()
    due = {
        "xadd": 2 * shape.engines * lasted_s / wire.HEARTBEAT_SECONDS,
        "info": lasted_s / replica_main.MEMORY_INTERVAL_S,
    }
    pace = min((after[name] - before[name]) / count for name, count in due.items())
    if pace < LEAST_PACE:
        say(f"only {pace:.0%} of what was due came: this machine is too slow for {times} times")
    told = {"work": round(used["replica"] / times, 5), "kept_pace": round(pace, 3)}
    return {"times": times, **told, "hurried_disturbed": used["disturbed"]}


def totals(found: dict[str, Any]) -> dict[str, float]:
    """``idle_core_share_<engines>`` of one replica, ``idle_work_share_<engines>`` of it without the cost of waking, and
    ``idle_redis_share_<engines>``: of each size the worst shape.
    """
    worst: dict[str, float] = {}
    for key, measured in found.items():
        if "_" in key:
            continue
        engines = Shape.of(key).engines
        size = min(1000, engines)
        for name, part in (("core", "replica"), ("work", "work"), ("redis", "redis")):
            at = f"idle_{name}_share_{size}"
            worst[at] = max(worst.get(at, 0.0), measured[part])
    return worst


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shapes", default=SHAPES, metavar="A,B", help="pools x engines of each (default %(default)s)")
    made.add_argument("--replicas", type=int, nargs="+", default=[1, 4], help="at rest together (default 1 4)")
    made.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default %(default)s)")
    made.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before it (default %(default)s)")
    made.add_argument("--profile", action="store_true", help="tell by module where the share of one more replica goes")
    return made


def main() -> int:
    """Exit codes: 0 measured, 1 a process broke, 2 wrong arguments."""
    return report(measure, parser().parse_args())


if __name__ == "__main__":
    sys.exit(main())
