"""The processes of `make loadtest`: store, engines, replicas, haproxy, Locust. All end with the ``with`` block.

Two fleets can be compared. ``warmfleet``: haproxy spreads connections over replicas of the router, which choose the
engines. ``session-affinity``: no router; haproxy reads the header X-Session-ID and sends a session always to the same
engine, which is all that a common balancer can do for caches.
"""

from __future__ import annotations

import csv
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import psutil

from warmfleet_loadtest.stacks.processes import (
    HAPROXY_CONFIG,
    Processes,
    StackError,
    answers,
    free_ports,
    get_json,
    haproxy_binary,
    replica_ready,
    start_haproxy,
    start_store,
    with_servers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

MODEL = "loadtest"
WARMFLEET, AFFINITY = "warmfleet", "session-affinity"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}  # by the word before the number in an engine's name
SESSION_CONFIG = HAPROXY_CONFIG.with_name("haproxy-session.cfg")
#: Counters of ``/sim/transfers`` of an engine that are shown; its violations are summed.
TRANSFER_COUNTS = ("transfers", "bytes", "seconds", "failed_transfers", "recomputed", "wrong_answers")
WATCH_S = 0.5  # time between two checks that the processes run
TERMINATE_S = 10.0  # longest time for a process to end by itself


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of processes. replicas, engines: at the begin. blocks: in the cache of an engine.

    step_time: a preset of ``step_costs``. spare_replicas, spare_engines: ports for processes that join later. prefill:
    engines that compute prompts for the other ones, which then are decode engines; 0: engines have no roles.
    """

    replicas: int = 3
    engines: int = 8
    blocks: int = 2_048
    step_time: str = "demo"
    spare_replicas: int = 1
    spare_engines: int = 1
    prefill: int = 0

    def engine_names(self) -> list[str]:
        """Name all engines, by their role if they have roles: first the ones to stop first, last the ones that join."""
        kind, others = ("decode" if self.prefill else "engine"), self.engines - self.prefill
        names = [f"{kind}-{place + 1}" for place in range(others + self.spare_engines)]
        return names[:others] + [f"prefill-{place + 1}" for place in range(self.prefill)] + names[others:]


class LocustStack(Processes):
    """Call ``start`` for everything but Locust, and then ``spawn`` for Locust. url: haproxy's address."""

    def __init__(self, folder: Path, fleet: str = WARMFLEET, size: Size | None = None) -> None:
        super().__init__(folder)
        self.fleet, self.size = fleet, size or Size()
        if fleet != WARMFLEET:
            self.size = replace(self.size, prefill=0)  # only a router sends the parts of a request to two engines
        replicas = self.size.replicas + self.size.spare_replicas
        engines = self.size.engine_names()
        ports = iter(free_ports(1 + replicas + len(engines)))
        self.url = f"http://127.0.0.1:{next(ports)}"
        #: Ports by name. haproxy knows all of them from the begin, and uses each as soon as a process answers there.
        self.replicas = {f"replica-{place + 1}": next(ports) for place in range(replicas)}
        self.engines = {name: next(ports) for name in engines}
        self._started: list[str] = []
        self._gone_s: dict[str, float] = {}  # CPU seconds of processes that were stopped, by kind
        self._store = ""

    def start(self) -> None:
        """Start all processes and wait until every replica can use every engine. Raises StackError."""
        haproxy_binary()  # raises before anything is started
        if self.fleet == WARMFLEET:
            self._store = start_store(self, "--maxmemory", "1gb")
        engines = list(self.engines)[: self.size.engines]
        for name in engines:
            self.start_engine(name)
        for name in engines:
            self.wait(name, partial(answers, f"http://127.0.0.1:{self.engines[name]}/health"))
        if self.fleet == WARMFLEET:
            replicas = list(self.replicas)[: self.size.replicas]
            for name in replicas:
                self.start_replica(name)
            for name in replicas:
                url = f"http://127.0.0.1:{self.replicas[name]}"
                self.wait(name, partial(replica_ready, url, self.size.engines))
        start_haproxy(self, self.balancer_config(), int(self.url.rsplit(":", 1)[1]))

    def balancer_config(self) -> str:
        """Return haproxy's configuration with all ports of this fleet, also those of processes that start later."""
        if self.fleet == WARMFLEET:
            return with_servers(HAPROXY_CONFIG.read_text(), self.replicas)
        return with_servers(SESSION_CONFIG.read_text(), self.engines)

    def start_engine(self, name: str) -> None:
        """Start the engine of this name. Does not wait for it."""
        engine = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", str(self.engines[name])]
        engine += ["--model", MODEL, "--blocks", str(self.size.blocks), "--step-time", self.size.step_time]
        if self._store:
            engine += ["--worker-id", name, "--redis", self._store]
        if role := self.role(name):
            engine += ["--kv-role", KV_ROLES[role]]
        self.spawn("engines", name, engine)

    def role(self, name: str) -> str:
        """Return the role of the engine of this name: prefill, decode, or empty in a fleet without roles."""
        kind = name.split("-")[0]
        return kind if kind in KV_ROLES else ""

    def roles(self) -> dict[str, str]:
        """Return the roles of all engines that were started, by name; empty in a fleet without roles."""
        return {name: role for name in self.engines if name in self._started and (role := self.role(name))}

    def transfers(self) -> dict[str, float]:
        """Return the sums of what running engines count of the blocks that they move; empty without roles."""
        found: Counter[str] = Counter()
        for name in self.roles():
            counts = get_json(f"http://127.0.0.1:{self.engines[name]}/sim/transfers") or {}
            found.update({key: counts.get(key, 0) for key in TRANSFER_COUNTS})
            found["violations"] += sum(counts.get("violations", {}).values())
        return dict(found)

    def start_replica(self, name: str) -> None:
        """Start the replica of this name. Does not wait for it."""
        command = [sys.executable, "-m", "warmfleet", "serve", "--port", str(self.replicas[name])]
        environment = {"WARMFLEET_REDIS_URL": self._store, "WARMFLEET_MODELS": MODEL}
        environment["WARMFLEET_APPROVED_TEMPLATES"] = "*"  # the templates are those of our own engines
        environment["WARMFLEET_ADMIN_PORT"] = "0"  # the operators' API is on the same port
        self.spawn("replicas", name, command, environment)

    def spare(self, places: Mapping[str, int]) -> str:
        """Return the first of these names that was never started. Raises StackError."""
        return self._one([name for name in places if name not in self._started], "place is left")

    def first(self, places: Mapping[str, int]) -> str:
        """Return the first of these names that runs. Raises StackError."""
        return self._one([name for name in places if name in self._running], "process is left")

    def _one(self, names: list[str], what: str) -> str:
        if not names:
            raise StackError(f"--events: no {what}")
        return names[0]

    def spawn(
        self, kind: str, name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        self._started.append(name)
        return super().spawn(kind, name, argv, environment)

    def kill(self, name: str) -> None:
        self._note_cpu(name)
        super().kill(name)

    def terminate(self, name: str) -> None:
        """Ask a process to end (SIGTERM), as a rollout does, and wait until it has."""
        self._note_cpu(name)
        _kind, process = self._running[name]
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_S)
        super().kill(name)

    def _note_cpu(self, name: str) -> None:
        kind, process = self._running[name]
        with suppress(psutil.Error):
            times = psutil.Process(process.pid).cpu_times()
            self._gone_s[kind] = self._gone_s.get(kind, 0.0) + times.user + times.system

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds so far, by kind of process, with child processes and processes that were stopped."""
        spent = super().cpu_s()
        return {kind: spent.get(kind, 0.0) + self._gone_s.get(kind, 0.0) for kind in {**spent, **self._gone_s}}

    def sessions(self) -> dict[str, int]:
        """Ask haproxy for the number of connections made to each server. Raises StackError without an answer."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(5)
                connection.connect(str(self.folder / "stats"))
                connection.sendall(b"show stat\n")
                text = b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
        except OSError as error:
            raise StackError(f"haproxy gives no statistics ({error}):\n{self.tail('haproxy')}") from error
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        known = {**self.replicas, **self.engines}
        return {row["svname"]: int(row["stot"]) for row in rows if row["svname"] in known}

    def sleep_until(self, when: float, look: Callable[[], None] = lambda: None) -> None:
        """Sleep until a monotonic time, and call ``look`` often. Raises StackError once Locust or haproxy has ended."""
        while (left := when - time.monotonic()) > 0:
            self.check("locust", "haproxy")
            look()
            time.sleep(min(left, WATCH_S))  # a real sleep: ``when`` is wall time
