"""A replica as a process, before an engine that records what it is sent."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from tests.fuzz.malformed import HIDDEN_PATH, LAST
from tests.support.engines.scripted import engine, reply
from tests.support.polling import poll

from warmfleet_loadtest.stacks.processes import Processes, answers, free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.support.engines.scripted import Engine, Seen

CLIENTS = 16
ANSWER_S = 60.0  # a busy machine; a request without an answer is a failure


@dataclass
class Target:
    """A replica as a process, and what its engine has received."""

    port: int
    pid: int
    received: int = 0
    smuggled: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    wrong: list[tuple[object, bytes]] = field(default_factory=list)

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    async def send_all(self, made: Iterator[bytes], count: int) -> None:
        """Send ``count`` requests over kept connections."""
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await self.sent_alone(next(made))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def sent_alone(self, raw: bytes) -> bytes:
        """Send a request and the one behind it, read until the replica closes, and check the statuses."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(raw if raw.endswith(LAST) else raw + LAST)
            async with asyncio.timeout(ANSWER_S):
                answer = await reader.read(-1)
        except (OSError, TimeoutError) as error:
            self.wrong.append((repr(error), raw))
            return b""
        finally:
            writer.transport.abort()
        statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
        for status in statuses:
            self.statuses[status] = self.statuses.get(status, 0) + 1
        if not statuses or any(status >= 500 for status in statuses):
            self.wrong.append((answer[:300], raw))
        return answer


@asynccontextmanager
async def target(redis_url: str, model: str) -> AsyncIterator[Target]:
    made: Target

    async def record(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        made.received += 1
        made.smuggled += seen.path == HIDDEN_PATH
        upstream.seen.clear()
        reply(writer, b'{"choices": [{"index": 0, "text": "x"}]}')

    with tempfile.TemporaryDirectory(prefix="wf-fuzz-") as folder, Processes(Path(folder)) as processes:
        async with engine(model, record) as upstream:
            [port] = free_ports(1)
            settings = {"REDIS_URL": redis_url, "MODELS": model, "STATIC_WORKERS": upstream.url, "PORT": str(port)}
            settings |= {"DECIDE_TIMEOUT_S": "2", "ADMIN_PORT": "0"}
            environment = {f"WARMFLEET_{name}": value for name, value in settings.items()}
            process = processes.spawn("replica", "replica", [sys.executable, "-m", "warmfleet", "serve"], environment)
            made = Target(port, process.pid)
            ready = f"http://127.0.0.1:{port}/readyz"
            await poll(lambda: asyncio.to_thread(answers, ready), 60, "the replica is ready")
            yield made
            log = processes.log("replica")
            assert "Traceback" not in log, log[-3_000:]
