"""Real vLLM, a prefill and a decode engine behind a router: the blocks of clients that leave are freed."""

from __future__ import annotations

import asyncio
import random
import re
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.support.fleet.split_requests import make_busy
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm import test_mooncake, test_roles
from tests.vllm.engine import BLOCK_TOKENS, SERVED_NAME, running
from tests.vllm.replicas import PATIENT_SECONDS, replicas

from warmfleet.cli.local.ports import free_port
from warmfleet.fleet import Fleet, connect

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vllm.engine import EngineOptions, VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.long(
        minutes=2,
        shows=(
            "real vLLM with NIXL and with Mooncake, a prefill and a decode engine: 200 clients leave at any time of "
            "their split requests, and the blocks of prompts that were just computed are freed at once"
        ),
    ),
]
CLIENTS, AT_ONCE, PROMPT = 200, 2, 1_000
BLOCKS = 2_000  # at the prefill engine, so that it keeps on computing whatever stays
#: Share of prompts that may stay: the engine answered just as a client left, long before the router believed that.
MOST_KEPT = 0.1


def nixl(redis_url: str, name: str, role: str) -> EngineOptions:
    return test_roles.options(redis_url, name, role, free_port())


@pytest.mark.parametrize("options", [nixl, test_mooncake.options], ids=["nixl", "mooncake"])
async def test_blocks_of_clients_that_leave_at_any_time_are_freed(options: Callable[..., EngineOptions]) -> None:
    with server(valkey_binary()) as redis_url:
        wanted = replace(options(redis_url, "p", "kv_producer"), blocks=BLOCKS), options(redis_url, "d", "kv_consumer")
        patient = {"WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS}
        with running(*wanted) as [prefill, decode], replicas(redis_url, 1, engines=2, **patient) as [url]:
            async with httpx.AsyncClient(timeout=120) as client:
                await leave(client, url, redis_url)
            with suppress(pytest.fail.Exception):
                await poll(lambda: kept(prefill) == 0, 5, every_s=0.5)
            free, stay = refusals(decode), kept(prefill)
            print(f"of prompts that were done when their client left, {free} are freed at once, {stay} stay")
            assert test_roles.counted(prefill, test_roles.AFTER_EXPIRY) == 0
            assert free > 0
            assert stay <= MOST_KEPT * (free + stay)


async def leave(client: httpx.AsyncClient, url: str, redis_url: str) -> None:
    """Let clients ask, and leave within twice the time that an answer takes if nothing runs beside."""
    rng, fleet, places = (
        random.Random(3),
        Fleet(connect(redis_url, timeout_s=5), SERVED_NAME),
        asyncio.Semaphore(AT_ONCE),
    )

    async def ask() -> str:
        body = {"model": SERVED_NAME, "max_tokens": 8, "ignore_eos": True, "stream": rng.random() < 0.5}
        answer = await client.post(
            f"{url}/v1/completions", json=body | {"prompt": rng.choices(range(3, 900), k=PROMPT)}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.headers.get("x-warmfleet-prefill-worker"))

    async def ask_and_leave(after_s: float) -> None:
        async with places:
            with suppress(TimeoutError):
                async with asyncio.timeout(after_s):
                    await ask()

    await make_busy(fleet, "d.0")
    took_s = []
    for _ in range(5):
        began_at = time.perf_counter()
        assert await ask() == "p.0"
        took_s.append(time.perf_counter() - began_at)
    for _ in range(10):
        await make_busy(fleet, "d.0")
        limits = [rng.uniform(0.0, 2 * sorted(took_s)[2]) for _ in range(CLIENTS // 10)]
        await asyncio.gather(*map(ask_and_leave, limits))
    await fleet.close()


def kept(engine: VllmEngine) -> int:
    """Return the number of prompts whose blocks this engine keeps."""
    engine.complete([5] * BLOCK_TOKENS)  # an idle engine hears nothing
    return round(test_mooncake.usage(engine) * BLOCKS * BLOCK_TOKENS / PROMPT)


def refusals(engine: VllmEngine) -> int:
    text = httpx.get(f"{engine.url}/metrics", timeout=30).text
    found = re.findall(r'^http_requests_total\{[^}]*status="4xx"[^}]*\} (\S+)', text, re.MULTILINE)
    return round(sum(map(float, found)))
