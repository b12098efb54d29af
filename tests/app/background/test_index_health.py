"""A replica's metrics of the index while no replica applies entries, events are lost, or a worker is silent."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fleet.publishing import WORKER, churn, equal, hashes, publishing, upkeep
from tests.support.polling import poll, until
from tests.support.redis.topology import Servers, free_ports
from tests.support.replicas.replica import Replica, replica

from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

NEVER_S = 1_000_000.0


async def shown(router: Replica) -> tuple[dict[str, Any], dict[str, Any]]:
    """The index and the single worker on the page /workers."""
    (model,) = json.loads((await router.get("/workers"))[1])["models"]
    return model["index"], model["workers"][0]["truth"]


@pytest.mark.in_turn
async def test_lag_divergence_resyncs_and_silence(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
    tracker = Tracker(limit=20_000)
    tracker.stored(hashes(500))
    async with replica(redis_url, model, apply_interval_s=NEVER_S, truth_interval_s=0.5) as router:
        metric = router.metric

        async def says(name: str, value: float) -> bool:
            return await metric(f"warmfleet_{name}") == value

        with publishing(redis_url, model, tracker) as publisher:
            async with upkeep(fleet):
                await equal(fleet, tracker)
                await poll(lambda: says('resyncs{cause="join"}', 1), what="the snapshot of the join is counted")
                await poll(lambda: says("index_entries", 500), what="entries")
                await poll(lambda: says("apply_lag_batches", 0), what="no lag")
            # no replica applies entries
            tracker.stored(hashes(2_000))
            await poll(lambda: _at_least(router, "apply_lag_batches", 16), what="the lag shows")
            await poll(lambda: _at_least(router, "apply_lag_seconds", 1), what="and grows")
            _, truth = await shown(router)
            assert truth["lag_batches"] >= 16
            assert truth["lag_s"] >= 1
            for _ in range(20):  # enough blocks to overflow the queue, although the publisher empties it meanwhile
                if tracker.dropped or publisher.state.dropped:
                    break
                await asyncio.to_thread(tracker.stored, hashes(30_000))
            assert tracker.dropped or publisher.state.dropped
            async with upkeep(fleet):
                await equal(fleet, tracker)
                await asyncio.to_thread(churn, tracker, 3)
                await equal(fleet, tracker)
                await poll(lambda: _at_least(router, 'divergences{state="found"}', 1), what="it was found")
                await poll(lambda: _at_least(router, 'divergences{state="healed"}', 1), what="and healed")
                await poll(lambda: _at_least(router, 'resyncs{cause="gap"}', 1), what="the cause is counted")
                await poll(lambda: says("diverged_workers", 0), what="all is healed")
                await poll(lambda: says("index_entries", len(tracker.table)), what="entries")
                await poll(lambda: says("retired_slots", 0), what="all is collected")
                assert await metric('warmfleet_index_events{kind="gap"}') >= 1
                assert await metric("warmfleet_memory_used_bytes") > 1e6
                await _is_whole(router, tracker)
        async with upkeep(fleet):  # the engine is gone, so no digests come
            first = (await shown(router))[1]["digest_age_s"]
            await poll(lambda: _older(router, first + 1), what="the last digest grows old")


async def _is_whole(router: Replica, tracker: Tracker) -> None:
    index, truth = await shown(router)
    assert index["entries"] == len(tracker.table)
    assert index["memory_used_bytes"] > 1e6
    assert index["counts"]["resync_gap"] == truth["resyncs"]["gap"] >= 1
    assert truth["found"] == truth["healed"] >= 1
    assert truth["cause"] == ""
    assert truth["lag_batches"] <= 2  # heartbeats come five times a second
    assert truth["digest_age_s"] < 5


async def _at_least(router: Replica, name: str, value: float) -> bool:
    return await router.metric(f"warmfleet_{name}") >= value


async def _older(router: Replica, seconds: float) -> bool:
    return bool((await shown(router))[1]["digest_age_s"] > seconds)


async def test_while_redis_is_away_nothing_is_claimed(model: str) -> None:
    with Servers() as servers:
        node = servers.start(free_ports(1)[0])
        until(node.client().ping, "the server answers")
        async with replica(f"redis://127.0.0.1:{node.port}", model, truth_interval_s=0.5) as router:
            await poll(lambda: _fresh(router), what="the fleet is read")
            node.kill()
            await poll(
                lambda: router.metric('warmfleet_task_failures_total{task="truth"}'), what="failures are counted"
            )
            (found,) = await _models(router)
            assert (found["fresh"], found["workers"]) == (False, [])
            assert found["index"]["entries"] == 0


async def test_before_redis_was_ever_there_nothing_is_claimed(model: str) -> None:
    async with replica("unix:///nowhere/s", model) as router:
        (found,) = await _models(router)
        assert (found["fresh"], found["workers"]) == (False, [])
        assert found["index"]["entries"] == 0


async def _models(router: Replica) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = json.loads((await router.get("/workers"))[1])["models"]
    return models


async def _fresh(router: Replica) -> bool:
    (found,) = await _models(router)
    return bool(found["fresh"])


async def test_the_figures_of_a_worker_are_kept_by_its_name(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(10))
    for starts in (1, 2):
        with publishing(redis_url, model, tracker):
            async with upkeep(fleet):
                await equal(fleet, tracker)
                await poll(lambda starts=starts: _joined(fleet, starts), what="a snapshot for each start")  # type: ignore[misc]


async def _joined(fleet: Fleet, starts: int) -> bool:
    truth = (await fleet.index.truth(await fleet.workers.read())).workers[WORKER]
    return truth.resyncs.get("join", 0) == starts
