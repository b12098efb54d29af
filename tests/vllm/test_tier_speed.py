"""A real engine that offloads: its tier is predicted by source, and its loads are priced as copies.

On a GPU (tests/README.md, "On a GPU") the tier is vLLM's own, and the engine drafts tokens, for which the CPU's lacks a
package. On the CPU the tier is that of ``truth/host_tier.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.device import DEVICE
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME, VENV, EngineOptions, running
from tests.vllm.replicas import replicas
from tests.vllm.tier_talk import BLOCKS, Talk, host_tier

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=4,
        shows=(
            "real vLLM with a tier on the CPU, or on a GPU with vLLM's own offloading and drafts from the prompt: "
            "predicted by source is what vLLM counts; seconds per byte beside a measured copy"
        ),
    ),
    pytest.mark.timeout(480),
]

REQUESTS = 80
GIGABYTES = "2"  # of the tier on a machine with a GPU
DRAFTS = ("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}))
COPIES_PER_LOAD = 20  # most times that a load of vLLM may take longer than a copy of as many bytes in one piece


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_loads_are_predicted_and_their_time_is_learned(device: str) -> None:
    if os.environ.get("ENGINE_DEVICE", "cpu") != device:
        pytest.skip(f"the engines of this run are not on the device {device}: set ENGINE_DEVICE (tests/README.md)")
    tier = ("--kv-offloading-size", GIGABYTES, *DEVICE.loaded, *DRAFTS) if device == "cuda" else host_tier(4 * BLOCKS)
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(redis_url=redis_url, blocks=BLOCKS, arguments=tier, start_s=240)
        with running(options) as [engine], replicas(redis_url, 1, engines=1) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)
            async with httpx.AsyncClient(timeout=120) as client:
                talk = Talk(engine, url, fleet, client, random.Random(3))
                for _ in range(REQUESTS):
                    await talk.ask()
            await poll(lambda: learned(fleet), 30, "a heartbeat tells how long a byte takes")
            told = (await fleet.workers.read())[0].record["sets"]["cpu"]
            await fleet.close()
    copied = await asyncio.to_thread(measured_copy, device, told["bytes_per_token"] * BLOCK_TOKENS)
    print(f"\n{device}: {dict(talk.seen)}, {len(talk.differ)} differ: {talk.differ}")
    print(f"{told}: {told['ps_per_byte']} ps a byte learned, {copied} ps in a copy of a block")
    assert not talk.differ
    assert talk.seen["loaded"] > REQUESTS // 10
    assert copied / 2 < told["ps_per_byte"] < COPIES_PER_LOAD * copied or device == "cpu"


async def learned(fleet: Fleet) -> bool:
    [view] = await fleet.workers.read()
    return "ps_per_byte" in view.record["sets"]["cpu"]


def measured_copy(device: str, size: int) -> float:
    """Picoseconds that a byte takes in a copy of so many bytes from memory to this device."""
    program = [str(VENV / "bin" / "python"), str(Path(__file__).with_name("copy_speed.py")), device, str(size)]
    return float(subprocess.run(program, capture_output=True, text=True, check=True).stdout)
