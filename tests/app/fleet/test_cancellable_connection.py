"""A cancelled call ends, whichever turn of the event loop cancels it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from warmfleet.fleet import connect
from warmfleet.fleet.connection.cancellable import CancellableTCP, CancellableTLS, CancellableUnix, connection_options

if TYPE_CHECKING:
    from pathlib import Path

TURNS = 40  # turns of the event loop, enough for two calls


@pytest.mark.parametrize("wanted", ["one connection", "a new connection for each"])
async def test_one_cancellation_ends_a_task_in_every_turn_of_the_loop(valkey_url: str, wanted: str) -> None:
    client = connect(valkey_url)
    await client.ping()

    async def call_for_ever() -> None:
        while True:
            await client.ping()
            if wanted != "one connection":
                await client.connection_pool.disconnect()

    for turns in range(TURNS):
        task = asyncio.create_task(call_for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        _, running = await asyncio.wait([task], timeout=60)
        while running:  # without the limit a failing test would not end
            task.cancel()
            _, still = await asyncio.wait([task], timeout=0.1)
            assert still, f"a cancellation after {turns} turns was lost"
        assert task.cancelled()
    await client.aclose()


async def test_a_write_that_nobody_reads_ends_in_time(tmp_path: Path) -> None:
    async def greet_then_hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while len(data := await reader.read(4_096)) < 4_096:
            writer.write(b"+OK\r\n" * data.count(b"CLIENT"))  # redis-py tells its name and version first
        await stopping.wait()
        writer.close()

    stopping = asyncio.Event()
    server = await asyncio.start_unix_server(greet_then_hang, tmp_path / "s", limit=4_096)
    client = connect(f"unix://{tmp_path}/s?socket_timeout=0.1&protocol=2")
    with pytest.raises(RedisTimeoutError, match="writing"):
        await client.set("key", b"x" * 50_000_000)
    stopping.set()
    await client.aclose()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("redis://a:1/2", CancellableTCP),
        ("rediss://a:1/2", CancellableTLS),
        ("unix:///tmp/s", CancellableUnix),
    ],
)
def test_every_kind_of_url_has_its_class(url: str, kind: type) -> None:
    assert connection_options(url)["connection_class"] is kind
