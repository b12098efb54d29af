"""The publisher against real servers and the real scripts: after any trouble the index equals the engine's table."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.publishing import WORKER, churn, equal, hashes, publishing, record, stream, upkeep
from tests.support.polling import poll

from warmfleet_worker import worker_publisher
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Findings, Tracker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet.fleet import Fleet


pytestmark = [pytest.mark.in_turn, pytest.mark.usefixtures("short_periods")]


async def test_the_index_follows_the_table(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await poll(lambda: publisher.state.acknowledged)
            for seed in range(5):
                await asyncio.to_thread(churn, tracker, 20, seed)
                if seed == 3:
                    tracker.cleared()
            await equal(fleet, tracker)
            assert len(tracker.table) > 100
    counts = await fleet.index.counts()
    assert publisher.state.joins == 1
    assert publisher.state.snapshots == publisher.state.dropped == 0
    assert not {"gap", "mismatch", "malformed", "resync_gap", "resync_digest"} & counts.keys()


async def test_a_table_that_is_filled_before_the_join_comes_as_a_snapshot(
    fleet: Fleet, redis_url: str, model: str
) -> None:
    tracker = Tracker()
    tracker.stored(hashes(5_000))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await asyncio.to_thread(churn, tracker, 20)
            await equal(fleet, tracker)
    assert publisher.state.snapshots == 1
    assert (await fleet.index.counts())["resync_join"] == 1


async def test_overflow_is_counted_and_healed(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker(limit=500)
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await poll(lambda: publisher.state.acknowledged)
            tracker.stored(hashes(3_000))
            assert tracker.dropped > 0
            await equal(fleet, tracker)
            assert len(tracker.table) == 3_000
            tracker.removed(list(tracker.table)[:100])
            await equal(fleet, tracker)
    assert publisher.state.dropped == tracker.dropped
    counts = await fleet.index.counts()
    assert counts["gap"] >= 1
    assert counts["resync_gap"] >= 1


async def test_lost_events_are_healed_even_if_no_router_asks(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_publisher, "SELF_RESYNC_SECONDS", 0.3)
    tracker = Tracker(limit=10)
    with publishing(redis_url, model, tracker) as publisher:
        await poll(lambda: publisher.state.joined)
        tracker.stored(hashes(300))
        await poll(lambda: publisher.state.snapshots == 1)  # no upkeep runs
        assert publisher.state.joins == 1, "not healed by a new join after a TTL"
    async with upkeep(fleet):
        await equal(fleet, tracker)


async def test_a_snapshot_never_runs_more_than_256_entries_ahead(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(128 * 600))
    with publishing(redis_url, model, tracker) as publisher:
        await poll(lambda: publisher.state.number >= wire.UNACKNOWLEDGED_ENTRIES)
        before, begin = publisher.state.number, time.monotonic()
        await asyncio.sleep(0.5)
        waiting = await fleet.redis.xlen(fleet.keys.events(WORKER))
        assert waiting <= wire.UNACKNOWLEDGED_ENTRIES + 8  # heartbeats are not held back
        assert publisher.state.number - before <= (time.monotonic() - begin) / wire.HEARTBEAT_SECONDS + 3
        async with upkeep(fleet):
            await equal(fleet, tracker)
    assert publisher.state.snapshots == 1


async def test_a_join_that_a_failover_has_lost_is_made_again(fleet: Fleet, redis_url: str, model: str) -> None:
    before = {"nonce": "0" * 16, "applied": 7, "id": None, "do": ""}  # of the process before this one
    await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(before))
    tracker = Tracker()
    tracker.stored(hashes(100))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await poll(lambda: publisher.state.acknowledged)
        await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(before))
        await poll(lambda: publisher.state.joins == 2, deadline_s=10.0)  # less than the TTL, which heals it, too
        assert publisher.state.stopped is None
        async with upkeep(fleet):
            await poll(lambda: publisher.state.acknowledged)
            await equal(fleet, tracker)


async def test_a_command_is_obeyed_once(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(10))
    with publishing(redis_url, model, tracker) as publisher:
        nonce = await poll(lambda: publisher._stream.nonce)
        await poll(lambda: publisher.state.snapshots == 1)
        command = {"nonce": nonce, "applied": publisher.state.number, "id": "c1", "do": "resync"}
        await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(command))
        await poll(lambda: publisher.state.snapshots == 2)
        number = publisher.state.number
        await poll(lambda: publisher.state.number >= number + 5)  # heartbeats: the worker has read the command again
        assert publisher.state.snapshots == 2
        begins = [entry for _, entry in await stream(fleet) if entry[b"o"] == b"begin"]
        assert [json.loads(entry[b"d"])["command"] for entry in begins] == [None, "c1"]


@pytest.mark.parametrize("junk", ["", "no json", "[1]", '{"nonce": 1}', '{"nonce": "a", "applied": "x"}'])
async def test_a_malformed_command_changes_nothing(fleet: Fleet, redis_url: str, model: str, junk: str) -> None:
    with publishing(redis_url, model, Tracker()) as publisher:
        await poll(lambda: publisher.state.joined)
        await fleet.redis.set(fleet.keys.command(WORKER), junk)
        number = publisher.state.number
        await poll(lambda: publisher.state.number >= number + 3)
        assert publisher.state.stopped is None


async def test_a_worker_that_is_asked_to_rejoin_begins_a_new_incarnation(
    fleet: Fleet, redis_url: str, model: str
) -> None:
    tracker = Tracker()
    tracker.stored(hashes(300))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            nonce = publisher._stream.nonce
            command = {"nonce": nonce, "applied": publisher.state.number, "id": "c2", "do": "rejoin"}
            await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(command))
            await poll(lambda: publisher.state.joins == 2)
            await poll(lambda: publisher.state.acknowledged)
            assert (await record(fleet))["nonce"] == publisher._stream.nonce != nonce
            await equal(fleet, tracker)


async def test_a_lost_stream_is_joined_again(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(1_000))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await fleet.redis.delete(*[key async for key in fleet.redis.scan_iter(f"{fleet.keys.prefix}*")])
            await poll(lambda: publisher.state.joins == 2, deadline_s=10.0)  # less than the TTL, which heals it, too
            await equal(fleet, tracker)


@asynccontextmanager
async def answers_lost(redis_url: str) -> AsyncIterator[tuple[str, list[int]]]:
    """A proxy to Redis that delivers every request, but breaks the connection before every third answer to XADD."""
    folder, requests, tasks = Path(tempfile.mkdtemp(prefix="wf-cut-")), [0], set[asyncio.Task[None]]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_unix_connection(redis_url.removeprefix("unix://"))
        answers = asyncio.create_task(pump(upstream_reader, writer))
        tasks.add(answers)
        with suppress(ConnectionError):
            while data := await reader.read(1 << 20):
                requests[0] += b"XADD" in data
                cut = b"XADD" in data and requests[0] % 3 == 0
                if cut:
                    answers.cancel()
                upstream.write(data)
                await upstream.drain()
                if cut:
                    await asyncio.sleep(0.02)  # Redis has it
                    break
        upstream.close()
        writer.close()

    server = await asyncio.start_unix_server(serve, folder / "s")
    try:
        yield f"unix://{folder}/s", requests
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        shutil.rmtree(folder)


async def test_lost_answers_lose_nothing_and_repeat_nothing(fleet: Fleet, redis_url: str, model: str) -> None:
    """Entries without an answer are sent again under their old numbers: no gap, no resync."""
    tracker = Tracker()
    async with answers_lost(redis_url) as (url, requests), upkeep(fleet):
        with publishing(url, model, tracker) as publisher:
            await poll(lambda: publisher.state.acknowledged)
            for seed in range(8):
                await asyncio.to_thread(churn, tracker, 5, seed)
                await asyncio.sleep(0.15)
            await equal(fleet, tracker)
            await asyncio.to_thread(publisher.stop, 5)
    assert publisher.state.errors >= 3
    assert requests[0] >= 9
    assert publisher.state.dropped == 0
    counts = await fleet.index.counts()
    assert counts["duplicate"] > 0
    assert not {"gap", "mismatch"} & counts.keys()


async def test_further_sets_follow_their_tables(fleet: Fleet, redis_url: str, model: str) -> None:
    """Changes before the join, beside a snapshot, and after a queue's overflow."""
    tracker, tier = Tracker(), Tracker(limit=500)
    tracker.stored(hashes(1_000))
    tier.stored(hashes(400))

    async def same() -> bool:
        told = (await record(fleet)).get("sets", {}).get("cpu")
        found = told and await cast("Any", fleet.redis.smembers(fleet.keys.slot(told["slot"])))
        return bool(found) and found == set(tier.table)

    with publishing(redis_url, model, tracker, sets={"cpu": tier}) as publisher:
        async with upkeep(fleet):
            await poll(same)
            await equal(fleet, tracker)
            tier.stored(hashes(5_000))
            tier.removed(list(tier.table)[:100])
            await poll(same)
            await equal(fleet, tracker)
            assert tier.dropped > 0
            tier.cleared()
            tier.stored(hashes(9))
            await poll(same)
    assert publisher.state.dropped == tier.dropped


async def test_what_is_found_in_a_store_is_published_as_it_is(fleet: Fleet, redis_url: str, model: str) -> None:
    """Finds before the join count, too. A new join, a snapshot and digests leave what the index knows."""
    tracker, finds, first = Tracker(), Findings(limit=500), hashes(300)
    tracker.stored(hashes(1_000))
    finds.found(first)

    async def known() -> set[bytes]:
        told = (await record(fleet)).get("sets", {}).get("disk")
        return set(await cast("Any", fleet.redis.smembers(fleet.keys.slot(told["slot"])))) if told else set()

    async def all_but(first_of_them: int) -> bool:
        return await known() == set(first[first_of_them:])

    sets = {"disk": {"store": "0123456789abcdef"}}
    with publishing(redis_url, model, tracker, sets={"disk": finds}, announced=sets) as publisher:
        async with upkeep(fleet):
            await poll(lambda: all_but(0))
            finds.missed(first[0])
            for other in hashes(400):
                finds.missed(other)  # more than this engine has found
            finds.found(first[1:3])
            await poll(lambda: all_but(1))
            await fleet.redis.delete(fleet.keys.events("w1.0"))
            joins = publisher.state.joins
            await poll(lambda: publisher.state.joins > joins)
            await equal(fleet, tracker)
            assert await all_but(1)
            finds.found(hashes(600))
            assert finds.dropped == 100, "the queue is bounded"
            await poll(lambda: publisher.state.acknowledged)
            snapshots = publisher.state.snapshots
            tracker.stored(hashes(9))
            await equal(fleet, tracker)
            assert len(await known()) >= 299
    assert publisher.state.snapshots == snapshots, "a loss there needs none"
    assert not {"mismatch", "malformed"} & (await fleet.index.counts()).keys()


async def test_the_copy_of_a_large_set_waits_for_the_fleet_without_steps(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More entries than may be unacknowledged: the publisher shares its process with the engine."""
    steps, step = [0], worker_publisher.WorkerPublisher.step
    tier = Tracker()
    tier.stored(hashes(60_000))

    def counted(publisher: worker_publisher.WorkerPublisher, now: float) -> None:
        steps[0] += 1
        step(publisher, now)

    async def same() -> bool:
        told = (await record(fleet)).get("sets", {}).get("cpu")
        return bool(told) and await cast("Any", fleet.redis.scard(fleet.keys.slot(told["slot"]))) == 60_000

    monkeypatch.setattr(worker_publisher.WorkerPublisher, "step", counted)
    with publishing(redis_url, model, Tracker(), sets={"cpu": tier}):
        async with upkeep(fleet):
            await poll(same, 60)
    assert steps[0] < 1_000
