"""Agents whose contexts are 1.5 times as large as the caches of two real engines, without and with the ledger.

Prompts must take the engines' time, so the model is larger than models/small, with random weights; answers are short.
The agents are of the barest kind: no names, no end signals, and no tool calls, as a random model makes none; they are
known by their prompts and short gaps. This needs a quiet machine: other work makes steps slow that compute little.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.device import DEVICE
from tests.vllm.engine import BLOCK_TOKENS, ROOT, SERVED_NAME, SLEEPS, EngineOptions, running
from tests.vllm.replicas import replicas

from warmfleet_loadtest.agents import Load, Player, figures
from warmfleet_loadtest.replay import Target
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_loadtest.traces.agents import Agents, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2_400),
    pytest.mark.long(
        minutes=12,
        shows="on real vLLM, agents that need 1.5 times the caches: with the ledger 1.2 times the sessions an hour,"
        " and at most half of the recomputed tokens (needs a quiet machine)",
    ),
]

MODEL = ROOT / "models" / "small"
WIDER = {"hidden_size": 512, "intermediate_size": 2_048}
LOADED = DEVICE.loaded or ("--load-format", "dummy", "--hf-overrides", json.dumps(WIDER))
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
#: A GPU computes more tokens in the time that the other parts of a step take.
SCALE, SEEDS = (10, (0,)) if DEVICE.loaded else (1, (0, 1))
CACHE_BYTES = ("--kv-cache-memory-bytes", str(6 << 30)) if DEVICE.loaded else ()
ENGINES, BLOCKS, OVERCOMMIT = 2, 256 * SCALE, 1.5
#: Mean tokens of a session's first text and of a tool's result.
FIRST, RESULT = 500 * SCALE, 160 * SCALE
SYSTEM, STEPS, ANSWER = 64, 10, 2
MOST_TOKENS = 3_200 * SCALE
SECONDS, SKIP, SPEED = 150, 0.4, 6.0  # seconds of the clock; at that speed all sessions of the loop begin within 10
GAPS_S = (0.3, 1.0)
#: A step that waits for an engine waits as long as it takes, or the fleet without a ledger would refuse some.
SETTINGS = {"WARMFLEET_QUEUE_TIMEOUT_S": "600"}
LEDGER = {"without": {"WARMFLEET_SESSION_WAIT_MAX_S": "0"}, "with": {}}


def agents(seed: int) -> Agents:
    """Make sessions of words that are one token each."""
    choose = random.Random(seed)
    words = [word for _, word in PromptTokenizer.load(MODEL).words]

    def text(size: int) -> str:
        return "".join(choose.choices(words, k=round(size * choose.uniform(0.7, 1.3))))

    def step(number: int) -> Step:
        return Step(text(RESULT if number else FIRST), ANSWER, choose.uniform(*GAPS_S) * SPEED)

    sessions = tuple(tuple(step(number) for number in range(STEPS)) for _ in range(300))
    return Agents("real", text(SYSTEM), sessions, SYSTEM, FIRST + (STEPS - 1) / 2 * (RESULT + ANSWER))


def play(urls: Sequence[str], seed: int) -> dict[str, Any]:
    """Return the figures of a run: sessions in an hour of the clock; times are SPEED times those of the clock."""
    chosen, seconds = agents(seed), SECONDS * SPEED
    at_once = round(OVERCOMMIT * ENGINES * (BLOCKS * BLOCK_TOKENS - SYSTEM) / chosen.context_tokens)
    player = Player(chosen, Load(seconds, at_once, skip=SKIP), Target(tuple(urls), SERVED_NAME, SPEED, seed))
    uvloop.run(player.run())
    found = figures(player.played, player.load, SKIP * seconds, seconds)
    return found | {"sessions_per_hour": round(SPEED * found["sessions_per_hour"])}


def run_all() -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each seed, by the names in LEDGER."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LEDGER}
    with server(valkey_binary()) as redis_url:
        options = EngineOptions(
            redis_url,
            model=MODEL,
            blocks=BLOCKS,
            max_model_len=MOST_TOKENS,
            arguments=(*LOADED, *CACHE_BYTES, *TOOLS),
            environment=SLEEPS,
        )
        with running(*(replace(options, worker_id=f"vllm-{at}") for at in range(ENGINES))):
            for seed, (name, settings) in itertools.product(SEEDS, LEDGER.items()):
                with replicas(redis_url, 2, ENGINES, "cost", **SETTINGS, **settings) as urls:
                    found[name].append(play(urls, seed))
                print(json.dumps({"ledger": name, "seed": seed} | found[name][-1]), flush=True)
    return found


def test_more_sessions_and_fewer_recomputed_tokens() -> None:
    if not MODEL.exists():
        pytest.fail("models/small is missing: run `make vllm`")
    found = run_all()
    assert [run["error_examples"] for runs in found.values() for run in runs if run["failed"]] == []

    def over(key: str) -> float:
        with_ledger, without = (fmean(run[key] for run in found[name]) for name in ("with", "without"))
        return with_ledger / without

    assert over("sessions_per_hour") >= 1.2
    assert over("recomputed") <= 0.5
