"""Long prompts beside streams: two engines of which one computes prompts for the other, and the same two that do all
themselves. On a GPU (tests/README.md, "On a GPU") both are on it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.device import DEVICE
from tests.vllm.engine import SERVED_NAME, SLEEPS, EngineOptions, running
from tests.vllm.replicas import replicas
from tests.vllm.test_roles import options

from warmfleet.cli.local.ports import free_port

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=6,
        shows=(
            "real vLLM on the CPU or a GPU, long prompts beside streams: gaps between tokens and time to first token "
            "of two engines with NIXL, one of them for prompts, and of two that serve alone"
        ),
    ),
    pytest.mark.timeout(480),
]

STREAMS, PROMPT, BLOCKS = 6, 3_400, 800
EVERY_S, SECONDS = {"cpu": 1.5, "cuda": 0.25}, 40.0


@dataclass
class Seen:
    """Seconds between two tokens of the streams, and until the first token of each long prompt. split: how many of
    these were computed by one engine for the other."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    split: int = 0

    def figures(self) -> dict[str, float]:
        gaps = sorted(self.gaps)
        told = {"gap_p50_ms": gaps[len(gaps) // 2], "gap_p99_ms": gaps[len(gaps) * 99 // 100]}
        told |= {
            "ttft_mean_ms": statistics.mean(self.first),
            "ttft_p90_ms": sorted(self.first)[len(self.first) * 9 // 10],
        }
        return {name: round(1_000 * seconds, 1) for name, seconds in told.items()} | {"long": len(self.first)}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_long_prompts_beside_streams(device: str) -> None:
    if os.environ.get("ENGINE_DEVICE", "cpu") != device:
        pytest.skip(f"the engines of this run are not on the device {device}: set ENGINE_DEVICE (tests/README.md)")
    apart = await measured(device, ("kv_producer", "kv_consumer"))
    together = await measured(device, ("", ""))
    print(f"\n{device}: apart ({apart.split} of {len(apart.first)} split) {apart.figures()}")
    print(f"{device}: together {together.figures()}")
    assert apart.split > len(apart.first) // 4
    assert not together.split


async def measured(device: str, roles: tuple[str, str]) -> Seen:
    """Drive two engines with these roles (empty: no connector) for a while."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(server(valkey_binary()))
        loaded = DEVICE.loaded if device == "cuda" else ()
        made = []
        for name, role in zip("ab", roles, strict=True):
            one = options(redis_url, name, role, free_port(), device) if role else EngineOptions(redis_url, name)
            environ = {**SLEEPS, **one.environment}
            made.append(
                replace(one, blocks=BLOCKS, arguments=(*one.arguments, *loaded), environment=environ, start_s=200)
            )
        stack.enter_context(running(*made))
        [url] = stack.enter_context(replicas(redis_url, 1, engines=2))
        seen, rng = Seen(), random.Random(5)
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            ends = time.monotonic() + SECONDS
            streams = [asyncio.create_task(stream(client, url, seen, ends)) for _ in range(STREAMS)]
            longs = []
            while time.monotonic() < ends:
                longs.append(
                    asyncio.create_task(long_prompt(client, url, seen, rng.choices(range(10, 4_000), k=PROMPT)))
                )
                await asyncio.sleep(EVERY_S[device])
            await asyncio.gather(*longs, *streams)
        return seen


async def stream(client: httpx.AsyncClient, url: str, seen: Seen, ends: float) -> None:
    while time.monotonic() < ends:
        body = {"prompt": [7] * 40, "max_tokens": 200, "ignore_eos": True}
        _, times = await tokens(client, url, body)
        seen.gaps += [after - before for before, after in itertools.pairwise(times)]


async def long_prompt(client: httpx.AsyncClient, url: str, seen: Seen, ids: list[int]) -> None:
    began_at = time.monotonic()
    prefill, times = await tokens(client, url, {"prompt": ids, "max_tokens": 4, "ignore_eos": True})
    seen.first.append(times[0] - began_at)
    seen.split += bool(prefill)


async def tokens(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, list[float]]:
    """Ask for a stream; return the engine that computed the prompt for the other, and when each event came."""
    asked = {"model": SERVED_NAME, "stream": True, "temperature": 0} | body
    async with client.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = answer.aiter_lines()
        times = [
            time.monotonic() async for line in lines if line.startswith("data: {") and json.loads(line[6:])["choices"]
        ]
        return answer.headers.get("x-warmfleet-prefill-worker", ""), times
