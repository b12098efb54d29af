"""The engine's own thread is not slowed down by a Redis in trouble. Measured in a process, against a real server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis
from tests.support.fleet.publishing import record, upkeep
from tests.support.polling import poll
from tests.support.redis.outages import STALL_SECONDS, Server, refusing, slow
from tests.worker_plugin.engine_thread import HELD

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet_worker.protocol import wire
from warmfleet_worker.stream import MAX_PENDING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LIMIT = 2_000  # records in the engine's queue: 0.1 s of its work
WELL_SECONDS, OUTAGE_SECONDS = 0.5, 1.5
#: A call that waited for Redis would take as long as Redis is away, stalls (1 s) or times out (2 s).
LONGEST_MS = 500 * STALL_SECONDS
P99_MS = 5.0  # Python lets another thread run for this long
GROWTH_MB = 16.0
#: A try every 3 s at most (with jitter 3.75), half a second until the command is read, a snapshot of 16 chunks.
HEALED_SECONDS = wire.HEARTBEAT_SECONDS + 1.0


class Engine:
    """The process that runs ``engine_thread``, and its answers."""

    def __init__(self, url: str, model: str) -> None:
        argv = [sys.executable, "-m", "tests.worker_plugin.engine_thread", url, model, str(LIMIT)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(argv, env=environment, **pipes)

    async def ask(self, question: str) -> Any:
        return await asyncio.to_thread(self._ask, question)

    def _ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def trouble(server: Server, how: str) -> Iterator[None]:
    """Redis is in trouble while the block runs, and well again afterwards. away, restarted: it comes back empty."""
    if how == "absent":
        yield
        server.start()
        return
    assert server.process is not None
    with redis.Redis.from_url(server.url, socket_timeout=30) as client, ExitStack() as stack:
        if how == "away":
            server.kill()
            stack.callback(server.start)
        elif how == "frozen":
            server.process.send_signal(19)
            stack.callback(server.process.send_signal, 18)
        elif how == "slow":
            stack.enter_context(slow(client))
        else:
            stack.enter_context(refusing(client, how))
        yield


async def endured(server: Server, model: str, how: str, seconds: float) -> None:
    """Redis is well, in trouble for ``seconds``, and well again. Returns the engine's figures and the time to heal."""
    fleet, engine = Fleet(connect(server.url, timeout_s=5), model), Engine(server.url, model)
    try:
        if how != "absent":
            server.start()
            async with upkeep(fleet):
                await poll(lambda: _held(fleet, HELD // 2), what="it reports")
        await engine.ask("look")
        await asyncio.sleep(WELL_SECONDS)
        well = await engine.ask("look")
        with trouble(server, how):
            await asyncio.sleep(seconds)
            bad = await engine.ask("look")
        back = time.monotonic()
        async with upkeep(fleet):
            table = {bytes.fromhex(key) for key in await engine.ask("freeze")}
            await poll(lambda: _equal(fleet, table), 4 * HEALED_SECONDS, "the index equals the table")
            healed_s = time.monotonic() - back
        said = ", ".join(f"{name} {well[name]:.3f} {bad[name]:.3f}" for name in ("p50_ms", "p99_ms", "longest_ms"))
        print(f"{how}: well and in trouble: {said}; right again after {healed_s:.2f} s")
        assert bad["calls"] / seconds > well["calls"] / WELL_SECONDS / 4, "it went on"
        assert bad["errors"] > well["errors"] or how in ("slow", "frozen")  # all calls are answered, after a while
        assert bad["dropped"] > well["dropped"], "its queue was too small for that"
        assert bad["p99_ms"] < max(P99_MS, 5 * well["p99_ms"])
        assert bad["longest_ms"] < LONGEST_MS
        assert bad["queued"] <= LIMIT
        assert bad["pending"] <= MAX_PENDING
        assert bad["memory_mb"] - well["memory_mb"] < GROWTH_MB
        assert healed_s < HEALED_SECONDS
    finally:
        engine.close()
        await fleet.close()


async def _held(fleet: Fleet, count: int) -> bool:
    slot = (await record(fleet)).get("slot", 0)
    return bool(slot) and cast("int", await cast("Any", fleet.redis.scard(fleet.keys.slot(slot)))) >= count


async def _equal(fleet: Fleet, table: set[bytes]) -> bool:
    slot = (await record(fleet)).get("slot", 0)
    return bool(slot) and await cast("Any", fleet.redis.smembers(fleet.keys.slot(slot))) == table


async def together(model: str, hows: Sequence[str], seconds: float) -> None:
    """Run all kinds of trouble at the same time, each on a server of its own; they mostly wait."""
    with ExitStack() as stack:
        servers = [Server() for _ in hows]
        for server in servers:
            stack.callback(server.remove)
        async with asyncio.TaskGroup() as group:
            for server, how in zip(servers, hows, strict=True):
                group.create_task(endured(server, model, how, seconds))


TROUBLES = [("absent", "away", "frozen", "slow"), ("OOM", "READONLY", "NOPERM", "BUSY")]


@pytest.mark.parametrize("hows", TROUBLES, ids=["away", "refusing"])
async def test_the_engine_never_notices(model: str, hows: Sequence[str]) -> None:
    await together(model, hows, OUTAGE_SECONDS)


@pytest.mark.long(
    minutes=5,
    shows="the thread of an engine does not notice a minute of trouble with Redis, in eight ways",
)
@pytest.mark.parametrize("hows", TROUBLES, ids=["away", "refusing"])
async def test_the_engine_never_notices_for_a_minute(model: str, hows: Sequence[str]) -> None:
    await together(model, hows, 60.0)
