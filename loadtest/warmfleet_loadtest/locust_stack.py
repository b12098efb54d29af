"""The processes of `make loadtest`: store, engines, replicas, haproxy, Locust; all die with the ``with`` block."""

from __future__ import annotations

import csv
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from warmfleet_loadtest.processes import (
    StackError,
    free_ports,
    get_json,
    haproxy_binary,
    proven_workers,
    store_binary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

CONFIG = Path(__file__).parents[1] / "haproxy.cfg"
MODEL = "loadtest"
ENGINES, REPLICAS, PLACES = 4, 3, 4
START_S = 60.0
POLL_S = 0.05


class LocustStack:
    """``folder``: private; logs and sockets go there, so its path must be short (a socket's may have 107 bytes)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = free_ports(1 + PLACES + ENGINES)
        self.url = f"http://127.0.0.1:{self._ports[0]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.kill()
        for process in self._processes.values():
            process.wait()

    def start(self) -> None:
        """Start everything but Locust; returns once every replica answers for every engine through haproxy."""
        haproxy = haproxy_binary()
        if haproxy is None:
            raise StackError("haproxy is missing: run `make deps` once")
        store = ["--port", "0", "--unixsocket", str(self._folder / "store"), "--save", "", "--appendonly", "no"]
        self.spawn("store", [store_binary(), *store, "--maxmemory-policy", "noeviction", "--maxmemory", "1gb"])
        self._await("store", lambda: _accepts(self._folder / "store"))
        for number, port in enumerate(self._ports[1 + PLACES :], 1):
            engine = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", str(port), "--model", MODEL]
            self.spawn(f"engine-{number}", [*engine, "--worker-id", f"engine-{number}", "--redis", self._redis_url])
        for number in range(1, REPLICAS + 1):
            self.start_replica(number)
        for number in range(1, REPLICAS + 1):
            self._await(f"replica-{number}", partial(self._knows_all_engines, number))
        environment = {"LOADTEST_PORT": str(self._ports[0]), "LOADTEST_STATS": str(self._folder / "stats")}
        environment |= {f"LOADTEST_REPLICA_{place}": str(self._ports[place]) for place in range(1, PLACES + 1)}
        self.spawn("haproxy", [haproxy, "-db", "-f", str(CONFIG)], {**os.environ, **environment})
        self._await("haproxy", lambda: get_json(f"{self.url}/v1/models") is not None)

    def start_replica(self, place: int) -> None:
        """Start the replica of a place (1 to PLACES) in haproxy's configuration; not waited for."""
        command = [sys.executable, "-m", "warmfleet", "serve", "--port", str(self._ports[place])]
        environment = {"WARMFLEET_REDIS_URL": self._redis_url, "WARMFLEET_MODELS": MODEL}
        environment["WARMFLEET_TRUST_TEMPLATES"] = "1"  # whoever measures approves of what is measured
        self.spawn(f"replica-{place}", command, {**os.environ, **environment})

    def kill_replica(self, place: int) -> None:
        self._processes[f"replica-{place}"].kill()
        self._processes[f"replica-{place}"].wait()

    def sessions(self) -> dict[str, int]:
        """Connections that each replica got, as haproxy counted them."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self._folder / "stats"))
            connection.sendall(b"show stat\n")
            text = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {row["svname"]: int(row["stot"]) for row in rows if row["svname"].startswith("replica-")}

    def spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process whose output goes to a log. Its end is ours at the latest."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        self._processes[name] = process
        return process

    def sleep_until(self, when: float) -> None:
        """Sleep to a monotonic time; raises StackError at once if Locust or haproxy ends before."""
        while (left := when - time.monotonic()) > 0:
            for name in ("locust", "haproxy"):
                if self._processes[name].poll() is not None:
                    raise StackError(f"{name} ended early:\n{self.tail(name)}")
            time.sleep(min(left, 0.5))

    def tail(self, name: str, lines: int = 15) -> str:
        text = (self._folder / f"{name}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    @property
    def _redis_url(self) -> str:
        return f"unix://{self._folder / 'store'}"

    def _knows_all_engines(self, place: int) -> bool:
        url = f"http://127.0.0.1:{self._ports[place]}"  # not ready: haproxy would take it for down
        return proven_workers(url) == ENGINES and get_json(f"{url}/readyz") is not None

    def _await(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                raise StackError(f"{name} is not ready:\n{self.tail(name)}")
            time.sleep(POLL_S)


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(str(path))
        return True
    return False
