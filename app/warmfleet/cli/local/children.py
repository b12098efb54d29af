"""Child processes of a local stack: each leads a process group; all are stopped in the reverse order of their start."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local import watchdog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_SECONDS = 0.02  # time between two looks at a process that is starting or ending


@dataclass
class Child:
    """A process and the file with its output. reported: the user need not be told (again) that it ended."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_seconds: float = 5.0
    reported: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def ending(self) -> str:
        """How the process ended, as a text: its signal or exit code."""
        code = self.process.poll()
        if code is None:
            return "running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def tail(self, lines: int = 12) -> str:
        """Read the last lines of the process's output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Children:
    """The processes of a stack. All are stopped when the ``with`` block ends, and also if this process is killed.

    Each child leads a session of its own, so Ctrl-C in the terminal reaches only this process, which then stops the
    children in order.
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
        """Start a process with ``env`` added to our environment. Raises CommandError if it cannot be started."""
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
        if not self._notify_watchdog(f"+{process.pid}"):
            raise CommandError(
                "the watchdog process is gone: nothing would stop the other processes if this command were killed"
            )
        return child

    def stop(self, child: Child) -> None:
        """Send SIGTERM to the child's process group, and SIGKILL after ``stop_seconds``."""
        self._end([child])

    def close(self) -> None:
        """Stop all processes in the reverse order of their start, and remove the private folder."""
        # Routers stop before engines and engines before the store; processes of one kind stop at the same time.
        kinds: dict[str, list[Child]] = {}
        for child in reversed(self._started):
            kinds.setdefault(child.name.rstrip("0123456789"), []).append(child)
        for children in kinds.values():
            self._end(children)
        self._started.clear()
        if self._watchdog.stdin is not None and not self._watchdog.stdin.closed:
            self._watchdog.stdin.close()
        self._watchdog.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # the watchdog has removed it, unless the watchdog was killed

    def newly_dead(self) -> list[Child]:
        """List children that ended by themselves since the last call."""
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
            # The whole group, because vLLM's engine core may outlive the API server that started it.
            watchdog.signal_group(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.reported = True
            self._notify_watchdog(f"-{child.process.pid}")

    def _notify_watchdog(self, line: str) -> bool:
        """Send a line to the watchdog; return False if the watchdog is gone."""
        if self._watchdog.stdin is None:
            return False
        try:
            self._watchdog.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            return False
        return True
