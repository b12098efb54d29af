"""The processes of ``bench_proxy``: a store, stub engines, replicas of this project and routers of other projects."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
from tests.bench.proxy_requests import MODEL

from warmfleet_loadtest.stacks import peers
from warmfleet_loadtest.stacks.processes import Processes, free_ports, get_json, replica_ready, start_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

#: The store shares its core with engines and client, so it may answer late; and no request may have to queue, for
#: the stubs report no progress, and booked work would seem to pile up.
REPLICA = {
    "WARMFLEET_APPROVED_TEMPLATES": "*",
    "WARMFLEET_DECIDE_TIMEOUT_S": "5",
    "WARMFLEET_MAX_ENGINE_WAIT_S": "3600",
    "WARMFLEET_ADMIN_PORT": "0",  # operators use the same port
}
ONE_THREAD = {"TOKIO_WORKER_THREADS": "1", "PYTHONPATH": ""}
BOOKED = b"x-warmfleet-reservation: booked"
ROOT = Path(__file__).parents[2]
PARTS = ("app", "worker_plugin", "loadtest")
ENGINES = 4


def sources(checkout: Path = ROOT) -> dict[str, str]:
    """The variable by which any interpreter finds the code of a checkout, whether or not it has it installed."""
    folder = checkout.resolve()
    return {"PYTHONPATH": os.pathsep.join(map(str, (*(folder / part for part in PARTS), ROOT)))}


def cpu_s(pids: tuple[int, ...]) -> float:
    """The CPU seconds that processes have used so far, by the scheduler's clock: all threads, also ended ones."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)  # CPUCLOCK_SCHED of a process: see clock_gettime(3)


@dataclass(frozen=True)
class Cores:
    """The core of the routers, and that of everything else; both are the same where there is only one."""

    routers: int
    others: int

    @classmethod
    def of_this_machine(cls) -> Cores:
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[-1], allowed[0])


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run this process, and processes that are started in the block, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class OtherWork:
    """A ``with`` block. Afterwards ``core_share`` is the CPU time per second that other processes than ``pids`` used:
    0.05 is a twentieth of one core. Time that the host took away counts as used, too.
    """

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._pids = pids
        self.core_share = 0.0

    def __enter__(self) -> Self:
        self._before, self._started = self._others_s(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.core_share = max(0.0, self._others_s() - self._before) / (time.perf_counter() - self._started)

    def _others_s(self) -> float:
        spent = psutil.cpu_times()
        return spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal - cpu_s(self._pids)


@dataclass
class Router:
    """A router that runs. needs: bytes that the head of each of its answers must have. idle: its share of a core."""

    name: str
    port: int
    pids: tuple[int, ...]
    needs: bytes = b""
    idle: float = 0.0


@dataclass(frozen=True)
class Engines:
    """Ports of the stubs, and of the simulated engines behind them."""

    stubs: tuple[int, ...]
    inner: tuple[int, ...]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.stubs]


class Fleet:
    """Starts the processes of one fleet, with their files in ``folder``. Raises StackError."""

    def __init__(self, processes: Processes, cores: Cores, count: int, python: str, *, reports: bool = False) -> None:
        """count: of the engines. python: the interpreter of replicas. reports: see ``stub_engines``."""
        self._python = python
        self.folder = processes.folder
        self.processes, self._cores = processes, cores
        with on_core(cores.others):
            self.store_url = start_store(processes)
            self.engines = self._start_engines(count, ["--reports"] if reports else [])
        self.store, self.engine_pids = (processes.pid("store"),), (processes.pid("engines"),)

    def _start_engines(self, count: int, options: Sequence[str]) -> Engines:
        argv = [sys.executable, "-m", "tests.bench.stub_engines", "--redis", self.store_url, "--count", str(count)]
        self.processes.spawn("engines", "engines", [*argv, "--model", MODEL, *options])

        def ports() -> list[tuple[str, str]]:
            return re.findall(r"stub (\d+) inner (\d+)\n", self.processes.log("engines"))

        self.processes.wait("engines", lambda: len(ports()) == count)
        return Engines(tuple(int(stub) for stub, _ in ports()), tuple(int(inner) for _, inner in ports()))

    def replica(self, name: str, more: Mapping[str, str], program: Sequence[str] = ("-m", "warmfleet")) -> Router:
        """Start a replica with these settings, and wait until it knows its workers."""
        [port] = free_ports(1)
        argv = [self._python, *program, "serve", "--port", str(port), "--redis", self.store_url, "--models", MODEL]
        ready = partial(replica_ready, f"http://127.0.0.1:{port}", len(self.engines.stubs))
        return Router(name, port, self._start(name, argv, {**sources(), **REPLICA, **more}, ready), BOOKED)

    def peer(self, name: str, folder: Path) -> Router:
        """Start a router of another project, whose commands are in ``folder``, and wait until it knows its workers."""
        port, metrics_port = free_ports(2)
        command, *rest = peers.PEERS[name](port, metrics_port, peers.Engines(self.engines.urls))
        known = partial(_knows, f"http://127.0.0.1:{port}/readiness", len(self.engines.stubs))
        return Router(name, port, self._start(name, [str(folder / command), *rest], ONE_THREAD, known))

    def check(self) -> None:
        """Raise StackError if a process has ended."""
        self.processes.check()

    def _start(
        self, name: str, argv: Sequence[str], more: Mapping[str, str], ready: Callable[[], object]
    ) -> tuple[int, ...]:
        """Start a router; returns the pids of its process and its children once it is ready."""
        with on_core(self._cores.routers):
            process = self.processes.spawn("routers", name, argv, more)
        self.processes.wait(name, ready)
        return (process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True)))


@contextmanager
def fleet_of(cores: Cores, count: int, python: str, *, reports: bool = False) -> Iterator[Fleet]:
    """A store and ``count`` stub engines. The bench's process runs on their core meanwhile. reports: see
    ``stub_engines``.
    """
    with (
        tempfile.TemporaryDirectory(prefix="wf-proxy-") as folder,
        Processes(Path(folder)) as processes,
        on_core(cores.others),
    ):
        yield Fleet(processes, cores, count, python, reports=reports)


def _knows(url: str, workers: int) -> bool:
    return bool((get_json(url) or {}).get("healthy_workers") == workers)
