"""Engines that draft tokens: what a prompt reuses there is predicted to the token."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest
from tests.support.engines.simulated import Kind, Simulated, simulated
from tests.support.polling import poll
from tests.support.replicas.replica import replica

if TYPE_CHECKING:
    from tests.support.replicas.replica import Replica


async def indexed(router: Replica, engine: Simulated) -> None:
    """Return when nothing is booked, and the index has the blocks that the engine has."""
    await router.unloaded()
    [worker] = await router.fleet.workers.read()

    async def equal() -> bool:
        held: Any = await cast("Any", router.fleet.redis.smembers(router.fleet.keys.slot(worker.load.slot)))
        return bool(held == set(engine.engine.core.scheduler.pool.held()))

    await poll(equal, 30, "the index equals the engine's table")


@pytest.mark.parametrize("kind", ["lookahead", "drop"])
async def test_what_is_predicted_is_cached(valkey_url: str, model: str, kind: Kind) -> None:
    rng, known, reused = random.Random(3), [[5]], 0
    async with simulated(valkey_url, model, kind=kind) as engine, replica(valkey_url, model) as router:
        await router.routable(1)
        await router.exact()
        for _ in range(60):
            await indexed(router, engine)
            head = rng.choice(known)
            prompt = head[: rng.randrange(len(head) + 1)] + rng.choices(range(3, 900), k=rng.randrange(1, 120))
            status, headers, text = await router.post({"model": model, "prompt": prompt, "max_tokens": 2})
            usage = orjson.loads(text)["usage"]
            assert (status, usage["prompt_tokens"]) == (200, len(prompt))
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert int(headers["x-warmfleet-matched-tokens"]) == cached
            reused += cached > 0
            known = [*known[-10:], prompt]
    assert reused > 15
