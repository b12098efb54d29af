"""A background task outlives failures of its rounds, and ends when it is stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.conftest import poll

from warmfleet.background import supervisor
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


async def test_the_wait_doubles_from_failure_to_failure_and_begins_anew_after_a_good_round(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LOG_EVERY_S", 0.0)
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        if len(rounds) in (1, 2, 4):
            raise FleetUnavailable("away")

    task = asyncio.create_task(supervise("test", 0.001, work, Metrics()))
    await poll(lambda: len(rounds) >= 5, what="a round after three failures")
    await stop([task])
    waits = [record.message for record in caplog.records if "test failed" in record.message]
    assert waits == [f"test failed, again in {seconds} s: away" for seconds in (0.2, 0.4, 0.2)]


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
