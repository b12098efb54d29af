"""T-LRU against LRU on real vLLM: the conversations of the paper's model, at half their length.

Two engines get the same prompts in turn, one by one, so that other work on the machine slows both alike.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import pytest
from tests.bench.tail_conversations import Turn, turns
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import BLOCK_TOKENS, MODEL, EngineOptions, VllmEngine, running

from warmfleet_loadtest.measuring.figures import quantile

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1_500),
    pytest.mark.long(
        minutes=3,
        shows="on real vLLM, mixed conversations compute fewer tokens at P90 and P95 under T-LRU than under LRU, and"
        " at most a tenth more in the mean",
    ),
]

SCALE = 2
MOST_TOKENS = 4_000  # a longer conversation would not fit into the model
CACHE_TOKENS = 10_000 // SCALE
COUNT, WARM_UP = 400, 50


def prompt_of(turn: Turn) -> list[int]:
    """The conversation so far, replies included, as a client sends it. The same conversation has the same tokens."""
    words = random.Random(turn.conversation)
    return [words.randrange(300, 1_000) for _ in range(max(1, (turn.history + turn.prompt) // SCALE))]


def ask(engine: VllmEngine, prompt: list[int]) -> tuple[float, float]:
    """Return (seconds, tokens that were not cached)."""
    began = time.monotonic()
    usage: dict[str, Any] = engine.complete(prompt, return_token_ids=False)["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return time.monotonic() - began, float(len(prompt) - cached)


def figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"mean": statistics.fmean(ordered)} | {f"p{q}": quantile(ordered, q / 100) for q in (50, 90, 95, 99)}


def test_the_tail_of_mixed_conversations_is_shorter() -> None:
    if not MODEL.exists():
        pytest.fail("models/tiny is missing: run `make vllm`")
    taken: dict[str, list[tuple[float, float]]] = {"LRU": [], "auto": []}
    with server(valkey_binary()) as redis_url:
        options = [
            EngineOptions(
                redis_url=redis_url,
                worker_id=f"vllm-{name.lower()}",
                blocks=CACHE_TOKENS // BLOCK_TOKENS,
                start_s=500.0,
                environment={"WARMFLEET_TTFT_TARGET_S": name} if name == "auto" else {},
            )
            for name in taken
        ]
        with running(*options) as engines:
            for turn in turns(COUNT, 0, 180.0):
                prompt = prompt_of(turn)
                if len(prompt) <= MOST_TOKENS:
                    for name, engine in zip(taken, engines, strict=True):
                        taken[name].append(ask(engine, prompt))
            assert "blocks are evicted for a time to first token" in engines[1].log.read_text(errors="replace")
    uncached = {name: figures([tokens for _, tokens in pairs[WARM_UP:]]) for name, pairs in taken.items()}
    seconds = {name: figures([spent for spent, _ in pairs[WARM_UP:]]) for name, pairs in taken.items()}
    print(json.dumps({"requests": len(taken["LRU"]), "uncached_tokens": uncached, "ttft_s": seconds}))
    assert uncached["auto"]["p90"] < 0.98 * uncached["LRU"]["p90"]
    assert uncached["auto"]["p95"] < uncached["LRU"]["p95"]
    assert uncached["auto"]["mean"] < 1.1 * uncached["LRU"]["mean"]
