"""A background task outlives failures of its rounds, and ends when it is stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.conftest import poll

from warmfleet.background.supervisor import stop, supervise
from warmfleet.errors import FleetUnavailable
from warmfleet.metrics import Metrics

if TYPE_CHECKING:
    import pytest


async def test_a_failing_round_is_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    metrics, rounds = Metrics(), []

    async def work() -> None:
        rounds.append(1)
        if len(rounds) == 1:
            raise FleetUnavailable("away")
        if len(rounds) == 2:
            raise ZeroDivisionError

    task = asyncio.create_task(supervise("test", 0.001, work, metrics))
    await poll(lambda: len(rounds) >= 4, what="rounds after two failures")
    await stop([task])
    assert b'warmfleet_task_failures_total{task="test"} 2.0' in metrics.render()
    assert len([record for record in caplog.records if "test failed" in record.message]) == 1  # not a line each time


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again() -> None:
    async def swallows() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    task = asyncio.create_task(swallows())
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await stop([task])
    assert task.cancelled()
