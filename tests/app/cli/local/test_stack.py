"""What a local stack asks for before it starts, and which chat templates its replicas may trust."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from warmfleet.__main__ import main
from warmfleet.cli import up
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local import engines, stack
from warmfleet.cli.local.children import Child
from warmfleet.cli.local.engines import EngineOptions, demo_template_sha256, engine_command
from warmfleet.cli.local.stack import Member, Plan, Stack
from warmfleet.cli.parser import build_parser

YOURS = ("http://127.0.0.1:9",)


@pytest.mark.parametrize("command", ["up", "demo"])
def test_without_the_simulator_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda _name: None)
    assert main([command]) == 2
    said = capsys.readouterr()
    assert said.err == f"warmfleet {command}: {engines.NO_SIMULATOR}\n"
    assert "store" not in said.out, "nothing was started"


@pytest.mark.parametrize(
    ("plan", "simulated"),
    [
        (Plan(), True),
        (Plan(engines=EngineOptions(kind="vllm")), False),
        (Plan(workers=YOURS), False),
    ],
)
def test_only_a_plan_without_engines_of_the_user_is_simulated(plan: Plan, simulated: bool) -> None:
    assert plan.simulated is simulated


def test_every_template_in_a_private_store_is_trusted() -> None:
    assert Stack(Plan())._approvals() == {"WARMFLEET_APPROVED_TEMPLATES": "*"}


def test_in_a_store_of_the_user_the_simulated_engines_template_is_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_APPROVED_TEMPLATES", "abc")
    approvals = Stack(Plan(redis_url="redis://h"))._approvals()
    assert approvals == {"WARMFLEET_APPROVED_TEMPLATES": f"abc,{demo_template_sha256()}"}


def test_engines_of_the_user_need_no_simulator_for_their_approvals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMFLEET_APPROVED_TEMPLATES", raising=False)
    monkeypatch.setattr(stack, "demo_template_sha256", lambda: pytest.fail("the simulator is not installed"))
    assert Stack(Plan(redis_url="redis://h", workers=YOURS))._approvals() == {}


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
    asked: list[str] = []
    ready = {"replica-1": 3, "replica-2": 2}  # rounds until each answers
    members = [Member(name, "http://127.0.0.1:9") for name in ready]

    def is_ready(_stack: Stack, member: Member) -> bool:
        asked.append(member.name)
        return asked.count(member.name) >= ready[member.name]

    monkeypatch.setattr(stack, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(Stack, "_ready", is_ready)
    Stack(Plan()).wait_ready(members)
    assert asked == ["replica-1", "replica-2"] * 2 + ["replica-1"]
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
