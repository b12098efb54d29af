"""A test run that is ended leaves no process behind, whichever signal comes and whatever the run does then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest
from tests.support.polling import until
from tests.support.run.long_tests import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEFT_S = 60.0  # time in which every process is gone after the signal, also on a busy machine

# Each of the files that a run gets begins with this. A file "*.started" says that the run is in its middle.
HEAD = """
import asyncio, os, pathlib, subprocess, sys, time, pytest
from tests.conftest import valkey_url

PARENT = "import subprocess, time; subprocess.Popen(['sleep', '600']); print('up', flush=True); time.sleep(600)"

def engine():
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    return process

def started():
    pathlib.Path(__file__).with_name(f"{os.getpid()}.started").touch()

@pytest.fixture(scope="module")
def engines():
    running = [engine() for _ in range(3)]
    yield running
    for process in running:
        time.sleep(STOP_S)
        os.killpg(process.pid, 9)
        process.wait()

STOP_S = 0
"""
TEST = "async def test_it(engines, valkey_url):\n    started()\n"
#: What a run does when the signal comes -> its tests.
DOING = {
    "waiting": HEAD + TEST + "    await asyncio.sleep(600)\n",
    "computing": HEAD + TEST + "    while True: pass\n",
    "deaf": HEAD + TEST + "    while True:\n        try: time.sleep(600)\n        except BaseException: pass\n",
    "slow-to-stop": HEAD + "STOP_S = 3\n" + TEST + "    await asyncio.sleep(600)\n",
    "starting-servers": HEAD + "@pytest.fixture\ndef slow():\n    engine()\n    started()\n    time.sleep(600)\n"
    "def test_it(slow): pass\n",
    "collecting": HEAD + "engine()\nstarted()\ntime.sleep(600)\n",
}


LEAVES = """
import atexit, pathlib, subprocess, time

LEFT = []
atexit.register(time.sleep, 1)

def test_it():
    LEFT.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
    pathlib.Path(__file__).with_name("it.started").touch()
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.01)
"""


class Case(NamedTuple):
    """``to``: one process, or its group, as a terminal and the command timeout do."""

    doing: str
    processes: int
    number: signal.Signals
    to: str = "process"
    by: str = "pytest"


OFTEN = [
    *[Case("waiting", 2, number) for number in (signal.SIGTERM, signal.SIGKILL)],
    Case("waiting", 2, signal.SIGTERM, by="make"),
    Case("collecting", 0, signal.SIGTERM),
]
RARE = [
    *[Case("waiting", 2, number, to="group") for number in (signal.SIGINT, signal.SIGHUP)],
    Case("deaf", 2, signal.SIGTERM),
    *[Case(doing, 0, signal.SIGTERM) for doing in ("computing", "slow-to-stop", "starting-servers")],
]
LONG = pytest.mark.long(minutes=2, shows="runs that compute, hear no signal or end slowly leave no process behind")


def name_of(case: Case) -> str:
    return "-".join(map(str, [*case[:2], case.number.name, *case[3:]]))


@pytest.mark.parametrize("case", [*OFTEN, *[pytest.param(case, marks=LONG) for case in RARE]], ids=name_of)
def test_a_run_that_is_ended_leaves_no_process(case: Case, tmp_path: Path) -> None:
    files = case.processes or 1
    for number in range(files):
        (tmp_path / f"test_{number}.py").write_text(DOING[case.doing])
    with run_of(case, tmp_path) as run:
        until(
            lambda: len([*tmp_path.glob("*.started")]) == files or not run.is_running(), "the run is in its middle", 60
        )
        processes = [run, *run.children(recursive=True)]
        (os.killpg if case.to == "group" else os.kill)(run.pid, case.number)
        _, left = psutil.wait_procs(processes, LEFT_S)
        told = [f"{process.pid} {process.name()}" for process in left]
        kill(left)
    assert len(processes) >= 1 + 3 * files
    assert not told


def test_a_run_that_ends_by_itself_leaves_no_process_and_has_its_own_status(tmp_path: Path) -> None:
    """Processes that a test leaves behind are killed; the run is not killed, even if its exit takes a while."""
    (tmp_path / "test_it.py").write_text(LEAVES)
    with run_of(Case("waiting", 0, signal.SIGTERM), tmp_path) as run:
        until(lambda: [*tmp_path.glob("*.started")] or not run.is_running(), "the run is in its middle", 60)
        processes = run.children(recursive=True)
        (tmp_path / "go").touch()
        assert run.wait(60) == pytest.ExitCode.OK
        assert len(processes) == 2, "the watchdog and what the test leaves"
        _, left = psutil.wait_procs(processes, LEFT_S)
        kill(left)
    assert not left


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    """Runs of these tests hear SIGHUP and SIGINT, also where their own run ignores them (nohup; a shell's ``&``)."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def run_of(case: Case, folder: Path) -> Iterator[psutil.Process]:
    """A run of the tests in ``folder`` that leads a process group. Its output is shown if the test fails."""
    pytest_options = ["-q", "-n", str(case.processes), "-p", "tests.support.run.ending", "-p", "no:cacheprovider"]
    pytest_options += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    argv = [sys.executable, "-m", "pytest", *pytest_options]
    if case.by == "make":
        ready = ("-o", "deps", "-o", ".venv/.dev-ready")
        pytest_options += ["tests/test_catalogue.py", "--deselect", "tests/test_catalogue.py"]  # needs no environment
        argv = ["make", "-C", str(ROOT), *ready, "test", f"ARGS={' '.join(pytest_options)}", f"PYTHON={sys.executable}"]
    with subprocess.Popen(argv, cwd=folder, process_group=0) as process:
        run = psutil.Process(process.pid)
        try:
            yield run
        finally:
            with suppress(psutil.NoSuchProcess):
                kill([*run.children(recursive=True), run])


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
