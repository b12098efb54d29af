"""A fleet is split into two pools, gets a third under load, and then one pool loses its engines. Real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.e2e.clients import Clients
from tests.e2e.conftest import load
from tests.support.polling import poll
from tests.support.replicas.replica import sample_of

from warmfleet.__main__ import main
from warmfleet.cli.client import admin_headers
from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.stack import Plan, Stack
from warmfleet.fleet import Spans

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS, ENGINES, PREFIXES = 6, 4, 12
LONG_TOKENS = 20_000  # of 5 ms or more each: of plain requests that last longer than the moves of most engines


@pytest.fixture
def four() -> Iterator[Stack]:
    with Stack(Plan(engines=EngineOptions(count=ENGINES), replicas=2)) as running:
        yield running


def pools(stack: Stack, *words: str) -> None:
    assert main(["pools", *words, "--redis", stack.redis_url, "--model", "demo"]) == 0


def seats(stack: Stack) -> dict[str, list[str]]:
    """The names of the engines that take requests in each pool, as all replicas see it; {} while they differ."""
    seen = [
        {
            model["model"]: sorted(worker["worker_id"] for worker in model["workers"] if worker["routable"])
            for model in stack.fleet(replica)
        }
        for replica in stack.replicas
    ]
    return seen[0] if all(answer == seen[0] for answer in seen) else {}


def pool_of(stack: Stack, number: int, replica: int) -> tuple[str, int]:
    """The pool that serves a prompt with this beginning, and how many tokens of it were matched."""
    text = f"{number} " + "the river and the stone " * 120
    body = {"model": "demo", "prompt": text, "max_tokens": 2}
    answer = httpx.post(f"{stack.replicas[replica].url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-warmfleet-pool"], int(answer.headers["x-warmfleet-matched-tokens"])


async def long_one(stack: Stack, number: int) -> str:
    """A plain request, whose answer comes in one piece at its end; returns "" if it is whole."""
    body = {"model": "demo", "prompt": f"{number} long", "max_tokens": LONG_TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=400) as http:
        answer = await http.post(f"{stack.replicas[number % 2].url}/v1/completions", json=body)
    found = answer.json().get("usage", {}).get("completion_tokens") if answer.status_code == 200 else answer.text
    return "" if found == LONG_TOKENS else f"{answer.status_code}: {found}"


def given_up(stack: Stack) -> float:
    """The number of requests that replicas have taken from engines that they believed to be dead."""
    pages = [httpx.get(f"{replica.operators}/metrics", headers=admin_headers()).text for replica in stack.replicas]
    return sum(sample_of(page, "warmfleet_given_up_requests_total") for page in pages)


@pytest.mark.long(
    minutes=5,
    shows=(
        "under load four engines of one pool move to two, and end the long plain requests that they had begun; a third "
        "pool is added; prompts stay in their home pools at both replicas; a pool whose engines are killed is passed "
        "over; no request fails, nothing stays booked"
    ),
)
@pytest.mark.timeout(600)
async def test_a_fleet_is_split_and_a_pool_dies(four: Stack) -> None:
    clients = Clients(list(four.replicas))
    begun = [asyncio.create_task(long_one(four, number)) for number in range(ENGINES)]
    await poll(
        lambda: sum(worker["load"]["in_flight"] for worker in four.workers()) == ENGINES, 60, "all are under way"
    )
    running = asyncio.create_task(clients.run(CLIENTS))
    try:
        await asyncio.to_thread(pools, four, "add", "demo#1", "demo#2")
        await asyncio.to_thread(pools, four, "drain", "demo", "--move")

        async def split() -> bool:
            found = await asyncio.to_thread(seats, four)
            return (len(found.get("demo#1", ())), len(found.get("demo#2", ()))) == (2, 2)

        await poll(split, 300, "two engines in each pool, 45 s each")
        assert await asyncio.gather(*begun) == [""] * ENGINES
        assert await asyncio.to_thread(given_up, four) == 0
        await asyncio.to_thread(pools, four, "remove", "demo", "--force")
        await asyncio.to_thread(pools, four, "add", "demo#3")  # the pool has no engine yet
        first = [await asyncio.to_thread(pool_of, four, number, 0) for number in range(PREFIXES)]
        again = [await asyncio.to_thread(pool_of, four, number, 1) for number in range(PREFIXES)]
        print(first, again)
        assert {pool for pool, _ in first} == {"demo#1", "demo#2"}
        assert sum(old[0] == new[0] for old, new in zip(first, again, strict=True)) >= PREFIXES - 1
        assert sum(matched > 0 for _, matched in again) >= PREFIXES - 1
        assert clients.failures == []
        victims = {name.rpartition(".")[0] for name in (await asyncio.to_thread(seats, four))["demo#1"]}
        for engine in four.engines:
            if engine.name in victims and engine.child is not None:
                engine.child.process.send_signal(signal.SIGKILL)
        clients.engine_deaths.append(time.monotonic() + 1)
        left = [await asyncio.to_thread(pool_of, four, number, number % 2) for number in range(PREFIXES)]
        assert {pool for pool, _ in left} == {"demo#2"}
    finally:
        clients.over = True
        await running
    print(json.dumps(dict(clients.outcomes)))
    assert clients.failures == []
    assert clients.outcomes["whole"] > 100

    async def nothing() -> bool:
        return await asyncio.to_thread(load, four) == 0

    await poll(nothing, Spans().lease_ms / 1000 + 5, "nothing is booked")
