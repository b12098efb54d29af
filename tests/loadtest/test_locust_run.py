"""`make loadtest`: its events, and one short real run in which replicas and engines come and go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.run.required_tools import require

from warmfleet_loadtest import locust_run
from warmfleet_loadtest.locust_run import EVENTS, Event, events_of
from warmfleet_loadtest.stacks.locust_stack import AFFINITY, WARMFLEET, LocustStack, Size

ROOT = Path(__file__).parents[2]


def run(folder: Path, *options: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    require("haproxy")
    paths = os.pathsep.join(str(ROOT / source) for source in ("app", "worker_plugin", "loadtest"))
    # Beside other work a decision may take longer than the 50 ms of the default; the test is not about fallbacks.
    environment = {**os.environ, "PYTHONPATH": paths, "WARMFLEET_DECIDE_TIMEOUT_S": "2"}
    command = [sys.executable, "-m", "warmfleet_loadtest.locust_run", "--out", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def test_events_are_read() -> None:
    assert events_of("20:add engine, 35.5:kill replica") == [
        Event(0.2, "add", "engine"),
        Event(0.355, "kill", "replica"),
    ]
    assert {(event.action, event.kind) for event in events_of(EVENTS)} == {
        ("add", "engine"), ("kill", "replica"), ("add", "replica"), ("stop", "engine"),
    }  # fmt: skip
    assert events_of("none") == []


@pytest.mark.parametrize("wrong", ["kill replica", "20:kill", "20:kill store", "100:kill replica", "x:add engine"])
def test_wrong_events_are_told_with_an_example(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        locust_run.main(["--events", wrong])

    assert "such as 35:kill replica" in capsys.readouterr().err


def test_a_wrong_load_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        locust_run.main(["--rate", "-1"])

    assert "above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "why"), [(None, "no trace at"), ("no trace", "is no trace")])
def test_a_trace_that_cannot_be_played_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, why: str
) -> None:
    file = tmp_path / "trace.xz"
    if text is not None:
        file.write_text(text)

    with pytest.raises(SystemExit) as ended:
        locust_run.main(["--trace", str(file), "--out", str(tmp_path / "out")])

    assert ended.value.code == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_haproxy_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_named: None)

    assert locust_run.main(["--out", str(tmp_path)]) == 2
    assert "make deps" in capsys.readouterr().err


@pytest.mark.parametrize(("fleet", "behind"), [(WARMFLEET, "replica"), (AFFINITY, "engine")])
def test_the_balancer_knows_those_that_may_join(tmp_path: Path, fleet: str, behind: str) -> None:
    require("haproxy")
    stack = LocustStack(tmp_path, fleet, Size(replicas=2, engines=2, spare_replicas=1, spare_engines=1))
    config = tmp_path / "haproxy.cfg"
    config.write_text(stack.balancer_config())
    check = [shutil.which("haproxy") or "/usr/sbin/haproxy", "-c", "-f", str(config)]
    environment = {**os.environ, "LOADTEST_PORT": "1024", "LOADTEST_STATS": str(tmp_path / "stats")}

    done = subprocess.run(check, capture_output=True, text=True, env=environment)

    assert done.returncode == 0, done.stderr
    assert [f"server {behind}-{place} " in config.read_text() for place in (1, 2, 3, 4)] == [True, True, True, False]


@pytest.mark.long(minutes=1, shows="`make loadtest` in small: no request fails while replicas and engines come and go")
def test_a_short_real_run_survives_what_comes_and_goes(tmp_path: Path) -> None:
    result = run(tmp_path, "--duration", "6", "--rate", "4", "--replicas", "2", "--engines", "2", "--mix", "chat=1")

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("passed\n")
    found = json.loads((tmp_path / "figures.json").read_text())["warmfleet"]
    assert [mark.split(" at ")[0] for mark in found["marks"]] == [
        "engine-3 added", "replica-1 killed", "replica-3 added", "engine-1 stopped",
    ]  # fmt: skip
    assert found["figures"]["all"]["failed"] == 0
    assert "replica-1 killed" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "locust-warmfleet.html").stat().st_size > 10_000
    assert "warmfleet: replica-1 killed at" in result.stderr


@pytest.mark.long(
    minutes=2,
    shows="beside session affinity, under Locust: more prompt tokens come from caches, and first tokens sooner",
)
def test_the_router_beats_session_affinity(tmp_path: Path) -> None:
    result = run(tmp_path, "--compare", "--duration", "40", "--rate", "6", timeout=400)

    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    ours, theirs = found["warmfleet"]["figures"]["all"], found["session-affinity"]["figures"]["all"]
    assert ours["failed"] == theirs["failed"] == 0
    assert ours["hit_ratio"] > theirs["hit_ratio"]
    assert ours["ttft_mean"] < theirs["ttft_mean"]
