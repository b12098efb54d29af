"""`make loadtest`: its events, and one short real run in which replicas and engines come and go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.run.required_tools import require

from warmfleet_loadtest import engine, locust_run
from warmfleet_loadtest.locust_run import EVENTS, Event, events_of
from warmfleet_loadtest.stacks import locust_stack
from warmfleet_loadtest.stacks.locust_stack import AFFINITY, WARMFLEET, LocustStack, Size
from warmfleet_loadtest.stacks.processes import Processes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.simulator.transfers.config import TransferConfig

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


@pytest.mark.parametrize("prefill", ["8", "9", "-1"])
def test_a_fleet_without_an_engine_that_decodes_is_refused(prefill: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        locust_run.main(["--prefill", prefill, "--rate", "-1"])  # the rate lets nothing start, whatever happens

    assert "at least one of the 8 engines" in capsys.readouterr().err


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> dict[str, TransferConfig | None]:
    """How the engines that a stack starts hand blocks over, by name, as the engine reads it. No process is started."""
    found: dict[str, TransferConfig | None] = {}

    def spawn(stack: Processes, kind: str, name: str, argv: Sequence[str], *_: object) -> None:
        stack._running[name] = kind, None  # type: ignore[assignment]
        found[name] = engine.transfer_config(engine.parser().parse_args(argv[3:]))

    monkeypatch.setattr(Processes, "spawn", spawn)
    monkeypatch.setattr(Processes, "__exit__", lambda *_: None)
    return found


def test_engines_have_roles_and_those_that_come_and_go_decode(
    tmp_path: Path, spawned: dict[str, TransferConfig | None]
) -> None:
    stack = LocustStack(tmp_path, WARMFLEET, Size(engines=3, prefill=1))
    for name in list(stack.engines)[:3]:
        stack.start_engine(name)
    joining = stack.spare(stack.engines)
    assert stack.first(stack.engines) == "decode-1"
    stack.start_engine(joining)

    assert {name: config and (config.role, config.recomputes) for name, config in spawned.items()} == {
        "decode-1": ("kv_consumer", True),
        "decode-2": ("kv_consumer", True),
        "prefill-1": ("kv_producer", True),
        "decode-3": ("kv_consumer", True),
    }
    assert joining == "decode-3"
    assert stack.roles() == {name: name.split("-")[0] for name in spawned}


@pytest.mark.parametrize(("fleet", "prefill"), [(WARMFLEET, 0), (AFFINITY, 1)])
def test_engines_without_roles_or_router_hand_nothing_over(
    tmp_path: Path, spawned: dict[str, TransferConfig | None], fleet: str, prefill: int
) -> None:
    stack = LocustStack(tmp_path, fleet, Size(engines=2, prefill=prefill))
    for name in stack.engines:
        stack.start_engine(name)

    assert spawned == {"engine-1": None, "engine-2": None, "engine-3": None}
    assert not stack.roles()
    assert not stack.transfers()


def test_counts_of_moved_blocks_are_summed(
    tmp_path: Path, spawned: dict[str, TransferConfig | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = LocustStack(tmp_path, WARMFLEET, Size(engines=3, prefill=1))
    for name in list(stack.engines)[:3]:
        stack.start_engine(name)
    late = {"transfers": 2, "wrong_answers": 1, "violations": {"twice": 1, "role": 2}, "by_source": {}}
    told = dict(
        zip(stack.engines, ({"transfers": 3, "violations": {}}, late, None), strict=False)
    )  # the last was stopped
    monkeypatch.setattr(
        locust_stack,
        "get_json",
        lambda url: next(told[name] for name, port in stack.engines.items() if f":{port}/sim/transfers" in url),
    )

    found = stack.transfers()

    assert len(spawned) == 3
    assert (found["transfers"], found["wrong_answers"], found["violations"], found["bytes"]) == (5, 1, 3, 0)


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
@pytest.mark.parametrize(
    ("roles", "joins", "stops"),
    [((), "engine-3", "engine-1"), (("--engines", "3", "--prefill", "1"), "decode-3", "decode-1")],
)
def test_a_short_real_run_survives_what_comes_and_goes(
    tmp_path: Path, roles: tuple[str, ...], joins: str, stops: str
) -> None:
    less = ("--replicas", "2", "--engines", "2", *roles, "--mix", "chat=1")
    result = run(tmp_path, "--duration", "6", "--rate", "4", *less)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("passed\n")
    found = json.loads((tmp_path / "figures.json").read_text())["warmfleet"]
    assert [mark.split(" at ")[0] for mark in found["marks"]] == [
        f"{joins} added", "replica-1 killed", "replica-3 added", f"{stops} stopped",
    ]  # fmt: skip
    assert found["figures"]["all"]["failed"] == 0
    assert ("split" in found) == bool(roles)
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
