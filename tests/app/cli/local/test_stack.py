"""What a local stack asks for before it starts, and which chat templates its replicas may trust."""

from __future__ import annotations

import pytest

from warmfleet.__main__ import main
from warmfleet.cli.local import engines, stack
from warmfleet.cli.local.engines import EngineOptions, demo_template_sha256
from warmfleet.cli.local.stack import Plan, Stack

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
    assert Stack(Plan())._approvals() == {"WARMFLEET_TRUST_TEMPLATES": "1"}


def test_in_a_store_of_the_user_the_simulated_engines_template_is_approved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMFLEET_APPROVED_TEMPLATES", "abc")
    approvals = Stack(Plan(redis_url="redis://h"))._approvals()
    assert approvals == {"WARMFLEET_APPROVED_TEMPLATES": f"abc,{demo_template_sha256()}"}


def test_engines_of_the_user_need_no_simulator_for_their_approvals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARMFLEET_APPROVED_TEMPLATES", raising=False)
    monkeypatch.setattr(stack, "demo_template_sha256", lambda: pytest.fail("the simulator is not installed"))
    assert Stack(Plan(redis_url="redis://h", workers=YOURS))._approvals() == {}
