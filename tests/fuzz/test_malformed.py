"""Malformed requests to a replica as a process, before an engine that records what it is sent.

None is answered with an error of the router itself, none reaches the engine as two, and memory does not grow.
"""

from __future__ import annotations

import random

import pytest
from tests.fuzz.malformed import requests, smuggler
from tests.fuzz.target import target

LONG = pytest.mark.long(
    minutes=5,
    shows="200,000 malformed requests and 50,000 attempts to smuggle one: no error of the router, memory stays flat",
)
GROWTH_BYTES = 48 * 2**20  # beside caches that fill: of prompts, of pages of the allocator

pytestmark = pytest.mark.timeout(3_600)


@pytest.mark.parametrize("count", [2_000, pytest.param(200_000, marks=LONG)])
async def test_malformed_requests_are_no_errors_of_the_router(valkey_url: str, model: str, count: int) -> None:
    made = requests(random.Random(12), model)
    async with target(valkey_url, model) as router:
        await router.send_all(made, count // 4)  # caches fill
        before = router.memory
        await router.send_all(made, count - count // 4)
        grown = router.memory - before
        print(f"{count} requests, {router.received} at the engine, {router.statuses}, memory +{grown / 2**20:.1f} MiB")
        assert router.wrong[:5] == []
        assert grown < GROWTH_BYTES
        assert router.received > count / 20, "many are well enough for an engine"


@pytest.mark.parametrize("count", [1_000, pytest.param(50_000, marks=LONG)])
async def test_no_request_is_smuggled(valkey_url: str, model: str, count: int) -> None:
    rng = random.Random(12)
    async with target(valkey_url, model) as router:
        await router.send_all(iter(lambda: smuggler(rng, model), b""), count)
        print(f"{count} requests, {router.received} at the engine, {router.statuses}")
        assert router.wrong[:5] == []
        assert router.smuggled == 0
        assert router.received > count / 20, "some are well enough for an engine"
