"""Reports of images: kept once each, in order, bounded, and read by each replica as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from warmfleet.fleet.image_reports import AT_ONCE, READS, ImageReports
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from tests.support.fleet.reporting_worker import ReportingWorker

    from warmfleet.fleet import Fleet

MOST, KEPT_S = 4_096, 86_400


def report(number: int) -> str:
    return wire.dumps([f"image {number}", [7, 3, 9, 1]])


async def test_each_report_is_read_once_in_order(reporter: ReportingWorker, fleet: Fleet) -> None:
    reader = ImageReports(fleet.scripts)
    assert await reader.news() == []
    for number in range(AT_ONCE + 5):
        await reporter.send("image", report(number))
    await reporter.applied()
    assert await reader.news() == [report(number).encode() for number in range(AT_ONCE + 5)]
    assert await reader.news() == []
    await reporter.send("image", report(3))
    await reporter.send("image", report(AT_ONCE + 5))
    await reporter.applied()
    assert await reader.news() == [report(3).encode(), report(AT_ONCE + 5).encode()]
    assert await fleet.redis.zcard(fleet.keys.images) == AT_ONCE + 6
    assert 0 < await fleet.redis.ttl(fleet.keys.images) <= KEPT_S


async def test_a_reader_that_is_far_behind_reads_on_in_the_next_round(store: aioredis.Redis, fleet: Fleet) -> None:
    reader, count = ImageReports(fleet.scripts), AT_ONCE * READS + 7
    await store.zadd(fleet.keys.images, {report(number): number for number in range(count)})
    assert [len(await reader.news()) for _ in range(3)] == [AT_ONCE * READS, 7, 0]


async def test_the_oldest_reports_go_when_there_are_too_many(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    now_us = (await store.time())[0] * 1_000_000
    await store.zadd(fleet.keys.images, {f"[{number}]": now_us + number for number in range(MOST)})
    await reporter.send("image", report(1))
    await reporter.applied()
    kept = await store.zrange(fleet.keys.images, 0, -1)
    assert len(kept) == MOST
    assert kept[0] == b"[1]"
    assert kept[-1] == report(1).encode()


async def test_a_report_ends_a_day_after_it_was_told(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    now_us = (await store.time())[0] * 1_000_000
    await store.zadd(
        fleet.keys.images, {"[1]": now_us - (KEPT_S + 2) * 1_000_000, "[2]": now_us - (KEPT_S - 60) * 1_000_000}
    )
    await reporter.send("image", report(1))
    await reporter.applied()
    assert await store.zrange(fleet.keys.images, 0, -1) == [b"[2]", report(1).encode()]


async def test_readers_miss_nothing_when_the_clock_steps_back(
    store: aioredis.Redis, reporter: ReportingWorker, fleet: Fleet
) -> None:
    reader = ImageReports(fleet.scripts)
    ahead = (await store.time())[0] * 1_000_000 + 3_600_000_000
    await store.zadd(fleet.keys.images, {"[1]": ahead})
    assert await reader.news() == [b"[1]"]
    for number in (1, 2):
        await reporter.send("image", report(number))
    await reporter.applied()
    assert await reader.news() == [report(1).encode(), report(2).encode()]


@pytest.mark.parametrize("wrong", ["", "{}", "[" + " " * 4_096])
async def test_a_report_of_another_form_is_counted(reporter: ReportingWorker, fleet: Fleet, wrong: str) -> None:
    await reporter.send("image", wrong)
    await reporter.applied()
    assert (await fleet.index.counts())["malformed"] == 1
    assert not await fleet.redis.exists(fleet.keys.images)
