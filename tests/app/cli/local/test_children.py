"""The processes of a stack end with it, also when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.children import Children

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]
PARENT = [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({SLEEP!r}); time.sleep(600)"]


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_leaving_the_block_stops_them_and_removes_the_folder() -> None:
    with Children() as children:
        child = children.start("sleeper-1", SLEEP)
        until(lambda: "up" in child.tail())
        assert children.folder.is_dir()
        assert (children.folder.stat().st_mode & 0o077) == 0, "private"
    assert child.ending == "killed by SIGTERM"
    assert not children.folder.exists()


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    with Children() as children:
        child = children.start("stubborn-1", STUBBORN, stop_seconds=0.2)
        until(lambda: "up" in child.tail())
        children.stop(child)
        assert child.ending == "killed by SIGKILL"
        assert children.newly_dead() == [], "it was stopped on purpose"


def test_the_children_of_a_child_end_with_it() -> None:
    with Children() as children:
        child = children.start("parent-1", PARENT)
        until(lambda: "up" in child.tail())
        [grandchild] = psutil.Process(child.process.pid).children()
    until(lambda: not alive(grandchild.pid))


def test_a_child_that_dies_is_reported_once() -> None:
    with Children() as children:
        child = children.start("sleeper-1", SLEEP)
        os.kill(child.process.pid, signal.SIGKILL)
        until(lambda: not child.alive)
        assert children.newly_dead() == [child]
        assert child.ending == "killed by SIGKILL"
        assert children.newly_dead() == []


def test_a_program_that_cannot_be_started_is_named() -> None:
    with Children() as children, pytest.raises(CommandError, match="missing-1 cannot be started"):
        children.start("missing-1", ["/nonexistent/program"])


def test_without_its_watchdog_a_stack_starts_nothing_more() -> None:
    with Children() as children:
        children._watchdog.kill()
        children._watchdog.wait(5)
        with pytest.raises(CommandError, match="watchdog"):
            children.start("sleeper-1", SLEEP)


def test_logs_stay_where_the_user_wants_them(tmp_path: Path) -> None:
    with Children(tmp_path / "logs") as children:
        child = children.start("sleeper-1", SLEEP)
        until(lambda: "up" in child.tail())
    assert (tmp_path / "logs/sleeper-1.log").read_text() == "up\n"


OWNER = """
import sys, time
from warmfleet.cli.local.children import Children
children = Children()
child = children.start("stubborn-1", {command!r})
while "up" not in child.tail():
    time.sleep(0.01)
print(child.process.pid, children.folder, flush=True)
time.sleep(600)
"""


def test_a_killed_owner_takes_them_along() -> None:
    """After SIGKILL of the owner its watchdog sees the pipe close. Children that ignore SIGTERM get five seconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script = OWNER.format(command=STUBBORN)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().split()
        assert alive(int(pid))
        owner.kill()
    until(lambda: not alive(int(pid)), 15)
    until(lambda: not Path(folder).exists())
