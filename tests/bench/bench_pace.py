"""How upkeep slows decisions: ``python -m tests.bench.bench_pace`` prints one JSON object as its last line.

Each of 64 workers writes a backlog. A child process applies it as a router does, while this process decides: chains of
625 blocks, one request after another, 1 ms in between. It does so three times: without a backlog, with the usual share
of Redis's time for the backlog, and with all of its time. decide_ms is the wait of the router on this machine, beside
other work. audit: the CPU time of the calls that walk one worker's slot to its end, by the scheduler's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import redis
from tests.support.fleet.keyspace import Keyspace
from tests.support.fleet.reporting_worker import ReportingWorker
from tests.support.redis.servers import PATIENT, server, valkey_binary

from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.protocol import wire

WORKERS, CHAIN_BLOCKS, IDLE_S = 64, 625, 5.0


async def write(store: Any, fleet: Fleet, batches: int) -> list[ReportingWorker]:
    """Let every worker join and store ``batches`` times 128 blocks."""
    cores, rng = [ReportingWorker(store, fleet, f"c{number}") for number in range(WORKERS)], random.Random(1)
    for reporter in cores:
        await reporter.join(capacity_blocks=1_000_000)
        pipe = store.pipeline(transaction=False)
        for _ in range(batches):
            reporter.number += 1
            pipe.xadd(
                reporter.stream,
                wire.entry(reporter.nonce, reporter.number, "stored", rng.randbytes(8 * wire.BATCH_BLOCKS)),
            )
        await pipe.execute()
    return cores


def upkeep(url: str, model: str, share_permille: int, answer: Any) -> None:
    """Run the upkeep of a router until the backlog is gone; send (blocks, seconds)."""

    async def run() -> None:
        async with connect(url, timeout_s=5) as client:
            fleet = Fleet(client, model, timeouts=PATIENT)
            fleet.pace = replace(Pace(), share_permille=share_permille)
            blocks, start, quiet = 0, time.perf_counter(), 0
            while quiet < 3:
                applied = await fleet.step()
                blocks, quiet = blocks + applied, 0 if applied else quiet + 1
                await asyncio.sleep(0.05)
            answer.put((blocks, time.perf_counter() - start - 0.15))

    asyncio.run(run())


async def decide_while(url: str, model: str, share_permille: int, batches: int) -> dict[str, Any]:
    async with connect(url, timeout_s=5) as store:
        fleet = Fleet(store, model, timeouts=PATIENT)
        keyspace, answer = Keyspace(store, fleet), multiprocessing.get_context("spawn").Queue()
        await keyspace.workers(8)
        await keyspace.ticked(grace_ms=600_000)
        await write(store, fleet, batches)
        waits, end = [], time.perf_counter() + IDLE_S
        child = multiprocessing.get_context("spawn").Process(target=upkeep, args=(url, model, share_permille, answer))
        if batches:
            child.start()
        while answer.empty() if batches else time.perf_counter() < end:
            ask = keyspace.ask(keyspace.chain(CHAIN_BLOCKS))
            start = time.perf_counter()
            await fleet.decide(ask)
            waits.append(1_000 * (time.perf_counter() - start))
            await fleet.settle(ask.reservation, "cancelled")
            await asyncio.sleep(0.001)
        blocks, seconds = answer.get() if batches else (0, IDLE_S)
        if batches:
            child.join()
            assert blocks == WORKERS * batches * wire.BATCH_BLOCKS, f"only {blocks} blocks were applied"
        cuts = statistics.quantiles(waits, n=1000)
        return {
            "decide_ms": {"p50": round(cuts[499], 3), "p99": round(cuts[989], 3), "p999": round(cuts[998], 3)},
            "decisions": len(waits),
            "applied_per_s": round(blocks / seconds),
        }


def ran_ms(schedstat: Path) -> float:
    """Return the CPU time of a thread in ms."""
    return int(schedstat.read_text().split()[0]) / 1e6


async def audit(url: str, model: str, blocks: int) -> dict[str, Any]:
    """Return the CPU times of the calls of one walk over ``blocks`` blocks."""
    async with connect(url, timeout_s=5) as store:
        fleet = Fleet(store, model, timeouts=PATIENT)
        fleet.pace = replace(Pace(), audit_gap_ms=0)
        reporter, rng = ReportingWorker(store, fleet), random.Random(3)
        await reporter.join(capacity_blocks=blocks)
        for _ in range(blocks // wire.BATCH_BLOCKS):
            await reporter.send("stored", rng.randbytes(8 * wire.BATCH_BLOCKS))
            await fleet.apply(reporter.worker_id)
        await reporter.applied()
        await fleet.audit(3600)
        await store.zadd(fleet.keys.audit, {reporter.worker_id: 1})
        process = (await store.info("server"))["process_id"]
        clock, calls, total = Path(f"/proc/{process}/schedstat"), [], 0
        walking = True
        while walking:
            before = ran_ms(clock)
            step = await fleet.audit(3600)
            calls.append(ran_ms(clock) - before)
            walking, total = step.walking, total + step.blocks
            assert not step.differs
        return {
            "blocks": total,
            "calls": len(calls),
            "call_ms": {"mean": round(statistics.mean(calls), 3), "longest": round(max(calls), 3)},
            "us_per_block": round(1_000 * sum(calls) / total, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=128, help="of 128 blocks, per worker")
    parser.add_argument("--audit", type=int, default=100_000, help="blocks of the slot that is walked")
    parser.add_argument("--server", help="binary; default: redis-server, else the embedded Valkey")
    options = parser.parse_args()
    with server(options.server or shutil.which("redis-server") or valkey_binary()) as url:
        made: dict[str, Any] = {"audit": asyncio.run(audit(url, "bench-audit", options.audit))}
        for name, share, batches in (
            ("idle", 300, 0),
            ("paced", 300, options.batches),
            ("all", 1_000, options.batches),
        ):
            made[name] = asyncio.run(decide_while(url, f"bench-{name}", share, batches))
        with redis.Redis.from_url(url) as client:
            info: Any = client.info("server")
        made["server"] = info.get("valkey_version") or info["redis_version"]
        print(json.dumps(made))


if __name__ == "__main__":
    main()
