"""The words that a shell offers when somebody presses Tab."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.support.replicas.fixed_answers import replica

from warmfleet.cli.local.running_stack import RunningStack, announced
from warmfleet.cli.terminal import completion

if TYPE_CHECKING:
    from pathlib import Path

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("WARMFLEET_MODELS", raising=False)


def completions(line: str, folder: Path) -> list[str]:
    """The words that a shell would offer at the end of this line."""
    answers = folder / "answers"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run([sys.executable, "-m", "warmfleet"], env=environment, capture_output=True, timeout=60, check=True)
    return answers.read_text().split("\n")


def test_a_shell_completes_models_of_the_running_stack(tmp_path: Path) -> None:
    with announced(RunningStack(NOBODY, "redis://a", ("Qwen/Qwen3-8B", "demo"), os.getpid(), (NOBODY,))):
        assert completions("warmfleet drain gpu1 --model d", tmp_path) == ["demo"]


def test_models_come_from_the_environment_and_the_running_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert completion.models() == []
    monkeypatch.setenv("WARMFLEET_MODELS", "b, a")
    with announced(RunningStack(NOBODY, "redis://a", ("demo", "a"), os.getpid(), (NOBODY,))):
        assert completion.models() == ["a", "b", "demo"]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (
            (200, {"models": [{"workers": [{"worker_id": "gpu1.0"}, {"worker_id": "gpu1.1"}]}]}),
            ["gpu1", "gpu1.0", "gpu1.1"],
        ),
        ((404, {}), []),
        ((200, "<html>"), []),
        ((200, {"models": 7}), []),
    ],
)
def test_workers_come_from_the_running_stack(
    answer: tuple[int, object], found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMFLEET_ADMIN_KEY", "secret")
    assert completion.workers() == []
    with (
        replica({"/workers": answer}) as (url, requests),
        announced(RunningStack(NOBODY, "redis://a", ("demo",), os.getpid(), (url,))),
    ):
        assert completion.workers() == found
    assert requests[0][0]["authorization"] == "Bearer secret"
