"""The tickets of one replica on the virtual clock: polls as ``routing/tickets`` makes them, in virtual time.

Two things are simpler: each poll names all tickets, and pauses do not grow while Redis is busy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from warmfleet.fleet import POLL_AT_ONCE, Decision, Standing
from warmfleet.fleet.ledger import HOLD_AT_ONCE
from warmfleet.routing.tickets import MIN_PAUSE_S, POLL_S, REVIEW_ELSEWHERE_S, REVIEW_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from warmfleet.fleet import Fleet, Hold, Question, Queued
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.virtual_clock import VirtualFleet

    Instead = Callable[[Queued, float], Awaitable[int | None]]
    Booked = Callable[[Fleet, Request, Decision, float], int]
    Send = Callable[[Request, int, float], None]


HOLD_POLL_S = 0.5  # replicas poll every 0.25 s, but places are given once a second


class VirtualTickets:
    """Requests of one replica that wait. booked: notes a decision and returns the number of its engine. send: sends a
    request there.
    """

    def __init__(self, fleet: Fleet, virtual: VirtualFleet, booked: Booked, send: Send) -> None:
        self.most = 0  # tickets that waited in this replica at a time
        self.refused = 0  # requests for which the queue had no place
        self._fleet = fleet
        self._virtual = virtual
        self._booked = booked
        self._send = send
        self._waiting: dict[str, tuple[Request, Question, float]] = {}  # by ticket; with time of arrival
        self._decided: dict[str, float] = {}  # when each ticket was decided last, the first of them first
        self._instead: dict[str, Instead] = {}
        self.held: dict[
            str, tuple[Request, Question, float, Hold]
        ] = {}  # by reservation; time, and answer, of the first
        self.holds: list[
            tuple[float, float, Hold]
        ] = []  # of held requests the times of begin and end, the first answer
        self._holds_next: float | None = None
        self._polled = 0.0
        self._next: float | None = None  # time of the next poll

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def choose(self, request: Request, ask: Question, now: float) -> int | None:
        """Choose as ``Router.choose`` does; a later poll sends a request that must wait."""
        answer = await self._fleet.queue.decide_in_turn(ask)
        if isinstance(answer, Decision):
            return self._booked(self._fleet, request, answer, now)
        self.keep(request, ask, answer, now)
        return None

    def keep(self, request: Request, ask: Question, answer: Queued, now: float, instead: Instead | None = None) -> None:
        """Keep the ticket of a request until its turn comes; refuse the request if it got none.

        instead: books it in another pool where that is better, and returns the number of the engine.
        """
        if answer.hold is not None:
            self._hold(request, ask, answer.hold, now)
            return
        if answer.outcome != "queued":
            self._refuse(request)
            return
        if answer.session:
            ask = replace(ask, session=ask.session[:1] + answer.session)
        self._waiting[ask.reservation] = request, ask, now
        self._decided[ask.reservation] = now
        if instead is not None:
            self._instead[ask.reservation] = instead
        self.most = max(self.most, len(self._waiting))
        self._poll_at(now + MIN_PAUSE_S)

    # ------------------------------------------------ held sessions

    def _hold(self, request: Request, ask: Question, hold: Hold, now: float) -> None:
        """Keep a request whose session has no place. Its id in the ledger is that of the answer."""
        _, _, since, first = self.held.get(ask.reservation, (request, ask, now, hold))
        known = replace(ask, session=ask.session[:1] + hold.session)
        self.held[ask.reservation] = request, known, since, first
        if self._holds_next is None:
            self._holds_next = now + HOLD_POLL_S
            self._virtual.at(self._holds_next, self._poll_holds, duty=True)

    async def _poll_holds(self, now: float) -> None:
        self._holds_next = None
        sessions = list({ask.session[1:] for _, ask, _, _ in self.held.values()})
        standing: dict[bytes, Standing] = {}
        for start in range(0, len(sessions), HOLD_AT_ONCE):
            line = await self._fleet.ledger.poll(sessions[start : start + HOLD_AT_ONCE])
            standing |= {session: told.standing for session, told in line.standings.items()}
        for reservation, (request, ask, since, first) in list(self.held.items()):
            if standing[ask.session[1:]] is Standing.WAITS:
                continue
            answer = await self._fleet.queue.decide_in_turn(ask)
            if not isinstance(answer, Decision) and answer.hold is not None:
                self._hold(request, ask, answer.hold, now)
                continue
            del self.held[reservation]
            self.holds.append((since, now, first))
            if isinstance(answer, Decision):
                self._send(request, self._booked(self._fleet, request, answer, now), now)
            else:
                self.keep(request, ask, answer, now)
        if self.held and self._holds_next is None:
            self._holds_next = now + HOLD_POLL_S
            self._virtual.at(self._holds_next, self._poll_holds, duty=True)

    def ask_soon(self, now: float) -> None:
        """A request of this replica had its first token or ended: a worker has more room."""
        if self._waiting:
            self._poll_at(max(now, self._polled + MIN_PAUSE_S))

    def _poll_at(self, when: float) -> None:
        if self._next is None or when < self._next:
            self._next = when
            self._virtual.at(when, self._poll, duty=True)

    async def _poll(self, now: float) -> None:
        if self._next is None or now < self._next:
            return  # another event has polled instead
        self._polled, self._next = now, None
        ids, room_in_s = list(self._waiting), POLL_S
        for start in range(0, len(ids), POLL_AT_ONCE):
            line = await self._fleet.queue.poll(ids[start : start + POLL_AT_ONCE])
            room_in_s = line.room_in_s
            for ticket in [name for name, standing in line.standings.items() if standing is not Standing.WAITS]:
                await self._ask_again(ticket, now)
        first = next(iter(self._decided), "")
        review_s = REVIEW_ELSEWHERE_S if first in self._instead else REVIEW_S
        if first and now - self._decided[first] >= review_s:
            await self._ask_again(first, now)
        if self._waiting:
            self._poll_at(now + max(MIN_PAUSE_S, min(room_in_s, POLL_S)))

    async def _ask_again(self, ticket: str, now: float) -> None:
        request, ask, came = self._waiting[ticket]
        del self._decided[ticket]
        answer = await self._fleet.queue.decide_in_turn(replace(ask, waited_ms=round(1_000 * (now - came))))
        if not isinstance(answer, Decision) and answer.outcome == "queued":
            number = await self._instead[ticket](answer, now) if ticket in self._instead else None
            if number is None:
                self._decided[ticket] = now
                return
            await self._fleet.queue.poll(leaving=[ticket])
            del self._waiting[ticket], self._instead[ticket]
            self._send(request, number, now)
            return
        del self._waiting[ticket]
        self._instead.pop(ticket, None)
        if isinstance(answer, Decision):
            self._send(request, self._booked(self._fleet, request, answer, now), now)
        else:
            self.keep(request, ask, answer, now)

    def _refuse(self, request: Request) -> None:
        self.refused += 1
        self._virtual.refuse(request)
