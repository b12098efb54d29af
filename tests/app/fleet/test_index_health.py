"""Each difference between the index and an engine's table is found, named, healed and counted; the lag is right."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker, block, blocks, digest_of

from warmfleet.fleet.index import LAGS_AT_ONCE
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet, WorkerTruth

NAME = "5ea50009"


@pytest.fixture
async def reporter(store: aioredis.Redis, fleet: Fleet) -> ReportingWorker:
    """A worker that holds blocks 1 to 3, which the index has, too."""
    fleet.upkeep.pace = replace(Pace(), min_gap_ms=0)
    one = ReportingWorker(store, fleet)
    await one.join()
    await one.send("stored", blocks(1, 2, 3))
    await one.heartbeat(digest_of(1, 2, 3))
    await one.applied()
    return one


async def truth(reporter: ReportingWorker) -> WorkerTruth:
    return (await reporter.fleet.index.truth(await reporter.fleet.workers.read())).workers["s.0"]


async def digest(reporter: ReportingWorker) -> None:
    await reporter.heartbeat(digest_of(1, 2, 3, 4))


async def gap(reporter: ReportingWorker) -> None:
    reporter.number += 1
    await reporter.heartbeat()


async def audit(reporter: ReportingWorker) -> None:
    await cast("Any", reporter.store.srem(reporter.keys.block(block(2)), (await reporter.row()).slot))
    await reporter.store.zadd(reporter.keys.audit, {"s.0": 1})
    while not (await reporter.fleet.upkeep.audit(3600)).differs:
        pass


async def interleaved(reporter: ReportingWorker) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("stored", blocks(4))


async def spoilt(reporter: ReportingWorker) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(1, 2))
    await reporter.end(digest_of(1, 2, 3), NAME)


async def overflow(reporter: ReportingWorker) -> None:
    for start in range(0, 3_000, 100):
        await reporter.send("stored", blocks(*range(start, start + 100)))


async def partial(reporter: ReportingWorker) -> None:
    await reporter.fleet.upkeep.tick(used_permille=900)
    await reporter.send("stored", blocks(4))
    await reporter.applied()
    reporter.fleet.upkeep.pace = replace(reporter.fleet.upkeep.pace, short_ms=0)
    await reporter.fleet.upkeep.tick(used_permille=0)


async def rejoin(reporter: ReportingWorker) -> None:
    """Begin the worker's stream anew with lower ids."""
    await reporter.store.delete(reporter.stream)
    await reporter.heartbeat(at="1-1")
    await reporter.applied()
    await reporter.join("n2")


CASES: dict[str, Callable[[ReportingWorker], Awaitable[None]]] = {
    case.__name__: case for case in (digest, gap, audit, interleaved, spoilt, overflow, partial, rejoin)
}


@pytest.mark.parametrize("cause", CASES)
async def test_a_divergence_is_named_and_its_snapshot_counted(
    reporter: ReportingWorker, fleet: Fleet, cause: str
) -> None:
    at_rest = await truth(reporter)
    assert (at_rest.cause, at_rest.found, at_rest.healed, at_rest.resyncs) == ("", 0, 0, {})
    await CASES[cause](reporter)
    await reporter.applied()
    open_now = await truth(reporter)
    assert (open_now.cause, open_now.found, open_now.healed) == (cause, 1, 0)
    assert open_now.diverged
    await reporter.heartbeat(digest_of(77))  # a second cause belongs to the open divergence
    await reporter.applied()
    await reporter.snapshot([1, 2, 3], NAME)
    await reporter.applied()
    healed = await truth(reporter)
    assert (healed.cause, healed.found, healed.healed, healed.resyncs) == ("", 1, 1, {cause: 1})
    assert (await fleet.index.counts())[f"resync_{cause}"] == 1
    assert (await reporter.holds()) == {block(number) for number in (1, 2, 3)}


async def test_a_new_incarnation_fills_which_is_no_divergence_and_keeps_the_figures(reporter: ReportingWorker) -> None:
    await digest(reporter)
    await reporter.snapshot([1], NAME)
    await reporter.join("n2")
    await reporter.applied()
    filling = await truth(reporter)
    assert (filling.cause, filling.diverged, filling.found, filling.healed) == ("join", False, 1, 1)
    await reporter.snapshot([1], NAME)
    await reporter.snapshot([1, 2], NAME)  # a snapshot that no one requested
    await reporter.applied()
    assert (await truth(reporter)).resyncs == {"digest": 1, "join": 1, "worker": 1}


async def test_a_digest_that_agrees_heals_without_a_snapshot(reporter: ReportingWorker, fleet: Fleet) -> None:
    await gap(reporter)  # the lost entries had no blocks
    await reporter.applied()
    assert (await truth(reporter)).cause == "gap"
    await reporter.heartbeat(digest_of(1, 2, 3))
    await reporter.applied()
    healed = await truth(reporter)
    assert (healed.cause, healed.found, healed.healed, healed.resyncs) == ("", 1, 1, {})
    assert await reporter.waiting() is None
    await reporter.join("n2")  # an empty engine sends a digest and no snapshot
    await reporter.heartbeat(digest_of())
    await reporter.applied()
    assert (await truth(reporter)).cause == ""
    assert not {name for name in await fleet.index.counts() if name.startswith("resync")}


async def test_the_age_of_a_digest(reporter: ReportingWorker) -> None:
    young = (await truth(reporter)).digest_age_s
    assert young is not None
    assert young < 30
    record = await reporter.record()
    record["truth"]["checked"] = int(time.time() * 1000) - 60_000
    await cast("Any", reporter.store.hset(reporter.keys.workers, "s.0", wire.dumps(record)))
    await reporter.heartbeat()  # without a digest
    await reporter.applied()
    assert (await truth(reporter)).digest_age_s == pytest.approx(60, abs=20)
    await reporter.heartbeat(digest_of(77))  # a digest that differs was compared, too
    await reporter.applied()
    assert cast("float", (await truth(reporter)).digest_age_s) < 30


async def test_a_worker_that_never_sent_a_digest(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await reporter.applied()
    assert (await truth(reporter)).digest_age_s is None


async def test_the_lag_of_many_streams(store: aioredis.Redis, fleet: Fleet) -> None:
    cores = [ReportingWorker(store, fleet, f"w{number}") for number in range(LAGS_AT_ONCE + 6)]
    for reporter in cores:
        await reporter.join()
    while await fleet.redis.xlen(fleet.keys.hello):
        fleet.upkeep.pace = replace(Pace(), min_gap_ms=0)
        await fleet.upkeep.tick()
    for reporter in cores:
        await reporter.applied()
    at = int(time.time() * 1000) - 5_000
    for number, reporter in enumerate(cores[::2]):
        reporter.number += 1
        fields = cast("dict[Any, Any]", wire.entry(reporter.nonce, reporter.number, "stored", blocks(number)))
        stream = f"{reporter.stream}"
        await store.delete(stream)
        await store.xadd(stream, fields, id=f"{at}-0")
        await reporter.heartbeat()
    await store.set(cores[1].stream, "no stream")  # `apply` finds no stream here
    found = (await fleet.index.truth(await fleet.workers.read())).workers
    for number, reporter in enumerate(cores):
        one = found[reporter.worker_id]
        assert one.lag_batches == (0 if number % 2 else 2)
        assert one.lag_s == (0 if number % 2 else pytest.approx(10, abs=6))


async def test_entries_and_retired_slots(reporter: ReportingWorker, fleet: Fleet) -> None:
    await reporter.send("begin", wire.dumps({"snapshot": NAME, "command": None}))
    await reporter.send("chunk", NAME.encode() + blocks(1, 2))
    await reporter.applied()
    seen = await fleet.index.truth(await fleet.workers.read())
    assert (seen.entries, seen.retired_slots) == (5, 0), "live and shadow slot"
    await reporter.end(digest_of(1, 2), NAME)
    await reporter.applied()
    seen = await fleet.index.truth(await fleet.workers.read())
    assert (seen.entries, seen.retired_slots) == (2, 1)
    await fleet.upkeep.collect()
    assert (await fleet.index.truth([])).retired_slots == 0
