"""A real engine with sliding windows beside full attention, behind a router: what is predicted is cached."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.conftest import TAG
from tests.vllm.engine import ROOT, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUESTS = 1_000
BLOCKS, MOST_TOKENS = 260, 1_500

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows=(
            "a real engine with sliding windows: of 1,000 random turns of chats, under eviction, as much is cached as "
            "the router predicted"
        ),
    ),
    pytest.mark.timeout(1_500),
]


@pytest.fixture
def stack() -> Iterator[tuple[str, str]]:
    """(address of a router, of Redis) before one engine, whose cache holds a few chats."""
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(redis_url=redis_url, model=ROOT / "models" / "tiny-windows", blocks=BLOCKS)
        with running(options), replicas(redis_url, engines=1) as urls:
            yield urls[0], redis_url


async def reported(fleet: Fleet) -> None:
    """Wait until everything that the engine reported is in the index. Reservations may linger."""

    async def done() -> bool:
        return not await fleet.redis.xlen(events)

    events = fleet.keys.events("vllm-a.0")
    await asyncio.sleep(0.1)  # the plugin publishes every 50 ms at most
    await poll(done, 60, "all entries are applied")


async def test_what_is_predicted_is_cached(stack: tuple[str, str]) -> None:
    url, redis_url = stack
    rng, chats, differ, hits = random.Random(1), list[list[int]](), list[tuple[int, int, int, int]](), Counter[bool]()
    fleet = Fleet(connect(redis_url, timeout_s=60), TAG)
    async with httpx.AsyncClient(timeout=300) as client:
        for number in range(REQUESTS):
            head = rng.choice(chats[-10:]) if chats and rng.random() < 0.85 else []
            if rng.random() < 0.3:
                head = head[: rng.randrange(len(head) + 1)]
            ids = head + [rng.randrange(10, 4_000) for _ in range(rng.randrange(1, 160))]
            ids = ids if len(ids) < MOST_TOKENS else ids[:300]
            body: dict[str, Any] = {"model": SERVED_NAME, "prompt": ids, "max_tokens": rng.randrange(1, 40)}
            body |= {"temperature": 0, "return_token_ids": True, "ignore_eos": True}
            answer = await client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            cached = (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            predicted = int(answer.headers["x-warmfleet-matched-tokens"])
            if predicted != cached:
                differ.append((number, len(ids), predicted, cached))
            hits[cached > 0] += 1
            chats.append(ids + told["choices"][0]["token_ids"])
            await reported(fleet)
            if number % 50 == 49:
                print(f"{number + 1}: {hits[True]} hits, differ {differ}", flush=True)
    counts, record = (
        await fleet.redis.hgetall(fleet.keys.counts),
        await fleet.redis.hget(fleet.keys.workers, "vllm-a.0"),
    )
    await fleet.close()
    print(f"\n{REQUESTS} requests, {hits[True]} hits, differ {differ}, counts {counts}")
    assert "ends" in json.loads(record or "{}")["sets"]
    assert hits[True] > REQUESTS / 4
    assert len(differ) <= REQUESTS / 1_000
