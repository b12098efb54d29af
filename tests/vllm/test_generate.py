"""A real engine that takes token ids at /inference/v1/generate: such prompts are matched to the token.

The second engine drafts tokens, so it computes the last block that it has cached of a prompt once more.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.draft_model import make_draft_model
from tests.vllm.engine import MODEL, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "prompts of token ids at /inference/v1/generate of real vLLM, also of one that drafts tokens (EAGLE): "
            "predicted = cached"
        ),
    ),
    pytest.mark.timeout(1_500),
]

PROMPTS = 60


@pytest.mark.parametrize("drafts", [False, True])
async def test_token_ids_are_matched_like_the_text_that_they_stand_for(drafts: bool, tmp_path: Path) -> None:
    rng, known, hits = random.Random(4), [[5]], 0
    drafting = ("--speculative-config", make_draft_model(tmp_path, MODEL)) if drafts else ()
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(redis_url=redis_url, arguments=("--enable-scale-out", *drafting))
        with running(options) as [engine], replicas(redis_url, 1, engines=1) as [url]:
            fleet = Fleet(connect(redis_url, timeout_s=5), SERVED_NAME)

            async def indexed() -> bool:
                [view] = await fleet.workers.read()
                held: Any = await fleet.redis.smembers(fleet.keys.slot(view.record["slot"]))
                return not view.load.in_flight and held == {key[-12:-4] for key in engine.table()}

            async with httpx.AsyncClient(timeout=120) as client:
                for number in range(PROMPTS):
                    await poll(indexed, 60, "index == the engine's table")
                    head = rng.choice(known)
                    ids = head[: rng.randrange(len(head) + 1)] + rng.choices(range(3, 8_000), k=rng.randrange(1, 200))
                    path, body = "/v1/completions", {"model": SERVED_NAME, "prompt": ids, "max_tokens": 2}
                    if number % 3:
                        sampling = {"max_tokens": 2, "temperature": 0}
                        path = "/inference/v1/generate"
                        body = {"model": SERVED_NAME, "token_ids": ids, "sampling_params": sampling}
                    answer = await client.post(url + path, json=body)
                    assert answer.status_code == 200, answer.text
                    usage = answer.json()["usage"]
                    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                    assert int(answer.headers["x-warmfleet-prompt-tokens"]) == usage["prompt_tokens"] == len(ids)
                    assert int(answer.headers["x-warmfleet-matched-tokens"]) == cached
                    hits += cached > 0 and "generate" in path
                    known = [*known[-10:], ids]
            await fleet.close()
    assert hits > PROMPTS // 6
