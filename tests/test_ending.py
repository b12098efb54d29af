"""A test run that is ended leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
from tests.catalogue import ROOT
from tests.topology import until

if TYPE_CHECKING:
    from pathlib import Path

WAITS = """
import asyncio, pathlib, subprocess, pytest

@pytest.fixture(scope="session")
def engine():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()

async def test_that_waits(engine):
    pathlib.Path("started").write_text(str(engine.pid))
    await asyncio.sleep(600)
"""


def test_sigterm_stops_what_fixtures_started(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(WAITS)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.ending", "-p", "no:cacheprovider"]
    argv += ["-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function", "--rootdir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as run:
        started = tmp_path / "started"
        until(lambda: started.exists() and started.read_text(), "the test runs", 60)
        engine = psutil.Process(int(started.read_text()))
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == pytest.ExitCode.INTERRUPTED
    assert not engine.is_running()
