"""The trace bench, which plays a trace through whole fleets of processes and makes the published tables."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.loadtest.test_trace import write

from warmfleet.settings import POLICIES
from warmfleet_loadtest.fleet_bench import faulty, main, over_own, table
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.stacks import peers
from warmfleet_loadtest.stacks.fleets import Fleet, Setup, balancer_config, others, ours, running
from warmfleet_loadtest.stacks.processes import HAPROXY_CONFIG, Processes, StackError, haproxy_binary

if TYPE_CHECKING:
    from pathlib import Path

SETUP = Setup(engines=2, blocks=512, mode="step", step_time="fast", decode_s=0.0, haproxy=True)
KEYS = ("mean_ttft", "p50_ttft", "p90_ttft", "p99_ttft", "hit_ratio", "imbalance", "failed")


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace is a generated one, and processes find the sources."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("WARMFLEET_DECIDE_TIMEOUT_S", "2")  # the default of 50 ms is too short beside other work
    monkeypatch.setattr("warmfleet_loadtest.traces.trace.SHARED", "nowhere")
    for name in ("TRACE", "POLICY", "REPLICAS", "FLEET", "SEEDS"):
        monkeypatch.delenv(name, raising=False)


def bench(out: Path, *more: str) -> list[str]:
    options = ["--rows", "40", "--speed", "10", "--engines", "2", "--engine-mode", "step", "--step-time", "fast"]
    return [*options, "--skip", "0", "--out", str(out), *more]


@pytest.mark.usefixtures("generated")
def test_two_replicas_behind_haproxy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(POLICIES, bench(tmp_path, "--policy", "cost", "--replicas", "2")) == 0
    printed = capsys.readouterr()
    run = json.loads(printed.out.splitlines()[-1])
    assert set(KEYS) <= set(run)
    assert (run["fleet"], run["rows"], run["requests"]) == ("cost x 2", 40, 40)
    assert (run["failed"], run["undecided"]) == (0, 0)
    assert 0 < run["p50_ttft"] <= run["p90_ttft"] <= run["p99_ttft"]
    assert set(run["cpu_s"]) == {"store", "engines", "replicas", "haproxy", "client"}
    assert run["hit_ratio"] > 0
    assert run["computed_tokens"] > 0
    assert "40/40, errors 0, ETA 0 s" in printed.err
    assert sorted(path.name for path in tmp_path.glob("*")) == [
        "figures.json",
        "hit_ratio.svg",
        "load.svg",
        "ttft_cdf.svg",
    ]
    assert "cost x 2" in (tmp_path / "load.svg").read_text()


AGENTS = ("--trace", "generated", "--seconds", "100", "--speed", "20", "--step-time", "fast", "--engines", "2")


@pytest.mark.usefixtures("generated")
def test_agents_in_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleets = ["--policy", "cost", "--fleet", "no-ledger:1", "--out", str(tmp_path)]
    assert main(POLICIES, [*AGENTS, *fleets, "--overcommit", "0.2"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    for run in printed["runs"]:
        assert run["sessions"] > 0
        assert run["at_once"] > 1
        assert run["recomputed"] < 0.5
    assert printed["ratios"]["cost x 1"]["sessions_per_hour"][1] > 0.5
    assert (tmp_path / "agents_ttft.svg").exists()
    assert len(json.loads((tmp_path / "figures.json").read_text())["no-ledger x 1"][0]["medians"]) == 24


@pytest.mark.long(minutes=1, shows="the trace bench plays a burst of agents")
@pytest.mark.usefixtures("generated")
def test_agents_in_a_burst(tmp_path: Path) -> None:
    assert main(POLICIES, [*AGENTS, "--fleet", "no-ledger:1", "--out", str(tmp_path), "--burst", "5"]) == 0
    assert "5 sessions more" in (tmp_path / "agents_ttft.svg").read_text()


@pytest.mark.usefixtures("generated")
def test_what_does_not_start_shows_why_and_does_not_stop_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "warmfleet_loadtest.fleet_bench.ours", lambda *_: [Fleet("odd x 1", "warmfleet", "no_such_policy", 1)]
    )
    assert main(POLICIES, bench(tmp_path, "--policy", "odd", "--fleet", "session-sticky,oracle")) == 1
    printed = capsys.readouterr()
    odd, direct, chosen = json.loads(printed.out.splitlines()[-1])["runs"]
    assert "no_such_policy" in odd["error"]
    assert (direct["failed"], direct["requests"]) == (0, 40)
    assert (chosen["failed"], chosen["requests"]) == (0, 40)
    assert "ended with 2" in printed.err


def growing_sessions(path: Path) -> Path:
    """Write a trace of 16 sessions of 10 turns. Each turn waits for the answer before, and is 6 blocks longer."""
    rows: list[dict[str, Any]] = []
    for turn in range(10):
        for session in range(16):
            new = [1_000 * session + 6 * turn + number for number in range(6)]
            row = {"t": turn + session / 16, "s": session, "n": turn + 1, "in": 96 * (turn + 1), "out": 8}
            rows.append({**row, "k": 6 * turn, "new": new})
    return write(path, rows, name="sessions", block=16, timing="synthetic")


@pytest.mark.long(minutes=3, shows="a trace through vllm-router and SMG, which are downloaded and installed (100 MB)")
@pytest.mark.usefixtures("generated")
def test_routers_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vllm-router learns from the engines' events, and so gets more hits than by the number of requests."""
    fleets = "vllm-router-kv:1,vllm-router-kv:2,smg:1,least-loaded,session-affinity:2"
    options = ["--rows", "160", "--engines", "4", "--engine-mode", "fcfs", "--fleet", fleets]
    options += ["--trace", str(growing_sessions(tmp_path / "sessions.jsonl.xz"))]
    assert main(POLICIES, bench(tmp_path, *options)) == 0
    runs = {run["fleet"]: run for run in json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]}
    assert len(runs) == 5
    assert all(run["failed"] == 0 and run["computed_tokens"] > 0 for run in runs.values())
    for name in ("vllm-router-kv x 1", "smg x 1", "session-affinity x 2"):
        assert runs[name]["hit_ratio"] > 1.5 * runs["least-loaded"]["hit_ratio"]
    assert {run["imbalance"] < 3 for run in runs.values()} == {True}


@pytest.mark.long(minutes=1, shows="a benchmark that is ended by a signal leaves no process behind")
@pytest.mark.usefixtures("generated")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_bench_that_is_ended_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    argv = [sys.executable, "-m", "tests.bench.bench_trace", *bench(tmp_path, "--fleet", "session-sticky")]
    with subprocess.Popen([*argv, "--speed", "0.1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children: list[psutil.Process] = []
        while not children:
            assert process.poll() is None
            time.sleep(0.05)  # the workers start
            children = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert psutil.wait_procs(children, 10)[1] == []


@pytest.mark.long(minutes=1, shows="the message of a benchmark that cannot install other routers")
def test_without_a_registry_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "FOLDER", tmp_path / "peers")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.setenv(name, "" if "EXTRA" in name or "FIND" in name else "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(StackError, match=r"is a package registry reachable\? pip: "):
        peers.install()


def test_fleets_by_name() -> None:
    assert [fleet.name for fleet in ours("cost,sticky", "1,4", POLICIES)] == [
        "cost x 1",
        "cost x 4",
        "sticky x 1",
        "sticky x 4",
    ]
    assert tuple(fleet.policy for fleet in ours("all", "1", POLICIES)) == POLICIES
    kv, affinity, sticky = others("vllm-router-kv:4,session-affinity:4,session-sticky")
    assert (kv.kind, kv.replicas, kv.balance, kv.takes_ids) == ("vllm-router-kv", 4, "random", True)
    assert (affinity.kind, affinity.policy, affinity.balance) == ("warmfleet", "cost", "session")
    assert (sticky.replicas, sticky.balance) == (0, "session")
    assert not others("smg")[0].takes_ids
    (without,), (programs,) = others("no-ledger:4"), others("vllm-router-programs:1")
    assert (without.kind, without.policy, without.ledger, affinity.ledger) == ("warmfleet", "cost", False, True)
    assert (programs.needs_names, programs.takes_ids, kv.needs_names) == (True, False, False)
    bridged, approximate, mixed = others("bridge:4,approximate:1,mixed:4")
    assert (bridged.name, bridged.kind, bridged.policy, bridged.connection) == (
        *("bridge x 4", "warmfleet"),
        *("cost", "bridge"),
    )
    assert (approximate.connection, approximate.replicas) == ("approximate", 1)
    assert (mixed.name, mixed.connection, mixed.replicas) == ("mixed x 4", "mixed", 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "odd"], "no policy 'odd'"),
        (["--replicas", "1,x"], "REPLICAS='1,x'"),
        (["--replicas", "0"], "REPLICAS='0'"),
        (["--fleet", "nginx:2"], "no fleet 'nginx:2'; known are vllm-router-kv:N"),
        (["--fleet", "smg:0"], "no fleet 'smg:0'"),
        (["--fleet", "least-loaded:2"], "no fleet 'least-loaded:2'"),
        (["--trace", "/nowhere"], "no trace at /nowhere"),
        (["--trace", __file__], "is no trace (lines of JSON in .xz"),
        (["--seeds", "0"], "--seeds"),
        (["--rows", "0"], "--rows"),
        (["--speed", "0"], "--speed"),
        (["--engines", "0"], "--engines"),
        (["--blocks", "1"], "--blocks"),
        (["--step-time", "odd"], "'odd' is neither a file nor one of fast"),
    ],
)
def test_wrong_usage(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(POLICIES, options) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_variable_is_a_wrong_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SEEDS", "three")
    with pytest.raises(SystemExit, match="2"):
        main(POLICIES, [])
    assert "--seeds: invalid int value: 'three'" in capsys.readouterr().err


@pytest.mark.usefixtures("generated")
def test_engines_that_end_on_the_way_are_an_error_of_their_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    spawn = Processes.spawn

    def noted(*args: Any) -> subprocess.Popen[bytes]:
        started.append(spawn(*args))
        return started[-1]

    monkeypatch.setattr(Processes, "spawn", noted)
    monkeypatch.setattr("warmfleet_loadtest.fleet_bench.Progress.tick", lambda *_, **__: started[0].kill())
    assert main(POLICIES, bench(tmp_path, "--fleet", "session-sticky")) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1])["error"].startswith("engines ended with -9:\nengine 0 serves sim")
    assert "error: session-sticky, seed 1/1: engines ended" in printed.err


def test_a_picker_may_only_cut_answers_that_had_begun() -> None:
    entry = {"fleet": "picker x 2", "failed": 3, "cut": 3, "booked": 0}
    assert not faulty(entry)
    assert faulty(entry | {"cut": 2})
    assert faulty(entry | {"booked": 1})
    assert faulty(entry | {"fleet": "cost x 2"}), "no replica of it was killed"
    assert faulty({"fleet": "picker x 2", "error": "no gateway"})


def test_pickers_are_compared_with_as_many_replicas_of_the_same_seed() -> None:
    found = {"picker x 2": [2.0, 3.0], "cost x 1": [9.0, 9.0], "cost x 2": [1.0, 2.0], "smg x 2": [5.0, 5.0]}
    told = over_own({name: [{"mean_ttft": each} for each in means] for name, means in found.items()})
    assert told == {"picker x 2": [2.0, 1.5, 1.75]}


def test_a_fleet_behind_a_gateway_needs_one() -> None:
    with pytest.raises(StackError, match="no gateway"), running(others("picker:1")[0], SETUP):
        pass


def test_program_scheduling_is_told_the_caches_and_the_step_times() -> None:
    costs = StepCosts(base_s=0.01, weights_s=0.02, prefill_token_s=1e-3, prefill_pair_s=1e-6)
    argv = peers.PEERS["vllm-router-programs"](1, 2, peers.Engines(["http://e"], blocks=101, costs=costs))
    told = json.loads(argv[argv.index("--program-scheduling-config-json") + 1])
    assert told["token_capacity_per_target"] == 1_600
    assert told["prefill_cost_model"]["linear_seconds_per_1k_tokens"] == 1.0
    assert told["prefill_cost_model"]["quadratic_seconds_per_1k_tokens_squared"] == 0.5
    assert told["decode_throughput_model"]["fixed_step_seconds"] == 0.03


def test_haproxy_takes_the_configuration(tmp_path: Path) -> None:
    for readyz in (True, False):
        text = balancer_config([81, 82], readyz=readyz)
        assert text.count("    server ") == 2
        assert "balance leastconn" in text
        assert ("GET /readyz" in text) is readyz
        (tmp_path / "haproxy.cfg").write_text(text)
        environment = {"LOADTEST_PORT": "80", "LOADTEST_STATS": str(tmp_path / "stats")}
        argv = [haproxy_binary(), "-c", "-f", str(tmp_path / "haproxy.cfg")]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "    server " not in HAPROXY_CONFIG.read_text()


@pytest.mark.usefixtures("generated")
def test_without_haproxy_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_args, **_named: None)
    with pytest.raises(StackError, match="make deps"), running(ours("cost", "1", POLICIES)[0], SETUP):
        pass


def test_a_table_shows_intervals() -> None:
    run: dict[str, Any] = {"fleet": "cost x 4", **dict.fromkeys(KEYS, 1.5), "ci95": dict.fromkeys(KEYS, 0.1)}
    lines = table([run, {"fleet": "odd x 1", "error": "no"}]).splitlines()
    assert lines[2].startswith("| cost x 4 | 1.5 ± 0.1 |")
    assert lines[2].endswith("| 1.5 |")
    assert lines[3] == "| odd x 1 |" + " - |" * len(KEYS)
