"""A real vLLM server with the plugin for this folder's tests, on a private Valkey."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import MODEL, SLEEPS, VENV, EngineOptions, VllmEngine, running
from tests.vllm.inside import Inside, inside
from tests.vllm.seeing import vision

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

#: The base model's name in every key of this folder's tests.
TAG = "tiny"
#: Blocks of 32 tokens in the cache, enough for two conversations of 2,000 tokens but not for three.
BLOCKS = 160


@dataclass(frozen=True)
class Reported:
    """A running engine, and the address of the Redis that it reports to."""

    engine: VllmEngine
    redis_url: str


@pytest.fixture(scope="session")
def installed() -> None:
    if not (VENV / "bin" / "vllm").exists() or not MODEL.exists():
        pytest.fail("real vLLM is not installed here: run `make vllm`")


@pytest.fixture(scope="session")
def vllm(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """A process that asks vLLM without an engine, also for models that see images."""
    with inside(tmp_path_factory.mktemp("vllm"), str(vision())) as process:
        yield process


@pytest.fixture(scope="session")
def vllm_store(installed: None) -> Iterator[str]:
    """URL of the Valkey that the engines report to."""
    with server(valkey_binary()) as redis_url:
        yield redis_url


@pytest.fixture(scope="session")
def reported(vllm_store: str) -> Iterator[Reported]:
    """Real vLLM, which finds the plugin by its entry point. Earlier tests used it: begin each test with ``fresh``."""
    goodbye = ("--shutdown-timeout", "10")  # without the grace vLLM kills its engine core
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    options = EngineOptions(vllm_store, model_tag=TAG, blocks=BLOCKS, arguments=(*goodbye, *tools), environment=SLEEPS)
    with running(options) as [engine]:
        yield Reported(engine, vllm_store)


@pytest.fixture
async def vllm_fleet(reported: Reported) -> AsyncIterator[Fleet]:
    """The scripts on that Valkey. Entries are applied only when the test calls ``step``."""
    fleet = Fleet(connect(reported.redis_url, timeout_s=5), TAG)
    yield fleet
    await fleet.close()
