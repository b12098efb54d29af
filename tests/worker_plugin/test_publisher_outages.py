"""The publisher while Redis is absent, killed, refusing: the engine goes on, the index is right afterwards."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis
from tests.conftest import poll, valkey_binary, wait_for_server
from tests.worker_plugin.publishing import churn, equal, hashes, publishing, upkeep

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.usefixtures("short_periods")


class Server:
    """A private Valkey at a fixed address, to be killed and started again."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wf-redis-"))
        self.url = f"unix://{self.folder}/s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", f"{self.folder}/s", "--save", "", "--dir", str(self.folder)]
        options += ["--busy-reply-threshold", "50", "--enable-debug-command", "yes"]
        self.process = subprocess.Popen([valkey_binary(), *options], stdout=subprocess.DEVNULL)
        wait_for_server(self.url, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()
    shutil.rmtree(server.folder)


async def test_redis_is_absent_killed_and_comes_back_empty(own_server: Server, model: str) -> None:
    tracker = Tracker()
    fleet = Fleet(connect(own_server.url, timeout_s=2), model)
    with publishing(own_server.url, model, tracker) as publisher:
        churn(tracker, 5, 1)
        await poll(lambda: publisher.state.errors > 0)
        own_server.start()
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await poll(lambda: publisher.state.acknowledged)
            own_server.kill()
            await asyncio.to_thread(churn, tracker, 20, 2)
            await poll(lambda: publisher.state.errors > 3)
            own_server.start()
            await equal(fleet, tracker)
            await asyncio.to_thread(churn, tracker, 20, 3)
            await equal(fleet, tracker)
    assert publisher.state.joins == 2
    await fleet.close()


async def test_an_outage_that_fills_the_queue_is_healed(own_server: Server, model: str) -> None:
    tracker = Tracker(limit=1_000)
    own_server.start()
    fleet = Fleet(connect(own_server.url, timeout_s=2), model)
    with publishing(own_server.url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            assert own_server.process is not None
            own_server.process.send_signal(19)  # SIGSTOP: the connection hangs
            await asyncio.to_thread(tracker.stored, hashes(5_000))
            begin = time.monotonic()
            tracker.removed(list(tracker.table)[:10])
            assert time.monotonic() - begin < 0.1  # the engine's side never waits
            await poll(lambda: publisher.state.errors > 0)
            own_server.process.send_signal(18)
            await equal(fleet, tracker)
    assert publisher.state.dropped > 3_000
    await fleet.close()


@contextmanager
def refusing(client: redis.Redis, how: str) -> Iterator[None]:
    """Make the server refuse writes with OOM, READONLY, NOPERM or BUSY."""
    thread: threading.Thread | None = None
    if how == "OOM":
        client.config_set("maxmemory", 1)
    elif how == "READONLY":
        client.replicaof("127.0.0.1", 1)
    elif how == "NOPERM":
        client.acl_setuser("default", commands=["-xadd"])
    else:
        thread = threading.Thread(target=_endless_script, args=(client,))
        thread.start()
    yield
    if how == "OOM":
        client.config_set("maxmemory", 0)
    elif how == "READONLY":
        client.replicaof("NO", "ONE")
    elif how == "NOPERM":
        client.acl_setuser("default", commands=["+xadd"])
    elif thread is not None:
        client.script_kill()
        thread.join()


def _endless_script(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)


@pytest.mark.parametrize("how", ["OOM", "READONLY", "NOPERM", "BUSY"])
@pytest.mark.parametrize("limit", [100_000, 200], ids=["queued", "overflowing"])
async def test_a_redis_that_refuses_is_survived(
    own_server: Server, model: str, how: str, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.start()
    tracker, fleet = Tracker(limit=limit), Fleet(connect(own_server.url, timeout_s=2), model)
    client = redis.Redis.from_url(own_server.url, socket_timeout=30)
    with publishing(own_server.url, model, tracker) as publisher:
        async with upkeep(fleet):
            tracker.stored(hashes(100))
            await equal(fleet, tracker)
        with refusing(client, how):
            await poll(lambda: publisher.state.errors > 0)
            await asyncio.to_thread(churn, tracker, 20)
        async with upkeep(fleet):
            await equal(fleet, tracker)
        dropped = publisher.state.dropped
    assert dropped > 0 if limit == 200 else dropped == 0
    assert publisher.state.joins == 1
    refusals = [line for line in caplog.messages if "away or refuses" in line]
    assert len(refusals) <= 3  # one per spell, not one per try
    client.close()
    await fleet.close()
