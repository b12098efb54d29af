"""While Redis is absent, killed or refusing the engine goes on, and the index is right afterwards."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis
from tests.support.fleet.publishing import churn, equal, hashes, publishing, upkeep
from tests.support.polling import poll
from tests.support.redis.outages import Server, refusing

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet_worker.tracker import Tracker

pytestmark = [pytest.mark.in_turn, pytest.mark.usefixtures("short_periods")]


async def test_the_index_is_right_after_redis_was_absent_killed_and_empty(own_server: Server, model: str) -> None:
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
            assert time.monotonic() - begin < 1.0  # the engine's side never waits; the publisher waits for 2 s
            await poll(lambda: publisher.state.errors > 0)
            own_server.process.send_signal(18)
            await equal(fleet, tracker)
    assert publisher.state.dropped > 3_000
    await fleet.close()


@pytest.mark.parametrize("how", ["OOM", "READONLY", "NOPERM", "BUSY"])
@pytest.mark.parametrize("limit", [100_000, 200], ids=["queued", "overflowing"])
async def test_the_index_is_right_after_redis_has_refused(
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
    assert len(refusals) <= 3  # one line per spell, not one per try
    client.close()
    await fleet.close()
