"""Router replicas as processes of their own, for tests with real engines."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
from tests.vllm.engine import SERVED_NAME

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_SECONDS = 90.0
#: The policy for tests that need a prompt's holder. By cost a session leaves an engine that was slow a moment ago, as
#: one is with its first prompt on a busy machine.
BY_MATCH = "two_state"
#: Engines take every core for seconds. A decision falls back after the default 50 ms, and then predicts nothing.
PATIENT_SECONDS = "2"


class Replica:
    """A replica, on the same port at each start. deaths: how often it was killed. killed: it is dead now."""

    def __init__(self, redis_url: str, policy: str = "cost", **settings: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMFLEET_")}
        kept |= {"WARMFLEET_REDIS_URL": redis_url, "WARMFLEET_MODELS": SERVED_NAME, "WARMFLEET_POLICY": policy}
        kept |= {"WARMFLEET_ADMIN_PORT": "0"}  # operators use the same port
        self._environment = kept | settings | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  ``ended`` closes it
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.deaths = 0
        self.start()

    def start(self) -> None:
        argv = [sys.executable, "-m", "warmfleet", "serve", "--host", "127.0.0.1", "--port", str(self._port)]
        self.killed = False
        self.process = subprocess.Popen(argv, env=self._environment, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self.killed = True
        self.deaths += 1
        self.process.kill()
        self.process.wait()

    def ended(self) -> None:
        """Wait until the replica has ended, and delete its log. Terminate the replica before."""
        self.process.wait(20)
        self._log.close()

    @property
    def log(self) -> str:
        """The end of the replica's log."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 4_000, max(0, size - 4_000)).decode(errors="replace")

    @property
    def proven(self) -> int:
        """The number of proven workers at the replica; -1 while it is not ready, or places requests by load alone."""
        try:
            if httpx.get(f"{self.url}/readyz", timeout=5).status_code != 200:
                return -1  # /workers reads Redis anew, but its own last reading may be older
            models = httpx.get(f"{self.url}/workers", timeout=5).json()["models"]
        except (httpx.HTTPError, ValueError, KeyError):
            return -1
        if any(model["identity"] == "none" for model in models):
            return -1
        return sum(w["routable"] and w["proof"] == "proven" for model in models for w in model["workers"])


@contextmanager
def running_replicas(
    redis_url: str, count: int = 2, engines: int = 2, policy: str = "cost", **settings: str
) -> Iterator[list[Replica]]:
    """Start ``count`` replicas; yields them once each knows the tokenizer and ``engines`` proven workers."""
    started: list[Replica] = []
    try:
        started += [Replica(redis_url, policy, **settings) for _ in range(count)]
        deadline = time.monotonic() + READY_SECONDS
        while not all(replica.proven == engines for replica in started):
            if time.monotonic() > deadline or any(replica.process.poll() is not None for replica in started):
                counts = [replica.proven for replica in started]
                log = next(
                    (replica.log for replica, count in zip(started, counts, strict=True) if count != engines), ""
                )
                raise RuntimeError(f"replicas not ready: {counts} of {engines} workers proven\n{log}")
            time.sleep(0.2)
        yield started
    finally:
        for replica in started:
            replica.process.terminate()
        for replica in started:
            replica.ended()


@contextmanager
def replicas(
    redis_url: str, count: int = 2, engines: int = 2, policy: str = "cost", **settings: str
) -> Iterator[list[str]]:
    """``running_replicas`` for tests that kill none: their base URLs."""
    patient = {"WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS}
    with running_replicas(redis_url, count, engines, policy, **{**patient, **settings}) as started:
        yield [replica.url for replica in started]
