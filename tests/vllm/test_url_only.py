"""Stock vLLM as an engine that is only a URL: the fleet's view of its cache follows its answers."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from redis import Redis
from tests.support.polling import until
from tests.vllm.engine import BLOCK_TOKENS, MODEL, SERVED_NAME, EngineOptions, running
from tests.vllm.replicas import PATIENT_SECONDS, Replica

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=4,
        shows=(
            "stock vLLM known by its URL only, found by a watched file: predicted = cached through its evictions; "
            "after evictions by a neighbour, a reset and a restart one answer, or the check, corrects what is "
            "believed; no request while it is paused"
        ),
    ),
]

BLOCKS = 256  # 8,192 tokens
WORDS = ["import", "value", "error", "list", "class", "return", "self", "name"]


def prompt(seed: int, words: int = 700) -> str:
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(words))


class Router:
    """A replica, and for a prompt its predicted and the engine's own cached tokens."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def ask(self, text: str, *, stream: bool = False) -> tuple[int, int]:
        """Send a prompt; returns (matched tokens of the decision, cached tokens of the engine)."""
        body: dict[str, Any] = {"model": SERVED_NAME, "prompt": text, "max_tokens": 2, "temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        answer = httpx.post(f"{self.replica.url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        if stream:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            usage = json.loads(events[-1])["usage"]
        else:
            usage = answer.json()["usage"]
        time.sleep(0.05)  # Redis gets its end after two milliseconds
        return int(answer.headers["x-warmfleet-matched-tokens"]), usage["prompt_tokens_details"]["cached_tokens"]

    def model(self) -> dict[str, Any]:
        """The entry of the model in /workers, {} while the replica does not answer."""
        try:
            [model] = httpx.get(f"{self.replica.url}/workers", timeout=10).json()["models"]
        except (httpx.HTTPError, ValueError):
            return {}
        return dict(model)

    def worker(self) -> dict[str, Any]:
        """The only worker's entry in /workers, {} while no worker is listed."""
        workers = self.model().get("workers")
        return dict(workers[0]) if workers else {}

    def results(self) -> dict[str, float]:
        page = httpx.get(f"{self.replica.url}/metrics", timeout=10).text
        lines = [line.split() for line in page.splitlines() if line.startswith("warmfleet_cached_predictions_total{")]
        return {name.partition('"')[2].partition('"')[0]: float(value) for name, value in lines}


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with running(EngineOptions(worker_id="url-only", blocks=BLOCKS, start_s=420)) as [one]:
        yield one


@pytest.fixture(params=["tokenizer", "text"])
def router(engine: VllmEngine, valkey_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Router]:
    """A replica that finds the engine in a file; its prompts are known as token ids, or as texts."""
    engine.reset_prefix_cache()
    path = tmp_path / "engines"
    path.write_text(f"# stock vLLM\n{engine.url}\n")
    settings = {"WARMFLEET_STATIC_WORKERS": f"file://{path}", "WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS}
    if request.param == "tokenizer":
        settings["WARMFLEET_TOKENIZER"] = str(MODEL)
    Redis.from_url(valkey_url).flushall()
    replica = Replica(valkey_url, **settings)
    try:
        made = Router(replica)
        until(lambda: made.worker().get("routable"), "the engine is found", 60)
        known = "exact" if request.param == "tokenizer" else "text"
        until(lambda: made.model().get("identity") == known, "prompts can be identified", 60)
        yield made
    finally:
        replica.process.terminate()
        replica.ended()


def test_predictions_follow_evictions_resets_and_restarts(router: Router, engine: VllmEngine) -> None:
    exact = router.worker()["load"]["capacity_blocks"] == BLOCKS
    assert exact or router.worker()["load"]["capacity_blocks"] == BLOCKS * BLOCK_TOKENS // 16

    # evictions by the fleet's own requests: more conversations than the cache holds
    choose, talks, off = random.Random(3), [prompt(seed, 300) for seed in range(12)], []
    for turn in range(40):
        at = choose.randrange(len(talks))
        talks[at] += " " + prompt(1_000 + turn, 30)
        matched, cached = router.ask(talks[at], stream=turn % 2 == 0)
        off.append(abs(matched - cached))
    print(f"predicted against cached tokens, 40 requests through evictions: {off}; {router.results()}")
    assert not exact or sum(error <= 2 * BLOCK_TOKENS for error in off) >= 36, "of a text the tokens are estimated"

    # a neighbour fills the cache past the router
    kept = [prompt(seed) for seed in (101, 102, 103)]
    for text in kept * 2:
        router.ask(text)
    for seed in range(201, 213):
        engine.complete(prompt(seed))
    before = router.results().get("fewer", 0.0)
    matched, cached = router.ask(kept[2], stream=True)
    assert matched > 600
    assert cached < 100, "no more than its beginning is left"
    assert router.results()["fewer"] == before + 1
    assert [router.ask(text)[0] for text in kept[:2]] == [0, 0], "one answer corrected all that was older"
    assert router.ask(kept[2])[0] > 600

    # a reset of the cache that no router learns of
    engine.reset_prefix_cache()
    assert router.ask(kept[1])[0] > 600
    assert router.ask(kept[0])[0] == 0

    # a restart: the failed check, or the new start of its process, empties the mirror
    slot = router.worker()["load"]["slot"]
    engine.kill()
    until(lambda: not router.worker().get("routable"), "the death is seen", 30)
    engine.start()
    engine.wait()
    until(lambda: router.worker().get("routable"), "it is back", 60)
    assert router.worker()["load"]["slot"] != slot
    assert router.ask(kept[1]) == (0, 0)
    matched, cached = router.ask(kept[1])
    assert matched > 600
    assert cached > 600


def test_a_paused_engine_gets_no_request_until_it_is_resumed(router: Router, engine: VllmEngine) -> None:
    router.ask(prompt(7))
    for mode in ("keep", "abort"):
        httpx.post(f"{engine.url}/pause", params={"mode": mode}, timeout=30).raise_for_status()
        paused_at = time.monotonic()
        until(lambda: router.worker().get("state") == "paused", "the pause is seen", 30)
        print(f"paused ({mode}): seen after {time.monotonic() - paused_at:.1f} s")
        body = {"model": SERVED_NAME, "prompt": prompt(8), "max_tokens": 2}
        refused = httpx.post(f"{router.replica.url}/v1/completions", json=body, timeout=30)
        assert refused.status_code == 503, refused.text
        httpx.post(f"{engine.url}/resume", timeout=30).raise_for_status()
        until(lambda: router.worker().get("routable"), "it goes on", 30)
        router.ask(prompt(7))
