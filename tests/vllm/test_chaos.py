"""Real engines under eviction pressure, while Redis is killed twice and a replica three times. Is the index ever wrong?

CHAOS_REQUESTS=600 in the environment makes a short run; by default there are 3,000 requests.

The witness (MONITOR) knows the index at each decision. The engines' journals know their tables and the blocks that
they found when they scheduled a request. Every difference must have a cause that both show.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from tests.support.polling import poll
from tests.vllm.causes import CROWD, Judge
from tests.vllm.chaos import Chaos, Load
from tests.vllm.engine import ROOT, SERVED_NAME, TRUTH, EngineOptions, VllmEngine, running
from tests.vllm.history import Engine, Index
from tests.vllm.replicas import running_replicas
from tests.vllm.witness import MortalRedis

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet_worker.protocol.wire import HEARTBEAT_SECONDS, Keys

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.causes import Verdict

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows=(
            "real vLLM answers 3,000 requests while Redis is killed twice and a replica three times: every "
            "wrong prediction has a known cause, and the index equals the engines' block tables"
        ),
    ),
]

REQUESTS = int(os.environ.get("CHAOS_REQUESTS", "3000"))
BLOCKS = 192  # of 32 tokens, enough for about a third of the clients' conversations
STEP_S = "0.05"  # as long as a larger model's step, so that requests overlap without starving the machine of CPU
PERIOD_S = HEARTBEAT_SECONDS + 1.0  # after this time the index must be right by itself


@pytest.mark.timeout(3_600)
async def test_predictions_and_index_under_chaos(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(MortalRedis(Keys(SERVED_NAME)))
        options = [engine_options(name, server, tmp_path) for name in ("vllm-a", "vllm-b")]
        engines = {engine.worker_id: engine for engine in stack.enter_context(running(*options))}
        # A template's process that starves on a busy machine meets its limit, and such a chat predicts nothing.
        replicas = stack.enter_context(running_replicas(server.url, WARMFLEET_APPROVED_TEMPLATES="*"))
        load = Load(list(replicas), REQUESTS)
        chaos = Chaos(load, server, replicas)
        begun = time.monotonic()
        await asyncio.gather(load.run(), chaos.run())
        seconds = time.monotonic() - begun
        fleet = Fleet(connect(server.url, timeout_s=5), SERVED_NAME)
        try:
            await asyncio.sleep(PERIOD_S)
            await index_is_the_tables(fleet, engines)
            await nothing_is_left(fleet)
            print("\ncounted in Redis since it last came back:", await fleet.index.counts())
        finally:
            await fleet.close()
    journals = {worker: Engine.of(tmp_path / f"{worker}.journal") for worker in engines}
    index = Index.of(server)
    verdict = Judge(index, journals, chaos.strikes).verdict()
    report(load, seconds, verdict, journals)
    given_up(index, journals)
    print("strikes:", chaos.strikes)
    assert load.failures == []
    assert (len(chaos.lost), len(chaos.replica_lost)) == (2, 3)
    told = {s.reservation: s.cached for e in journals.values() for s in e.stays.values() if s.ran is not None}
    assert {reservation: cached // 32 for reservation, cached in index.progress.items()}.items() <= told.items()
    assert verdict.odd == []
    assert verdict.compared > REQUESTS / 2, "decisions without Redis predict nothing: they must be few"
    assert verdict.crowded.total() > verdict.compared / 2, f"fewer than {CROWD} concurrent requests"


def engine_options(name: str, server: MortalRedis, folder: Path) -> EngineOptions:
    environment = {
        "ENGINE_TRUTH_JOURNAL": str(folder / f"{name}.0.journal"),
        "ENGINE_TRUTH_STEP_S": STEP_S,
        "PYTHONPATH": os.pathsep.join(
            (str(TRUTH), str(ROOT / "worker_plugin"))
        ),  # finds the plugin of this working tree
    }
    return EngineOptions(redis_url=server.url, worker_id=name, blocks=BLOCKS, environment=environment)


async def index_is_the_tables(fleet: Fleet, engines: dict[str, VllmEngine]) -> None:
    """Compare the index with the engines' tables, entry by entry and in both directions."""
    keys, store = fleet.keys, fleet.redis
    views = {view.worker_id: view for view in await fleet.workers.read()}
    assert views.keys() == engines.keys()
    tables = {worker: {key[-12:-4] for key in await asyncio.to_thread(engines[worker].table)} for worker in engines}
    assert min(map(len, tables.values())) > BLOCKS / 2
    expected: dict[bytes, set[bytes]] = {}
    for worker_id, view in views.items():
        slot = view.record["slot"]
        assert await store.smembers(keys.slot(slot)) == tables[worker_id], worker_id
        for block in tables[worker_id]:
            expected.setdefault(keys.block(block), set()).add(str(slot).encode())
    forward = {key async for key in store.scan_iter(keys.prefix + "b:*", 1_000)}
    assert forward == expected.keys()
    for key, slots in expected.items():
        assert await store.smembers(key) == slots
    slots = {keys.slot(view.record["slot"]).encode() for view in views.values()}
    assert {key async for key in store.scan_iter(keys.prefix + "s:*", 1_000)} == slots, "old slots are collected"


async def nothing_is_left(fleet: Fleet) -> None:
    """Wait until no load, reservation or credit is left. Leases expire after 30 s, tombstones after 60."""
    keys, store = fleet.keys, fleet.redis

    async def empty() -> bool:
        loads = [view.load for view in await fleet.workers.read()]
        booked = sum(
            worker_load.in_flight + worker_load.prefill_tokens + worker_load.decode_tokens for worker_load in loads
        )
        return not booked and not await store.hlen(keys.lease) and not await store.zcard(keys.leases)

    await poll(empty, 75, "no reservation is left")
    credit = [key for name in "xc" async for key in store.scan_iter(f"{keys.prefix}{name}:*", 1_000)]
    assert credit == []


def given_up(index: Index, journals: dict[str, Engine]) -> None:
    """Return how long Redis expected each prompt that no engine got, because its client or its replica gave up."""
    came = {reservation for engine in journals.values() for reservation in engine.stays}
    never = [booking for booking in index.bookings.values() if booking.reservation not in came]
    told = [(index.told[booking.reservation], booking.at) for booking in never if booking.reservation in index.told]
    late = sorted(round(there - booked, 2) for there, booked in told) or [0.0]
    print(f"booked, never came: {len(never)}; told after, s: p50 {late[len(late) // 2]}, longest {late[-8:]}")


def report(load: Load, seconds: float, verdict: Verdict, journals: dict[str, Engine]) -> None:
    lags = sorted(verdict.lags) or [0.0]
    print(f"\n{load.total} requests in {seconds:.0f} s, {load.total / seconds:.1f} a second")
    print("clients:", dict(load.outcomes), "reservations:", dict(load.words))
    print("preempted:", sum(journal.preemptions for journal in journals.values()))
    print(verdict.table())
    print(f"not yet reported: {len(lags)}, p50 {lags[len(lags) // 2]:.3f} s, longest {lags[-1]:.3f} s")
    for line in [*verdict.odd[:10], *load.failures[:10]]:
        print("!", line)
