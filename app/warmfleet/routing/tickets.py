"""Polls Redis for the waiting requests of this replica that may be served now (have their turn), and ends their waits.

Redis keeps the order of the tickets (lua/parts/shared/tickets.lua) and the line of sessions that are held until the
caches have room for them.

While a model has tickets in this replica, one task polls for all of them: when Redis expects an engine to have room,
as soon as a request of this replica has its first token or ends, and every 20 ms. While the model has no ticket, no
task runs. A ticket that no poll renews expires, so a replica that dies leaves no ticket behind.

Each poll also lets one request be decided again, if its last decision is a while ago: by now an engine may hold more
of its prompt, or an engine of its other home pool may have room.

For held sessions another task polls every 250 ms, as sessions wait for seconds or minutes.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import POLL_AT_ONCE, Standing
from warmfleet.fleet.connection.multiplexed import SILENT_S
from warmfleet.fleet.ledger import HOLD_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import Line
    from warmfleet.pools.pool import Pool

Name = TypeVar("Name")
Kind = TypeVar("Kind", bound="Polls[Any]")

POLL_S = 0.02  # longest pause between two polls, hence longest delay of a turn that Redis did not predict
MIN_PAUSE_S = 0.005  # least pause between two polls: requests that end at the same time cause one poll
REVIEW_S = 0.25  # time between two decisions for a ticket; above POLL_S: one costs Redis as much as several polls
REVIEW_ELSEWHERE_S = 0.05  # REVIEW_S for models with several pools; shorter, because another pool may have room by now
NAMED_AT_LEAST, NAMED_SHARE = 32, 8  # a poll renews an eighth of the tickets, at least 32; each costs Redis 3 µs
LINE_POLL_S = 0.25  # pause between two polls for held sessions; a session that no poll renews for 5 s leaves the line
PAUSES = 4  # least pause, as a multiple of the last poll's duration, so that a long queue does not keep Redis busy


class Tickets:
    """The tickets (places in the queues of all models) of this replica's requests, and its held sessions."""

    def __init__(self) -> None:
        self._polls: dict[str, TicketPolls] = {}
        self._lines: dict[str, LinePolls] = {}

    async def wait_in_line(self, pool: Pool, ticket: str, session: bytes) -> Standing:
        """Return the held session's state once that is not WAITS. ticket: the request's id; of several of a session."""
        return await self._line_of(pool).wait_in_line(ticket, session)

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
        """Return whether this pool has a waiting request, or a place to give up."""
        kept = self._polls.get(pool.tag), self._lines.get(pool.tag)
        return any(polls is not None and polls.task is not None for polls in kept)

    def leave(self, pool: Pool, ticket: str) -> None:
        """Give up a ticket; nothing happens if Redis has no such ticket."""
        self._of(pool).leave(ticket)

    def leave_line(self, pool: Pool, ticket: str, session: bytes) -> None:
        """Let a held session leave the line, unless another request of it waits here."""
        self._line_of(pool).leave_line(ticket, session)

    def room_freed(self, pool: Pool) -> None:
        """Poll soon, because a request of this replica has freed room at a worker."""
        if polls := self._polls.get(pool.tag):
            polls.ask_soon()

    def _of(self, pool: Pool) -> TicketPolls:
        return _of_pool(self._polls, pool, TicketPolls)

    def _line_of(self, pool: Pool) -> LinePolls:
        return _of_pool(self._lines, pool, LinePolls)

    async def drained(self) -> None:
        """Return when no request waits and nothing is left to give up, even if Redis did not answer."""
        while running := [
            *(polls.task for polls in self._polls.values() if polls.task is not None),
            *(polls.task for polls in self._lines.values() if polls.task is not None),
        ]:
            await asyncio.wait(running)


class Polls(Generic[Name]):
    """The requests of one model that wait in this replica, by name. ``task`` polls Redis while there are any."""

    poll_s = POLL_S  # longest pause between two polls
    first_pause_s = MIN_PAUSE_S

    def __init__(self, pool: Pool) -> None:
        self.task: asyncio.Task[None] | None = None
        self.pool = pool
        self._soon = asyncio.Event()
        self._waiting: dict[str, asyncio.Future[Standing]] = {}  # by id, in the order of their last decisions
        self._leaving: dict[Name, float] = {}  # when it was given up

    async def _ask(self, leaving: list[Name]) -> None:
        """Poll Redis once for all that wait, and give up those that are leaving. Raises WarmfleetError."""
        raise NotImplementedError

    def _next_in_s(self) -> float:
        return self.poll_s

    def _review(self) -> None:
        """Look at those that wait on after a poll."""

    def _rest(self) -> None:
        """Note that no poll comes until another request waits."""

    async def _wait(self, ticket: str) -> Standing:
        """Return the state of a waiting request once the request is to be decided again."""
        future: asyncio.Future[Standing]
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._run()
        try:
            return await future
        finally:
            self._waiting.pop(ticket, None)

    def leave(self, name: Name) -> None:
        """Give up a place at the next poll that Redis answers."""
        self._leaving[name] = time.perf_counter()
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
            pause_s = self.first_pause_s
            while True:
                await asyncio.sleep(pause_s)
                self._soon.clear()
                began = time.perf_counter()
                await self._poll()
                if not self._waiting and not self._leaving:
                    return
                pause_s = min(max(MIN_PAUSE_S, PAUSES * (time.perf_counter() - began)), POLL_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._next_in_s() - pause_s):
                        await self._soon.wait()
        finally:
            self.task = None
            self._rest()
            self._end_all_waits()  # a wait is left only if this task was cancelled or failed

    async def _poll(self) -> None:
        """Ask which have their turn. If Redis was silent for SILENT_S, end all waits as UNKNOWN."""
        left_at, self._leaving = self._leaving, {}
        try:
            await self._ask([*left_at])
        except WarmfleetError as error:
            self.pool.degraded.failed(f"queue: {error}")
            now = time.perf_counter()  # no older leave is sent again: a place expires after seconds by itself
            self._leaving = {name: at for name, at in left_at.items() if now - at < SILENT_S} | self._leaving
            if self.pool.degraded.silent:
                self._end_all_waits()
        else:
            self.pool.degraded.succeeded()
            self._review()

    def _end(self, ticket: str, standing: Standing) -> None:
        """End a wait, unless the request waits on."""
        future = self._waiting.get(ticket)
        if standing is not Standing.WAITS and future is not None and not future.done():
            future.set_result(standing)

    def _end_all_waits(self) -> None:
        for ticket in self._waiting:
            self._end(ticket, Standing.UNKNOWN)


class TicketPolls(Polls[str]):
    """The tickets of one model in this replica.

    A poll returns all tickets that have their turn. It renews the tickets that it names to Redis (``_named``).
    """

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.work_s = 0.0
        self._room_in_s = math.inf
        self._review_at: dict[str, float] = {}
        self._to_name: dict[str, None] = {}  # ids; first those that were renewed longest ago

    async def wait(self, ticket: str, *, elsewhere: bool = False) -> Standing:
        """Return the ticket's state once that is not WAITS, or once the request is to be decided again.

        elsewhere: as for ``Tickets.wait``.
        """
        self._review_at[ticket] = time.perf_counter() + (REVIEW_ELSEWHERE_S if elsewhere else REVIEW_S)
        self._to_name[ticket] = None
        try:
            return await self._wait(ticket)
        finally:
            self._review_at.pop(ticket, None)
            self._to_name.pop(ticket, None)

    async def _ask(self, leaving: list[str]) -> None:
        waiting, poll = self._named(), self.pool.fleet.queue.poll
        for start in range(0, len(leaving), POLL_AT_ONCE):
            self._take_answer(await poll((), leaving[start : start + POLL_AT_ONCE]))
        for start in range(0, len(waiting), POLL_AT_ONCE):
            self._take_answer(await poll(waiting[start : start + POLL_AT_ONCE]))

    def _next_in_s(self) -> float:
        return min(self._room_in_s, POLL_S)

    def _rest(self) -> None:
        self.pool.lead_time.waiting(0.0)  # without polls, this replica does not know the queue's length

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
            self._end(ticket, standing)


class LinePolls(Polls[bytes]):
    """The held sessions of one model in this replica. A poll names them all, which renews them in the line.

    Several requests of a session may wait at once. All of them have their turn with the session.
    """

    poll_s = first_pause_s = LINE_POLL_S

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._sessions: dict[str, bytes] = {}  # by the id of the request

    async def wait_in_line(self, ticket: str, session: bytes) -> Standing:
        """Return the session's state once that is not WAITS."""
        self._sessions[ticket] = session
        self._leaving.pop(session, None)
        try:
            return await self._wait(ticket)
        finally:
            self._sessions.pop(ticket, None)

    def leave_line(self, ticket: str, session: bytes) -> None:
        """Let the session leave at the next poll that Redis answers, unless another request of it waits here."""
        if all(other != session or name == ticket for name, other in self._sessions.items()):
            self.leave(session)

    async def _ask(self, leaving: list[bytes]) -> None:
        held, poll = [*dict.fromkeys(self._sessions.values())], self.pool.fleet.ledger.poll
        self.pool.idle.wake()  # an idle pool would tick too rarely to let sessions in
        for start in range(0, len(leaving), HOLD_AT_ONCE):
            await poll((), leaving[start : start + HOLD_AT_ONCE])
        for start in range(0, len(held), HOLD_AT_ONCE):
            line = await poll(held[start : start + HOLD_AT_ONCE])
            for ticket, session in self._sessions.items():
                if (told := line.standings.get(session)) is not None:
                    self._end(ticket, told.standing)


def _of_pool(known: dict[str, Kind], pool: Pool, kind: Callable[[Pool], Kind]) -> Kind:
    """Return the polls of this pool; made anew for a pool that was removed, and came back as another object."""
    polls = known.get(pool.tag)
    if polls is None or polls.pool is not pool:
        for tag in [tag for tag, kept in known.items() if kept.task is None]:  # because pools come and go
            del known[tag]
        polls = known[pool.tag] = kind(pool)
    return polls
