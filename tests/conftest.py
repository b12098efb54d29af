"""Real servers for all tests: a private Valkey and a private Debian Redis, both on unix sockets."""

from __future__ import annotations

import functools
import gc
import os
import sys
import uuid
from typing import TYPE_CHECKING

import pytest
import redis.utils
from hypothesis import settings
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary
from tests.support.run.required_tools import skipped_summary

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import redis.asyncio as aioredis

pytest_plugins = ["tests.support.run.ending", "tests.support.run.scheduling"]

# Python files are compiled once, whatever the environment says, and not by each of the many processes that tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Every connection asks for the version of redis-py, which is read from a file each time.
redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)

# No deadline for Hypothesis examples, because a busy machine slows them; tests of time have bounds of their own.
settings.register_profile("warmfleet", deadline=None)
settings.load_profile("warmfleet")


SERVERS = ("valkey", "redis7")

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
        for number, choice in enumerate(SERVERS):
            if choice in rest and cases.setdefault((name, rest.replace(choice, "")), len(cases)) % 2 != number:
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
    """The URL of each of the two servers in turn, for tests of scripts."""
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
