"""The load test's verdict on made-up runs, and one short real run with its kill and its added replica."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.tools import require

from warmfleet_loadtest import locust_run
from warmfleet_loadtest.locust_run import Run, describe, verdict

ROOT = Path(__file__).parents[2]
ROW = {"requests": 10, "failures": 0, "mean_ms": 5.0, "p50_ms": 5, "p95_ms": 9}
SUMMARY: dict[str, Any] = {
    "rows": {"chat chat": ROW, "TTFT chat": ROW},
    "errors": [],
    "fallbacks": [],
    "broken": [[100.5, "retried"], [101.0, "cut"]],
    "reservations": {"booked": 10},
    "workers": {"w1": 10},
    "matched_tokens": 50,
    "prompt_tokens": 100,
}
RUN = Run(killed_at=100.0, added_at=110.0, sessions={"replica-1": 4, "replica-4": 2}, locust_status=0)


def test_a_run_whose_breaks_all_follow_the_kill_passes() -> None:
    assert verdict(SUMMARY, RUN) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"errors": ["1 x chat: Refused"], "rows": {"chat chat": ROW | {"failures": 1}}}, "1 failures"),
        ({"rows": {"TTFT chat": ROW}}, "no requests"),
        ({"broken": [[99.9, "retried"]]}, "other times than the kill"),
        ({"broken": [[103.1, "cut"]]}, "other times than the kill"),
        ({"reservations": {"booked": 7, "fallback": 3}, "fallbacks": [99.0, 104.0, 105.0]}, "3 of 10 requests"),
    ],
)
def test_what_fails_a_run(change: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in verdict(deepcopy(SUMMARY) | change, RUN))


def test_an_added_replica_without_traffic_fails_a_run() -> None:
    assert verdict(SUMMARY, replace(RUN, sessions={"replica-1": 4, "replica-4": 0})) == [
        "the added replica-4 got no traffic"
    ]


def test_locusts_own_complaint_fails_a_run() -> None:
    assert verdict(SUMMARY, replace(RUN, locust_status=1)) == ["Locust ended with 1"]


def test_the_description_hides_no_break() -> None:
    text = describe(SUMMARY, RUN)

    assert "1 before an answer, 1 in mid-stream" in text
    assert "50 of 100 prompt tokens matched (50%)" in text
    assert "replica-1 4, replica-4 2" in text


def test_few_fallbacks_are_told_but_fail_nothing() -> None:
    summary = SUMMARY | {"reservations": {"booked": 9, "fallback": 1}, "fallbacks": [104.0]}

    assert verdict(summary, RUN) == []
    assert "WARNING   1 without a decision (fallback), s from the kill: +4" in describe(summary, RUN)


def test_without_haproxy_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_named: None)

    assert locust_run.main(["--report", str(tmp_path / "r.html")]) == 2
    assert "make deps" in capsys.readouterr().err


def test_a_short_real_run_survives_a_kill_and_uses_the_added_replica(tmp_path: Path) -> None:
    require("haproxy")
    command = [sys.executable, "-m", "warmfleet_loadtest.locust_run", "--duration", "6", "--users", "4"]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("app", "worker_plugin", "loadtest"))
    report = tmp_path / "report.html"
    # Beside other work a decision may take longer than the 50 ms of the default; the test is not about fallbacks.
    environment = {**os.environ, "PYTHONPATH": paths, "WARMFLEET_DECIDE_TIMEOUT_S": "2"}

    result = subprocess.run(
        [*command, "--report", str(report)],
        capture_output=True, text=True, timeout=280, env=environment,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    assert "killed    replica-1 (SIGKILL)" in result.stdout
    assert result.stdout.endswith("passed\n")
    assert report.stat().st_size > 10_000
