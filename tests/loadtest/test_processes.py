"""Processes of a measurement: one that does not start says why, and none is left at the end."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from warmfleet_loadtest.stacks import processes
from warmfleet_loadtest.stacks.processes import Processes, StackError

if TYPE_CHECKING:
    from pathlib import Path

#: A parent with a child. The sum takes several ticks of the kernel's clock of CPU time, which has 100 ticks a second.
PARENT = """import subprocess, time
subprocess.Popen(["sleep", "600"])
sum(range(5_000_000))
print("up", flush=True)
time.sleep(600)"""


def test_children_of_children_end_with_the_block(tmp_path: Path) -> None:
    with Processes(tmp_path) as running:
        started = running.spawn("some", "parent", [sys.executable, "-c", PARENT])
        running.wait("parent", lambda: "up" in running.log("parent"))
        running.check()
        parent = psutil.Process(started.pid)
        family = [parent, *parent.children()]
        assert running.cpu_s()["some"] > 0
    assert len(family) == 2
    assert psutil.wait_procs(family, 5)[1] == []


def test_a_signal_while_they_end_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as an exception out of the killing of one of them."""
    kill, signals = Processes.kill, iter([True])

    def interrupted(running: Processes, name: str) -> None:
        kill(running, name)
        if next(signals, False):
            raise SystemExit(143)

    monkeypatch.setattr(Processes, "kill", interrupted)
    with pytest.raises(SystemExit), Processes(tmp_path) as running:
        family = [psutil.Process(running.spawn("some", name, ["sleep", "600"]).pid) for name in ("one", "two")]
    assert psutil.wait_procs(family, 5)[1] == []


def test_what_has_ended_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as running:
        running.spawn("some", "odd", ["sh", "-c", "seq 99; exit 3"])
        with pytest.raises(StackError, match=r"odd ended with 3:\n85\n(.*\n)*99$"):
            running.wait("odd", lambda: False)
        running.kill("odd")
        running.check()


def test_what_cannot_be_started_or_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "READY_S", 0.2)
    with Processes(tmp_path) as running:
        with pytest.raises(StackError, match="gone cannot be started: "):
            running.spawn("some", "gone", [str(tmp_path / "missing")])
        running.spawn("some", "slow", ["sleep", "600"])
        began = time.monotonic()
        with pytest.raises(StackError, match="slow is not ready after 0 s"):
            running.wait("slow", lambda: False)
        assert time.monotonic() - began < 5
