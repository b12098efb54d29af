"""A worker that becomes another one while it runs is found out by its requests; what a tenant asks makes none of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.replica import Replica, replica
from tests.app.simulated import Kind, Simulated, simulated
from tests.conftest import poll

from warmfleet import probe
from warmfleet.selftest import random_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import WorkerView

CHANGES: tuple[Kind, ...] = ("template", "tokenizer", "seed", "algorithm")
CAUSES = {"template": "chat", "tokenizer": "text", "seed": "tokens", "algorithm": "tokens"}


async def the(router: Replica) -> WorkerView:
    (view,) = await router.fleet.workers()
    return view


async def proven(router: Replica) -> None:
    """In Redis, and as the replica itself sees it."""

    async def so() -> bool:
        return await router.metric('warmfleet_workers{state="proven"}') == 1

    await poll(so, 30, "the worker is proven")


async def chat(router: Replica, model: str, messages: list[dict[str, str]]) -> dict[str, str]:
    """One more turn of a conversation; the answer's headers."""
    messages.append({"role": "user", "content": random_text(30)})
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    status, headers, answer = await router.post(body, "/v1/chat/completions")
    assert status == 200, answer
    messages.append(json.loads(answer)["choices"][0]["message"])
    return headers


@pytest.mark.parametrize("kind", CHANGES)
async def test_a_worker_that_changes_is_found_out_within_20_requests_and_comes_back(
    valkey_url: str, model: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "BACKOFF_S", (0.5, 1.0))
    monkeypatch.setattr(probe, "SUSPECTED_S", (0.1, 600.0))
    async with simulated(valkey_url, model) as worker, replica(valkey_url, model) as router:
        await proven(router)
        messages: list[dict[str, str]] = []
        matched = [int((await chat(router, model, messages))["x-warmfleet-matched-tokens"]) for _ in range(4)]
        assert matched[3] > matched[2] > matched[1] > 0
        worker.become(kind)
        for requests in itertools.count(1):
            await chat(router, model, messages)
            await asyncio.sleep(0.05)
            view = await the(router)
            if view.proof == "identity":
                break
            assert requests < 20
        print(f"{kind}: load only after {requests} requests: {view.record['reason']}")
        assert view.record["cause"] == CAUSES[kind]
        assert view.routable
        assert await router.metric(f'warmfleet_downgrades_total{{cause="{CAUSES[kind]}"}}') == 1
        assert view.record["reason"] in (await router.get("/workers"))[1].decode()
        headers = await chat(router, model, messages)
        assert headers["x-warmfleet-matched-tokens"] == "0"
        worker.become("right")
        await proven(router)
        await router.unloaded()
