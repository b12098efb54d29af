"""Finds late pools: those that have not answered a request LATE_S after another pool did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from warmfleet.errors import FleetUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

Answer = TypeVar("Answer", bound="asyncio.Future[Any]")

LATE_S = 0.05  # longest wait for a pool after another pool has answered; a decision takes a hundredth of it
GRACE_S = 0.005  # further wait, to read answers that arrived while this replica's event loop was blocked


class LatePool(FleetUnavailable):
    """The error in place of a late pool's answer."""

    def __init__(self) -> None:
        super().__init__(f"no answer within {LATE_S:g} s of another pool's")


async def late(answers: Iterable[Answer]) -> set[Answer]:
    """Wait for these answers; returns those that are late."""
    waiting = {answer for answer in answers if not answer.done()}
    if waiting:
        _, waiting = await asyncio.wait(waiting, timeout=LATE_S)
    if waiting:
        await asyncio.sleep(GRACE_S)
    return {answer for answer in waiting if not answer.done()}
