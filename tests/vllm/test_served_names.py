"""Real vLLM that serves other names than the others of its pool: it gets no request that it would refuse."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "real engines whose names differ: one that lacks its pool's name takes no request and is told of with the "
            "remedy, and an alias of one goes to that one"
        ),
    ),
    pytest.mark.timeout(1_500),
]

OTHER = "served-by-another-name"


async def asked(url: str, model: str, count: int) -> tuple[Counter[int], set[str]]:
    """Send ``count`` fresh requests one after another. Return their statuses, and the workers that answered."""
    statuses, workers = Counter[int](), set[str]()
    async with httpx.AsyncClient(timeout=120) as client:
        for _ in range(count):
            body = {"model": model, "prompt": f"{random.random()} fox", "max_tokens": 1}
            answer = await client.post(f"{url}/v1/completions", json=body)
            statuses[answer.status_code] += 1
            workers |= {answer.headers.get("x-warmfleet-worker", "")} - {""}
    return statuses, workers


async def states(url: str) -> dict[str, dict[str, Any]]:
    async with httpx.AsyncClient() as client:
        (model,) = (await client.get(f"{url}/workers")).json()["models"]
    return {worker["worker_id"]: worker for worker in model["workers"]}


async def test_each_name_goes_to_the_engines_that_serve_it() -> None:
    with server(valkey_binary()) as redis_url:
        # The last of two equal options counts, so each server has the names given below.
        names = {"right": [SERVED_NAME], "both": [SERVED_NAME, "alias"], "wrong": [OTHER]}
        options = [
            EngineOptions(redis_url=redis_url, worker_id=name, arguments=("--served-model-name", *served))
            for name, served in names.items()
        ]
        with running(*options), replicas(redis_url) as (url, _):

            async def settled() -> bool:
                found = {name: state["state"] for name, state in (await states(url)).items()}
                return found == {"right.0": "proven", "both.0": "proven", "wrong.0": "misnamed"}

            await poll(settled, 120, "two are proven and one is misnamed")
            told = (await states(url))["wrong.0"]
            assert told["why"] == f"it serves {OTHER}, not {SERVED_NAME}: --served-model-name {SERVED_NAME}"
            statuses, workers = await asked(url, SERVED_NAME, 24)
            assert statuses == {200: 24}
            assert workers <= {"right.0", "both.0"}
            assert await asked(url, "alias", 12) == ({200: 12}, {"both.0"})
            assert (await asked(url, OTHER, 1))[0] == {404: 1}
            async with httpx.AsyncClient() as client:
                listed = json.loads((await client.get(f"{url}/v1/models")).content)["data"]
            assert {entry["id"] for entry in listed} == {SERVED_NAME, "alias"}
