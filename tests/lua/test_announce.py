"""announce, through the public door: Replicas.announce and Replicas.read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest

from warmfleet.errors import BadArgument
from warmfleet.fleet import Announcement, LastMinute
from warmfleet.fleet.replicas import FORGET_MS

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet

TOLD = Announcement(
    url="http://10.0.0.5:9090",
    version="0.1.0",
    started=1_800_000_000,
    policy="cost",
    in_flight=3,
    waiting=2,
    minute=LastMinute(decided=60, fallbacks=1, prompt_tokens=1_000, matched_tokens=900, waits={7: 50, 9: 10}),
)


async def now_ms(store: aioredis.Redis) -> int:
    seconds, micros = await store.time()
    return seconds * 1000 + micros // 1000


async def put(store: aioredis.Redis, fleet: Fleet, name: str, raw: bytes) -> None:
    await cast("Any", store.hset(fleet.keys.replicas, name, raw))


async def test_what_a_replica_tells_is_read_as_it_was_told(store: aioredis.Redis, fleet: Fleet) -> None:
    assert await fleet.replicas.announce("b:9090", TOLD) == 1
    assert await fleet.replicas.announce("a:9090", Announcement()) == 2
    first, second = await fleet.replicas.read()
    assert (first.name, first.told) == ("a:9090", Announcement())
    assert (second.name, second.told, second.state) == ("b:9090", TOLD, "serving")
    assert 0 <= second.age_s < 5
    assert 0 < await store.pttl(fleet.keys.replicas) <= FORGET_MS


async def test_a_replica_that_stops_takes_its_word_back_and_the_last_one_the_key(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    await fleet.replicas.announce("a:9090", TOLD)
    await fleet.replicas.announce("b:9090", TOLD)
    assert await fleet.replicas.announce("a:9090", None) == 1
    assert await fleet.replicas.announce("a:9090", None) == 1, "twice is once"
    assert await fleet.replicas.announce("b:9090", None) == 0
    assert not await store.exists(fleet.keys.replicas)


@pytest.mark.parametrize(("age_ms", "state"), [(0, "serving"), (7_000, "serving"), (9_000, "silent")])
async def test_a_replica_that_tells_nothing_is_silent(
    store: aioredis.Redis, fleet: Fleet, age_ms: int, state: str
) -> None:
    await put(store, fleet, "a:9090", b"%d %s" % (await now_ms(store) - age_ms, TOLD.pack()))
    (view,) = await fleet.replicas.read()
    assert view.state == state
    assert view.heard == (state != "silent")


async def test_old_entries_go_entries_of_the_future_go_and_there_is_a_bound(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    now = await now_ms(store)
    await put(store, fleet, "old:1", b"%d {}" % (now - FORGET_MS - 1_000))
    await put(store, fleet, "future:1", b"%d {}" % (now + 60_000))
    await put(store, fleet, "nonsense:1", b"{}")
    assert await fleet.replicas.announce("a:9090", TOLD) == 1
    for number in range(300):
        await put(store, fleet, f"forged:{number}", b"%d {}" % (now - 1_000 - number))
    assert await fleet.replicas.announce("a:9090", TOLD) == 256
    names = {view.name for view in await fleet.replicas.read()}
    assert len(names) == 256
    assert "a:9090" in names
    assert "forged:299" not in names, "the oldest goes"


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        orjson.dumps({"url": 5}),
        orjson.dumps({"in_flight": "many"}),
        orjson.dumps({"minute": {"decided": None}}),
        orjson.dumps({"minute": [1]}),
        orjson.dumps({"minute": {"waits": {"a": 1}}}),
    ],
)
async def test_what_cannot_be_read_is_left_out(store: aioredis.Redis, fleet: Fleet, record: bytes) -> None:
    await put(store, fleet, "odd:1", b"%d %s" % (await now_ms(store), record))
    await fleet.replicas.announce("a:9090", TOLD)
    assert [view.name for view in await fleet.replicas.read()] == ["a:9090"]


async def test_fields_of_a_newer_version_are_left_out(store: aioredis.Redis, fleet: Fleet) -> None:
    newer = orjson.dumps(orjson.loads(TOLD.pack()) | {"zone": "a"})
    await put(store, fleet, "b:1", b"%d %s" % (await now_ms(store), newer))
    (view,) = await fleet.replicas.read()
    assert view.told == TOLD


async def test_a_record_that_is_too_long_is_refused(fleet: Fleet) -> None:
    with pytest.raises(BadArgument):
        await fleet.replicas.announce("a:1", Announcement(url="x" * 9_000))
    with pytest.raises(BadArgument):
        await fleet.replicas.announce("", TOLD)
