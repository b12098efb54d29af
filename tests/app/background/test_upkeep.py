"""The background rounds of upkeep: they renew reservations and compare the index with the workers' digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tests.support.engines.scripted import STREAM_HEAD, engine, event, freezing
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.background import upkeep
from warmfleet.fleet import RENEW_AT_ONCE, Fleet, Renewal, connect
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools

if TYPE_CHECKING:
    import redis.asyncio as aioredis


async def test_long_streams_keep_their_reservation(valkey_url: str, model: str) -> None:
    async with (
        engine(model, freezing(STREAM_HEAD, event("x"))) as upstream,
        replica(valkey_url, model, upstream.url, renew_interval_s=0.05) as router,
    ):
        body = {"model": model, "prompt": "x" * 1_000, "stream": True}
        async with router.client.post(f"{router.url}/v1/completions", json=body) as answer:
            await answer.content.readany()

            async def renewed() -> bool:
                return await router.metric('warmfleet_renewed_reservations_total{result="renewed"}') >= 2

            await poll(renewed, what="renewals")
            (row,) = [worker.load for worker in await router.fleet.workers.read()]
            assert row.prefill_tokens == 0  # the first byte has given the prefill back
            assert row.in_flight == 1
            assert row.decode_tokens > 250
        await router.unloaded()


async def test_more_reservations_than_fit_one_call_are_renewed(model: str, valkey_url: str) -> None:
    async with connect(valkey_url, timeout_s=5) as client:
        fleet, metrics = Fleet(client, model), Metrics()
        record = {"scheme_id": 7, "url": "http://127.0.0.1:1", "models": [model]}
        await fleet.workers.register("w.0", record, 10)
        pool, count = Pool(model, fleet, DegradedMode(1.0)), RENEW_AT_ONCE + 3
        for number in range(count):
            pool.reservations.add(Renewal(f"wf-{number}", "w.0", 1, 1))
        await upkeep.renew(Pools([pool]), metrics)
        assert [worker.load.in_flight for worker in await fleet.workers.read()] == [count]
        assert metrics.renewed.labels("rebuilt")._value.get() == count


async def test_an_audit_goes_on_to_its_end_and_is_counted(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter, metrics = ReportingWorker(store, fleet), Metrics()
    pools = Pools([Pool(fleet.keys.tag, fleet, DegradedMode(1.0))])
    await reporter.join()
    for start in range(0, 1000, 100):
        await reporter.send("stored", blocks(*range(start, start + 100)))
    await reporter.applied()
    for seen in (1000.0, 1000.0):
        await poll(lambda: _audited(pools, metrics), what="an audit is due")
        assert metrics.audited_blocks._value.get() >= seen
    assert metrics.audit_mismatches._value.get() == 0
    await cast("Any", store.srem(fleet.keys.block(block(5)), (await reporter.row()).slot))
    await poll(lambda: _audited(pools, metrics, differs=True), what="the next audit finds it")


async def _audited(pools: Pools, metrics: Metrics, *, differs: bool = False) -> bool:
    await upkeep.audit(pools, metrics, 0.001)
    return bool((metrics.audit_mismatches if differs else metrics.audited_blocks)._value.get())
