"""A store for runs on the virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.bench.virtual_store import private_server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server for one module, whose runs empty it."""
    with private_server() as found:
        yield found
