"""The needs of a local stack before it starts, and the chat templates that its replicas may trust."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from warmfleet.__main__ import main
from warmfleet.cli import up
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local import engines, replicas, stack
from warmfleet.cli.local.children import Child
from warmfleet.cli.local.engines import EngineOptions, demo_template_sha256, engine_command
from warmfleet.cli.local.stack import Member, Plan, Stack, ports_for_gateways
from warmfleet.cli.parser import build_parser
from warmfleet.settings import Settings

YOURS = ("http://127.0.0.1:9",)


@pytest.mark.parametrize("command", ["up", "demo"])
def test_without_the_simulator_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _name: None)
    assert main([command]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"warmfleet {command}: {engines.NO_SIMULATOR}\n"
    assert "store" not in printed.out, "nothing was started"


TRUSTED = {"WARMFLEET_APPROVED_TEMPLATES": "*"}


@pytest.mark.parametrize(
    ("plan", "simulated", "approvals"),
    [
        (Plan(), True, TRUSTED),
        (Plan(engines=EngineOptions(kind="vllm")), False, TRUSTED),
        (Plan(workers=YOURS), False, TRUSTED),
        (Plan(redis_url="redis://h"), True, {"WARMFLEET_APPROVED_TEMPLATES": f"abc,{demo_template_sha256()}"}),
        (Plan(redis_url="redis://h", workers=YOURS), False, {}),
    ],
)
def test_a_private_store_is_trusted_and_in_one_of_the_user_only_the_simulators_template(
    plan: Plan, simulated: bool, approvals: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_APPROVED_TEMPLATES", "abc")
    if not simulated:
        monkeypatch.setattr(stack, "demo_template_sha256", lambda: pytest.fail("the simulator is not installed"))
    assert plan.simulated is simulated
    assert Stack(plan)._approvals() == approvals


def test_flags_behind_two_dashes_are_for_vllm_and_win() -> None:
    def planned(*words: str) -> Plan:
        return up.plan_of(build_parser().parse_args(["up", *words]))

    options = planned("--engine", "vllm", "--engines", "1", "--", "--block-size", "64").engines
    assert (options.count, options.flags) == (1, ("--block-size", "64"))
    here = replace(options, vllm_python=sys.executable, model=str(Path(__file__).parent))
    argv, _environment = engine_command(here, "vllm-1", 18_000, "redis://h")
    assert argv[-2:] == ["--block-size", "64"]
    with pytest.raises(CommandError, match="--engine vllm"):
        planned("--", "--block-size", "64")


def test_every_replica_is_asked_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    polled: list[str] = []
    ready = {"replica-1": 3, "replica-2": 2}  # rounds until each answers
    members = [Member(name, "http://127.0.0.1:9") for name in ready]

    def is_ready(_stack: Stack, member: Member) -> bool:
        polled.append(member.name)
        return polled.count(member.name) >= ready[member.name]

    monkeypatch.setattr(stack, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(Stack, "_ready", is_ready)
    Stack(Plan()).wait_ready(members)
    assert polled == ["replica-1", "replica-2"] * 2 + ["replica-1"]
    monkeypatch.setattr(stack, "REPLICA_SECONDS", 0.0)
    ready["replica-2"] = 99
    with pytest.raises(CommandError, match="replica-2 does not answer /readyz after 0 s"):
        Stack(Plan()).wait_ready(members)


def test_progress_tells_what_a_real_engine_that_is_not_known_yet_does(tmp_path: Path) -> None:
    starting = Stack(Plan(engines=EngineOptions(kind="vllm")))
    log = tmp_path / "vllm-2.log"
    log.write_text("(EngineCore pid=7) INFO 11-23 02:31:00 [loader.py:1] Loading weights took 0.05 seconds\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        starting.engines = [
            Member(name, "http://127.0.0.1:9", Child(name, process, tmp_path / f"{name}.log"))
            for name in ("vllm-1", "vllm-2")
        ]
        known = [[{"workers": [{"worker_id": "vllm-1.0"}]}]]
        assert starting._still_busy(known) == "; vllm-2: Loading weights took 0.05 seconds"
        known[0][0]["workers"].append({"worker_id": "vllm-2.0"})
        assert starting._still_busy(known) == ""


def test_each_replica_has_ports_of_its_own_for_gateways() -> None:
    given = {"WARMFLEET_EPP_PORT": "9002", "WARMFLEET_EPP_HEALTH_PORT": "0", "WARMFLEET_PORT": "1"}
    assert [ports_for_gateways(given, number) for number in (0, 1)] == [
        {"WARMFLEET_EPP_PORT": "9002"},
        {"WARMFLEET_EPP_PORT": "9003"},
    ]
    assert ports_for_gateways({"WARMFLEET_EPP_PORT": "any"}, 1) == {}, "the replica says what is wrong with it"


def test_rows_of_ports_for_gateways_that_overlap_are_refused() -> None:
    given = {"WARMFLEET_EPP_PORT": "9002", "WARMFLEET_EPP_HEALTH_PORT": "9003"}
    assert ports_for_gateways(given, 0) == given
    with pytest.raises(CommandError, match="at least 2 apart"):
        ports_for_gateways(given, 1)
    with pytest.raises(CommandError, match="at least 2 apart"):
        replicas.bind(Settings(epp_port=9002, epp_health_port=9003), 2)
