"""Full memory: what every script does at the limit, and how an index that was left partial becomes whole again."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from redis.exceptions import ResponseError
from tests.support.fleet.keyspace import READY, Keyspace
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, digest_of, held
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import SCRIPT_KEYS, Announcement, Flag, Fleet, Proof, Renewal, connect, new_reservation
from warmfleet.fleet.pool_registry import clear
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import redis.asyncio as aioredis

MB = 2**20
LUA = Path(__file__).parents[2] / "lua"


@pytest.fixture(params=["valkey", "redis7"])
async def own_store(request: pytest.FixtureRequest) -> AsyncIterator[aioredis.Redis]:
    """A server of this test's own, without a limit to begin with."""
    with server(valkey_binary() if request.param == "valkey" else redis7_binary()) as url:
        async with connect(url, timeout_s=5) as client:
            yield client


@pytest.fixture
def own_fleet(own_store: aioredis.Redis, model: str) -> Fleet:
    fleet = Fleet(own_store, model, timeouts=PATIENT)
    fleet.upkeep.pace = Pace(min_gap_ms=0, short_ms=300)
    return fleet


async def memory_is(fleet: Fleet, *, short: bool) -> None:
    """Write ``tick`` as a tick would have written it for this memory."""
    now = int(time.time() * 1000)
    await fleet.redis.set(fleet.keys.tick, f"{now} 0 0 0 {now if short else 0}")


# ---------------------------------------------------------------- at the limit

WRITES_REFUSED = {"prove", "vouch", "eject", "register", "audit"}


async def prepared(fleet: Fleet) -> dict[str, Callable[[], Awaitable[Any]]]:
    """A call of every script that has something to write."""
    store, reporter, keyspace = fleet.redis, ReportingWorker(fleet.redis, fleet), Keyspace(fleet.redis, fleet)
    await keyspace.workers(4)
    await store.zadd(fleet.keys.alive_servers, {"w1": time.time() * 1000})
    await reporter.join()
    await reporter.send("stored", blocks(*range(300, 400)))
    await reporter.applied()
    await reporter.send("removed", blocks(*range(300, 310)))
    control = ReportingWorker(store, fleet, "t")
    await control.join()
    await control.send("stored", blocks(1))
    await control.applied()
    await control.send("cleared")
    entry = cast("dict[Any, Any]", wire.entry("m1", 1, "join", wire.dumps({"schema": wire.SCHEMA})))
    await store.xadd(fleet.keys.server("s"), entry)
    ask, known, gone = keyspace.ask(keyspace.chain(10)), keyspace.ask(), keyspace.ask()
    for request in (known, gone):
        await fleet.bookings.decide(request)
    await fleet.upkeep.audit(3600)
    await store.zadd(fleet.keys.audit, {"s.0": 1, "t.0": 2})
    await cast("Any", store.sadd(fleet.keys.retired, 77))
    await cast("Any", store.sadd(fleet.keys.slot(77), b"8 bytes."))
    renewal = Renewal(known.reservation, "w1.0", 1, 101)
    return {
        "decide": lambda: fleet.bookings.decide(ask),
        "queue": fleet.queue.poll,
        "hold": fleet.ledger.poll,
        "settle": lambda: fleet.bookings.settle(gone.reservation, "failed"),
        "renew": lambda: fleet.bookings.renew([renewal]),
        "client": lambda: fleet.scripts.run(
            "client", fleet.keys.prefix, "keep", 30_000, new_reservation(1, client="c" * 11)
        ),
        "tick": fleet.upkeep.tick,
        "apply": lambda: fleet.upkeep.apply("s.0"),
        "apply_control": lambda: fleet.upkeep.apply("t.0"),
        "apply_server": lambda: fleet.upkeep.apply_server("s"),
        "collect": fleet.upkeep.collect,
        "drain": lambda: fleet.workers.drain("s.0", draining=True),
        "forget": lambda: fleet.upkeep.forget("w2.0"),
        "prove": lambda: fleet.probes.prove("s.0", "n1", Proof("proven", "")),
        "vouch": lambda: fleet.workers.vouch("w1.0", "n1"),
        "eject": lambda: fleet.workers.eject("w1.0", good=False),
        "register": lambda: fleet.workers.register("plain", {"scheme_id": 1}, 10),
        "lag": lambda: fleet.index.truth([]),
        "audit": lambda: fleet.upkeep.audit(3600),
        "announce": lambda: fleet.replicas.announce("a:9090", Announcement()),
    }


async def test_what_every_script_does_at_the_limit(own_store: aioredis.Redis, own_fleet: Fleet) -> None:
    calls = await prepared(own_fleet)
    assert set(calls) == SCRIPT_KEYS.keys() - {"replay", "rights"}, "no router runs these"
    await own_store.config_set("maxmemory", 1)
    for name, call in calls.items():
        if name in WRITES_REFUSED:
            with pytest.raises(FleetUnavailable, match="used memory"):
                await call()
        else:
            assert await call() is not None, name
    slots = {int(slot) for slot in await cast("Any", own_store.smembers(own_fleet.keys.retired))}
    assert slots, "what was cleared and forgotten at the limit is retired"
    assert await own_store.xlen(own_fleet.keys.events("s.0")) == 0
    assert len(await ReportingWorker(own_store, own_fleet).holds()) == 90
    with pytest.raises(ResponseError):
        await own_store.xadd("a stream", {"a": "b"})


async def test_a_pool_can_be_removed_to_make_room(own_store: aioredis.Redis, own_fleet: Fleet) -> None:
    """A request is under way, whose keys must go, too."""
    keyspace = Keyspace(own_store, own_fleet)
    await keyspace.worker(1)
    await keyspace.hold(1, keyspace.chain(20_000))
    await own_fleet.bookings.decide(keyspace.ask(keyspace.chain(20)))
    used = (await own_store.info("memory"))["used_memory"]
    await own_store.config_set("maxmemory", used - 100_000)
    assert await clear(own_fleet, shared=False)
    assert await own_store.keys(own_fleet.keys.prefix + "*") == []


def test_the_readme_says_the_same() -> None:
    section = (LUA / "README.md").read_text().partition("## Full memory")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    said = {name: "refused" in what for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    assert said == {name: name in WRITES_REFUSED for name in SCRIPT_KEYS.keys() - {"replay"}}


async def test_while_writes_are_refused_nobody_expires(own_store: aioredis.Redis, own_fleet: Fleet) -> None:
    keyspace = Keyspace(own_store, own_fleet)
    await memory_is(own_fleet, short=False)
    assert not (await own_fleet.upkeep.tick()).grace
    await keyspace.worker(1, age_ms=60_000)
    await own_store.config_set("maxmemory", 1)
    tick = await own_fleet.upkeep.tick()
    assert (tick.grace, tick.short, tick.forget) == (True, True, ())
    assert (await own_fleet.bookings.decide(keyspace.ask())).worker_id == "w1.0"


# ---------------------------------------------------------------- hysteresis


@pytest.mark.parametrize(
    ("readings", "short"),
    [
        ([849], [False]),
        ([850, 800, 751, 749, 800], [True, True, True, False, False]),
        ([900, -1, 100], [True, False, False]),  # nobody can read it, and writes pass
        ([0, -1], [False, False]),
    ],
)
async def test_between_the_marks_nothing_changes(fleet: Fleet, readings: list[int], short: list[bool]) -> None:
    fleet.upkeep.pace = Pace(min_gap_ms=0, short_ms=0)
    assert [(await fleet.upkeep.tick(used_permille=reading)).short for reading in readings] == short


async def test_short_lasts_a_while(fleet: Fleet) -> None:
    fleet.upkeep.pace = Pace(min_gap_ms=0, short_ms=60_000)
    assert (await fleet.upkeep.tick(used_permille=900)).short
    assert (await fleet.upkeep.tick(used_permille=100)).short
    fleet.upkeep.pace = Pace(min_gap_ms=60_000)
    assert (await fleet.upkeep.tick(used_permille=100)).short, "a tick that is skipped knows, too"
    fleet.upkeep.pace = Pace(min_gap_ms=0, short_ms=0)
    assert not (await fleet.upkeep.tick(used_permille=100)).short


# ---------------------------------------------------------------- one worker


async def test_while_memory_is_short_nothing_is_inserted_and_the_rest_goes_on(
    reporter: ReportingWorker, fleet: Fleet
) -> None:
    await reporter.send("stored", blocks(1, 2, 3))
    await reporter.applied()
    await memory_is(fleet, short=True)
    await reporter.send("stored", blocks(4))
    await reporter.send("removed", blocks(1))
    await reporter.heartbeat(digest_of(2, 3, 4), speed_tps=1234)
    await reporter.applied()
    row = await reporter.row()
    assert await reporter.holds() == held(2, 3)
    assert row.flags & Flag.PARTIAL
    assert row.speed_tps == 1234
    assert await fleet.index.counts() == {"partial": 1}
    assert (await reporter.command()).get("do") is None
    fleet.upkeep.pace = Pace(min_gap_ms=0)
    assert (await fleet.upkeep.tick()).ran
    assert (await reporter.command()).get("do") is None, "no snapshot is asked for that there is no room for"


async def test_while_memory_is_short_no_digest_is_compared(reporter: ReportingWorker, fleet: Fleet) -> None:
    await memory_is(fleet, short=True)
    await reporter.heartbeat(digest_of(1))
    await reporter.applied()
    assert await fleet.index.counts() == {}
    assert await reporter.waiting() is None
    await memory_is(fleet, short=False)
    await reporter.heartbeat(digest_of(1))
    await reporter.applied()
    assert await fleet.index.counts() == {"mismatch": 1}


async def test_when_there_is_room_again_a_snapshot_makes_it_whole(reporter: ReportingWorker, fleet: Fleet) -> None:
    fleet.upkeep.pace = Pace(min_gap_ms=0, short_ms=0)
    await memory_is(fleet, short=True)
    await reporter.send("stored", blocks(1, 2))
    await reporter.applied()
    await memory_is(fleet, short=False)
    await reporter.heartbeat(digest_of(1, 2))
    await reporter.applied()
    assert (await reporter.row()).flags & Flag.PARTIAL
    assert cast("float", await reporter.waiting()) < 0
    await fleet.upkeep.tick()
    command = await reporter.command()
    assert command["do"] == "resync"
    await reporter.snapshot([1, 2], command=command["id"])
    await reporter.heartbeat(digest_of(1, 2))
    await reporter.applied()
    assert await reporter.holds() == held(1, 2)
    assert not (await reporter.row()).flags & Flag.PARTIAL
    assert await fleet.index.counts() == {"partial": 1, "resync_partial": 1}


async def test_what_was_left_out_and_evicted_since_needs_no_snapshot(reporter: ReportingWorker, fleet: Fleet) -> None:
    await memory_is(fleet, short=True)
    await reporter.send("stored", blocks(1, 2))
    await reporter.send("removed", blocks(1, 2))
    await reporter.applied()
    await memory_is(fleet, short=False)
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    assert not (await reporter.row()).flags & Flag.PARTIAL
    assert await reporter.waiting() is None


async def test_a_snapshot_that_does_not_fit_is_given_up(reporter: ReportingWorker, fleet: Fleet) -> None:
    name = "5ea50001"
    await reporter.send("stored", blocks(1))
    await reporter.send("begin", wire.dumps({"snapshot": name, "command": None}))
    await reporter.send("chunk", name.encode() + blocks(2, 3))
    await reporter.applied()
    shadow = (await reporter.record())["shadow"]
    await memory_is(fleet, short=True)
    await reporter.send("chunk", name.encode() + blocks(4))
    await reporter.send("chunk", name.encode() + blocks(5))
    await reporter.end(digest_of(2, 3, 4, 5), name)
    await reporter.applied()
    assert await reporter.retired() == {shadow}
    assert cast("float", await reporter.waiting()) < 0
    assert await reporter.holds() == held(1)
    assert await fleet.index.counts() == {"partial": 1, "stale": 2}


async def test_a_partial_winner_is_verified(keyspace: Keyspace) -> None:
    """Blocks that were left out are holes; a set with holes may look deeper than it is."""
    await keyspace.ticked()
    await keyspace.worker(1, flags=READY | Flag.PARTIAL)
    chain = keyspace.chain(10)
    await keyspace.hold(1, chain)
    await keyspace.drop(1, chain[4 * 8 : 5 * 8])
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(chain))).matched_tokens == 4 * 16
