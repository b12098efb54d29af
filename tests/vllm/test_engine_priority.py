"""Real engines that sort: prompts wait there in the order of their uncached work, and mixed load near saturation."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import psutil
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.device import DEVICE
from tests.vllm.engine import BLOCK_TOKENS, ROOT, SERVED_NAME, SLEEPS, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet_loadtest.replay import Target, replay, summary, table
from warmfleet_loadtest.traces.workload import Mix, mixed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.vllm.engine import VllmEngine

    from warmfleet_loadtest.measuring.client import Reply
    from warmfleet_loadtest.traces.trace import Trace

pytestmark = pytest.mark.vllm
SORTS = ("--scheduling-policy", "priority")
#: Engines sleep while they wait, or they would spin on two cores: replicas would wait seconds for a core.
#: Sizes of prompts in tokens, in the order in which they come.
SIZES = (3_200, 2_400, 1_600, 800, 100)
#: Seconds between prompts. A waiting prompt grows old: it goes before one that comes later by more than four times the
#: time that the difference of their work takes. Of two in a row that is .4 s at the 7,000 tokens a second of
#: models/small; of models/tiny it is less than the time between two prompts on a busy machine.
GAP_S = 0.03
#: Rules under comparison. ``engines``: the engines sort, and enough requests wait there for sorting.
RULES: dict[str, dict[str, str]] = {
    "held_2s": {"WARMFLEET_MAX_ENGINE_WAIT_S": "2"},
    "default": {},
    "engines": {"WARMFLEET_MAX_ENGINE_WAIT_S": "2", "WARMFLEET_ENGINE_PRIORITY": "1"},
}
CACHE_TOKENS = 16_384
#: Of the requests that the engines served of the flood in a second. At 1.0 some slices were more than they can do: then
#: the line grows as long as the slice lasts, and a mean tells which rule met the machine at a slow moment.
NEAR_SATURATION = 0.85


async def sizes_as_they_end(url: str, engine: VllmEngine) -> list[int]:
    """Ask for prompts of SIZES while a stream keeps the engine busy, and end the stream when all of them wait there.
    Returns the sizes as their answers come.
    """
    ended: list[int] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        asyncio.TaskGroup() as group,
        client.stream("POST", "/v1/completions", json=body(40, 4_000, stream=True)) as busy,
    ):
        tokens = busy.aiter_bytes()  # the stream ends when nothing refers to its task
        await anext(tokens)
        for size in SIZES:
            group.create_task(ask(client, size, ended))
            await asyncio.sleep(GAP_S)
        while await waiting(client, engine) < len(SIZES):
            assert not ended, "the stream must keep the engine busy until all prompts wait there"
            await asyncio.sleep(0.1)
    return ended


def body(size: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    ids = random.Random(size).choices(range(300, 500), k=size)
    return {"model": SERVED_NAME, "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, **more}


async def ask(client: httpx.AsyncClient, size: int, ended: list[int]) -> None:
    (await client.post("/v1/completions", json=body(size, 1))).raise_for_status()
    ended.append(size)


async def waiting(client: httpx.AsyncClient, engine: VllmEngine) -> float:
    """The number of requests that wait in this engine, by its own metrics."""
    return gauge((await client.get(f"{engine.url}/metrics")).text, "vllm:num_requests_waiting")


def gauge(metrics: str, name: str) -> float:
    """The sum of the samples of this name; 0 without any."""
    families = text_string_to_metric_families(metrics)
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def speed_known(url: str) -> None:
    """Return when this replica knows the engine's speed: the numbers that it sends are computed with it."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for size in range(1_001, 1_101):
            if gauge((await client.get("/metrics")).text, "warmfleet_worker_prefill_tokens_per_second"):
                return
            (await client.post("/v1/completions", json=body(size, 1))).raise_for_status()
    raise AssertionError("no speed is known after a hundred prompts")


class Played(NamedTuple):
    """Answers of a load, how long all of them took, and the CPU time that the engines used meanwhile."""

    replies: list[Reply]
    spent_s: float
    engine_cpu_s: float

    def and_then(self, other: Played) -> Played:
        return Played(
            self.replies + other.replies, self.spent_s + other.spent_s, self.engine_cpu_s + other.engine_cpu_s
        )

    def told(self) -> dict[str, Any]:
        """The figures of the answers. ``engine_cpu_us_per_token``: of a computed one. It tells when the machine was
        slow: near saturation a few percent multiply a mean.
        """
        found = summary(self.replies, skip=0.0)
        computed = max(1, found["recomputed_tokens"])
        return found | {"engine_cpu_us_per_token": round(1e6 * self.engine_cpu_s / computed, 1)}


def load(rate: float, seconds: float, seed: int) -> Trace:
    return mixed(Mix(rate=rate, seconds=seconds, seed=seed, output_tokens=(2, 12)))


def play(redis_url: str, engines: Sequence[VllmEngine], trace: Trace, settings: dict[str, str]) -> Played:
    """Send a load through two new replicas to engines with empty caches."""
    for engine in engines:
        engine.reset_prefix_cache()
    with replicas(redis_url, 2, 2, "cost", **settings) as urls:
        time.sleep(1.0)  # one period of upkeep, after which the router knows that the caches are empty
        began, used_s = time.monotonic(), cpu_s(engines)
        replies, _ = uvloop.run(replay(trace, Target(tuple(urls), SERVED_NAME)))
        return Played(replies, time.monotonic() - began, cpu_s(engines) - used_s)


def cpu_s(engines: Sequence[VllmEngine]) -> float:
    """CPU time of all processes of these engines so far."""
    servers = [psutil.Process(engine.process.pid) for engine in engines if engine.process is not None]
    times = [process.cpu_times() for server in servers for process in (server, *server.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


@pytest.mark.long(minutes=2, shows="a real engine takes waiting prompts by the priority that routers send")
def test_prompts_wait_in_the_engine_by_their_uncached_work() -> None:
    with server(valkey_binary()) as redis_url:
        arguments = (*SORTS, "--max-num-seqs", "1", *DEVICE.loaded)
        options = EngineOptions(redis_url=redis_url, model=small_model(), arguments=arguments, environment=SLEEPS)
        with running(options) as engines:
            found = {}
            for wanted in ("1", "0"):
                settings = {"WARMFLEET_ENGINE_PRIORITY": wanted, "WARMFLEET_MAX_ENGINE_WAIT_S": "0"}
                with replicas(redis_url, count=1, engines=1, **settings) as urls:
                    uvloop.run(speed_known(urls[0]))
                    found[wanted] = uvloop.run(sizes_as_they_end(urls[0], engines[0]))
                engines[0].reset_prefix_cache()
    assert found["1"] == sorted(SIZES)
    assert found["0"][-1] != max(SIZES)  # the order in which they came, or nearly so on a busy machine


def small_model() -> Path:
    model = ROOT / "models" / "small"
    if not model.exists():
        pytest.fail("models/small is missing: run `make vllm`")
    return model


@pytest.mark.timeout(1_800)
@pytest.mark.long(
    minutes=15, shows="mixed load near saturation of two real engines: held back, by default, sorted by engines"
)
def test_mixed_load_near_saturation() -> None:
    model = small_model()
    found: dict[str, Played] = {rule: Played([], 0.0, 0.0) for rule in RULES}
    with server(valkey_binary()) as redis_url:
        blocks = CACHE_TOKENS // BLOCK_TOKENS
        options = [
            EngineOptions(
                redis_url=redis_url,
                worker_id=name,
                model=model,
                blocks=blocks,
                arguments=(*SORTS, *DEVICE.loaded),
                environment=SLEEPS,
            )
            for name in ("vllm-a", "vllm-b")
        ]
        with running(*options) as engines:
            flood = play(
                redis_url, engines, load(DEVICE.flood_rate, DEVICE.flood_s, seed=DEVICE.rounds), RULES["held_2s"]
            )
            rate = NEAR_SATURATION * sum(not reply.error for reply in flood.replies) / flood.spent_s
            print(f"\n{rate:.1f} requests a second are near saturation", flush=True)
            for number in range(DEVICE.rounds):
                for rule in (*RULES, *RULES)[number % len(RULES) :][: len(RULES)]:  # each is first, second and last
                    one = play(redis_url, engines, load(rate, DEVICE.slice_s, seed=number), RULES[rule])
                    print(f"slice {number} {rule}: {json.dumps(one.told())}", flush=True)
                    found[rule] = found[rule].and_then(one)
    rows = {rule: outcome.told() for rule, outcome in found.items()}
    for rule, outcome in found.items():
        tokens = sum(reply.prompt_tokens + reply.output_tokens for reply in outcome.replies)
        rows[rule]["tokens_per_s"] = round(tokens / outcome.spent_s, 1)
    print(table(rows))
    print(json.dumps(rows))
    assert all(row["errors"] == 0 for row in rows.values())
    for rule in ("default", "engines"):
        assert rows[rule]["tokens_per_s"] > 0.98 * rows["held_2s"]["tokens_per_s"]
        assert rows[rule]["ttft_mean_s"] < 1.05 * rows["held_2s"]["ttft_mean_s"]
