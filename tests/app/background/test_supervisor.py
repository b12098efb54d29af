"""A background task outlives failures of its rounds, and ends when it is stopped."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.support.polling import poll

from warmfleet.background.clock import Clock
from warmfleet.background.supervisor import stop, supervise
from warmfleet.errors import FleetUnavailable
from warmfleet.logs.folding import Folding
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode

if TYPE_CHECKING:
    import pytest

AT_ONCE = 0.001, 0.001  # a failed round is tried again


async def test_a_failing_round_is_counted_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    metrics, rounds = Metrics(), []

    async def work() -> None:
        rounds.append(1)
        if len(rounds) < 20:
            raise FleetUnavailable("away")
        if len(rounds) == 20:
            raise ZeroDivisionError

    with caplog.filtering(Folding()):  # as every process joins repeated lines
        task = asyncio.create_task(supervise("test", 0.001, work, metrics, Clock(), retry_s=AT_ONCE))
        await poll(lambda: len(rounds) >= 22, what="rounds after twenty failures")
        await stop([task])
    assert b'warmfleet_task_failures_total{task="test"} 20.0' in metrics.render()
    told = [record for record in caplog.records if "test failed" in record.message]
    assert [bool(record.exc_info) for record in told] == [
        False,
        True,
    ]  # one line for each fault


async def test_a_task_that_fails_again_and_again_folds_no_line_of_another(caplog: pytest.LogCaptureFixture) -> None:
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        raise FleetUnavailable(f"away for the {rounds}th time")

    with caplog.filtering(Folding()):
        for name in ("one", "two"):
            last = rounds + 20
            task = asyncio.create_task(supervise(name, 0.001, work, Metrics(), Clock(), retry_s=AT_ONCE))
            await poll(lambda: rounds >= last, what="failures")  # noqa: B023  it is called at once
            await stop([task])
    assert "two failed" in caplog.text


async def test_the_wait_doubles_from_failure_to_failure_and_begins_anew_after_a_good_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds: list[int] = []

    async def work() -> None:
        rounds.append(1)
        if len(rounds) in (1, 2, 4):
            raise FleetUnavailable("away")

    task = asyncio.create_task(supervise("test", 0.001, work, Metrics(), Clock()))
    await poll(lambda: len(rounds) >= 5, what="a round after three failures")
    await stop([task])
    waits = [record.message for record in caplog.records if "test failed" in record.message]
    assert waits == [f"test failed, again in {seconds} s: away" for seconds in (0.2, 0.4, 0.2)]


async def test_a_failure_names_the_pool_that_the_task_is_for(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise FleetUnavailable("away")

    task = asyncio.create_task(supervise("apply", 0.001, work, Metrics(), Clock(), "demo#2"))
    await poll(lambda: caplog.messages, what="a failure")
    await stop([task])
    assert caplog.messages[0] == "demo#2: apply failed, again in 0.2 s: away"
    DegradedMode(1.0, "demo#2").failed("away")
    assert caplog.messages[-1] == "demo#2: deciding without Redis: away"


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
