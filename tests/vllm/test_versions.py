"""vLLM 0.28 to 0.33 as real servers on the CPU: both halves join, and decisions predict what is cached.

Each version runs in the interpreter of ``.venv-vllm`` with its own wheel in front (see ``trees.py``); 0.33, which has
no wheel for the CPU, is its own Python code on the compiled files of 0.32.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import SERVED_NAME, EngineOptions, VllmEngine
from tests.vllm.replicas import running_replicas
from tests.vllm.trees import VERSIONS, environment, tree

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=8,
        shows=(
            "vLLM 0.28 to 0.33 as real servers behind a real router: both halves join, predicted = cached; one with "
            "a renamed internal serves, and says in one line that it is not reported"
        ),
    ),
    pytest.mark.timeout(900),
]

TURNS = 4
START_SECONDS = 400.0
#: Renamed internals, by a word: the name, the new name, and the plugin's message. vLLM works as before.
RENAMED = {
    "blocks": (
        "cached_block_hash_to_block",
        "blocks_by_hash",
        "vllm.v1.core.block_pool.BlockPool.cached_block_hash_to_block: this engine reports nothing",
    ),
    "load": (
        "def get_request_counts(self)",
        "def counts_of_requests(self)",
        "vllm.v1.core.sched.scheduler.Scheduler.get_request_counts: this engine does not report its load",
    ),
}


def engine_of(folder: Path, redis_url: str, *arguments: str) -> VllmEngine:
    """A server of the tree in this folder, with the plugin."""
    kept = ("PYTHONPATH", "VLLM_CACHE_ROOT", "VLLM_TARGET_DEVICE", "VLLM_CPU_KVCACHE_SPACE")
    environ = environment(folder)
    options = EngineOptions(
        redis_url=redis_url,
        arguments=arguments,
        environment={name: environ[name] for name in kept},
        start_s=START_SECONDS,
    )
    return VllmEngine(options)


@contextmanager
def started(folder: Path, redis_url: str, *arguments: str) -> Iterator[VllmEngine]:
    engine = engine_of(folder, redis_url, *arguments)
    try:
        engine.start()
        engine.wait()
        yield engine
    finally:
        engine.remove()


@dataclass(frozen=True)
class Answer:
    predicted: int
    cached: int
    tokens: int
    text: str


def chat(url: str, messages: list[dict[str, str]]) -> Answer:
    body: dict[str, Any] = {"model": SERVED_NAME, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    usage, headers = answer.json()["usage"], answer.headers
    assert int(headers["x-warmfleet-prompt-tokens"]) == usage["prompt_tokens"]
    return Answer(
        int(headers["x-warmfleet-matched-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
        str(answer.json()["choices"][0]["message"]["content"]),
    )


def words(count: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["import", "return", "class", "value", "index", "yield", "self"]) for _ in range(count))


def our_lines(engine: VllmEngine) -> list[str]:
    """The plugin's lines in vLLM's log, from the word ``warmfleet:`` on."""
    lines = engine.log.read_text(errors="replace").splitlines()
    return [line[line.index("warmfleet:") :] for line in lines if "warmfleet:" in line]


@pytest.fixture
def store() -> Iterator[str]:
    with server(valkey_binary()) as url:
        yield url


@pytest.mark.parametrize("version", VERSIONS)
def test_a_real_server_joins_and_predictions_are_right(version: str, store: str) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(started(tree(version), store))
        (replica,) = stack.enter_context(running_replicas(store, 1, 1, WARMFLEET_DECIDE_TIMEOUT_S="2"))
        assert httpx.get(f"{engine.url}/version", timeout=10).json()["version"] == version
        lines = our_lines(engine)
        assert f"warmfleet: {engine.worker_id} joined {SERVED_NAME}" in lines
        assert f"warmfleet: server vllm-a joined {SERVED_NAME} as {engine.url}" in lines
        assert not [line for line in lines if "joined" not in line and "joining again" not in line], lines
        told = []
        for conversation in range(2):
            messages = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": words(250, 10 * conversation + turn)})
                answer = chat(replica.url, messages)
                told.append((answer.predicted, answer.cached, answer.tokens))
                messages.append({"role": "assistant", "content": answer.text})
        print(f"\nvLLM {version}: (predicted, cached, prompt tokens): {told}")
        assert [predicted for predicted, _, _ in told] == [cached for _, cached, _ in told]
        assert sum(cached for _, cached, _ in told) > 2_000


def patched(source: Path, folder: Path, what: str) -> Path:
    """A copy of a tree in which an internal has another name, everywhere."""
    old, new, _ = RENAMED[what]
    shutil.copytree(source, folder, copy_function=os.link)  # no second copy of 400 MB
    for file in folder.rglob("*.py"):
        text = file.read_text(errors="surrogateescape")
        changed = text.replace(old, new)
        if what == "load":
            changed = changed.replace(".get_request_counts()", ".counts_of_requests()")
        if changed != text:
            file.unlink()
            file.write_text(changed, errors="surrogateescape")
    return folder


@pytest.mark.parametrize("what", RENAMED)
def test_a_renamed_internal_costs_one_line_and_no_request(what: str, store: str) -> None:
    source = tree("0.32.0")
    with (
        tempfile.TemporaryDirectory(dir=source.parent) as folder,
        started(patched(source, Path(folder) / "tree", what), store) as engine,
    ):
        for seed in range(3):
            assert engine.complete(words(200, seed), max_tokens=4)["usage"]["completion_tokens"] == 4
        lines = our_lines(engine)
        differs = [line for line in lines if "differs" in line]
        expected = "warmfleet: vLLM 0.32.0 differs from what this plugin knows: there is no "
        assert differs == [expected + RENAMED[what][-1]]
        if what == "blocks":
            assert lines == differs, "nothing else: neither half joins"
        else:
            with running_replicas(store, 1, 1, WARMFLEET_DECIDE_TIMEOUT_S="2") as (replica,):
                first, second = (chat(replica.url, [{"role": "user", "content": words(300, 1)}]) for _ in range(2))
                assert (first.predicted, first.cached) == (0, 0)
                assert second.predicted == second.cached > 0, "its blocks are still reported"
