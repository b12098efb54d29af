"""The labels of an engine: as they are written, as the environment has them, and as they are announced."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.fleet.publishing import config

from warmfleet_worker.config import labels_of_environment
from warmfleet_worker.protocol.labels import read_labels
from warmfleet_worker.protocol.wire import WireError

WRONG = [
    "zone",
    "zone=",
    "=a",
    "zone=a b",
    "z=o=n",
    "zone=a,zone=b",
    "x" * 64 + "=a",
    ",".join(f"l{n}=a" for n in range(9)),
]


def test_labels_are_read() -> None:
    assert read_labels("") == {}
    assert read_labels("zone=eu-1a, hardware=h100,") == {"zone": "eu-1a", "hardware": "h100"}
    assert read_labels("zone=eu-1a&tier=A.b_c-9") == {"zone": "eu-1a", "tier": "A.b_c-9"}


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_told_and_costs_only_the_labels(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WireError, match="label"):
        read_labels(text)
    monkeypatch.setenv("WARMFLEET_LABELS", text)
    assert labels_of_environment() == {}
    assert "WARMFLEET_LABELS has no effect" in caplog.text


def test_a_join_announces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_LABELS", "zone=eu-1a")
    said = replace(config("redis://unused", "m"), labels=labels_of_environment())
    assert json.loads(said.join())["labels"] == {"zone": "eu-1a"}
