"""Two real engines know only their model: each finds a pool and keeps it, and one of them moves while it serves."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.chaos import Load
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME, EngineOptions, VllmEngine, running
from tests.vllm.replicas import PATIENT_SECONDS, Replica, running_replicas
from tests.vllm.test_chaos import nothing_is_left
from tests.vllm.test_fleet import Real, ask, settled, user
from tests.vllm.test_life_cycle import LONG_ANSWER, stream

from warmfleet.__main__ import main
from warmfleet.fleet import Fleet, connect
from warmfleet.protocol.pools import weight

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from warmfleet.fleet.rows import LoadRow

    Talk = list[dict[str, str]]  # messages

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows=(
            "two real engines that know only their model get a pool each, and keep it over a restart; one moves to the "
            "other pool under streams: no request fails, the new index equals its table, predicted = cached there, and "
            "nothing stays booked or indexed in the old pool"
        ),
    ),
    pytest.mark.timeout(1_500),
]

BLOCKS = 4_096  # more than all prompts of the test need: nothing is evicted
STEP_S = "0.02"  # added to each step: a long answer takes longer than a move
CLIENTS, TALKS, WORDS = 8, 3, 1_000
AFTER = 100  # requests that are answered after the move


@dataclass(frozen=True)
class Spread:
    """A served model with a pool for each of its two engines, and its replica. pools: by tag."""

    real: Real
    replica: Replica
    pools: dict[str, Fleet]

    async def seats(self) -> dict[str, list[str]]:
        """The proved workers that take requests in each pool, as the replica sees them."""
        async with httpx.AsyncClient(timeout=10) as client:
            models = (await client.get(f"{self.replica.url}/workers")).json()["models"]
        return {
            model["model"]: [
                worker["worker_id"] for worker in model["workers"] if worker["routable"] and worker["proof"] == "proven"
            ]
            for model in models
        }

    async def change(self, *words: str) -> None:
        """Run ``warmfleet pools``."""
        assert await asyncio.to_thread(main, ["pools", *words, "--redis", self.real.redis_url]) == 0

    async def load(self, tag: str, worker_id: str) -> LoadRow:
        [found] = [view for view in await self.pools[tag].workers.read() if view.worker_id == worker_id]
        return found.load


@asynccontextmanager
async def spread(folder: Path) -> AsyncIterator[Spread]:
    tags = [f"{SERVED_NAME}#1", f"{SERVED_NAME}#2"]
    with server(valkey_binary()) as url:
        assert await asyncio.to_thread(main, ["pools", "add", *tags, "--redis", url]) == 0
        pools = {tag: Fleet(connect(url, timeout_s=5), tag) for tag in tags}
        with (
            engines(url, folder) as found,
            running_replicas(url, 1, WARMFLEET_DECIDE_TIMEOUT_S=PATIENT_SECONDS) as [replica],
        ):
            yield Spread(Real([replica.url], found, url), replica, pools)
        for pool in pools.values():
            await pool.close()


@contextmanager
def engines(redis_url: str, folder: Path) -> Iterator[dict[str, VllmEngine]]:
    """Two engines, by worker_id. WARMFLEET_MODEL is the name of the model, without a pool."""
    options = [
        EngineOptions(
            redis_url=redis_url,
            worker_id=name,
            blocks=BLOCKS,
            arguments=("--shutdown-timeout", "10"),
            environment={"ENGINE_TRUTH_JOURNAL": str(folder / name), "ENGINE_TRUTH_STEP_S": STEP_S},
        )
        for name in ("vllm-a", "vllm-b")
    ]
    with running(*options) as started:
        yield {engine.worker_id: engine for engine in started}


async def test_engines_find_their_pools_and_one_moves_while_it_serves(tmp_path: Path) -> None:
    async with spread(tmp_path) as fleet:
        seats = await fleet.seats()
        assert sorted(map(len, seats.values())) == [1, 1], "each has a pool of its own"
        old, new = fleet.pools
        [mover] = seats[old]
        empty = await restart(fleet, mover, old)
        assert (await fleet.seats()).items() >= seats.items(), "both are where they were"
        await fleet.change("remove", empty)

        talks = await hold(fleet.real)
        await move(fleet, mover, old, new)
        assert await fleet.seats() == {old: [], new: sorted(fleet.real.engines)}
        for pool in fleet.pools.values():
            await nothing_is_left(pool)
        await predict(fleet, new, talks)

        await fleet.change("remove", old)
        await poll(lambda: forgotten(fleet, old), 120, "the replica lets the old pool go", every_s=0.5)
        await poll(lambda: is_empty(fleet.pools[old]), 20, "nothing of the old pool is left in Redis", every_s=0.5)
        assert await fleet.seats() == {new: sorted(fleet.real.engines)}


async def restart(fleet: Spread, worker_id: str, tag: str) -> str:
    """Restart the engine of this pool beside an empty one, where a new engine of its name would go: returns its tag."""
    engine = fleet.real.engines[worker_id]
    name = engine.options.worker_id
    others = (f"{SERVED_NAME}#{number}" for number in itertools.count(3))
    empty = next(other for other in others if weight(other, name) > weight(tag, name))
    await fleet.change("add", empty)
    await asyncio.to_thread(engine.stop)
    said = len(engine.log.read_bytes())
    engine.start()
    await asyncio.to_thread(engine.wait)
    await poll(lambda: f"{worker_id} joined ".encode() in engine.log.read_bytes()[said:], 60, "it has joined again")

    async def serves() -> bool:
        return worker_id in itertools.chain(*(await fleet.seats()).values())

    await poll(serves, 60, "it serves again", every_s=0.2)
    return empty


async def hold(real: Real) -> dict[str, list[Talk]]:
    """Let each engine hold conversations that no other has; they go past the fleet."""
    seeds = itertools.count()
    talks = {name: [[user(WORDS, next(seeds))] for _ in range(TALKS)] for name in real.engines}
    for name, engine in real.engines.items():
        for messages in talks[name]:
            await asyncio.to_thread(engine.chat, messages)
    return talks


async def move(fleet: Spread, mover: str, old: str, new: str) -> None:
    """Drain the pool of ``mover`` under load. Every request ends whole, also a long one that began before the move."""
    pool, load = fleet.pools[old], Load([fleet.replica], sys.maxsize, CLIENTS)
    async with asyncio.TaskGroup() as tasks:
        long = await long_answers(fleet, tasks)
        tasks.create_task(load.run())
        await poll(lambda: load.done >= CLIENTS, 120, "the load is under way")
        begun = time.monotonic()
        await fleet.change("drain", old, "--move")

        async def left() -> bool:
            return await pool.redis.zscore(pool.keys.alive, mover) is None

        async def serves() -> bool:
            return mover in (await fleet.seats())[new] and (await fleet.load(new, mover)).in_flight > 0

        async def told() -> bool:
            return (await fleet.load(new, mover)).foreign_decode_tokens > 0

        await poll(left, 60, "its core has left")
        left_s = time.monotonic() - begun
        await poll(serves, 120, "it has requests in its new pool", every_s=0.1)
        serves_s, during = time.monotonic() - begun, load.done
        await poll(told, 20, "its long answer is foreign load there", every_s=0.1)
        assert (await fleet.load(old, mover)).in_flight > 0, "and is booked where it was decided"
        await poll(lambda: load.done >= during + AFTER, 300, "the load goes on")
        load.total = load.begun  # no more
    print(f"\nthe core left after {left_s:.1f} s; it had requests in its new pool after {serves_s:.1f} s")
    print(f"{load.done} requests, of which {during} until then: {dict(load.outcomes)}, {dict(load.words)}")
    print(f"counted: { ({tag: await pool.index.counts() for tag, pool in fleet.pools.items()}) }")
    assert load.failures == []
    assert {task.result() for task in long} == {LONG_ANSWER}


async def long_answers(fleet: Spread, tasks: asyncio.TaskGroup) -> list[asyncio.Task[int]]:
    """Begin long answers until an engine of each pool has one."""
    begun: list[asyncio.Task[int]] = []
    busy: list[bool] = [False]
    while not all(busy):
        first = asyncio.Event()
        begun.append(tasks.create_task(stream(fleet.replica.url, first, len(begun))))
        await first.wait()
        busy = [any(worker.load.in_flight for worker in await pool.workers.read()) for pool in fleet.pools.values()]
    return begun


async def predict(fleet: Spread, tag: str, talks: dict[str, list[Talk]]) -> None:
    """Go on with each conversation at the engine that has held it since before the move: predicted = cached."""
    pool, [url], tokens = fleet.pools[tag], fleet.real.replicas, 0
    await settled(fleet.real, pool)
    before = await pool.index.counts()
    for name, messages in [(name, talk) for name, some in talks.items() for talk in some]:
        for question in range(2):
            turn = await ask(url, messages)
            assert (turn.worker_id, turn.predicted) == (name, turn.cached)
            assert turn.cached > WORDS - BLOCK_TOKENS
            tokens += turn.cached
            messages += [{"role": "assistant", "content": turn.text}, user(40, question)]
            await settled(fleet.real, pool)
    after = await pool.index.counts()
    counts = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in ("exact", "over", "short", "mismatch")}
    print(f"predictions in {tag}: {counts}; {tokens} tokens cached as predicted")
    assert counts == {"exact": 4 * TALKS, "over": 0, "short": 0, "mismatch": 0}


async def forgotten(fleet: Spread, tag: str) -> bool:
    return tag not in await fleet.seats()


async def is_empty(pool: Fleet) -> bool:
    return not [key async for key in pool.redis.scan_iter(f"{pool.keys.prefix}*", 1_000)]
