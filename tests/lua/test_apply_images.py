"""Reports of images: kept once each, in order, bounded, and read by each replica as they come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.requests.image_rules import MADE

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.image_reports import AT_ONCE, ImageReports
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from tests.support.fleet.reporting_worker import ReportingWorker

    from warmfleet.fleet import Fleet

MOST, KEPT_S = 4_096, 86_400
MOST_NEW, AGAIN_S = 1_024, 300
WRONG = [
    *(
        "",
        "{}",
        "[" + " " * 4_096,
        "[]",
        "[[",
        '["a"]',
        '["a",7]',
        '["a",[]]',
        '["a",[7]]',
        '["a",[7,-1]]',
        '["a",["7",1]]',
    ),
    *('["",[7,1]]', "[5,[7,1]]", '["a",[7,1.5]]', '["a",[4294967296,1]]', '["a",[7,1],1]', "[" * 4_000),
]


def report(number: int) -> str:
    return wire.dumps([f"image {number}", [7, 3, 9, 1]])


def kept(number: int) -> bytes:
    return (MADE + report(number)).encode()


@pytest.fixture(autouse=True)
async def announced(store: aioredis.Redis, fleet: Fleet) -> None:
    """The server of the worker announces what it makes of images."""
    await store.hset(fleet.keys.servers, "s", wire.dumps({"facts": {"images": {"made": MADE}}}))


async def test_each_report_is_read_once_in_order(reporter: ReportingWorker, fleet: Fleet) -> None:
    reader = ImageReports(fleet.scripts)
    assert await reader.news() == {}
    for number in range(AT_ONCE + 5):
        await reporter.send("image", report(number))
    await reporter.applied()
    assert list(await reader.news()) == [kept(number) for number in range(AT_ONCE)]
    assert list(await reader.news()) == [kept(number) for number in range(AT_ONCE, AT_ONCE + 5)]
    assert await reader.news() == {}
    await reporter.send("image", report(3))
    await reporter.send("image", report(AT_ONCE + 5))
    await reporter.applied()
    news = await reader.news()
    assert list(news) == [kept(3), kept(AT_ONCE + 5)]
    now = (await fleet.redis.time())[0]
    assert all(abs(told_at - now) < 60 for told_at in news.values())
    assert await fleet.redis.zcard(fleet.keys.images) == AT_ONCE + 6
    assert 0 < await fleet.redis.ttl(fleet.keys.images) <= KEPT_S


async def test_no_report_is_missed_if_redis_fails_between_two_readings(
    store: aioredis.Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ImageReports(fleet.scripts)
    await store.zadd(fleet.keys.images, {f"[{number}]": number for number in range(AT_ONCE + 1)})
    ask = fleet.scripts.ask
    monkeypatch.setattr(fleet.scripts, "ask", failing)
    with pytest.raises(FleetUnavailable):
        await reader.news()
    monkeypatch.setattr(fleet.scripts, "ask", ask)
    assert [len(await reader.news()) for _ in range(3)] == [AT_ONCE, 1, 0]


async def failing(*_words: object) -> None:
    raise FleetUnavailable("Redis is away")


async def test_all_is_read_anew_after_redis_lost_its_data_and_its_clock_stepped_back(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    reader = ImageReports(fleet.scripts)
    await store.zadd(fleet.keys.images, {"[1]": (await store.time())[0] * 1_000_000 + 3_600_000_000})
    assert list(await reader.news()) == [b"[1]"]
    await store.delete(fleet.keys.images)
    await reporter.send("image", report(1))
    await reporter.applied()
    await reader.news()
    assert list(await reader.news()) == [kept(1)]


async def test_a_reader_may_begin_anew_while_it_reads(store: aioredis.Redis, fleet: Fleet) -> None:
    reader = ImageReports(fleet.scripts)
    await store.zadd(fleet.keys.images, {"[1]": 1})
    assert len(await reader.news()) == 1
    reading = asyncio.ensure_future(reader.news())
    await asyncio.sleep(0)
    reader.begin_anew()
    assert await reading == {}
    assert list(await reader.news()) == [b"[1]"]


async def test_reports_of_a_server_that_announces_no_rule_are_not_kept(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    told: list[dict[str, Any]] = [{}, {"images": {}}, {"images": {"made": 7}}, {"images": {"made": "x" * 16}}]
    for facts in told:
        await store.hset(fleet.keys.servers, "s", wire.dumps({"facts": facts}))
        await reporter.send("image", report(1))
        await reporter.applied()
    assert not await store.exists(fleet.keys.images)
    assert "malformed" not in await fleet.index.counts()


async def test_reports_are_counted_and_not_kept_while_memory_is_short(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    await store.set(fleet.keys.tick, "0 0 0 0 1 0")
    await reporter.send("image", report(1))
    await reporter.applied()
    assert (await fleet.index.counts())["image_short"] == 1
    assert not await store.exists(fleet.keys.images)


async def test_the_oldest_reports_go_when_there_are_too_many(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    now_us = (await store.time())[0] * 1_000_000
    await store.zadd(fleet.keys.images, {f"[{number}]": now_us + number for number in range(MOST)})
    await reporter.send("image", report(1))
    await reporter.applied()
    left = await store.zrange(fleet.keys.images, 0, -1)
    assert len(left) == MOST
    assert left[0] == b"[1]"
    assert left[-1] == kept(1)


async def test_a_worker_that_floods_pushes_out_no_image_that_others_still_tell(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    now_us = (await store.time())[0] * 1_000_000
    told = f"{fleet.keys.prefix}told_images:{reporter.worker_id}"
    await store.zadd(fleet.keys.images, {f"[{number}]": now_us + number for number in range(MOST)})
    for number in range(MOST_NEW):
        await reporter.send("image", report(number))
    await reporter.applied()
    assert 0 < await store.ttl(told) <= AGAIN_S
    for number in (MOST_NEW, 0):
        await reporter.send("image", report(number))
    await reporter.applied()
    assert (await fleet.index.counts())["image_flood"] == 1
    left = await store.zrange(fleet.keys.images, 0, -1)
    assert left[: MOST - MOST_NEW] == [b"[%d]" % number for number in range(MOST_NEW, MOST)]
    assert left[-1] == kept(0), "what is known already may be told again"
    await store.delete(told)
    await reporter.send("image", report(MOST_NEW))
    await reporter.applied()
    assert await store.zscore(fleet.keys.images, kept(MOST_NEW)) is not None


async def test_a_report_ends_a_day_after_it_was_told(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    now_us = (await store.time())[0] * 1_000_000
    await store.zadd(
        fleet.keys.images, {"[1]": now_us - (KEPT_S + 2) * 1_000_000, "[2]": now_us - (KEPT_S - 60) * 1_000_000}
    )
    await reporter.send("image", report(1))
    await reporter.applied()
    assert await store.zrange(fleet.keys.images, 0, -1) == [b"[2]", kept(1)]


async def test_readers_miss_nothing_when_the_clock_steps_back(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    reader = ImageReports(fleet.scripts)
    ahead = (await store.time())[0] * 1_000_000 + 3_600_000_000
    await store.zadd(fleet.keys.images, {"[1]": ahead})
    assert list(await reader.news()) == [b"[1]"]
    for number in (1, 2):
        await reporter.send("image", report(number))
    await reporter.applied()
    assert list(await reader.news()) == [kept(1), kept(2)]


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_report_of_another_form_is_counted(reporter: ReportingWorker, fleet: Fleet, wrong: str) -> None:
    await reporter.send("image", wrong)
    await reporter.applied()
    assert (await fleet.index.counts())["malformed"] == 1
    assert not await fleet.redis.exists(fleet.keys.images)
