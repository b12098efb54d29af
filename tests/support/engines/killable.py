"""Engines as processes of their own, which a test kills. They hold each request until the test lets them answer.

As a program it is one such engine: ``python -m tests.support.engines.killable MODEL FOLDER WAY``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, answer_well, chunk, engine, reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: When a request is held: before any byte of the answer, or after the head of a stream. ``core``: before any byte; if
#: the test then kills the core, the API server says so, as vLLM's does.
Way = Literal["silent", "head", "core"]
CORE_DIED = {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.", "code": 500}
ESTABLISHED, LOOK_S = "01", 0.005


@dataclass(eq=False)
class EngineProcess:
    """An engine's process. ``folder`` holds its files: ``got`` has a byte for each request that it has read."""

    process: subprocess.Popen[bytes]
    folder: Path
    url: str = ""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def got(self) -> int:
        """The number of requests that the process has read."""
        return (self.folder / "got").stat().st_size

    @property
    def unread(self) -> bool:
        """Whether the kernel has bytes for the process that it has not read."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(f[1].endswith(port) and f[3] == ESTABLISHED and not f[4].endswith(":00000000") for f in lines)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_core(self) -> None:
        """From now on every request, also those that are held, is answered as by vLLM's API server without a core."""
        (self.folder / "core").touch()


class EngineProcesses(list[EngineProcess]):
    """All engines of a test."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def answer(self) -> None:
        """Let every engine answer the requests that it holds, and all later ones."""
        (self.folder / "go").touch()

    def hold(self) -> None:
        (self.folder / "go").unlink()


@asynccontextmanager
async def engine_processes(model: str, folder: Path, count: int, way: Way = "silent") -> AsyncIterator[EngineProcesses]:
    """Start ``count`` engines, which answer until a test makes them hold. All are killed at the end."""
    from tests.support.polling import poll  # not at the top: its imports are most of what an engine would compute

    engines = EngineProcesses(folder)
    engines.answer()
    try:
        for number in range(count):
            own = folder / str(number)
            own.mkdir()
            (own / "got").touch()
            engines.append(EngineProcess(started(model, own, way), own))
        for process in engines:
            await poll((process.folder / "url").exists, 60, "the engine listens")
            process.url = (process.folder / "url").read_text()
        yield engines
    finally:
        for process in engines:
            process.kill()


def started(model: str, folder: Path, way: Way) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", __name__, model, str(folder), way]
    return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


async def main(model: str, folder: Path, way: Way) -> None:
    """Serve until the process is killed."""

    async def answer(one: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        with (folder / "got").open("ab") as got:
            got.write(b".")
        headless = way == "head" and seen.json.get("stream") and not (folder.parent / "go").exists()
        if headless:
            writer.write(STREAM_HEAD)
            await writer.drain()
        while not (folder.parent / "go").exists() and not (folder / "core").exists():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if (folder / "core").exists():
            reply(writer, json.dumps({"error": CORE_DIED}).encode(), "500 Internal Server Error")
        elif headless:
            chunk(writer, b"data: [DONE]\n\n")
            chunk(writer, b"")
        else:
            await answer_well(one, seen, writer)

    async with engine(model, answer) as serving:
        (folder / "new").write_text(serving.url)
        (folder / "new").rename(folder / "url")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))  # type: ignore[arg-type]
