"""Faults in a fleet of real processes while clients with kept connections send, and never send again.

Each drill prints one row (``-s``). No request fails before the first byte of its answer while some worker could serve.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import redis.asyncio as aioredis
from tests.drills.clients import Clients
from tests.drills.fleet import START_S, Fleet, running
from tests.support.polling import poll

from warmfleet.fleet import Spans

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.drills.toxic import Toxic

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

LONG = pytest.mark.long(
    minutes=10,
    shows=(
        "three replicas, three engines and Redis as processes: each is killed, frozen, slow, cut off, reset or "
        "restarted while clients that never send again are served; a table of what failed, recovery, and load left"
    ),
)
CLIENTS = 8
BEFORE_S = AFTER_S = 2.0
PARTITION_S = 30.0
ENGINE_KEEPALIVE_S = 5.0  # after which the simulated engines, as vLLM does, close an idle connection

Fault = Callable[[Fleet], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class Row:
    """The results of a drill.

    before, after: requests that failed before, and after, the first byte of their answers. lost: with a killed replica.
    slowest_s: the longest wait for a first byte: requests that are at an engine when its way breaks are tried elsewhere
    after 30 s at most, because a plain answer may take long. recover_s: from the end of the fault until every replica
    can use every engine. load: what stays booked at last; settle_s: how long after the last answer.
    """

    drill: str
    requests: int
    before: int
    after: int
    lost: int
    slowest_s: float
    recover_s: float
    load: int
    settle_s: float

    @property
    def line(self) -> str:
        return " ".join(
            f"{value:>10}" if number else f"{value:<28}" for number, value in enumerate(asdict(self).values())
        )


HEAD = " ".join(f"{name:>10}" if number else f"{name:<28}" for number, name in enumerate(Row.__annotations__))


# ---------------------------------------------------------------- faults


def toxic(ways: Callable[[Fleet], list[Toxic]], spoil: Callable[[Toxic], None]) -> Fault:
    """A fault at the proxies of ``ways``, which heals."""

    @asynccontextmanager
    async def fault(fleet: Fleet) -> AsyncIterator[None]:
        for way in ways(fleet):
            spoil(way)
        try:
            yield
        finally:
            for way in ways(fleet):
                way.heal()

    return fault


def hold(way: Toxic) -> None:
    way.hold()


def reset(way: Toxic) -> None:
    way.reset()


def forget(way: Toxic) -> None:
    way.forget()


def garble(way: Toxic) -> None:
    way.garbles = True


def late(seconds: float) -> Callable[[Toxic], None]:
    def spoil(way: Toxic) -> None:
        way.late_s = seconds

    return spoil


def engine(fleet: Fleet) -> list[Toxic]:
    return [fleet.engines[0].http]


def engine_and_plugin(fleet: Fleet) -> list[Toxic]:
    return [fleet.engines[0].http, fleet.engines[0].redis]


def plugins(fleet: Fleet) -> list[Toxic]:
    return [engine.redis for engine in fleet.engines]


def routers(fleet: Fleet) -> list[Toxic]:
    return [replica.redis for replica in fleet.replicas]


def a_router(fleet: Fleet) -> list[Toxic]:
    return [fleet.replicas[0].redis]


def a_plugin(fleet: Fleet) -> list[Toxic]:
    return [fleet.engines[0].redis]


@asynccontextmanager
async def engine_killed(fleet: Fleet) -> AsyncIterator[None]:
    fleet.processes.kill(fleet.engines[0].name)
    yield
    fleet.start_engine(fleet.engines[0])


def frozen(name: str) -> Fault:
    @asynccontextmanager
    async def fault(fleet: Fleet) -> AsyncIterator[None]:
        fleet.signal(name, signal.SIGSTOP)
        try:
            yield
        finally:
            fleet.signal(name, signal.SIGCONT)

    return fault


@asynccontextmanager
async def replica_killed(fleet: Fleet) -> AsyncIterator[None]:
    replica = fleet.replicas[0]
    replica.killed = True
    fleet.processes.kill(replica.name)
    await poll(lambda: not replica.ready, 30, "the balancer has noticed")
    yield
    fleet.start_replica(replica)


@asynccontextmanager
async def redis_killed(fleet: Fleet) -> AsyncIterator[None]:
    """Redis is killed, and comes back empty."""
    fleet.processes.kill("redis")
    yield
    await fleet.start_redis()


@asynccontextmanager
async def redis_full(fleet: Fleet) -> AsyncIterator[None]:
    """Redis refuses every write, as at its maxmemory."""
    async with aioredis.Redis(port=fleet.redis_port) as client:
        await client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            await client.config_set("maxmemory", "0")


@asynccontextmanager
async def rolling_restart(fleet: Fleet) -> AsyncIterator[None]:
    for replica in fleet.replicas:
        await fleet.stop_replica(replica)
        fleet.start_replica(replica)
        await poll(lambda: replica.ready, START_S, "it is ready again")  # noqa: B023
    yield


@asynccontextmanager
async def nothing(_: Fleet) -> AsyncIterator[None]:
    yield


# ---------------------------------------------------------------- drills


@dataclass(frozen=True)
class Drill:
    """cuts: streams that have begun may be cut. pause: between the requests of a client, if not the usual."""

    name: str
    fault: Fault
    seconds: float
    cuts: bool = False
    pause: tuple[float, float] = (0.0, 0.1)


SHORT = [Drill("engine SIGKILL", engine_killed, 2, cuts=True)]
DRILLS = [
    Drill("engine SIGSTOP", frozen("engine-1"), 25, cuts=True),
    Drill("engine slow", toxic(engine, late(0.5)), 10),
    Drill("engine RST", toxic(engine, reset), 10, cuts=True),
    Drill("engine half-open", toxic(engine, forget), 10, cuts=True),
    Drill("engine garbage", toxic(engine, garble), 10, cuts=True),
    Drill("replica SIGKILL", replica_killed, 5),
    Drill("Redis SIGKILL", redis_killed, 5),
    Drill("Redis SIGSTOP", frozen("redis"), 10),
    Drill("Redis +1 s", toxic(routers, late(1.0)), 10),
    Drill("Redis full", redis_full, 10),
    Drill("Redis garbage", toxic(routers, garble), 5),
    Drill("routers | Redis", toxic(routers, hold), PARTITION_S),
    Drill("a router | Redis", toxic(a_router, hold), PARTITION_S),
    Drill("plugins | Redis", toxic(plugins, hold), PARTITION_S),
    Drill("a plugin | Redis", toxic(a_plugin, hold), PARTITION_S),
    Drill("routers | an engine", toxic(engine, hold), PARTITION_S, cuts=True),
    Drill("all | an engine and plugin", toxic(engine_and_plugin, hold), PARTITION_S, cuts=True),
    Drill("rolling restart", rolling_restart, 0),
    Drill("spaced 4.9 to 5.1 s", nothing, 30, pause=(ENGINE_KEEPALIVE_S - 0.1, ENGINE_KEEPALIVE_S + 0.1)),
]
PARAMETERS = [pytest.param(drill, id=drill.name) for drill in SHORT]
PARAMETERS += [pytest.param(drill, id=drill.name, marks=LONG) for drill in DRILLS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with running() as made:
        yield made


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """The rows of all drills, which are printed at the end: a table, and one JSON object."""
    found: list[Row] = []
    yield found
    print("\n" + "\n".join([HEAD, *(row.line for row in found)]))
    print(json.dumps({row.drill: asdict(row) for row in found}))


@pytest.mark.parametrize("drill", PARAMETERS)
async def test_drill(fleet: Fleet, rows: list[Row], drill: Drill) -> None:
    await poll(fleet.whole, START_S, "the fleet is whole before the drill")
    clients = Clients(fleet, drill.pause)
    sending = asyncio.create_task(clients.run(CLIENTS))
    try:
        await asyncio.sleep(BEFORE_S)
        async with drill.fault(fleet):
            await asyncio.sleep(drill.seconds)
        healed = time.monotonic()
        await poll(fleet.whole, START_S, "the fleet recovers")
        recover_s = time.monotonic() - healed
        await asyncio.sleep(AFTER_S)
    finally:
        clients.over = True
        await sending
    ended, load = time.monotonic(), await fleet.load()
    while load != 0 and time.monotonic() - ended < Spans().lease_ms / 1000 + 15:
        await asyncio.sleep(0.2)
        load = await fleet.load()
    failed = [request for request in clients.asked if request.failure]
    lost = [request for request in failed if request.failure.startswith("lost with")]
    before = [request for request in failed if request.first_s is None and request not in lost]
    after = [request for request in failed if request.first_s is not None and request not in lost]
    slowest = max((request.first_s or 0.0 for request in clients.asked), default=0.0)
    counts = (len(clients.asked), len(before), len(after), len(lost), round(slowest, 1))
    row = Row(drill.name, *counts, round(recover_s, 1), load, round(time.monotonic() - ended, 1))
    rows.append(row)
    print(f"\n{HEAD}\n{row.line}")
    assert [request.failure for request in before] == []
    assert drill.cuts or [request.failure for request in after] == []
    assert load == 0
    assert len(clients.asked) - len(failed) > CLIENTS, "requests were served"
