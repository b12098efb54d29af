"""Real processes: engines that joined by themselves are listed by their URLs, too, in several spellings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import until

from warmfleet.cli.local.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.cli.local.stack import Stack

ROUNDS_S = 12.0  # two rounds of checks


def settings(stack: Stack, engines: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMFLEET_")}
    kept |= {"WARMFLEET_REDIS_URL": stack.redis_url, "WARMFLEET_MODELS": "demo", "WARMFLEET_ADMIN_PORT": "0"}
    return kept | {"WARMFLEET_STATIC_WORKERS": engines, "PYTHONPATH": os.pathsep.join(sys.path)}


@contextmanager
def listing(stack: Stack, engines: str) -> Iterator[str]:
    """The URL of one more replica of this fleet, which has this list of engines."""
    port = free_port()
    argv = [sys.executable, "-m", "warmfleet", "serve", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(argv, env=settings(stack, engines))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def workers(url: str) -> list[dict[str, Any]]:
    try:
        return list(httpx.get(f"{url}/workers", timeout=10).json()["models"][0]["workers"])
    except (httpx.HTTPError, ValueError, LookupError):
        return []


@pytest.mark.parametrize("spelling", ["http://127.0.0.1:{}", "http://localhost:{}", "HTTP://0.0.0.0:{}/v1"])
def test_an_engine_with_the_plugin_that_is_listed_is_booked_once(stack: Stack, spelling: str) -> None:
    ports = [engine.url.rpartition(":")[2] for engine in stack.engines]
    engines = ",".join(spelling.format(port) for port in ports)
    with listing(stack, engines) as url:
        until(lambda: workers(url), "the replica answers", 60)
        seen, began = set[tuple[str, str]](), time.monotonic()

        def looked() -> bool:
            seen.update((worker["worker_id"], worker["state"]) for worker in workers(url))
            return time.monotonic() - began > ROUNDS_S

        until(looked, "two rounds of checks", 90)
        assert {state for _, state in seen} == {"proven"}
        assert len(seen) == len(ports)
        told = subprocess.run(
            [sys.executable, "-m", "warmfleet", "doctor", "--model", "demo"],
            env=settings(stack, engines), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        listed = [line for line in told.stdout.splitlines() if " listed: " in line]
        assert len(listed) == len(ports), told.stdout
        assert all("is the worker sim-" in line and "joined by itself" in line for line in listed), listed
