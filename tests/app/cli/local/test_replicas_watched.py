"""The parent of ``serve --workers``: replicas that hang, and a machine that starts no process. Replicas are stubs."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.support.polling import poll

from warmfleet.api.listening import parent as line
from warmfleet.cli.local import replicas
from warmfleet.cli.local.replicas import Replicas, Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

#: A replica that only speaks on the line to its parent: ready, alive every 10 ms, and gone when that ends.
STUB = """
import socket, sys
line = socket.socket(fileno=int(sys.argv[2].split(",")[1]))
line.sendall(b"ready\\n{beat}")
line.settimeout(0.01)
while True:
    try:
        if line.recv(4096) in (b"", {retired!r}):
            break
    except TimeoutError:
        line.sendall(b"{beat}")
"""


@asynccontextmanager
async def parent(folder: Path, beat: str = "alive\\n") -> AsyncIterator[Replicas]:
    """The parent of two stubs, in this process; both are ready."""
    stub = folder / "stub.py"
    stub.write_text(STUB.format(retired=line.RETIRED.line(), beat=beat))
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        made = Replicas([sys.executable, "-S", str(stub)], Shared([first, second], []), 5.0)
        running = asyncio.create_task(made.run())
        try:
            await poll(lambda: len(ready(made)) == 2, 30, "both are ready")
            yield made
        finally:
            made._stop(signal.SIGTERM)
            assert await asyncio.wait_for(running, 30) == 0


def ready(made: Replicas) -> list[int]:
    """The processes of the replicas that are ready."""
    return [place.process.pid for place in made._places if place is not None and place.ready.is_set()]


async def test_a_replica_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile and afterwards the other one stays as it is."""
    monkeypatch.setattr(replicas, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(replicas, "SILENT_BEATS", 10)
    monkeypatch.setattr(replicas, "FIRST_PAUSE_S", 0.01)
    async with parent(tmp_path) as made:
        hung, other = ready(made)
        os.kill(hung, signal.SIGSTOP)
        await poll(lambda: other in ready(made) and len({*ready(made)} - {hung}) == 2, 60, "another takes its place")
        assert ready(made)[1] == other
    assert f"replica 0 (process {hung}) hangs" in caplog.text
    assert caplog.text.count("hangs") == 1


async def test_while_the_parent_itself_does_not_run_nobody_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(replicas, "SILENT_BEATS", 5)
    async with parent(tmp_path) as made:
        before = ready(made)
        await asyncio.sleep(0.2)
        asyncio.get_running_loop().call_soon(time.sleep, 1.0)
        await asyncio.sleep(0.2)
        assert ready(made) == before
    assert "hangs" not in caplog.text


async def test_a_replica_of_a_version_without_heartbeats_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(replicas, "SILENT_BEATS", 2)
    async with parent(tmp_path, beat="") as made:
        before = ready(made)
        await asyncio.sleep(0.2)
        assert ready(made) == before
    assert "hangs" not in caplog.text


async def test_a_replica_tells_that_it_is_ready_and_then_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "HEARTBEAT_S", 0.01)
    ours, theirs = socket.socketpair()
    reasons, stopped = ["no worker yet", "no worker yet", ""], asyncio.Event()

    async def listen(_told: line.Listening) -> None: ...

    replica = asyncio.create_task(line.Parent(theirs).obey(listen, stopped.set, lambda: reasons.pop(0)))
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    async with asyncio.timeout(30):
        assert [await reader.readline() for _ in range(4)] == [line.READY, *[line.ALIVE] * 3]
        writer.write(line.RETIRED.line())
        await replica
    assert stopped.is_set()
    writer.close()


async def test_a_machine_that_starts_no_process_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then the other replica listens on both sockets."""
    monkeypatch.setattr(replicas, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(replicas, "LONGEST_PAUSE_S", 0.05)
    async with parent(tmp_path) as made:
        start, refused = asyncio.create_subprocess_exec, list[int]()

        async def full(*command: Any, **more: Any) -> Any:
            if len(refused) < 3:
                refused.append(1)
                raise OSError(11, "Resource temporarily unavailable")
            return await start(*command, **more)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
        killed, other = ready(made)
        shared = made._places[1]
        assert shared is not None
        os.kill(killed, signal.SIGKILL)
        await poll(lambda: len(refused) == 1, 30, "it was tried")
        assert shared.listening == line.Listening((1, 0), operators=True)
        await poll(lambda: len(ready(made)) == 2, 30, "it was tried until it worked")
        assert ready(made)[1] == other
        assert shared.listening == line.Listening((1,), operators=True)
    assert caplog.text.count("replica 0 cannot be started") == 3


async def test_a_reload_that_was_faster_fills_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While a replica that ended is started again: the second one is retired, and both places have one replica."""
    monkeypatch.setattr(replicas, "FIRST_PAUSE_S", 0.01)
    caplog.set_level(logging.INFO, "warmfleet.replicas")
    async with parent(tmp_path) as made:
        start, starts, go_on = asyncio.create_subprocess_exec, list[int](), asyncio.Event()

        async def slow(*command: Any, **more: Any) -> Any:
            starts.append(1)
            if len(starts) == 1:
                await go_on.wait()
            return await start(*command, **more)

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
        os.kill(ready(made)[0], signal.SIGKILL)
        await poll(lambda: len(starts) == 1, 30, "it is started again")
        made._reload.set()
        await poll(lambda: "every replica was replaced" in caplog.text, 30, "the reload is over")
        places = ready(made)
        go_on.set()
        await poll(lambda: len(made._alive) == 3, 30, "the late one is there")
        await poll(lambda: len(made._alive) == 2, 30, "and ended")
        assert ready(made) == places
