"""A picker whose calls end behind the request, because the engines report the ends of requests, behind a real Envoy.

Every case asserts the client's status and bytes, that no call is left open while the engine answers, and that the
reports of the engines give all load back.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from tests.envoy.gateway_config import MODES, Mode
from tests.envoy.world import EVERY_MODE, PATH, World, booked, cut, die, running_world, under_load, whole_answers
from tests.support.polling import poll

from warmfleet.fleet import Lease, Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

LEFT = "warmfleet_left_reservations_total"
SEEN_S = 2.0  # engines report an end within 0.1 s, and routers apply the report within 0.03 s; the machine may be busy
OFTEN = ("duplex", "buffered_streamed")
LONG = pytest.mark.long(minutes=1, shows="clients that leave and engines that break off, where calls end early")
BOOKING = pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[] if mode.name in OFTEN else LONG, id=mode.name) for mode in MODES if booked(mode)],
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(valkey_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with running_world(valkey_url, tmp_path_factory.mktemp("envoy"), reports_ends=True) as made:
        yield made


@dataclass
class Accounts:
    """The reservations of one test: the number that were left, and the outcomes that the replica settled, before."""

    world: World
    left: float
    before: Counter[str]

    async def are(self, left: int) -> None:
        """Assert that so many reservations were left to engines, none settled, and that nothing is booked any more."""
        begun = time.monotonic()
        await self.world.replica.unloaded()
        assert time.monotonic() - begun < SEEN_S
        assert await self.world.replica.metric(LEFT) - self.left == left
        assert await self.world.outcomes() - self.before == Counter()
        assert len(self.world.pool.reservations) == 0


@pytest_asyncio.fixture(loop_scope="module")
async def accounts(world: World) -> Accounts:
    return Accounts(world, await world.replica.metric(LEFT), await world.outcomes())


async def calls_of(world: World) -> int:
    """Return the number of calls that Envoy has open at the picker."""
    told = await world.envoy.ask("/stats?filter=cluster.pickers.upstream_rq_active")
    return int(told.rsplit(":", 1)[1])


@EVERY_MODE
async def test_answers_pass_by(world: World, accounts: Accounts, mode: Mode) -> None:
    """Plain, streamed, and one whose request has 1 MiB, which waits for the windows of the call."""
    got = await world.ask(mode, world.body())
    assert json.loads(got.body)["usage"]["completion_tokens"] == 5
    got = await world.ask(mode, world.body(tokens=200, stream=True))
    assert (got.status, got.tokens) == (200, 200)
    got = await world.ask(mode, world.body(user="x" * 2**20))
    assert got.status == (413 if mode.request == "BUFFERED" else 200)
    async with world.client.get(world.envoy.urls[mode.name] + "/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == [world.model]
    await accounts.are(booked(mode) * (2 if mode.request == "BUFFERED" else 3))


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.request != "STREAMED"], ids=lambda mode: mode.name)
async def test_no_call_is_open_while_an_engine_answers(world: World, accounts: Accounts, mode: Mode) -> None:
    """So a picker that dies breaks no answer. A client that leaves is seen by the engine."""
    async with world.client.post(world.envoy.urls[mode.name] + PATH, json=world.body(tokens=4_000, stream=True)) as got:
        await got.content.readany()
        await poll(lambda: calls_of_none(world), 10, "the call has ended")
        assert world.running() == 1
        assert len(world.pool.reservations) == 0, "nobody renews it"
        assert await world.replica.load() > 0 or not booked(mode)
    await poll(lambda: world.running() == 0, 10, "the engine stops its work")
    await accounts.are(booked(mode))


async def calls_of_none(world: World) -> bool:
    return await calls_of(world) == 0


@BOOKING
async def test_a_client_that_leaves_while_the_picker_decides(world: World, accounts: Accounts, mode: Mode) -> None:
    async with world.busy():
        waits = asyncio.create_task(world.ask(mode, world.body()))
        await world.queued(1)
        waits.cancel()
        await world.queued(0)
    await accounts.are(0)


@BOOKING
async def test_an_engine_that_breaks_off(world: World, accounts: Accounts, mode: Mode) -> None:
    async with world.client.post(world.envoy.urls[mode.name] + PATH, json=world.body(tokens=4_000, stream=True)) as got:
        await got.content.readany()
        for engine in world.engines.values():
            cut(engine)
        with pytest.raises(aiohttp.ClientError):
            await got.read()
    await accounts.are(1)
    assert world.pool.outliers.verdicts == {}


@under_load(pytest.mark.long(minutes=2, shows="1,000 streamed answers in each mode are whole where calls end early"))
async def test_answers_under_load_are_whole(world: World, accounts: Accounts, mode: Mode, count: int) -> None:
    await whole_answers(world, mode, count)
    await accounts.are(count * booked(mode))


# ---------------------------------------------------------------- the last test, which leaves one engine dead


async def test_a_request_that_never_reached_its_engine_is_left_to_its_lease(world: World, accounts: Accounts) -> None:
    """Nobody tells of Envoy's own 503: the lease ends 30 s after the decision."""
    fleet = world.replica.fleet
    await die(world.engines["right"])
    got = await world.ask(MODES[0], world.body(), **{"x-subset": world.address("right")})
    assert got.status == 503
    store: Any = fleet.redis
    leases = {name: Lease.unpack(lease) for name, lease in (await store.hgetall(fleet.keys.lease)).items()}
    [name] = [name for name, lease in leases.items() if lease.stage == Stage.BOOKED]
    seconds, micros = await store.time()
    assert await store.zscore(fleet.keys.leases, name) - (1_000 * seconds + micros / 1_000) <= 30_000
    await store.zadd(fleet.keys.leases, {name: 1})
    await fleet.bookings.reap()
    await accounts.are(1)
