"""Every difference of an index from its engine's table is noticed, named, healed and counted; the lag is right."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.lua.stream import Core, block, blocks, digest_of

from warmfleet.fleet.index_health import LAGS_AT_ONCE
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet, WorkerTruth

NAME = "5ea50009"


@pytest.fixture
async def core(store: aioredis.Redis, fleet: Fleet) -> Core:
    """A worker that holds blocks 1 to 3, as it and the index agree."""
    fleet.pace = replace(Pace(), min_gap_ms=0)
    one = Core(store, fleet)
    await one.join()
    await one.send("stored", blocks(1, 2, 3))
    await one.heartbeat(digest_of(1, 2, 3))
    await one.applied()
    return one


async def truth(core: Core) -> WorkerTruth:
    return (await core.fleet.truth(await core.fleet.workers())).workers["s.0"]


async def digest(core: Core) -> None:
    await core.heartbeat(digest_of(1, 2, 3, 4))


async def gap(core: Core) -> None:
    core.number += 1
    await core.heartbeat()


async def audit(core: Core) -> None:
    await cast("Any", core.store.srem(core.keys.block(block(2)), (await core.row()).slot))
    await core.store.zadd(core.keys.audit, {"s.0": 1})
    while not (await core.fleet.audit(3600)).differs:
        pass


async def interleaved(core: Core) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("stored", blocks(4))


async def spoilt(core: Core) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(1, 2))
    await core.end(digest_of(1, 2, 3), NAME)


async def overflow(core: Core) -> None:
    for start in range(0, 3_000, 100):
        await core.send("stored", blocks(*range(start, start + 100)))


async def partial(core: Core) -> None:
    core.fleet.used_permille = 900
    await core.fleet.tick()
    await core.send("stored", blocks(4))
    await core.applied()
    core.fleet.used_permille, core.fleet.pace = 0, replace(core.fleet.pace, short_ms=0)
    await core.fleet.tick()


async def rejoin(core: Core) -> None:
    """The stream begins anew with lower ids."""
    await core.store.delete(core.stream)
    await core.heartbeat(at="1-1")
    await core.applied()
    await core.join("n2")


CASES: dict[str, Callable[[Core], Awaitable[None]]] = {
    one.__name__: one for one in (digest, gap, audit, interleaved, spoilt, overflow, partial, rejoin)
}


@pytest.mark.parametrize("cause", CASES)
async def test_a_divergence_is_named_and_its_snapshot_counted(core: Core, fleet: Fleet, cause: str) -> None:
    at_rest = await truth(core)
    assert (at_rest.cause, at_rest.found, at_rest.healed, at_rest.resyncs) == ("", 0, 0, {})
    await CASES[cause](core)
    await core.applied()
    open_now = await truth(core)
    assert (open_now.cause, open_now.found, open_now.healed) == (cause, 1, 0)
    assert open_now.diverged
    await core.heartbeat(digest_of(77))  # another cause on top is the same divergence
    await core.applied()
    await core.snapshot([1, 2, 3], NAME)
    await core.applied()
    healed = await truth(core)
    assert (healed.cause, healed.found, healed.healed, healed.resyncs) == ("", 1, 1, {cause: 1})
    assert (await fleet.counts())[f"resync_{cause}"] == 1
    assert (await core.holds()) == {block(number) for number in (1, 2, 3)}


async def test_a_new_incarnation_fills_which_is_no_divergence_and_keeps_the_figures(core: Core) -> None:
    await digest(core)
    await core.snapshot([1], NAME)
    await core.join("n2")
    await core.applied()
    filling = await truth(core)
    assert (filling.cause, filling.diverged, filling.found, filling.healed) == ("join", False, 1, 1)
    await core.snapshot([1], NAME)
    await core.snapshot([1, 2], NAME)  # of its own accord
    await core.applied()
    assert (await truth(core)).resyncs == {"digest": 1, "join": 1, "worker": 1}


async def test_a_digest_that_agrees_heals_without_a_snapshot(core: Core, fleet: Fleet) -> None:
    await gap(core)  # what was lost were no blocks
    await core.applied()
    assert (await truth(core)).cause == "gap"
    await core.heartbeat(digest_of(1, 2, 3))
    await core.applied()
    healed = await truth(core)
    assert (healed.cause, healed.found, healed.healed, healed.resyncs) == ("", 1, 1, {})
    assert await core.waiting() is None
    await core.join("n2")  # an empty engine: no snapshot, but a digest
    await core.heartbeat(digest_of())
    await core.applied()
    assert (await truth(core)).cause == ""
    assert not {name for name in await fleet.counts() if name.startswith("resync")}


async def test_the_age_of_a_digest(core: Core) -> None:
    young = (await truth(core)).digest_age_s
    assert young is not None
    assert young < 30
    record = await core.record()
    record["truth"]["checked"] = int(time.time() * 1000) - 60_000
    await cast("Any", core.store.hset(core.keys.workers, "s.0", wire.dumps(record)))
    await core.heartbeat()  # without a digest
    await core.applied()
    assert (await truth(core)).digest_age_s == pytest.approx(60, abs=20)
    await core.heartbeat(digest_of(77))  # a digest that differs was compared, too
    await core.applied()
    assert cast("float", (await truth(core)).digest_age_s) < 30


async def test_a_worker_that_never_sent_a_digest(store: aioredis.Redis, fleet: Fleet) -> None:
    core = Core(store, fleet)
    await core.join()
    await core.applied()
    assert (await truth(core)).digest_age_s is None


async def test_the_lag_of_many_streams(store: aioredis.Redis, fleet: Fleet) -> None:
    cores = [Core(store, fleet, f"w{number}") for number in range(LAGS_AT_ONCE + 6)]
    for core in cores:
        await core.join()
    while await fleet.redis.xlen(fleet.keys.hello):
        fleet.pace = replace(Pace(), min_gap_ms=0)
        await fleet.tick()
    for core in cores:
        await core.applied()
    at = int(time.time() * 1000) - 5_000
    for number, core in enumerate(cores[::2]):
        core.number += 1
        fields = cast("dict[Any, Any]", wire.entry(core.nonce, core.number, "stored", blocks(number)))
        stream = f"{core.stream}"
        await store.delete(stream)
        await store.xadd(stream, fields, id=f"{at}-0")
        await core.heartbeat()
    await store.set(cores[1].stream, "no stream")  # for apply to judge
    found = (await fleet.truth(await fleet.workers())).workers
    for number, core in enumerate(cores):
        one = found[core.worker_id]
        assert one.lag_batches == (0 if number % 2 else 2)
        assert one.lag_s == (0 if number % 2 else pytest.approx(10, abs=6))


async def test_entries_and_retired_slots(core: Core, fleet: Fleet) -> None:
    await core.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await core.send("chunk", NAME.encode() + blocks(1, 2))
    await core.applied()
    seen = await fleet.truth(await fleet.workers())
    assert (seen.entries, seen.retired_slots) == (5, 0), "live and shadow slot"
    await core.end(digest_of(1, 2), NAME)
    await core.applied()
    seen = await fleet.truth(await fleet.workers())
    assert (seen.entries, seen.retired_slots) == (2, 1)
    await fleet.collect()
    assert (await fleet.truth([])).retired_slots == 0
