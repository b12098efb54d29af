"""Child processes of a stack: started in groups of their own, watched, stopped in reverse order."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local import watchdog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_SECONDS = 0.02  # for starts and ends that nothing announces within a time limit


@dataclass
class Child:
    """One process and the file that its output goes to. ``reported``: its end has been told."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_seconds: float = 5.0
    reported: bool = field(default=False)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.process.poll()
        if code is None:
            return "running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def tail(self, lines: int = 12) -> str:
        """The last lines of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Children:
    """Every process of one stack. Leaving the ``with`` block stops them all; so does the death of this process.

    Each child leads a session of its own: Ctrl-C in the terminal reaches only us, and we stop them in order.
    """

    def __init__(self, logs: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warmfleet-"))
        self.logs = logs or self.folder
        self.logs.mkdir(parents=True, exist_ok=True)
        self._started: list[Child] = []
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, stop_seconds: float = 5.0
    ) -> Child:
        """Start one process; ``env`` is added to ours. Raises CommandError if it cannot be run at all."""
        log = self.logs / f"{name}.log"
        with log.open("ab") as out:
            try:
                process = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandError(f"{name} cannot be started: {error}") from error
        child = Child(name, process, log, stop_seconds)
        self._started.append(child)
        if not self._tell(f"+{process.pid}"):
            raise CommandError("the watchdog process is gone: nothing would clean up after us")
        return child

    def stop(self, child: Child) -> None:
        """SIGTERM, then SIGKILL after ``stop_seconds``; to the whole group, for engines that have children."""
        self._end([child])

    def close(self) -> None:
        """Stop everything, what was started last first, and remove the private folder."""
        # one kind after the other (routers, engines, store), each kind at once
        kinds: dict[str, list[Child]] = {}
        for child in reversed(self._started):
            kinds.setdefault(child.name.rstrip("0123456789"), []).append(child)
        for children in kinds.values():
            self._end(children)
        self._started.clear()
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            self._watchdog.stdin.close()
        self._watchdog.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # the watchdog did, if it was still there

    def newly_dead(self) -> list[Child]:
        """Children that ended since the last call, without being asked to."""
        dead = [child for child in self._started if not child.reported and not child.alive]
        for child in dead:
            child.reported = True
        return dead

    def _end(self, children: list[Child]) -> None:
        for child in children:
            watchdog.signal_group(child.process.pid, signal.SIGTERM)
        for child in children:
            deadline = time.monotonic() + child.stop_seconds
            while child.alive and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            # also what outlived its leader: vLLM's engine core is a child of the API server
            watchdog.signal_group(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.reported = True
            self._tell(f"-{child.process.pid}")

    def _tell(self, line: str) -> bool:
        """One line to the watchdog; False if it is gone."""
        if self._watchdog.stdin is None:
            return False
        try:
            self._watchdog.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            return False
        return True
