"""The four states that ``warmfleet demo`` walks through leave no process running."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from warmfleet.cli.local.states import _end


async def test_requests_end_although_a_cancellation_gets_lost() -> None:
    async def swallows() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    async def fails() -> None:
        raise ConnectionError

    tasks = [asyncio.create_task(swallows()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await _end(tasks)
    assert tasks[0].cancelled()
