"""A whole fleet as processes, driven by a trace: what the published tables are made with."""

from __future__ import annotations

import json
import os
import sys

import pytest

from warmfleet_loadtest.compare import StackError, StackPlan, main, stack


@pytest.mark.parametrize("policies", ["cost", pytest.param("cost,round_robin", marks=pytest.mark.long)])
def test_a_trace_through_a_fleet(
    policies: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setattr("warmfleet_loadtest.trace.SHARED", "nowhere")
    monkeypatch.delenv("TRACE", raising=False)
    options = ["--rows", "30", "--speed", "10", "--engines", "2", "--step-time", "fast", "--skip", "0"]
    assert main([*options, "--policies", policies]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(results) == policies.split(",")
    for row in results.values():
        assert (row["requests"], row["errors"]) == (30, 0)
        assert row["ttft_mean_s"] > 0
    if "round_robin" in results:
        assert results["round_robin"]["busiest_over_mean"] < 1.2


def test_a_stack_that_does_not_start_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with (
        pytest.raises(StackError, match=r"(?s)ended with 2.*no_such_policy"),
        stack(StackPlan("no_such_policy", engines=1, replicas=1)),
    ):
        pass
