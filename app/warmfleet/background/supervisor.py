"""Runs a replica's background tasks. A failed round is counted, logged and tried again; it ends no other task."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, retry_if_exception_type, wait_exponential

from warmfleet.errors import WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from tenacity import RetryCallState

    from warmfleet.background.clock import Clock
    from warmfleet.metrics import Metrics

logger = logging.getLogger("warmfleet.background.supervisor")

#: First and longest wait after a failed round; the wait doubles with each further failure. The longest is one second:
#: a single pool whose Redis is away makes a round over all pools fail, and the other pools still need that round.
RETRY_S = 0.2, 1.0
CANCEL_AGAIN_S = 0.2


async def supervise(
    name: str,
    interval_s: float,
    work: Callable[[], Awaitable[object]],
    metrics: Metrics,
    clock: Clock,
    tag: str = "",
    retry_s: tuple[float, float] = RETRY_S,
) -> None:
    """Run ``work`` every ``interval_s`` seconds until cancelled; a failed round is tried again after a shorter wait.

    The first round comes at once, further rounds on the clock's beats. interval_s: 0 if ``work`` itself waits until
    the next round is due. tag: the pool of the task, if it has a pool; its log lines name the tag.
    retry_s: the first and the longest wait after failed rounds.
    """
    first_s, last_s = retry_s
    failures = AsyncRetrying(
        retry=retry_if_exception_type(Exception),  # a task must outlive every failure of its rounds
        wait=wait_exponential(first_s, max=last_s),
        before_sleep=_FailureReport(name, metrics, tag),
    )
    async for spell in failures:  # this loop turns only after a failure, so good rounds cost nothing here
        with spell:
            while True:
                await work()
                spell.retry_state.attempt_number = 1  # after a good round the next failure has the first wait again
                await asyncio.sleep(interval_s and clock.until(interval_s))


class _FailureReport:
    """Counts and logs every failure of one task."""

    def __init__(self, name: str, metrics: Metrics, tag: str) -> None:
        self._name = f"{tag}: {name}" if tag else name
        self._logger = logger.getChild(name)  # the log folds repeated lines by logger: this keeps tasks apart
        self._failures = metrics.task_failures.labels(name)

    def __call__(self, state: RetryCallState) -> None:
        self._failures.inc()
        error = state.outcome.exception() if state.outcome is not None else None
        trace = None if isinstance(error, WarmfleetError) else error  # expected errors need no stack trace
        self._logger.warning("%s failed, again in %.1f s: %s", self._name, state.upcoming_sleep, error, exc_info=trace)


async def stop(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` and return when all have ended.

    A task is cancelled again every CANCEL_AGAIN_S, because a library's ``wait_for`` may swallow one cancellation.
    """
    running = set(tasks)
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=CANCEL_AGAIN_S)
