"""While no heartbeat can be heard, dead workers are found by health checks over HTTP."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis.asyncio
from tests.support.engines.scripted import engine
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.support.replicas.replica import replica

from warmfleet.background.outage_checks import OutageChecks
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.fleet import Fleet, Tick, connect
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.fleet_view import view_of
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def shut(client: Redis) -> None:
    await cast("Any", client).shutdown(nosave=True)


async def fill(client: Redis) -> None:
    """Make Redis refuse every heartbeat from now on."""
    await client.config_set("maxmemory", 1)


@pytest.mark.parametrize("trouble", [shut, fill])
async def test_a_dead_worker_is_found_without_heartbeats(
    trouble: Any, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        url = stack.enter_context(server(valkey_binary()))
        engines = [await stack.enter_async_context(engine(model)) for _ in range(3)]
        urls = [upstream.url for upstream in engines]
        router = await stack.enter_async_context(replica(url, model, *urls, policy="round_robin"))
        await router.routable(3)
        async with redis.asyncio.Redis.from_url(url) as client:
            await trouble(client)
        await engines[0].die()

        async def found() -> bool:
            """Whether the dead engine is found by the check, or by its registration, which a full Redis can remove."""
            away = trouble is fill and await router.metric('warmfleet_workers{state="unroutable"}') == 1
            return away or await router.metric('warmfleet_health_checks_total{result="silent"}') >= 1

        with caplog.at_level(logging.WARNING, "warmfleet"):
            await poll(found, 15, "the dead one is found")
        assert urls[0] in caplog.text
        assert "servers that do not answer /health: 1: " in caplog.text or trouble is fill
        before = await router.metric("warmfleet_retries_total")
        for number in range(12):
            status, headers, _ = await router.post({"model": model, "prompt": f"prompt {number} " * 50})
            assert status == 200
            assert not urls[0].endswith(headers["x-warmfleet-worker"].rpartition("-")[2])
        assert await router.metric("warmfleet_retries_total") == before, "nobody met the dead one"


async def test_workers_that_redis_has_lost_are_asked(valkey_url: str, model: str) -> None:
    fleet = Fleet(connect(valkey_url, timeout_s=5), model)
    pool = Pool(model, fleet, DegradedMode(1.0))
    client = EngineClient(Addresses(("127.0.0.0/8",), ()), 1.0)
    checks = OutageChecks(Pools([pool]), client, Metrics(), 5.0)
    async with engine(model) as one, engine(model) as two:
        for number, url in enumerate((one.url, two.url)):
            record = {"scheme_id": 7, "url": url, "models": [model]}
            await fleet.workers.register(f"w.{number}", record, 10)
        pool.show(view_of(await fleet.workers.read(), None, (), text=True))
        pool.show(view_of((), None, (), text=True))
        await one.die()
        await checks.round()
        assert pool.avoided() == ("w.0",)
        pool.last_known._none_since -= 60.0
        assert [worker.worker_id for worker in pool.last_known.workers] == ["w.0", "w.1"], "the dead one is avoided"
        await two.die()
        pool.last_known._answered_at -= 60.0
        await checks.round()
        assert pool.last_known.workers == (), "none of them answers"
    await client.close()
    await fleet.close()


async def test_pools_are_checked_at_once(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers answer just before the timeout: with pools checked in turn, the first pool would get requests again.

    A pool with more servers than may be checked at once is checked in two turns.
    """
    pools = [
        Pool(tag, Fleet(connect(valkey_url, timeout_s=5), tag), DegradedMode(1.0)) for tag in (f"{model}#1", model)
    ]
    servers = {pools[0].tag: 1, pools[1].tag: 200}
    for pool in pools:
        for number in range(servers[pool.tag]):
            record = {"scheme_id": 7, "url": f"http://{number}.{pool.tag}", "models": [model]}
            await pool.fleet.workers.register(f"w.{number}", record, 10)
        pool.show(view_of(await pool.fleet.workers.read(), None, (), text=True))
        pool.fleet.upkeep.last_tick = Tick(ran=True, grace=True)
    asked: list[str] = []
    go_on = asyncio.Event()

    async def healthy(url: str, _timeout_s: float) -> bool:
        asked.append(url)
        await go_on.wait()
        return False

    client = EngineClient(Addresses((), ()), 1.0)
    monkeypatch.setattr(client, "healthy", healthy)
    checking = asyncio.create_task(OutageChecks(Pools(pools), client, Metrics(), 5.0).round())
    try:
        await poll(lambda: len(asked) > 100, 5, "half of all servers are asked at once")
        assert {url.rpartition(".")[2] for url in asked} == {*servers}
    finally:
        go_on.set()
        await checking
        await client.close()
        for pool in pools:
            await pool.fleet.close()
    assert len({*asked}) == len(asked) == sum(servers.values()), "each was asked"


async def test_no_health_is_checked_while_heartbeats_are_heard(valkey_url: str, model: str) -> None:
    fleet = Fleet(connect(valkey_url, timeout_s=5), model)
    pool, metrics = Pool(model, fleet, DegradedMode(1.0)), Metrics()
    async with engine(model) as one:
        await fleet.workers.register("w.0", {"scheme_id": 7, "url": one.url, "models": [model]}, 10)
        pool.show(view_of(await fleet.workers.read(), None, (), text=True))
        client = EngineClient(Addresses(("127.0.0.0/8",), ()), 1.0)
        checks = OutageChecks(Pools([pool]), client, metrics, 5.0)
        asked = metrics.health_checks.labels("answered")._value
        await checks.round()
        assert asked.get() == 0
        fleet.upkeep.last_tick = Tick(ran=True, grace=True)
        await checks.round()
        assert asked.get() == 1
        assert not pool.avoided()
        await client.close()
    await fleet.close()
