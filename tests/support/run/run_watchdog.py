"""Kills processes that a test run leaves behind, however the run ended. ending.py starts this program beside the run.

    python tests/support/run/run_watchdog.py NAME PID

The run alone holds the other end of this program's standard input. A byte there says that the run is ending, and end of
file that the run is gone. Processes of the run are those that have NAME in RUNS, a variable of their environment, and
all that descend from these. A server may overwrite its environment, so descendants are looked for while parents live.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import psutil

RUNS = "TEST_RUNS"  # the names of a run and of the runs that started it
ORDERLY_S = 5.0  # for a run that is ending, with its fixtures
KILLED_S = 2.0  # between SIGTERM and SIGKILL, for processes that are left then, or after the run was killed
POLL_S = 0.1


class Leftovers:
    """The processes of the run ``name``, as far as they were seen."""

    def __init__(self, name: str, pid: int) -> None:
        self._name = name
        self._run = psutil.Process(pid)
        self._seen = {self._run}

    def look(self) -> set[psutil.Process]:
        """Return the processes that run, but not this program."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self._name in process.environ().get(RUNS, ""):
                    self._seen.add(process)
        for process in [*self._seen]:
            with suppress(psutil.Error):
                self._seen.update(process.children(recursive=True))
        return {process for process in self._seen if process.pid != os.getpid() and runs(process)}

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all that run."""
        for process in self.look():
            with suppress(psutil.Error):
                process.send_signal(number)

    def wait(self, seconds: float, *, while_run: bool) -> None:
        """Return when no process runs, or the run itself has ended if ``while_run``; or after ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (left := self.look()) and (not while_run or self._run in left):
            time.sleep(POLL_S)


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def main(name: str, pid: int) -> None:
    """Follow the run to its end, then kill what is left of it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leftovers = Leftovers(name, pid)
    if os.read(0, 1):
        leftovers.wait(ORDERLY_S, while_run=True)
    leftovers.send(signal.SIGTERM)
    leftovers.wait(KILLED_S, while_run=False)
    leftovers.send(signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
