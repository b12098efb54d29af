"""The processes of `make loadtest`: store, engines, replicas, haproxy, Locust. All end with the ``with`` block."""

from __future__ import annotations

import csv
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from warmfleet_loadtest.stacks.processes import (
    HAPROXY_CONFIG,
    Processes,
    StackError,
    free_ports,
    haproxy_binary,
    replica_ready,
    start_haproxy,
    start_store,
)

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "loadtest"
ENGINES, REPLICAS, PLACES = 4, 3, 4
WATCH_S = 0.5


class LocustStack(Processes):
    """``start`` starts everything but Locust; ``spawn`` Locust then. url: that of haproxy."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ports = free_ports(1 + PLACES + ENGINES)
        self._store = ""
        self.url = f"http://127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        """Start all processes and wait until every replica can use every engine. Raises StackError."""
        haproxy_binary()  # raises before anything is started
        self._store = start_store(self, "--maxmemory", "1gb")
        for number, port in enumerate(self._ports[1 + PLACES :], 1):
            engine = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", str(port), "--model", MODEL]
            name = f"engine-{number}"
            self.spawn("engines", name, [*engine, "--worker-id", name, "--redis", self._store])
        for place in range(1, REPLICAS + 1):
            self.start_replica(place)
        for place in range(1, REPLICAS + 1):
            url = f"http://127.0.0.1:{self._ports[place]}"
            self.wait(f"replica-{place}", partial(replica_ready, url, ENGINES))
        places = {f"LOADTEST_REPLICA_{place}": str(self._ports[place]) for place in range(1, PLACES + 1)}
        start_haproxy(self, HAPROXY_CONFIG, self._ports[0], places)

    def start_replica(self, place: int) -> None:
        """Start the replica for a place (1 to PLACES) in haproxy's configuration. Does not wait for it."""
        command = [sys.executable, "-m", "warmfleet", "serve", "--port", str(self._ports[place])]
        environment = {"WARMFLEET_REDIS_URL": self._store, "WARMFLEET_MODELS": MODEL}
        environment["WARMFLEET_TRUST_TEMPLATES"] = "1"  # the templates are those of our own engines
        self.spawn("replicas", f"replica-{place}", command, environment)

    def sessions(self) -> dict[str, int]:
        """The number of connections that haproxy has made to each replica. Raises StackError without an answer."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(self.folder / "stats"))
                connection.sendall(b"show stat\n")
                text = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        except OSError as error:
            raise StackError(f"haproxy gives no statistics ({error}):\n{self.tail('haproxy')}") from error
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {row["svname"]: int(row["stot"]) for row in rows if row["svname"].startswith("replica-")}

    def sleep_until(self, when: float) -> None:
        """Sleep until a monotonic time. Raises StackError as soon as Locust or haproxy has ended."""
        while (left := when - time.monotonic()) > 0:
            self.check("locust", "haproxy")
            time.sleep(min(left, WATCH_S))  # the schedule of the run is in wall time
