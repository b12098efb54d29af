"""An engine joins a busy fleet, and a prefix becomes hot: over real HTTP, with real processes."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.e2e.conftest import wait_for_no_load
from tests.e2e.traffic import Sent, Traffic, get
from tests.support.polling import until

from warmfleet.background.prewarm import CLAIM_S
from warmfleet.cli.local.engines import EngineOptions, engine_command
from warmfleet.cli.local.ports import free_port
from warmfleet.cli.local.stack import Member, Plan, Stack
from warmfleet_loadtest.measuring.figures import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.long(
        minutes=4,
        shows=(
            "real processes: an engine that joins a busy fleet gets no more than its share; a prefix in 60 "
            "% of the requests gets the holders that its load needs, and loses them again; a replica is "
            "killed while it warms an engine"
        ),
    ),
    pytest.mark.timeout(600),
]

JOINED = "sim-new"
FIRST_S, END_S = 5.0, 45.0
PREFIX_TOKENS, SUFFIX_TOKENS = 3_000, 600


def add_engine(stack: Stack) -> None:
    """Start one more engine, without waiting for it."""
    port = free_port()
    argv, environment = engine_command(stack.plan.engines, JOINED, port, stack.redis_url)
    stack.engines.append(Member(JOINED, f"http://127.0.0.1:{port}", stack.children.start(JOINED, argv, environment)))


def state(stack: Stack) -> dict[str, Any]:
    """Return the new worker as a living replica lists it, or an empty dict where it is unknown."""
    alive = [replica for replica in stack.replicas if replica.child is not None and replica.child.alive]
    return next((worker for worker in stack.workers(alive[0]) if worker["worker_id"] == f"{JOINED}.0"), {})


async def levels(operators: str, traffic: Traffic, until_s: float) -> list[dict[str, int]]:
    """Return the requests in flight of every routable worker, ten times a second until ``until_s``."""
    seen = []
    while traffic.now_s < until_s:
        workers = (await get(f"{operators}/workers"))["models"][0]["workers"]
        seen.append({worker["worker_id"]: int(worker["load"]["in_flight"]) for worker in workers if worker["routable"]})
        await asyncio.sleep(0.1)
    return seen


def test_a_joining_engine_gets_its_share_and_no_more() -> None:
    """A new engine gets at first a quarter of the requests, those that bring its load level, and some by chance.

    An engine that joins is idle, so each request ends sooner there until it is as busy as the others. That is no
    stampede. A router that chose by old readings of the load would send it every request until the next reading.
    """
    with Stack(Plan(engines=EngineOptions(count=3))) as stack:
        asyncio.run(join(stack))
        wait_for_no_load(stack)


async def join(stack: Stack) -> None:
    urls = [replica.url for replica in stack.replicas]
    traffic = Traffic(urls, 10.0, lambda _at: ("new", traffic.ids(800), 8))
    run = asyncio.ensure_future(traffic.run(END_S))
    watch = asyncio.ensure_future(levels(stack.replicas[0].operators, traffic, END_S))
    await asyncio.sleep(10.0)  # traffic without the new engine
    await asyncio.to_thread(add_engine, stack)
    await run
    seen = await watch
    assert [sent.reply.error for sent in traffic.sent if sent.reply.error] == []
    there = [sent for sent in traffic.sent if sent.reply.worker == f"{JOINED}.0"]
    assert there, "it gets requests"
    begin = min(sent.at_s for sent in there)
    first = [sent for sent in traffic.sent if begin <= sent.at_s < begin + FIRST_S]
    got = sum(sent.reply.worker == f"{JOINED}.0" for sent in first)
    level = next(loads for loads in seen if f"{JOINED}.0" in loads)
    others = [count for name, count in level.items() if name != f"{JOINED}.0"]
    bound = len(first) / 4 + sum(others) / len(others) + 3 * math.sqrt(len(first) * 3 / 16)
    peaks = {name: max(loads.get(name, 0) for loads in seen) for name in seen[-1]}
    p99 = [quantile(traffic.waits(*span), 0.99) for span in ((0, begin), (begin, begin + FIRST_S), (begin, END_S))]
    print(f"\njoin: {got} of {len(first)} requests of its first {FIRST_S:.0f} s, bound {bound:.1f}; at most {peaks}")
    print(f"P99 of TTFT before {p99[0]:.2f} s, in these seconds {p99[1]:.2f} s, until the end {p99[2]:.2f} s")
    assert 0.1 * len(first) < got <= bound
    assert peaks[f"{JOINED}.0"] <= max(count for name, count in peaks.items() if name != f"{JOINED}.0") + 1


async def holders(operators: str, prefix: list[int]) -> set[str]:
    """Return the workers that hold most of the prefix, by the index."""
    told = await get(f"{operators}/explain", {"model": "demo", "prompt": [*prefix, 300]})
    return {
        candidate["worker_id"] for candidate in told["candidates"] if candidate["matched_tokens"] > PREFIX_TOKENS // 2
    }


def test_a_hot_prefix_gets_the_holders_that_its_load_needs() -> None:
    """12 requests a second of 0.15 s each keep at least two engines busy; before and after that, one is enough."""
    with Stack(Plan(engines=EngineOptions(count=4, blocks=1_024))) as stack:
        asyncio.run(hot(stack))
        wait_for_no_load(stack)


async def hot(stack: Stack) -> None:
    calm_s, hot_s, end_s = 10.0, 35.0, 75.0
    urls = [replica.url for replica in stack.replicas]
    rng = random.Random(7)
    prefix = [256 + rng.randrange(4_096) for _ in range(PREFIX_TOKENS)]

    def following(at_s: float) -> tuple[str, list[int], int]:
        share = 0.6 if calm_s <= at_s < hot_s else 0.02
        if rng.random() < share:
            return "hot", prefix + traffic.ids(SUFFIX_TOKENS), 8
        return "other", traffic.ids(400), 8

    traffic = Traffic(urls, 20.0, following)
    run, seen = asyncio.ensure_future(traffic.run(end_s)), list[tuple[float, int]]()
    while not run.done():
        await asyncio.sleep(0.5)
        seen.append((traffic.now_s, len(await holders(stack.replicas[0].operators, prefix))))
    await run
    assert [sent.reply.error for sent in traffic.sent if sent.reply.error] == []
    report(traffic, seen, calm_s, hot_s, end_s)
    first = next(at for at, count in seen if count >= 2 and at >= calm_s)
    assert first - calm_s < 5
    assert max(count for at, count in seen if at < hot_s) >= 2
    assert seen[-1][1] < max(count for _, count in seen)


def report(traffic: Traffic, seen: Sequence[tuple[float, int]], calm_s: float, hot_s: float, end_s: float) -> None:
    print("\nholders over time: " + " ".join(f"{at:.0f}s:{count}" for at, count in seen[::4]))
    for name, begin, end in (("before", 0, calm_s), ("hot", calm_s, hot_s), ("after", hot_s, end_s)):
        hot: list[Sent] = [sent for sent in traffic.sent if sent.kind == "hot" and begin <= sent.at_s < end]
        by = {sent.reply.worker for sent in hot}
        cold = sum(sent.reply.cached_tokens < PREFIX_TOKENS // 2 for sent in hot)
        waits = traffic.waits(begin, end)
        spread = ", ".join(f"P{round(100 * share)} {quantile(waits, share):.2f} s" for share in (0.5, 0.9, 0.99))
        print(f"{name}: {len(waits)} requests, {len(hot)} hot on {len(by)} engines, {cold} of them cold; {spread}")


def test_a_replica_killed_while_it_warms_an_engine_leaves_it_routable_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_WARM_PREFIXES", "6")
    words = ("water", "river", "stone", "paper", "light", "table", "green", "sound", "house", "north")
    with Stack(Plan(engines=EngineOptions(count=1, step_time="8"))) as stack:  # 2 ms a token
        for number in range(6):
            prefix = " ".join(random.Random(number).choices(words, k=700))
            bodies = [{"model": "demo", "prompt": f"{prefix} {tail}?", "max_tokens": 1} for tail in range(4)]
            for replica in stack.replicas:
                for body in bodies[:3]:
                    httpx.post(f"{replica.url}/v1/completions", json=body, timeout=60).raise_for_status()
        add_engine(stack)

        def warming(member: Member) -> bool:
            lines = httpx.get(f"{member.operators}/metrics").text.splitlines()
            return any(
                line.startswith("warmfleet_warmed_tokens_total ") and float(line.split()[1]) > 0 for line in lines
            )

        until(lambda: any(map(warming, stack.replicas)), "a replica warms it", 60)
        assert (state(stack)["proof"], state(stack)["routable"]) == ("warming", False)
        [owner] = [replica for replica in stack.replicas if warming(replica)]
        assert owner.child is not None
        owner.child.process.send_signal(signal.SIGKILL)
        owner.child.process.wait()
        began = time.monotonic()
        until(lambda: state(stack).get("routable", False), "it is routable", CLAIM_S + 10)
        print(f"\nroutable {time.monotonic() - began:.1f} s after the replica that warmed it was killed")
        assert state(stack)["proof"] == "proven"
        wait_for_no_load(stack, 45)
