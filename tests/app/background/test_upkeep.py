"""Background work outlives its own failures, ends when told to, and a replica that is told to stop says so first."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.app.engine import STREAM_HEAD, engine, event, freezing
from tests.app.replica import replica
from tests.conftest import poll, valkey_binary
from tests.conftest import server as server_of
from tests.lua.stream import Core, block, blocks

from warmfleet.background import upkeep
from warmfleet.background.memory import MemoryWatch
from warmfleet.background.supervisor import stop, supervise
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import RENEW_AT_ONCE, Fleet, Renewal, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet.main import _Server, server
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool, Pools
from warmfleet.settings import Settings

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.api.service_routes import Health


async def test_a_failing_round_is_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    metrics, rounds = Metrics(), []

    async def work() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise FleetUnavailable("away")
        if len(rounds) == 2:
            raise ZeroDivisionError

    task = asyncio.create_task(supervise("test", 0.001, work, metrics))
    await poll(lambda: len(rounds) >= 4, what="rounds after two failures")
    await stop([task])
    assert b'warmfleet_task_failures_total{task="test"} 2.0' in metrics.render()
    assert len([record for record in caplog.records if "test failed" in record.message]) == 1  # not a line each time


async def test_a_lost_cancellation_does_not_keep_a_replica_from_stopping() -> None:
    async def swallows() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await stop([task])
    assert task.cancelled()


async def test_a_stop_signal_drains_first() -> None:
    made = server(Settings(models=("m",), drain_s=0.1))
    assert isinstance(made, _Server)
    health: Health = made._health
    made.handle_exit(signal.SIGTERM, None)
    assert health.draining
    assert not made.should_exit
    await poll(lambda: made.should_exit, 5, "it stops after the drain")
    other = server(Settings(models=("m",), drain_s=60.0))
    other.handle_exit(signal.SIGTERM, None)
    other.handle_exit(signal.SIGTERM, None)
    assert other.should_exit  # a second signal stops at once


async def test_long_streams_keep_their_reservation(valkey_url: str, model: str) -> None:
    async with (
        engine(model, freezing(STREAM_HEAD, event("x"))) as upstream,
        replica(valkey_url, model, upstream.url, renew_interval_s=0.05) as router,
    ):
        body = {"model": model, "prompt": "x" * 1_000, "stream": True}
        async with router.client.post(f"{router.url}/v1/completions", json=body) as answer:
            await answer.content.readany()

            async def renewed() -> bool:
                return await router.metric('warmfleet_renewed_total{result="renewed"}') >= 2

            await poll(renewed, what="renewals")
            (row,) = [worker.load for worker in await router.fleet.workers()]
            assert row.prefill_tokens == 0  # the first byte gave it back
            assert row.in_flight == 1
            assert row.decode_tokens > 250
        await router.unloaded()


async def test_more_than_one_call_takes_are_renewed(model: str, valkey_url: str) -> None:
    async with connect(valkey_url, timeout_s=5) as client:
        fleet, metrics = Fleet(client, model), Metrics()
        record = {"scheme_id": 7, "url": "http://127.0.0.1:1", "models": [model]}
        await fleet.register("w.0", record, 10, healthy=True)
        pool, count = Pool(model, fleet, DegradedMode(1.0)), RENEW_AT_ONCE + 3
        for number in range(count):
            pool.reservations.add(Renewal(f"wf-{number}", "w.0", 1, 1))
        await upkeep.renew(Pools([pool]), metrics)
        assert [worker.load.in_flight for worker in await fleet.workers()] == [count]
        assert metrics.renewed.labels("rebuilt")._value.get() == count


async def test_how_full_redis_is_reaches_the_next_tick_and_people(model: str, caplog: pytest.LogCaptureFixture) -> None:
    with server_of(valkey_binary()) as url:
        async with connect(url, timeout_s=5) as client:
            fleet, metrics = Fleet(client, model), Metrics()
            fleet.pace = Pace(min_gap_ms=0, short_ms=0)
            watch = MemoryWatch(Pools([Pool(model, fleet, DegradedMode(1.0))]), metrics)
            await client.config_set("maxmemory", (await fleet.memory()).used + 100_000)
            await client.config_set("maxmemory-policy", "allkeys-lru")
            for _ in range(2):
                await watch.look()
                await fleet.tick()
            assert fleet.short
            assert metrics.memory_used_ratio._value.get() > 0.85
            assert metrics.memory_short._value.get() == 1
            await client.config_set("maxmemory", 0)
            await watch.look()
            await fleet.tick()
            await watch.look()
            assert metrics.memory_short._value.get() == 0
            assert len([line for line in caplog.messages if "maxmemory-policy is allkeys-lru" in line]) == 1
            assert len([line for line in caplog.messages if "memory" in line or "room" in line]) == 3
        fleet = Fleet(connect("unix:///nowhere/s"), model)
        fleet.used_permille = 900
        with pytest.raises(FleetUnavailable):
            await MemoryWatch(Pools([Pool(model, fleet, DegradedMode(1.0))]), metrics).look()
        assert fleet.used_permille == -1


async def test_an_audit_goes_on_to_its_end_and_is_counted(
    store: aioredis.Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, metrics = Core(store, fleet), Metrics()
    pools = Pools([Pool(fleet.keys.tag, fleet, DegradedMode(1.0))])
    await core.join()
    for start in range(0, 1000, 100):
        await core.send("stored", blocks(*range(start, start + 100)))
    await core.applied()
    monkeypatch.setattr(upkeep, "AUDIT_INTERVAL_S", 0.001)
    for seen in (1000.0, 1000.0):
        await poll(lambda: _audited(pools, metrics), what="an audit is due")
        assert metrics.audited_blocks._value.get() >= seen
    assert metrics.audit_mismatches._value.get() == 0
    await cast("Any", store.srem(fleet.keys.block(block(5)), (await core.row()).slot))
    await poll(lambda: _audited(pools, metrics, differs=True), what="the next audit finds it")


async def _audited(pools: Pools, metrics: Metrics, *, differs: bool = False) -> bool:
    await upkeep.audit(pools, metrics)
    return bool((metrics.audit_mismatches if differs else metrics.audited_blocks)._value.get())
