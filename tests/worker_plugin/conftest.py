"""Fixtures for the tests of the publishers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.redis.outages import Server

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)


@pytest.fixture
def own_server() -> Iterator[Server]:
    server = Server()
    yield server
    server.remove()
