"""A replica checks engines without heartbeats over HTTP, and vouches for them while they answer."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.engines.scripted import Engine, engine, reply
from tests.support.fleet.keyspace import Keyspace
from tests.support.polling import poll

from warmfleet.background import vouching
from warmfleet.background.vouching import Vouching
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.fleet import Tick
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import view_of
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.settings import Settings
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet


class Quiet:
    """A fleet of workers whose heartbeats the test sends or omits, and the rounds of one replica."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet, client: EngineClient) -> None:
        self.keyspace, self.fleet, self.metrics = Keyspace(store, fleet), fleet, Metrics()
        self.pool = Pool(fleet.keys.tag, fleet, DegradedMode(1.0))
        self.vouching = Vouching(Pools([self.pool]), client, Settings(), self.metrics)

    async def worker(self, number: int, one: Engine, *, silent_s: float, server_s: float | None = None) -> str:
        name = await self.keyspace.worker(number, age_ms=round(silent_s * 1000))
        server = wire.dumps({"nonce": "s1", "url": one.url, "models": [one.model], "version": "1"})
        await cast("Any", self.keyspace.store.hset(self.keyspace.keys.servers, f"w{number}", server))
        seen = time.time() - (silent_s if server_s is None else server_s)
        await self.keyspace.store.zadd(self.keyspace.keys.alive_servers, {f"w{number}": seen * 1000})
        return name

    async def round(self) -> dict[str, str]:
        """Run one round and return the state of each worker after it."""
        self.vouching._asked_at.clear()
        self.pool.show(view_of(await self.fleet.workers.read(), None, (), text=True))
        await self.vouching.round()
        found = await self.fleet.workers.read()
        self.pool.show(view_of(found, None, (), text=True))
        return {view.worker_id: view.state.value for view in found}

    def count(self, metric: str, result: str) -> float:
        return self.metrics.registry.get_sample_value(f"warmfleet_{metric}_total", {"result": result}) or 0.0


@pytest.fixture
async def quiet(store: aioredis.Redis, fleet: Fleet) -> AsyncIterator[Quiet]:
    client = EngineClient(Addresses(("127.0.0.0/8",), ()), 1.0)
    made = Quiet(store, fleet, client)
    await made.keyspace.ticked()
    yield made
    await client.close()


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[Engine]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(engine("m")) for _ in range(count)]


async def test_a_fleet_that_is_cut_off_is_served_and_the_dead_worker_is_not(
    quiet: Quiet, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(3) as made:
        for number, one in enumerate(made, 1):
            await quiet.worker(number, one, silent_s=40.0)
        await made[2].die()
        with caplog.at_level(logging.WARNING, "warmfleet"):
            states = await quiet.round()
            await quiet.round()
        assert states == {"w1.0": "unheard", "w2.0": "unheard", "w3.0": "silent"}
        assert {(await quiet.fleet.bookings.decide(quiet.keyspace.ask())).worker_id for _ in range(8)} == {
            "w1.0",
            "w2.0",
        }
        assert "2 workers answer over HTTP but send no heartbeats" in caplog.text
        assert (quiet.count("vouched_workers", "vouched"), quiet.count("health_checks", "silent")) == (2, 2)


async def test_it_is_asked_before_it_expires_and_not_while_it_is_heard(quiet: Quiet) -> None:
    async with engines(2) as made:
        await quiet.worker(1, made[0], silent_s=11.0)
        await quiet.worker(2, made[1], silent_s=vouching.ASK_AFTER_S + 0.1)
        assert await quiet.round() == {"w1.0": "proven", "w2.0": "unheard"}
        assert quiet.count("health_checks", "answered") == 1


async def test_the_other_replicas_are_spared_the_call(quiet: Quiet) -> None:
    async with engines(1) as made:
        await quiet.worker(1, made[0], silent_s=40.0)
        await quiet.round()
        await quiet.round()
        assert quiet.count("health_checks", "answered") == 1


async def test_one_that_stops_answering_is_avoided_and_then_lapses(quiet: Quiet) -> None:
    async with engines(1) as made:
        await quiet.worker(1, made[0], silent_s=40.0)
        await quiet.round()
        await made[0].die()
        record = wire.dumps({"nonce": "n1", "server_id": "w1", "slot": 1, "vouched": (time.time() - 6) * 1000})
        await cast("Any", quiet.keyspace.store.hset(quiet.keyspace.keys.workers, "w1.0", record))
        assert await quiet.round() == {"w1.0": "unheard"}, "until a TTL after its last answer"
        assert quiet.pool.avoided() == ("w1.0",)
        assert quiet.count("vouched_workers", "renewed") == 0


@pytest.mark.parametrize("page", [b'{"data": [{"id": "another"}]}', b'{"data": 5}', b"no JSON"])
async def test_another_server_at_its_address_is_no_witness(
    quiet: Quiet, page: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "_page", lambda _self, path: page if path == "/v1/models" else b"{}")
    async with engines(1) as made:
        await quiet.worker(1, made[0], silent_s=40.0)
        assert await quiet.round() == {"w1.0": "silent"}


async def test_a_core_that_stands_still_gets_no_requests_though_its_server_answers(quiet: Quiet) -> None:
    async with engines(1) as made:
        await quiet.worker(1, made[0], silent_s=16.0, server_s=1.0)
        assert await quiet.round() == {"w1.0": "silent"}
        assert quiet.count("vouched_workers", "refused") == 1


async def test_an_engine_that_says_it_is_ill_is_no_witness(quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ill(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reply(writer, b"{}", "503 Ill")
        writer.close()

    server = await asyncio.start_server(ill, "127.0.0.1", 0)
    one = Engine("m", cast("Any", None))
    one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await quiet.worker(1, one, silent_s=40.0)
    assert await quiet.round() == {"w1.0": "silent"}
    server.close()


async def test_nobody_asks_while_redis_is_away(quiet: Quiet) -> None:
    async with engines(1) as made:
        await quiet.worker(1, made[0], silent_s=40.0)
        quiet.fleet.upkeep.last_tick = Tick(ran=True, grace=True)
        assert await quiet.round() == {"w1.0": "silent"}
        assert quiet.count("health_checks", "answered") == 0


async def test_heartbeats_end_it(quiet: Quiet, caplog: pytest.LogCaptureFixture) -> None:
    async with engines(1) as made:
        await quiet.worker(1, made[0], silent_s=40.0)
        await quiet.round()
        await quiet.worker(1, made[0], silent_s=0.0)
        await poll(lambda: _heard(quiet), 30, "the tick of the next second sees both halves")
        with caplog.at_level(logging.WARNING, "warmfleet"):
            await quiet.round()
        assert quiet.count("vouched_workers", "renewed") == 0


async def _heard(quiet: Quiet) -> bool:
    await quiet.fleet.upkeep.tick()
    return [worker.state.value for worker in await quiet.fleet.workers.read()] == ["proven"]
