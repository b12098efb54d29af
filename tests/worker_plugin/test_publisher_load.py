"""The publisher reports finished prefills and the load, and sends almost nothing for an idle engine."""

from __future__ import annotations

import asyncio
import json
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fleet.publishing import WORKER, equal, hashes, publishing, stream, upkeep
from tests.support.polling import poll

from warmfleet.fleet import Flag
from warmfleet_worker import load as load_module
from warmfleet_worker.load import LOAD_CHECK_SECONDS, STANDSTILL_SECONDS, Load, SmoothedLoad, Standstill
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import Fleet


pytestmark = [pytest.mark.in_turn, pytest.mark.usefixtures("short_periods")]


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
        # The lower quartile counts: other work on the machine makes times longer.
        assert sorted(delays.values())[len(delays) // 4] <= wire.PROGRESS_FLUSH_SECONDS


async def test_a_prompts_blocks_are_reported_before_its_prefill(fleet: Fleet, redis_url: str, model: str) -> None:
    """Routers rely on the order: they take a block that comes after its prefill for missing."""
    tracker = Tracker()
    with publishing(redis_url, model, tracker) as publisher:
        await poll(lambda: publisher.state.joined)
        made = dict(zip([f"wf-{number:022}" for number in range(60)], hashes(60), strict=True))
        for reservation, block_hash in made.items():
            tracker.stored(block_hash)
            publisher.progress(reservation, 0, 100)
            await asyncio.sleep(0.004)

        async def told() -> list[bytes | str] | None:
            found: list[bytes | str] = []
            for _, entry in await stream(fleet):
                data = entry[b"d"]
                if entry[b"o"] in (b"stored", b"chunk"):
                    data = data[len(data) % 8 or 8 * (entry[b"o"] == b"chunk") :]
                    found += [data[at : at + 8] for at in range(0, len(data), 8)]
                elif entry[b"o"] == b"progress":
                    found += [item[0] for item in json.loads(data)]
            return found if made.keys() <= {key for key in found if isinstance(key, str)} else None

        order = await poll(told, what="all is told")
        assert isinstance(order, list)
        assert [name for name in made if order.index(made[name]) > order.index(name)] == []


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


async def test_foreign_load_that_moves_is_reported_at_once(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 60.0)
    now = [Load(running=1, speed_tps=5_000)]
    with publishing(redis_url, model, Tracker(), load=lambda: now[0]):
        async with upkeep(fleet):
            await poll(lambda: _is(partial(_foreign, fleet), (0, 0)))
            now[0] = Load(running=2, foreign_prefill_tokens=10_000, foreign_decode_tokens=3_000)
            begin = time.monotonic()
            await poll(lambda: _is(partial(_foreign, fleet), (10_000, 3_000)))
            assert time.monotonic() - begin < 5.0  # the next heartbeat is due after a minute


async def test_a_pause_is_told_at_once(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 60.0)
    now = [Load()]

    async def paused() -> bool | None:
        views = await fleet.workers.read()
        return bool(views[0].load.flags & Flag.PAUSED) if views else None

    with publishing(redis_url, model, Tracker(), load=lambda: now[0]):
        async with upkeep(fleet):
            for told in (False, True, False):  # without a heartbeat that is due
                now[0] = Load(paused=told)
                await poll(partial(_is, paused, told), 5, "the row says it")


async def test_foreign_load_that_comes_and_goes_is_reported_as_its_mean(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.05)
    now = [Load(foreign_prefill_tokens=8_000, speed_tps=100_000)]

    async def falls() -> bool:
        return 0 < (await _foreign(fleet))[0] < 8_000

    with publishing(redis_url, model, Tracker(), load=lambda: now[0]):
        async with upkeep(fleet):
            await poll(lambda: _is(partial(_foreign, fleet), (8_000, 0)))
            await asyncio.sleep(2)
            now[0] = Load(speed_tps=100_000)
            await poll(falls, what="a mean falls by and by, and is not 0 at once")
            now[0] = Load(foreign_prefill_tokens=20_000)
            await poll(lambda: _is(partial(_foreign, fleet), (20_000, 0)), 2, "what there is now counts at least")


def test_past_foreign_load_is_forgotten() -> None:
    recent = SmoothedLoad()
    there = [Load(running=1, foreign_prefill_tokens=4_000 * (at < 40), speed_tps=50_000) for at in range(100)]
    told = [recent.smooth(load, at / 4) for at, load in enumerate(there)]
    assert [load.foreign_prefill_tokens for load in told[:40]] == [4_000] * 40
    after = [load.foreign_prefill_tokens for load in told[40:]]
    assert after == sorted(after, reverse=True)
    assert 1_300 < after[7] < 1_700, "e-fold in two seconds"
    assert after[-1] == 0
    assert {load.running for load in told} == {1}


def test_past_foreign_load_does_not_make_an_idle_engine_look_saturated() -> None:
    """The mean is at most one second of the engine's work, and a look after a gap weighs no more than others."""
    recent = SmoothedLoad()
    for at in range(40):
        recent.smooth(Load(foreign_prefill_tokens=80_000, speed_tps=8_000), at / 4)
    after = recent.smooth(Load(speed_tps=8_000), 10.0).foreign_prefill_tokens
    assert after == pytest.approx(8_000 * math.exp(-1 / 8), abs=2)
    alone = SmoothedLoad()
    alone.smooth(Load(), 0.0)
    assert alone.smooth(Load(foreign_prefill_tokens=4_000), 600.0).foreign_prefill_tokens == 4_000
    assert alone.smooth(Load(), 600.25).foreign_prefill_tokens < 1_000


async def _foreign(fleet: Fleet) -> tuple[int, int]:
    """(foreign prefill tokens, foreign decode tokens) that the only worker has reported last."""
    views = await fleet.workers.read()
    return (views[0].load.foreign_prefill_tokens, views[0].load.foreign_decode_tokens) if views else (-1, -1)


async def _is(read: Callable[[], Any], value: object) -> bool:
    return bool(await read() == value)


async def test_a_load_that_cannot_be_read_once_does_not_stop_the_reports(
    fleet: Fleet, redis_url: str, model: str
) -> None:
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


async def test_a_stopped_publisher_says_goodbye(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    async with upkeep(fleet):
        with publishing(redis_url, model, tracker):
            await equal(fleet, tracker)
            assert await fleet.redis.zscore(fleet.keys.alive, WORKER) is not None
            tracker.stored(hashes(50))

        async def left() -> bool:
            return await fleet.redis.zscore(fleet.keys.alive, WORKER) is None

        await poll(left)
        await equal(fleet, tracker)  # queued entries went out first


async def test_an_idle_engine_sends_almost_nothing(fleet: Fleet, redis_url: str, model: str) -> None:
    tracker = Tracker()
    tracker.stored(hashes(2_000))
    with publishing(redis_url, model, tracker) as publisher:
        async with upkeep(fleet):
            await equal(fleet, tracker)
            await poll(lambda: publisher.state.acknowledged)
        before = (await fleet.redis.xinfo_stream(fleet.keys.events(WORKER)))["entries-added"]
        begin = time.monotonic()
        await asyncio.sleep(5 * wire.HEARTBEAT_SECONDS)
        entries = await stream(fleet)
        added = (await fleet.redis.xinfo_stream(fleet.keys.events(WORKER)))["entries-added"] - before
        assert 2 <= added <= (time.monotonic() - begin) / wire.HEARTBEAT_SECONDS + 2
        assert {entry[b"o"] for _, entry in entries} == {b"heartbeat"}
        assert max(sum(len(part) for pair in entry.items() for part in pair) for _, entry in entries) <= 200


def looks_until(standstill: Standstill, load: Load, begin: float, seconds: float) -> float | None:
    """Look four times a second; returns after how many seconds the engine first stands still."""
    for look in range(int(seconds / LOAD_CHECK_SECONDS) + 1):
        if standstill.look(load, begin + look * LOAD_CHECK_SECONDS):
            return look * LOAD_CHECK_SECONDS
    return None


def test_an_engine_with_work_and_no_step_stands_still() -> None:
    standstill, works = Standstill(), Load(running=1, steps=7)
    assert looks_until(standstill, works, 0.0, 2 * STANDSTILL_SECONDS) == STANDSTILL_SECONDS
    now = 2 * STANDSTILL_SECONDS + LOAD_CHECK_SECONDS
    assert not standstill.look(Load(running=1, steps=8), now), "it stepped"
    assert looks_until(standstill, Load(running=1, steps=8), now + LOAD_CHECK_SECONDS, STANDSTILL_SECONDS - 1) is None
    now += STANDSTILL_SECONDS
    assert not standstill.look(Load(), now), "it has no work"
    assert looks_until(standstill, Load(running=1, steps=8), now + LOAD_CHECK_SECONDS, STANDSTILL_SECONDS - 1) is None


@pytest.mark.parametrize("load", [Load(), Load(running=3)], ids=["idle or paused", "nobody counts steps"])
def test_an_engine_whose_steps_are_not_known_never_stands_still(load: Load) -> None:
    assert looks_until(Standstill(), load, 0.0, 600.0) is None


def test_a_thread_that_could_not_look_does_not_take_its_engine_for_still() -> None:
    """For minutes the process had no CPU, or the engine's thread kept the interpreter's lock."""
    standstill, works = Standstill(), Load(running=1, steps=7)
    assert not any(standstill.look(works, 100.0 * look) for look in range(20))


async def test_no_heartbeat_is_sent_while_the_engine_stands_still(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load_module, "STANDSTILL_SECONDS", 0.5)
    now, tracker = [Load(running=1, steps=1)], Tracker()
    with publishing(redis_url, model, tracker, load=lambda: now[0]) as publisher:
        async with upkeep(fleet):
            await poll(lambda: "stands still with 1 requests" in caplog.text, 10, "the standstill is noticed")
            (heard,) = [worker.heartbeat_age_s for worker in await fleet.workers.read()]
            tracker.stored(hashes(3))
            await equal(fleet, tracker)  # its blocks are reported on

            async def older() -> bool:
                (age,) = [worker.heartbeat_age_s for worker in await fleet.workers.read()]
                return (age or 0.0) > (heard or 0.0) + 5 * wire.HEARTBEAT_SECONDS

            await poll(older, 10, "no heartbeat comes")
            rounds, step = list[float](), publisher.step

            def counted(at: float) -> None:
                rounds.append(at)
                step(at)

            monkeypatch.setattr(publisher, "step", counted)
            await asyncio.sleep(0.5)
            assert len(rounds) < 30, "nor does the thread turn in circles"
            now[0] = Load(running=1, steps=2)
            await poll(lambda: "works again" in caplog.text, 10, "the engine works")

            async def young() -> bool:
                (age,) = [worker.heartbeat_age_s for worker in await fleet.workers.read()]
                return (age or 9.0) < 5 * wire.HEARTBEAT_SECONDS

            await poll(young, 10, "heartbeats come again")


async def test_a_goodbye_is_said_although_it_is_asked_for_in_the_middle_of_a_step(
    fleet: Fleet, redis_url: str, model: str
) -> None:
    asked = False

    def load() -> Load:  # called when the step has already looked whether it is the last one
        nonlocal asked
        asked = True
        publisher._stopping.set()
        return Load()

    with publishing(redis_url, model, Tracker(), load=load) as publisher:
        await asyncio.to_thread(publisher._thread.join, 10)
        assert asked
    assert [entry[b"o"] for _, entry in await stream(fleet)][-1] == b"leave"


async def test_sessions_that_yield_are_read_with_the_blocks_that_an_engine_stores(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "YIELDS_SECONDS", 60)
    tracker, told, key = Tracker(), list[str](), fleet.keys.yields(WORKER)
    ids = [f"wf-{number:022}" for number in range(wire.YIELDS_PER_READING + 44)]
    with publishing(redis_url, model, tracker, yielded=told.extend) as publisher:
        await poll(lambda: publisher.state.joined)
        await fleet.redis.rpush(key, *ids)
        tracker.stored(hashes(1))
        await poll(lambda: len(told) == wire.YIELDS_PER_READING)
        for number in range(4):
            tracker.stored(hashes(2 + number))
            await asyncio.sleep(wire.FLUSH_SECONDS)
        assert await fleet.redis.llen(key) == 44, "the next reading is not due"
        publisher._due.yields = 0.0
        tracker.stored(hashes(9))
        await poll(lambda: told == ids)
        assert not await fleet.redis.exists(key)


async def test_without_a_use_for_them_or_entries_to_send_yields_are_not_read(
    fleet: Fleet, redis_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 60)
    key, told = fleet.keys.yields(WORKER), list[str]()
    for use in (None, told.extend):
        tracker = Tracker()
        with publishing(redis_url, model, tracker, yielded=use) as publisher:
            await poll(lambda publisher=publisher: publisher.state.joined)  # type: ignore[misc]
            await asyncio.sleep(0.2)
            await fleet.redis.rpush(key, "wf-a")
            if use is None:
                tracker.stored(hashes(1))
            await asyncio.sleep(wire.YIELDS_SECONDS + 0.3)
            assert await fleet.redis.lrange(key, 0, -1) == [b"wf-a"], "an idle engine needs no room, a bridge has none"
            await fleet.redis.delete(key)


@pytest.mark.parametrize("kind", ["string", "binary"])
async def test_a_key_that_holds_something_else_does_no_harm(
    fleet: Fleet, redis_url: str, model: str, kind: str
) -> None:
    tracker, told, key = Tracker(), list[str](), fleet.keys.yields(WORKER)
    await (fleet.redis.set(key, "x") if kind == "string" else fleet.redis.rpush(key, b"\xff\x00"))
    with publishing(redis_url, model, tracker, yielded=told.extend) as publisher:
        for number in range(8):
            tracker.stored(hashes(1 + number))
            await asyncio.sleep(0.1)
        async with upkeep(fleet):
            await equal(fleet, tracker)
        assert publisher.state.errors == 0
    assert told == ([] if kind == "string" else ["\ufffd\x00"])
