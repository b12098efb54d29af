"""A time limit does not count the time in which the event loop was late, up to a bound, and it still ends."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from warmfleet.fleet.connection.loop_aware_timeout import MOST_S, Patience


async def test_time_is_up_when_nothing_comes() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Patience(0.05):
            await asyncio.sleep(10)
    assert 0.05 <= time.monotonic() - began < 5


async def test_what_came_in_time_is_read_though_the_loop_was_busy() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.send(b"answer")
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.2)
    async with Patience(0.05):
        assert await reader.read(6) == b"answer"
    writer.close()
    theirs.close()


async def test_a_loop_that_is_always_busy_ends_the_wait_all_the_same() -> None:
    busy = True

    def block() -> None:
        time.sleep(0.1)
        if busy:
            asyncio.get_running_loop().call_soon(block)

    asyncio.get_running_loop().call_soon(block)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Patience(0.05):
            await asyncio.sleep(60)
    busy = False
    assert time.monotonic() - began < MOST_S + 10.0


async def test_a_cancelled_call_stays_cancelled() -> None:
    async def call() -> None:
        async with Patience(5):
            await asyncio.sleep(10)

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
