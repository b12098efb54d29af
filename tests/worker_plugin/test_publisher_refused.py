"""A key that takes no entry stands under the stream's name: it is deleted, and worker and server report again."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import ResponseError
from tests.support.fleet.publishing import WORKER, equal, hashes, publishing, upkeep
from tests.support.polling import poll

from warmfleet_worker import stream
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

pytestmark = pytest.mark.in_turn

LAST = "18446744073709551615-18446744073709551615"
KINDS = ["string", "last id", "last id, emptied", "next year, emptied"]


@pytest.fixture(autouse=True)
def short_waits(short_periods: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BACKOFF_SECONDS", (0.05, 0.2))


async def plant(store: aioredis.Redis, key: str, kind: str) -> None:
    """Put an unusable key under the stream's name, as an attacker with no permission but XADD could."""
    if kind == "string":
        await store.set(key, "no stream")
        return
    at = LAST if "last" in kind else f"{int(time.time() + 366 * 86_400) * 1000}-0"
    await store.xadd(key, {"a": "b"}, id=at, maxlen=0 if "emptied" in kind else None, approximate=False)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unusable_key_under_a_new_workers_name_is_replaced(
    fleet: Fleet, redis_url: str, model: str, kind: str
) -> None:
    await plant(fleet.redis, fleet.keys.events(WORKER), kind)
    tracker = Tracker()
    tracker.stored(hashes(100))
    with publishing(redis_url, model, tracker):
        async with upkeep(fleet):
            await equal(fleet, tracker)
    assert (await fleet.index.counts())["hostile"] >= 1


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unusable_key_under_a_reporting_workers_name_is_replaced(
    fleet: Fleet, redis_url: str, model: str, kind: str
) -> None:
    """Redis has come back empty but for this key."""
    tracker = Tracker()
    tracker.stored(hashes(100))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await poll(lambda: publisher.state.acknowledged)
        await fleet.redis.delete(*[key async for key in fleet.redis.scan_iter(f"{fleet.keys.prefix}*")])
        with suppress(ResponseError):  # the worker was faster, and has joined again
            await plant(fleet.redis, fleet.keys.events(WORKER), kind)
        tracker.stored(hashes(100))
        async with upkeep(fleet):
            await equal(fleet, tracker)
            assert publisher.state.stopped is None


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unusable_key_under_a_new_servers_name_is_replaced(
    fleet: Fleet, redis_url: str, model: str, kind: str
) -> None:
    await plant(fleet.redis, fleet.keys.server("w1"), kind)
    half = ServerPublisher(ServerConfig(redis_url, model, "w1", "http://10.0.0.1:9", (model,), "test"))
    half.start()
    try:
        async with upkeep(fleet):
            await poll(lambda: fleet.redis.hexists(fleet.keys.servers, "w1"))
    finally:
        half.stop(5)
