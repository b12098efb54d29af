"""When another process joins under the same name, the later one keeps the name, if it is alive."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.publishing import WORKER, churn, config, equal, hashes, publishing, record, upkeep
from tests.support.polling import poll

from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from warmfleet.fleet import Fleet

pytestmark = pytest.mark.in_turn


@pytest.fixture(autouse=True)
def seconds_for_minutes(short_periods: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every 0.2 s, a TTL of 2 s."""
    monkeypatch.setattr(wire, "WORKER_TTL_SECONDS", 2.0)


async def late_join(fleet: Fleet, redis_url: str, model: str) -> str:
    """Let the join of a dead process arrive now. Returns its nonce."""
    nonce = "dead0000dead0000"
    fields = wire.entry(nonce, 1, "join", config(redis_url, model).join())
    await fleet.redis.xadd(fleet.keys.events(WORKER), fields)  # type: ignore[arg-type]
    return nonce


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
                assert (old.state.joins, new.state.joins, new.state.stopped) == (1, 1, None)


async def test_a_dead_process_whose_join_comes_late_does_not_keep_the_name(
    fleet: Fleet, redis_url: str, model: str
) -> None:
    tracker = Tracker()
    tracker.stored(hashes(300))
    async with upkeep(fleet):
        with publishing(redis_url, model, tracker) as living:
            await equal(fleet, tracker)
            await poll(lambda: living.state.acknowledged)
            nonce = await late_join(fleet, redis_url, model)
            await poll(lambda: taken(fleet, nonce), 5, "stream order decides: it is taken for the worker")
            await asyncio.to_thread(churn, tracker, 10)
            await equal(fleet, tracker)
            assert (living.state.joins, living.state.stopped) == (2, None)
            assert (await record(fleet))["nonce"] == living._stream.nonce


async def test_a_dead_process_whose_entries_come_late_does_not_keep_the_name(
    fleet: Fleet, redis_url: str, model: str
) -> None:
    """The dead process's entries are applied bit by bit, so a moving entry number is no proof of life."""
    tracker = Tracker()
    tracker.stored(hashes(300))
    async with upkeep(fleet):
        with publishing(redis_url, model, tracker) as living:
            await equal(fleet, tracker)
            nonce = await late_join(fleet, redis_url, model)
            await poll(lambda: living._rival.nonce == nonce, 5)
            late = wire.entry(nonce, 2, "stored", b"".join(hashes(3)))
            await fleet.redis.xadd(fleet.keys.events(WORKER), late)  # type: ignore[arg-type]
            await equal(fleet, tracker)
            assert (living.state.joins, living.state.stopped) == (2, None)


async def test_three_living_processes_end_with_one(fleet: Fleet, redis_url: str, model: str) -> None:
    trackers = [Tracker() for _ in range(3)]
    for number, tracker in enumerate(trackers):
        tracker.stored(hashes(100 + number))
    async with upkeep(fleet):
        with (
            publishing(redis_url, model, trackers[0]) as one,
            publishing(redis_url, model, trackers[1]) as two,
            publishing(redis_url, model, trackers[2]) as three,
        ):
            every = (one, two, three)
            await poll(lambda: sum(each.state.stopped is None for each in every) == 1, 20, "one is left")
            [left] = [at for at, each in enumerate(every) if each.state.stopped is None]
            await equal(fleet, trackers[left])
            assert sum(each.state.joins for each in every) <= 4, "they do not take turns"


async def taken(fleet: Fleet, nonce: str) -> bool:
    raw = await fleet.redis.get(fleet.keys.command(WORKER))
    return bool(json.loads(raw or "{}").get("nonce") == nonce)
