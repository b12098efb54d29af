"""Requests that wait their turn: their bodies here, their order in Redis (lua/parts/shared/fair_queue.lua).

While a model has tickets here one task asks about all of them, every 50 ms and as soon as something of this replica's
ends; while it has none, nothing runs. A ticket nobody asks about expires, so a replica that dies leaves none.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from warmfleet.errors import BadRequest, Overloaded, QueueTimeout, WarmfleetError
from warmfleet.fleet import POLL_AT_ONCE, Decision, Queued, Standing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from warmfleet.fleet import Line
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Call, Trip
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.routing.admission_queue")

POLL_S = 0.05  # a ticket lives for 1 s after it was asked about
HURRY_S = 0.005  # least time between two polls: what ends at once is asked about once
PAUSES = 4  # times as long as a poll took, at least, until the next: a long line must not keep Redis busy with itself
MAX_RETRY_AFTER_S = 60
LOG_EVERY_S = 5.0
MAX_DIGITS = 12


def patience_s(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """How long the client lets its request wait for a worker with room. Raises BadRequest."""
    told = next((value.strip() for name, value in headers if name == b"x-request-timeout-ms"), None)
    if told is None:
        return math.inf
    if not told.isdigit() or len(told) > MAX_DIGITS or int(told) == 0:
        raise BadRequest("X-Request-Timeout-Ms must be a whole number of milliseconds.", "X-Request-Timeout-Ms")
    return int(told) / 1_000


class Waiting:
    """All that waits in this replica, of all models, and how much of it."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.bytes = 0
        self._held: Counter[bytes] = Counter()  # of these, by tenant
        self._settings = settings
        self._metrics = metrics
        self._lines: dict[str, TicketPolls] = {}
        self._logged_at = -LOG_EVERY_S

    async def in_turn(self, call: Call, trip: Trip, decide: Callable[[], Awaitable[Decision | Queued]]) -> Decision:
        """Decide; while all workers are saturated, wait for the request's turn. Raises Overloaded, QueueTimeout."""
        size = len(call.body)
        trip.may_wait = self._take(call.flow, size)  # before it is known whether it must: else it took another's place
        try:
            answer = await decide()
            return answer if isinstance(answer, Decision) else await self._waited(call, trip, decide, answer)
        finally:
            if trip.may_wait:
                self._give_back(call.flow, size)

    async def _waited(
        self, call: Call, trip: Trip, decide: Callable[[], Awaitable[Decision | Queued]], answer: Decision | Queued
    ) -> Decision:
        left_s = call.patience_s - (time.perf_counter() - call.began)
        deadline = asyncio.get_running_loop().time() + min(left_s, self._settings.queue_timeout_s)
        self._admitted(trip, answer)
        with self._counted(trip.pool):
            while isinstance(answer, Queued):
                await self._turn(trip.pool, trip.reservation, deadline, answer)
                answer = await decide()
                self._admitted(trip, answer)
                if isinstance(answer, Queued) and trip.spared:  # they have room, so it stays its turn
                    await asyncio.sleep(POLL_S)
        return answer

    def _admitted(self, trip: Trip, answer: Decision | Queued) -> None:
        """Raises Overloaded if it has no ticket, though it needs one."""
        if isinstance(answer, Queued) and answer.outcome != "queued":
            trip.ticket = False
            raise self._refused(trip.pool, answer.outcome if trip.may_wait else "bytes", answer.work_s)

    def _take(self, flow: bytes, size: int) -> bool:
        """Room for a body. A tenant that holds as much as is free gets no more, so there is room for the others."""
        if self._held[flow] + size > self._settings.queue_max_bytes - self.bytes:
            return False
        self.bytes += size
        self._held[flow] += size
        return True

    def _give_back(self, flow: bytes, size: int) -> None:
        self.bytes -= size
        self._held[flow] -= size
        if not self._held[flow]:
            del self._held[flow]

    @contextmanager
    def _counted(self, pool: Pool) -> Iterator[None]:
        waits, began = self._metrics.queued.labels(pool.tag), time.perf_counter()
        waits.inc()
        try:
            yield
        finally:
            waits.dec()
            self._metrics.queue_seconds.observe(time.perf_counter() - began)

    async def _turn(self, pool: Pool, ticket: str, deadline: float, queued: Queued) -> None:
        """Return when ``ticket`` is to be asked for again. deadline: by the event loop's clock.

        Raises Overloaded if another took its place, QueueTimeout.
        """
        polls = self._polls(pool)
        try:
            async with asyncio.timeout_at(deadline):
                standing = await polls.wait(ticket)
        except TimeoutError:
            work_s = polls.work_s or queued.work_s
            raise self._refused(pool, "deadline", work_s) from None
        if standing is Standing.DISPLACED:
            raise self._refused(pool, "displaced", polls.work_s)

    def _refused(self, pool: Pool, reason: str, work_s: float) -> WarmfleetError:
        """reason: ``full``, ``displaced``, ``bytes``, ``deadline``. work_s: what the fleet has to do first."""
        self._metrics.queue_rejected.labels(reason).inc()
        if time.monotonic() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = time.monotonic()
            logger.warning("%s is overloaded: a request was refused (%s)", pool.tag, reason)
        error: WarmfleetError
        if reason == "deadline":
            error = QueueTimeout("All workers are busy, and the time that this request may wait is over.")
        elif reason == "bytes":
            error = Overloaded("All workers are busy, and there is no room for so large a body to wait.")
        else:
            error = Overloaded("All workers are busy, and as many requests wait as may.")
        error.retry_after_s = min(max(1, math.ceil(work_s)), MAX_RETRY_AFTER_S)
        return error

    def leave(self, pool: Pool, ticket: str) -> None:
        """Give up a ticket that may be there."""
        self._polls(pool).leave(ticket)

    def hurry(self, pool: Pool) -> None:
        """Some worker has more room now."""
        if polls := self._lines.get(pool.tag):
            polls.soon.set()

    def _polls(self, pool: Pool) -> TicketPolls:
        if pool.tag not in self._lines:
            self._lines[pool.tag] = TicketPolls(pool)
        return self._lines[pool.tag]

    async def drained(self) -> None:
        """Return when nobody waits and every ticket was given up, or could not be."""
        while running := [polls.task for polls in self._lines.values() if polls.task is not None]:
            await asyncio.wait(running)


class TicketPolls:
    """The tickets of one model here. ``work_s``: what the fleet had to do for all that waits, at the last poll."""

    def __init__(self, pool: Pool) -> None:
        self.soon = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.work_s = 0.0
        self._pool = pool
        self._tickets: dict[str, asyncio.Future[Standing]] = {}
        self._leaving: list[str] = []

    async def wait(self, ticket: str) -> Standing:
        """What became of it: anything but WAITS."""
        future: asyncio.Future[Standing]
        future = self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self._run()
        try:
            return await future
        finally:
            self._tickets.pop(ticket, None)

    def leave(self, ticket: str) -> None:
        self._leaving.append(ticket)
        self.soon.set()
        self._run()

    def _run(self) -> None:
        if self.task is None:
            self.task = asyncio.ensure_future(self._polling())

    async def _polling(self) -> None:
        try:
            pause_s = HURRY_S
            while True:
                await asyncio.sleep(pause_s)
                self.soon.clear()
                began = time.perf_counter()
                await self._round()
                if not self._tickets and not self._leaving:
                    return
                pause_s = min(max(HURRY_S, PAUSES * (time.perf_counter() - began)), POLL_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S - pause_s):
                        await self.soon.wait()
        finally:
            self.task = None
            self._release()  # nobody, unless this was cancelled or broke

    async def _round(self) -> None:
        """Ask about all tickets. While Redis is away they all end their wait: who asks then is told what to do."""
        leaving, waiting = self._leaving, list(self._tickets)
        self._leaving = []
        try:
            for start in range(0, len(leaving), POLL_AT_ONCE):
                self._tell(await self._pool.fleet.poll((), leaving[start : start + POLL_AT_ONCE]))
            for start in range(0, len(waiting), POLL_AT_ONCE):
                self._tell(await self._pool.fleet.poll(waiting[start : start + POLL_AT_ONCE]))
        except WarmfleetError as error:
            self._pool.fallback.failed(f"queue: {error}")
            if not self._pool.fallback.asks_redis:
                self._release()
        else:
            self._pool.fallback.succeeded()

    def _tell(self, line: Line) -> None:
        self.work_s = line.work_s
        for ticket, standing in line.standings.items():
            future = self._tickets.get(ticket)
            if standing is not Standing.WAITS and future is not None and not future.done():
                future.set_result(standing)

    def _release(self) -> None:
        for future in self._tickets.values():
            if not future.done():
                future.set_result(Standing.UNKNOWN)
