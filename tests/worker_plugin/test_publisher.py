"""The publisher against real servers and the real scripts: whatever happens, the index becomes the engine's table."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import redis
from tests.conftest import poll, valkey_binary, wait_for_server

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet.maintenance import stop
from warmfleet_worker import publisher as publisher_module
from warmfleet_worker import wire
from warmfleet_worker.publisher import Load, PublisherConfig, WorkerPublisher
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SCHEME = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)
WORKER = "w1.0"


def config(redis_url: str, model: str, capacity_blocks: int = 100_000) -> PublisherConfig:
    return PublisherConfig(redis_url, model, WORKER, "w1", 0, SCHEME, capacity_blocks, 32_768, "test-1")


def hashes(count: int) -> list[bytes]:
    return [os.urandom(8) for _ in range(count)]


def churn(tracker: Tracker, steps: int, seed: int = 0) -> None:
    """What an engine does: store prompts, evict older blocks."""
    rng, held = random.Random(seed), list(tracker.table)
    for _ in range(steps):
        fresh = [rng.randbytes(8) for _ in range(rng.randrange(1, 200))]
        tracker.stored(fresh)
        held += fresh
        rng.shuffle(held)
        gone, held = held[: len(held) // 3], held[len(held) // 3 :]
        tracker.removed(gone)


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)


@contextmanager
def publishing(redis_url: str, model: str, tracker: Tracker, **more: Any) -> Iterator[WorkerPublisher]:
    publisher = WorkerPublisher(config(redis_url, model), tracker, **more)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.stop(5)


@asynccontextmanager
async def upkeep(fleet: Fleet) -> AsyncIterator[None]:
    """A router's maintenance loop, which survives a Redis that is away."""

    async def loop() -> None:
        while True:
            with suppress(FleetUnavailable):  # the tests below take Redis away
                await fleet.step()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        await stop([task])


async def record(fleet: Fleet) -> dict[str, Any]:
    raw = await fleet.redis.hget(fleet.keys.workers, WORKER)
    return dict(json.loads(raw)) if raw else {}


async def stream(fleet: Fleet) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """What the worker has written and nobody has applied."""
    return cast("list[tuple[bytes, dict[bytes, bytes]]]", await fleet.redis.xrange(fleet.keys.events(WORKER)))


async def equal(fleet: Fleet, tracker: Tracker, deadline_s: float = 20.0) -> None:
    """Wait until the index equals the tracker's table, in both directions."""

    async def check() -> bool:
        slot = (await record(fleet)).get("slot", 0)
        return bool(slot and await fleet.redis.smembers(fleet.keys.slot(slot)) == set(tracker.table))

    await poll(check, deadline_s, "the index equals the table")
    slot = (await record(fleet))["slot"]
    for block_hash in list(tracker.table)[:100]:
        assert await fleet.redis.sismember(fleet.keys.block(block_hash), slot)


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
    counts = await fleet.counts()
    assert publisher.state.joins == 1
    assert publisher.state.snapshots == publisher.state.dropped == 0
    assert not {"gap", "mismatch", "malformed", "resync"} & counts.keys()


async def test_a_table_that_is_there_at_join_comes_as_a_snapshot(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(5_000))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await asyncio.to_thread(churn, tracker, 20)
            await equal(fleet, tracker)
    assert publisher.state.snapshots == 1
    assert (await fleet.counts())["resync"] == 1


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
    counts = await fleet.counts()
    assert counts["gap"] >= 1
    assert counts["resync"] >= 1


async def test_lost_events_are_healed_even_if_nobody_asks(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "SELF_RESYNC_SECONDS", 0.3)
    tracker = Tracker(limit=10)
    with publishing(redis_url, model, tracker) as publisher:
        await poll(lambda: publisher.state.joined)
        tracker.stored(hashes(300))
        await poll(lambda: publisher.state.snapshots == 1)  # no upkeep runs
    async with upkeep(fleet):
        await equal(fleet, tracker)


async def test_a_snapshot_never_runs_ahead_of_what_is_applied(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(128 * 600))
    with publishing(redis_url, model, tracker) as publisher:
        await poll(lambda: publisher.state.number >= wire.UNACKNOWLEDGED_ENTRIES)
        before = publisher.state.number
        await asyncio.sleep(0.5)
        waiting = await fleet.redis.xlen(fleet.keys.events(WORKER))
        assert waiting <= wire.UNACKNOWLEDGED_ENTRIES + 8  # heartbeats are not held back
        assert publisher.state.number - before <= 5
        async with upkeep(fleet):
            await equal(fleet, tracker)
    assert publisher.state.snapshots == 1


async def test_a_join_that_a_failover_has_lost_is_made_again(fleet: Fleet, redis_url: str, model: str) -> None:
    before = {"nonce": "0" * 16, "applied": 7, "id": None, "do": ""}  # of the process before this one
    await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(before))
    tracker = Tracker()
    tracker.stored(hashes(100))
    with publishing(redis_url, model, tracker) as publisher:
        await poll(lambda: "0" * 16 in publisher._stream.older)
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await poll(lambda: publisher.state.acknowledged)
        await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(before))
        await poll(lambda: publisher.state.joins == 2)
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
        await poll(lambda: publisher.state.number >= number + 5)  # heartbeats: it has read the command again
        assert publisher.state.snapshots == 2
        begins = [entry for _, entry in await stream(fleet) if entry[b"o"] == b"begin"]
        assert [json.loads(entry[b"d"])["command"] for entry in begins] == [None, "c1"]


@pytest.mark.parametrize("junk", ["", "no json", "[1]", '{"nonce": 1}', '{"nonce": "a", "applied": "x"}'])
async def test_a_senseless_command_changes_nothing(fleet: Fleet, redis_url: str, model: str, junk: str) -> None:
    with publishing(redis_url, model, Tracker()) as publisher:
        await poll(lambda: publisher.state.joined)
        await fleet.redis.set(fleet.keys.command(WORKER), junk)
        number = publisher.state.number
        await poll(lambda: publisher.state.number >= number + 3)
        assert publisher.state.stopped is None


async def test_told_to_rejoin_it_begins_anew(fleet: Fleet, redis_url: str, model: str) -> None:
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


async def test_told_to_drain_it_says_so(fleet: Fleet, redis_url: str, model: str) -> None:
    with publishing(redis_url, model, Tracker()) as publisher:
        nonce = await poll(lambda: publisher._stream.nonce)
        command = {"nonce": nonce, "applied": 1, "id": "c3", "do": "drain"}
        await fleet.redis.set(fleet.keys.command(WORKER), json.dumps(command))
        await poll(lambda: publisher.state.draining)


async def test_of_two_processes_with_one_name_the_later_stays(fleet: Fleet, redis_url: str, model: str) -> None:
    first, second = Tracker(), Tracker()
    first.stored(hashes(300))
    second.stored(hashes(200))
    async with upkeep(fleet):
        with publishing(redis_url, model, first) as old:
            await equal(fleet, first)
            await poll(lambda: old.state.acknowledged)
            with publishing(redis_url, model, second) as new:
                await poll(lambda: old.state.stopped)
                assert WORKER in str(old.state.stopped)
                await poll(lambda: not old._thread.is_alive())
                await asyncio.to_thread(churn, second, 10)
                await equal(fleet, second)
                assert new.state.stopped is None
                assert new.state.joins == 1


async def test_a_lost_stream_is_joined_again(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(1_000))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await fleet.redis.delete(*[key async for key in fleet.redis.scan_iter(f"{fleet.keys.prefix}*")])
            await poll(lambda: publisher.state.joins == 2)
            await equal(fleet, tracker)


@asynccontextmanager
async def answers_lost(redis_url: str) -> AsyncIterator[tuple[str, list[int]]]:
    """A way to Redis that delivers every request, but cuts the connection before the answer of every third XADD."""
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
    counts = await fleet.counts()
    assert counts["duplicate"] > 0
    assert not {"gap", "mismatch"} & counts.keys()


async def test_progress_arrives_within_20_ms(fleet: Fleet, redis_url: str, model: str) -> None:
    with publishing(redis_url, model, Tracker()) as publisher:
        await poll(lambda: publisher.state.joined)
        told: dict[str, float] = {}
        for number in range(15):
            await asyncio.sleep(0.03)
            reservation = f"wf-{number:022}"
            told[reservation] = time.time()
            publisher.progress(reservation, 64, 100)
        await asyncio.sleep(0.2)
        delays = {}
        for entry_id, entry in await stream(fleet):
            if entry[b"o"] == b"progress":
                for reservation, cached, prompt in json.loads(entry[b"d"]):
                    assert (cached, prompt) == (64, 100)
                    delays[reservation] = int(entry_id.split(b"-")[0]) / 1_000 - told[reservation]
        assert delays.keys() == told.keys()
        assert sorted(delays.values())[len(delays) // 2] <= wire.PROGRESS_FLUSH_SECONDS


async def test_much_progress_is_split_into_entries_of_64(fleet: Fleet, redis_url: str, model: str) -> None:
    with publishing(redis_url, model, Tracker()) as publisher:
        await poll(lambda: publisher.state.joined)
        for number in range(200):
            publisher.progress(f"wf-{number:022}", 0, 1)

        async def told() -> list[int]:
            entries = await stream(fleet)
            return [len(json.loads(entry[b"d"])) for _, entry in entries if entry[b"o"] == b"progress"]

        async def complete() -> bool:
            return sum(await told()) == 200

        await poll(complete)
        assert max(await told()) <= wire.PROGRESS_PER_ENTRY


async def test_foreign_load_that_moves_is_told_at_once(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 60.0)
    now = [Load(running=1, speed_tps=5_000)]
    with publishing(redis_url, model, Tracker(), load=lambda: now[0]):
        async with upkeep(fleet):

            async def foreign() -> tuple[int, int]:
                views = await fleet.workers()
                load = views[0].load if views else None
                return (load.foreign_prefill_tokens, load.foreign_decode_tokens) if load else (-1, -1)

            await poll(lambda: _is(foreign, (0, 0)))
            now[0] = Load(running=2, foreign_prefill_tokens=10_000, foreign_decode_tokens=3_000)
            begin = time.monotonic()
            await poll(lambda: _is(foreign, (10_000, 3_000)))
            assert time.monotonic() - begin < 1.0


async def _is(read: Callable[[], Any], value: object) -> bool:
    return bool(await read() == value)


async def test_a_load_that_cannot_be_read_stops_nothing_for_good(fleet: Fleet, redis_url: str, model: str) -> None:
    broken = [True]

    def load() -> Load:
        if broken:
            raise KeyError("a bug")
        return Load(running=3)

    tracker = Tracker()
    with publishing(redis_url, model, tracker, load=load) as publisher:
        await poll(lambda: publisher.state.errors > 1)
        broken.clear()
        tracker.stored(hashes(10))
        async with upkeep(fleet):
            await equal(fleet, tracker)


async def test_it_leaves_when_stopped(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    async with upkeep(fleet):
        with publishing(redis_url, model, tracker):
            await equal(fleet, tracker)
            assert await fleet.redis.zscore(fleet.keys.alive, WORKER) is not None
            tracker.stored(hashes(50))

        async def left() -> bool:
            return await fleet.redis.zscore(fleet.keys.alive, WORKER) is None

        await poll(left)
        await equal(fleet, tracker)  # what was queued went out first


async def test_an_idle_engine_says_almost_nothing(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(2_000))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await poll(lambda: publisher.state.acknowledged)
        before = (await fleet.redis.xinfo_stream(fleet.keys.events(WORKER)))["entries-added"]
        await asyncio.sleep(5 * wire.HEARTBEAT_SECONDS)
        entries = await stream(fleet)
        added = (await fleet.redis.xinfo_stream(fleet.keys.events(WORKER)))["entries-added"] - before
        assert 3 <= added <= 7
        assert {entry[b"o"] for _, entry in entries} == {b"heartbeat"}
        assert max(sum(len(part) for pair in entry.items() for part in pair) for _, entry in entries) <= 200


class Server:
    """A private Valkey at a fixed address, to be killed and started again."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="wf-redis-"))
        self.url = f"unix://{self.folder}/s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", f"{self.folder}/s", "--save", "", "--dir", str(self.folder)]
        options += ["--busy-reply-threshold", "50", "--enable-debug-command", "yes"]
        self.process = subprocess.Popen([valkey_binary(), *options], stdout=subprocess.DEVNULL)
        wait_for_server(self.url, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.kill()
    shutil.rmtree(server.folder)


async def test_redis_is_absent_killed_and_comes_back_empty(own_server: Server, model: str) -> None:
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
            assert time.monotonic() - begin < 0.1  # the engine's side never waits
            await poll(lambda: publisher.state.errors > 0)
            own_server.process.send_signal(18)
            await equal(fleet, tracker)
    assert publisher.state.dropped > 3_000
    await fleet.close()


@contextmanager
def refusing(client: redis.Redis, how: str) -> Iterator[None]:
    """Make the server refuse writes with OOM, READONLY, NOPERM or BUSY."""
    thread: threading.Thread | None = None
    if how == "OOM":
        client.config_set("maxmemory", 1)
    elif how == "READONLY":
        client.replicaof("127.0.0.1", 1)
    elif how == "NOPERM":
        client.acl_setuser("default", commands=["-xadd"])
    else:
        thread = threading.Thread(target=_endless_script, args=(client,))
        thread.start()
    yield
    if how == "OOM":
        client.config_set("maxmemory", 0)
    elif how == "READONLY":
        client.replicaof("NO", "ONE")
    elif how == "NOPERM":
        client.acl_setuser("default", commands=["+xadd"])
    elif thread is not None:
        client.script_kill()
        thread.join()


def _endless_script(client: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        client.eval("while true do end", 0)


@pytest.mark.parametrize("how", ["OOM", "READONLY", "NOPERM", "BUSY"])
@pytest.mark.parametrize("limit", [100_000, 200], ids=["queued", "overflowing"])
async def test_a_redis_that_refuses_is_survived(
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
    assert len(refusals) <= 3  # one per spell, not one per try
    client.close()
    await fleet.close()
