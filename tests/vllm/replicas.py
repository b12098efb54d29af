"""Router replicas as processes of their own, for tests with real engines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
from tests.vllm.engine import SERVED_NAME, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

READY_SECONDS = 90.0
#: Engines take every core for seconds; after the default 50 ms a decision falls back, and nothing is predicted.
PATIENT_SECONDS = "2"


@contextmanager
def replicas(redis_url: str, count: int = 2, engines: int = 2, policy: str = "cost") -> Iterator[list[str]]:
    """Start ``count`` replicas; yields their base URLs once each knows the tokenizer and ``engines`` proven workers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMFLEET_")}
    kept |= {"WARMFLEET_REDIS_URL": redis_url, "WARMFLEET_MODELS": SERVED_NAME, "WARMFLEET_POLICY": policy}
    kept["WARMFLEET_DECIDE_TIMEOUT_S"] = PATIENT_SECONDS
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes, urls = [], []
    try:
        for _ in range(count):
            port = free_port()
            argv = [sys.executable, "-m", "warmfleet", "serve", "--host", "127.0.0.1", "--port", str(port)]
            processes.append(subprocess.Popen(argv, env=kept, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            urls.append(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + READY_SECONDS
        while not all(_proven(url) == engines for url in urls):
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"replicas not ready: {[_proven(url) for url in urls]} of {engines} workers proven")
            time.sleep(0.2)
        yield urls
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


def _proven(url: str) -> int:
    try:
        models = httpx.get(f"{url}/workers", timeout=5).json()["models"]
    except (httpx.HTTPError, ValueError, KeyError):
        return -1
    if any(model["identity"] == "none" for model in models):
        return -1  # it would route by load
    return sum(w["routable"] and w["proof"] == "proven" for model in models for w in model["workers"])
