"""A test run that gets SIGTERM, SIGINT or SIGHUP ends with its fixtures; a watchdog kills all processes that are left.

A run in several processes passes the signal on. Otherwise its processes would hear of the end after five seconds, and
would be killed five seconds later.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import psutil
from tests.support.run import run_watchdog

if TYPE_CHECKING:
    import pytest

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def pytest_configure(config: pytest.Config) -> None:
    """Set the handlers, also in each process of ``-n``, where tests run in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    watchdog = None if hasattr(config, "workerinput") else Watchdog()
    ending = Ending(config, watchdog)
    config.pluginmanager.register(ending)  # held here, because tests replace handlers of signals
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, ending)


class Watchdog:
    """Runs beside this run, and outlives it."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        os.environ[run_watchdog.RUNS] = f"{os.environ.get(run_watchdog.RUNS, '')} {name}"
        argv = [sys.executable, run_watchdog.__file__, name, str(os.getpid())]
        quiet = subprocess.DEVNULL
        # A number, which is closed with the process and not before: a file would be closed while Python exits.
        reads, self._pipe = os.pipe()
        self._process = subprocess.Popen(argv, stdin=reads, stdout=quiet, stderr=quiet, start_new_session=True)
        os.close(reads)

    def run_is_ending(self) -> None:
        with suppress(BrokenPipeError):
            os.write(self._pipe, b"e")


class Ending:
    """Handles the first of SIGNALS. Later ones are ignored, because they would cut the end of fixtures short."""

    def __init__(self, config: pytest.Config, watchdog: Watchdog | None) -> None:
        self._config = config
        self._watchdog = watchdog

    def __call__(self, number: int, frame: object) -> NoReturn:
        """Raises KeyboardInterrupt, which ends the run."""
        for each in SIGNALS:
            signal.signal(each, _ignore)
        if self._watchdog is not None:
            self._watchdog.run_is_ending()
        if self._config.pluginmanager.hasplugin("dsession"):
            for process in psutil.Process().children():  # processes of -n: they start tests, and so servers
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        raise KeyboardInterrupt


def _ignore(_number: int, _frame: object) -> None:
    """Unlike SIG_IGN, this is not inherited by programs that fixtures start at their end."""
