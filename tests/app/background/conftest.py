"""A fixture for tests of engines without the plugin: replicas whose checks run by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.replicas.stock_checks import Checks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
async def replica(valkey_url: str, model: str) -> AsyncIterator[Callable[..., Checks]]:
    """A function that makes the checks of a replica with these engines."""
    made: list[Checks] = []

    def make(*entries: str, **times: Any) -> Checks:
        made.append(Checks(valkey_url, model, list(entries), **times))
        return made[-1]

    yield make
    for checks in made:
        await checks.client.close()
        await checks.fleet.close()
