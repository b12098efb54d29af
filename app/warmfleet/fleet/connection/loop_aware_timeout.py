"""A time limit for calls: time in which a busy event loop could not read the answer does not count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

STEPS = 4  # in a time limit; a step counts only if the loop ran its timer on time
LATE_S = 0.005  # seconds; a timer that runs later than this is not on time
MOST_S = 1.0  # seconds by which a time limit grows at most


class Patience:
    """``asyncio.timeout(seconds)`` that does not give up an answer which arrived in time and could not be read yet.

    A burst of large prompts keeps the event loop busy for longer than Redis needs, and a call may take several turns of
    the loop (connect, greet, ask). So the limit is counted in steps, and a step at whose end the loop was late does not
    count. The limit never grows beyond ``seconds`` + MOST_S.
    """

    __slots__ = ("_due", "_handle", "_last", "_left", "_loop", "_step", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._step = seconds / STEPS

    async def __aenter__(self) -> Self:
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._left = STEPS
        self._due = self._loop.time() + self._step
        self._last = self._due + STEPS * self._step + MOST_S
        self._handle = self._loop.call_at(self._due, self._reached)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _reached(self) -> None:
        now = self._loop.time()
        if now - self._due <= LATE_S:
            self._left -= 1
        if self._left > 0 and now < self._last:
            self._due = now + self._step
            self._handle = self._loop.call_at(self._due, self._reached)
        else:
            self._timeout.reschedule(now)
