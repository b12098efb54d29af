"""Sandboxes for chat templates, whose processes end with the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from warmfleet import sandbox
from warmfleet.metrics import Metrics
from warmfleet.sandbox import Sandboxed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test machine may be busy: what waits only because of that is not what is tested."""
    monkeypatch.setattr(sandbox, "WALL_S", 30.0)
    monkeypatch.setattr(sandbox, "WAIT_S", 30.0)


@pytest.fixture
async def started(patience: None) -> AsyncIterator[Callable[..., Sandboxed]]:
    """Makes sandboxes, ends their processes."""
    made: list[Sandboxed] = []

    def start(source: str, content_format: str = "auto") -> Sandboxed:
        made.append(Sandboxed(source, content_format, "test", Metrics()))
        return made[-1]

    yield start
    for one in made:
        await one.end()
