"""Shared by the tests of the publisher."""

from __future__ import annotations

import pytest

from warmfleet_worker import wire


@pytest.fixture
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", 0.2)
