"""A burst of requests for one new prefix, over HTTP and two replicas: the fleet computes the prefix once."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import httpx
from tests.e2e.conftest import wait_for_no_load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.cli.local.stack import Stack

REQUESTS = 64
WORDS = ("water", "river", "stone", "paper", "light", "table", "green", "sound", "house", "north")


async def burst(urls: Sequence[str], seed: int) -> list[tuple[str, int, str]]:
    """Send all requests at once, to ``urls`` in turn. Return worker_id, matched tokens and reservation of each."""
    prefix = " ".join(random.Random(seed).choices(WORDS, k=4_000))
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def ask(number: int) -> tuple[str, int, str]:
            body = {"model": "demo", "prompt": f"{prefix} Question {number}?", "max_tokens": 2}
            answer = await client.post(f"{urls[number % len(urls)]}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert int(answer.headers["x-warmfleet-prompt-tokens"]) >= 4_000
            said = [answer.headers[f"x-warmfleet-{what}"] for what in ("worker", "matched-tokens", "reservation")]
            return said[0], int(said[1]), said[2]

        return await asyncio.gather(*(ask(number) for number in range(REQUESTS)))


async def test_64_at_once_over_two_replicas_are_chosen_for_as_by_one(stack: Stack) -> None:
    replicas = [replica.url for replica in stack.replicas]
    cold = {}
    for seed, urls in enumerate((replicas, replicas[:1])):
        answers = await burst(urls, seed)
        booked = [(worker, matched) for worker, matched, reservation in answers if reservation == "booked"]
        assert len(booked) > REQUESTS / 2, "on a machine that is busy with other work some fall back"
        cold[len(urls)] = {worker for worker, matched in booked if matched < 3_900}
        wait_for_no_load(stack)
    assert 1 <= len(cold[2]) <= 2, cold
    assert 1 <= len(cold[1]) <= 2, cold
