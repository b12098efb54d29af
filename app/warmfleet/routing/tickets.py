"""Polls Redis for the waiting requests of this replica that may be served now (have their turn), and ends their waits.

Redis keeps the order of the tickets (lua/parts/shared/tickets.lua).

While a model has tickets in this replica, one task polls for all of them: when Redis expects an engine to have room,
as soon as a request of this replica has its first token or ends, and every 20 ms. While the model has no ticket, no
task runs. A ticket that no poll renews expires, so a replica that dies leaves no ticket behind.

Each poll also lets one request be decided again, if its last decision is a while ago: by now an engine may hold more
of its prompt, or an engine of its other home pool may have room.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import POLL_AT_ONCE, Standing
from warmfleet.fleet.connection.multiplexed import SILENT_S

if TYPE_CHECKING:
    from warmfleet.fleet import Line
    from warmfleet.pools.pool import Pool

POLL_S = 0.02  # longest pause between two polls, hence longest delay of a turn that Redis did not predict
MIN_PAUSE_S = 0.005  # least pause between two polls: requests that end at the same time cause one poll
REVIEW_S = 0.25  # time between two decisions for a ticket; above POLL_S: one costs Redis as much as several polls
REVIEW_ELSEWHERE_S = 0.05  # REVIEW_S for models with several pools; shorter, because another pool may have room by now
NAMED_AT_LEAST, NAMED_SHARE = 32, 8  # a poll renews an eighth of the tickets, at least 32; each costs Redis 3 µs
PAUSES = 4  # least pause, as a multiple of the last poll's duration, so that a long queue does not keep Redis busy


class Tickets:
    """The tickets (places in the queues of all models) of this replica's requests."""

    def __init__(self) -> None:
        self._polls: dict[str, TicketPolls] = {}

    async def wait(self, pool: Pool, ticket: str, *, elsewhere: bool = False) -> Standing:
        """Return the ticket's state when the request should be decided again: the ticket has its turn, was displaced or
        is unknown, or it still WAITS but its last decision is a while ago. elsewhere: the model has other pools, too.
        """
        return await self._of(pool).wait(ticket, elsewhere=elsewhere)

    def work_s(self, pool: Pool) -> float:
        """Return the seconds that the whole fleet needs for the prefill of the queue, by the last poll."""
        polls = self._polls.get(pool.tag)
        return polls.work_s if polls is not None and polls.pool is pool else 0.0

    def any(self, pool: Pool) -> bool:
        """Return whether this pool has a waiting request or a ticket to give up."""
        polls = self._polls.get(pool.tag)
        return polls is not None and polls.task is not None

    def leave(self, pool: Pool, ticket: str) -> None:
        """Give up a ticket; nothing happens if Redis has no such ticket."""
        self._of(pool).leave(ticket)

    def room_freed(self, pool: Pool) -> None:
        """Poll soon, because a request of this replica has freed room at a worker."""
        if polls := self._polls.get(pool.tag):
            polls.ask_soon()

    def _of(self, pool: Pool) -> TicketPolls:
        polls = self._polls.get(pool.tag)
        if polls is None or polls.pool is not pool:  # a pool may be removed, and come back as another object
            # Drop the polls of pools without a ticket, because pools come and go.
            self._polls = {tag: kept for tag, kept in self._polls.items() if kept.task is not None}
            polls = self._polls[pool.tag] = TicketPolls(pool)
        return polls

    async def drained(self) -> None:
        """Return when no request waits and no ticket is left to give up, even if Redis did not answer."""
        while running := [polls.task for polls in self._polls.values() if polls.task is not None]:
            await asyncio.wait(running)


class TicketPolls:
    """The tickets of one model in this replica. ``task`` polls Redis while there are any.

    A poll returns all tickets that have their turn. It renews the tickets that it names to Redis (``_named``).
    """

    def __init__(self, pool: Pool) -> None:
        self.task: asyncio.Task[None] | None = None
        self.work_s = 0.0
        self.pool = pool
        self._soon = asyncio.Event()
        self._room_in_s = math.inf
        self._waiting: dict[str, asyncio.Future[Standing]] = {}  # by id, in the order of their last decisions
        self._review_at: dict[str, float] = {}
        self._to_name: dict[str, None] = {}  # ids; first those that were renewed longest ago
        self._leaving: dict[str, float] = {}  # by id, when the ticket was given up

    async def wait(self, ticket: str, *, elsewhere: bool = False) -> Standing:
        """Return the ticket's state once that is not WAITS, or once the request is to be decided again.

        elsewhere: as for ``Tickets.wait``.
        """
        future: asyncio.Future[Standing]
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._review_at[ticket] = time.perf_counter() + (REVIEW_ELSEWHERE_S if elsewhere else REVIEW_S)
        self._to_name[ticket] = None
        self._run()
        try:
            return await future
        finally:
            self._waiting.pop(ticket, None)
            self._review_at.pop(ticket, None)
            self._to_name.pop(ticket, None)

    def leave(self, ticket: str) -> None:
        """Give up a ticket at the next poll that Redis answers."""
        self._leaving[ticket] = time.perf_counter()
        self._soon.set()
        self._run()

    def ask_soon(self) -> None:
        """Make the next poll as soon as the least pause is over."""
        self._soon.set()

    def _run(self) -> None:
        if self.task is None:
            self.task = asyncio.ensure_future(self._polling())

    async def _polling(self) -> None:
        try:
            pause_s = MIN_PAUSE_S
            while True:
                await asyncio.sleep(pause_s)
                self._soon.clear()
                began = time.perf_counter()
                await self._poll()
                if not self._waiting and not self._leaving:
                    return
                pause_s = min(max(MIN_PAUSE_S, PAUSES * (time.perf_counter() - began)), POLL_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(self._room_in_s, POLL_S) - pause_s):
                        await self._soon.wait()
        finally:
            self.task = None
            self.pool.lead_time.waiting(0.0)  # without polls, this replica does not know the queue's length
            self._end_all_waits()  # a wait is left only if this task was cancelled or failed

    async def _poll(self) -> None:
        """Ask which tickets have their turn. If Redis was silent for SILENT_S, end all waits as UNKNOWN."""
        left_at, waiting = self._leaving, self._named()
        leaving, self._leaving = [*left_at], {}
        try:
            for start in range(0, len(leaving), POLL_AT_ONCE):
                self._take_answer(await self.pool.fleet.queue.poll((), leaving[start : start + POLL_AT_ONCE]))
            for start in range(0, len(waiting), POLL_AT_ONCE):
                self._take_answer(await self.pool.fleet.queue.poll(waiting[start : start + POLL_AT_ONCE]))
        except WarmfleetError as error:
            self.pool.degraded.failed(f"queue: {error}")
            now = time.perf_counter()  # no older leave is sent again: a ticket expires after a second by itself
            self._leaving = {ticket: at for ticket, at in left_at.items() if now - at < SILENT_S} | self._leaving
            if self.pool.degraded.silent:
                self._end_all_waits()
        else:
            self.pool.degraded.succeeded()
            self._review()

    def _named(self) -> list[str]:
        """Return the tickets that the next poll renews: those that were renewed longest ago."""
        named = list(islice(self._to_name, max(NAMED_AT_LEAST, len(self._to_name) // NAMED_SHARE)))
        for ticket in named:
            self._to_name[ticket] = self._to_name.pop(ticket)  # to the end
        return named

    def _review(self) -> None:
        """End the wait of the request whose last decision is the oldest, if that is old enough."""
        ticket = next((ticket for ticket, future in self._waiting.items() if not future.done()), None)
        if ticket is not None and time.perf_counter() >= self._review_at[ticket]:
            self._waiting[ticket].set_result(Standing.WAITS)

    def _take_answer(self, line: Line) -> None:
        self.work_s, self._room_in_s = line.work_s, line.room_in_s
        self.pool.lead_time.waiting(line.work_s)
        for ticket, standing in (*line.standings.items(), *((ticket, Standing.TURN) for ticket in line.turns)):
            future = self._waiting.get(ticket)
            if standing is not Standing.WAITS and future is not None and not future.done():
                future.set_result(standing)

    def _end_all_waits(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_result(Standing.UNKNOWN)
