"""A trace through two pickers behind a real Envoy, one of which is killed, as the bench ``trace`` plays it."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.bench.envoy_gateway import door

from warmfleet.settings import POLICIES
from warmfleet_loadtest.fleet_bench import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.long(minutes=1, shows="a trace through two pickers, one of which is killed, fails no request that waits")
def test_a_killed_picker_fails_no_request_before_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("WARMFLEET_DECIDE_TIMEOUT_S", "2")  # the default of 50 ms is too short beside other work
    monkeypatch.setattr("warmfleet_loadtest.traces.trace.SHARED", "nowhere")
    options = ["--rows", "400", "--speed", "10", "--engines", "4", "--engine-mode", "step", "--step-time", "fast"]

    done = main(POLICIES, [*options, "--out", str(tmp_path), "--fleet", "picker:2"], gateway=door)

    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    own, asked = found["runs"]
    assert done == 0, found
    assert (own["fleet"], asked["fleet"]) == ("cost x 2", "picker x 2")
    assert (own["failed"], asked["failed"] - asked["cut"]) == (0, 0)
    assert (own["booked"], asked["booked"]) == (0, 0)
    assert asked["hit_ratio"] > 0.9 * own["hit_ratio"]
    assert {*asked["cpu_s"]} == {"store", "engines", "replicas", "envoy", "client"}
    assert len(found["over_own"]["picker x 2"]) == 2
