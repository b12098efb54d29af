"""Stock vLLM, without the plugin and behind an API key, through ``up --worker``."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.support.polling import until
from tests.vllm.engine import SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import PATIENT_SECONDS

from warmfleet.cli.local.stack import Plan, Stack

if TYPE_CHECKING:
    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=2,
        shows=(
            "vLLM without the plugin, started with `up --worker`: the later turns of a conversation stay "
            "on their engine, and move when it dies"
        ),
    ),
]

KEY = "sk-only-the-fleet-knows"


def user(words: int, seed: int) -> dict[str, str]:
    choose = random.Random(seed)
    return {
        "role": "user",
        "content": " ".join(choose.choice(["import", "value", "error", "list"]) for _ in range(words)),
    }


def turn(url: str, messages: list[dict[str, str]]) -> tuple[str, int]:
    """Send ``messages`` and append the answer; return the worker and its cached tokens."""
    body = {"model": SERVED_NAME, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
    return answer.headers["x-warmfleet-worker"], answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def serving(stack: Stack, worker_id: str, engines: list[VllmEngine]) -> VllmEngine:
    [url] = [worker["url"] for worker in stack.workers() if worker["worker_id"] == worker_id]
    [engine] = [engine for engine in engines if engine.url == url.rstrip("/")]
    return engine


def test_later_turns_stay_and_move_without_an_error_when_the_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_DECIDE_TIMEOUT_S", PATIENT_SECONDS)
    options = [EngineOptions(worker_id=f"stock-{name}", arguments=("--api-key", KEY)) for name in "ab"]
    with running(*options) as engines:
        plan = Plan(workers=tuple(engine.url for engine in engines), worker_api_key=KEY)
        with Stack(plan) as stack:
            talks: list[list[dict[str, str]]] = []
            homes: list[str] = []
            while len(talks) < 4 or len(set(homes)) == 1:  # chance decides between engines of equal cost
                assert len(talks) < 16, "an idle fleet spreads its first conversations"
                talks.append([user(600, len(talks))])
                homes.append(turn(stack.replicas[len(talks) % 2].url, talks[-1])[0])
            for number in range(1, 3):
                for n, talk in enumerate(talks):
                    talk.append(user(40, 100 * number + n))
                    worker, cached = turn(stack.replicas[(n + number) % 2].url, talk)
                    assert worker == homes[n]
                    assert cached >= 550

            serving(stack, homes[0], engines).kill()
            for n, talk in enumerate(talks):  # at once, before the death is noticed
                talk.append(user(40, 900 + n))
                worker, _ = turn(stack.replicas[n % 2].url, talk)
                assert worker != homes[0]
            until(lambda: sum(w["routable"] for w in stack.workers()) == 1, "the dead engine is seen as such", 20)
            until(
                lambda: not any(w["load"]["in_flight"] + w["load"]["prefill_tokens"] for w in stack.workers()),
                "no load left",
            )
