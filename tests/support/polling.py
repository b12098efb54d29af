"""Tests wait here until a condition holds, for no longer than a deadline."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from collections.abc import Callable

POLL_S = 0.01


async def poll(
    check: Callable[[], object], deadline_s: float = 30.0, what: str = "", *, every_s: float = POLL_S
) -> object:
    """Call ``check`` (plain or async) until it returns something true, and return that; fail after ``deadline_s``.

    Time in which a busy machine did not let this process run does not count.
    """
    end = time.monotonic() + deadline_s
    while True:
        value = check()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        asleep = time.monotonic()
        if asleep > end:
            pytest.fail(f"not within {deadline_s} s: {what or check}")
        await asyncio.sleep(every_s)
        end += time.monotonic() - asleep - every_s


def until(true: Callable[[], object], what: str, seconds: float = 15.0) -> None:
    """Call ``true`` until it returns something true, and take an error for a no; fail the test after ``seconds``.

    Time in which a busy machine did not let this process run does not count.
    """
    deadline = time.monotonic() + seconds
    while True:
        with suppress(redis.RedisError, OSError):
            if true():
                return
        asleep = time.monotonic()
        if asleep > deadline:
            pytest.fail(f"not within {seconds} s: {what}")
        time.sleep(POLL_S)
        deadline += time.monotonic() - asleep - POLL_S
