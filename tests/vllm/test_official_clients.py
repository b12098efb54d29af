"""The official clients get the same results through a router as from real vLLM itself."""

from __future__ import annotations

import asyncio
import json
import subprocess
import venv
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.support.polling import poll
from tests.vllm.conftest import TAG, Reported
from tests.vllm.engine import EngineOptions, running
from tests.vllm.replicas import PATIENT_SECONDS, Replica

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=4,
        shows=(
            "the official clients of OpenAI and Anthropic and LangChain, which are downloaded from PyPI, get the same "
            "results through a router as from vLLM itself: chats, tools, streams, structured output, embeddings, "
            "responses, messages"
        ),
    ),
    pytest.mark.timeout(900),
]

PACKAGES = ("openai", "anthropic", "langchain-openai")
EMBEDDING = "embedding"
#: A busy engine may answer a plain stream differently: floating-point sums depend on what is computed together.
TRIES = 3


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the clients."""
    folder = tmp_path_factory.mktemp("clients")
    venv.create(folder, with_pip=True)
    made = folder / "bin" / "python"
    subprocess.run([made, "-m", "pip", "install", "-qq", *PACKAGES], check=True, cwd=folder)
    return made


async def results(python: Path, url: str) -> dict[str, Any]:
    """The results that the clients get from a server."""
    script = __file__.replace("test_official_clients", "official_clients")
    found: dict[str, Any] = json.loads(await asyncio.to_thread(run, [str(python), script, url, TAG, EMBEDDING]))
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout


@contextmanager
def router_of(redis_url: str, embedder: str) -> Iterator[str]:
    """The URL of a replica for both models. vLLM's pooling server cannot be probed, so the operator names it."""
    settings = {
        "WARMFLEET_MODELS": f"{TAG},{EMBEDDING}",
        "WARMFLEET_STATIC_WORKERS": embedder,
        "WARMFLEET_DECIDE_TIMEOUT_S": PATIENT_SECONDS,
    }
    served = Replica(redis_url, **settings)
    try:
        yield served.url
    finally:
        served.process.terminate()
        served.ended()


def ready(url: str) -> bool:
    """The replica identifies chats exactly, and both models have a worker."""
    try:
        models = httpx.get(f"{url}/workers", timeout=5).json()["models"]
    except httpx.HTTPError:
        return False
    return models[0]["identity"] == "exact" and all(any(w["routable"] for w in model["workers"]) for model in models)


async def test_clients_see_no_difference(reported: Reported, python: Path) -> None:
    options = EngineOptions(arguments=("--convert", "embed", "--served-model-name", EMBEDDING))
    with running(options) as [embedder], router_of(reported.redis_url, embedder.url) as url:
        await poll(partial(ready, url), 90, "both models are served")
        differences: dict[str, Any] = {}
        for _ in range(TRIES):
            expected = await results(python, reported.engine.url)
            vectors, routed = await results(python, embedder.url), await results(python, url)
            expected |= {name: vectors[name] for name in expected if "embeddings" in name}
            expected |= {
                "models": sorted([TAG, EMBEDDING]),
                "model": TAG,
            }  # vLLM's own server does not tell of one model
            differences = {name: (value, routed[name]) for name, value in expected.items() if routed[name] != value}
            if not differences:
                break
        print(json.dumps({name: str(value)[:160] for name, value in expected.items()}, indent=1))
        assert differences == {}
