"""Fixtures: a replica with an engine, a real tokenizer, sandboxes for chat templates that end with the test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.scripted import Engine, engine
from tests.support.replicas.replica import Replica, replica
from tests.support.requests import deepseek_tokenizer

from warmfleet.metrics import Metrics
from warmfleet.untrusted import render_process as sandbox
from warmfleet.untrusted.render_process import Sandboxed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from warmfleet.prompt.tokenizer import Encoder


@pytest.fixture
async def replica_and_engine(valkey_url: str, model: str) -> AsyncIterator[tuple[Replica, Engine]]:
    """A replica and the engine behind it, which answers well."""
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, connect_timeout_s=10.0) as router:
        yield router, upstream


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return deepseek_tokenizer.loaded()


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer waits for sandboxes, so that a rendering on a busy test machine does not time out."""
    monkeypatch.setattr(sandbox, "WALL_S", 30.0)
    monkeypatch.setattr(sandbox, "WAIT_S", 30.0)


@pytest.fixture
async def started(patience: None) -> AsyncIterator[Callable[..., Sandboxed]]:
    """A function that makes sandboxes for chat templates; their processes end with the test."""
    made: list[Sandboxed] = []

    def start(source: str, content_format: str = "auto") -> Sandboxed:
        made.append(Sandboxed(source, content_format, "test", Metrics()))
        return made[-1]

    yield start
    for box in made:
        await box.end()
