"""The fleet-wide queue: its order is in Redis (lua/parts/shared/tickets.lua), requests wait in their replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from warmfleet.fleet.bookings import Seen
from warmfleet.fleet.client import argv
from warmfleet.fleet.codes import Mode, Standing
from warmfleet.fleet.ledger import Hold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet.bookings import Bookings, Candidate, Decision, Question
    from warmfleet.fleet.client import Scripts

POLL_AT_ONCE = 128  # most ids in one call, so that it takes Redis less than 1 ms; lua/queue.lua takes up to 512


@dataclass(frozen=True, slots=True)
class Queued:
    """A request that is not booked: it has a ticket, finds the queue full, or has lost its place to another request.

    waiting: tickets in the queue. work_s: seconds that the whole fleet needs to compute the uncached parts of these
    tickets' prompts. turn_s: seconds of prefill, plus half of the seconds of waiting, at the worker that the request
    waits for: a price by which pools are compared (lua/parts/decide/wait_turn.lua). matched_tokens: cached there.
    hold: of a request without a ticket whose session is held until it has a place (outcome ``held``). session: of
    another, the id in the ledger, which the next decision for this request wants; empty without one.
    """

    outcome: Literal["queued", "full", "displaced", "held"]
    waiting: int
    work_s: float
    turn_s: float = 0.0
    matched_tokens: int = 0
    hold: Hold | None = None
    session: bytes = b""


@dataclass(frozen=True, slots=True)
class Next:
    """The ticket that is first in order, whether or not it may be served now.

    to_compute_s: seconds of prefill for the prompt's uncached part, at the worker that needs least. tenants: number
    of tenants with tickets, counted in each priority class. worker_id: the worker that the ticket gets or waits for;
    has_room: that worker could take it now. any_has_room: some worker that can serve it has room. to_compute_there_s:
    as to_compute_s, at ``worker_id``, to 1 % of its price; 0 with a policy other than ``cost``.
    """

    reservation: str
    prompt_tokens: int
    to_compute_s: float
    waited_s: float
    tenants: int
    worker_id: str
    has_room: bool
    any_has_room: bool
    to_compute_there_s: float

    @classmethod
    def of(cls, told: Sequence[Any]) -> Next | None:
        if not told:
            return None
        name, tokens, size_us, waited_ms, tenants, worker, has_room, any_has_room, there_us = told
        seconds = (size_us / 1e6, waited_ms / 1000)
        rooms = (has_room == 1, any_has_room == 1)
        return cls(name.decode(), tokens, *seconds, tenants, worker.decode(), *rooms, there_us / 1e6)


@dataclass(frozen=True, slots=True)
class Line:
    """The queue as a poll finds it.

    waiting: tickets of all replicas. work_s: seconds that the whole fleet needs to compute the uncached parts of
    their prompts. standings: by id, the state of each ticket that the poll named. room_in_s: time until a full engine
    has room, if it goes on at its speed; infinite if not predictable. turns: ids of the tickets, of all replicas, that
    may be served now. next: None if the poll named a ticket, or no ticket waits.
    """

    waiting: int
    work_s: float
    standings: Mapping[str, Standing]
    room_in_s: float = math.inf
    turns: frozenset[str] = frozenset()
    next: Next | None = None


class Queue:
    """``decide_in_turn`` gives a request a ticket if no worker has room for it; ``poll`` renews and ends tickets."""

    def __init__(self, scripts: Scripts, bookings: Bookings) -> None:
        self._scripts = scripts
        self._bookings = bookings

    async def decide_in_turn(self, question: Question, *, explain: bool = False) -> Decision | Queued:
        """Decide as ``decide`` does, but give a request that must wait a ticket, under its reservation's id.

        When the ticket may be served, call this again with the same id. Raises what ``decide`` raises, and RateLimited
        if the request's client is at a limit; then nothing changes in Redis, where an earlier call may have left a
        ticket for this id.
        """
        command = self._bookings.decide_command(question, Mode.EXPLAIN if explain else Mode.BOOK)
        answer = await self._scripts.call("decide", command, self._scripts.timeouts.request_s)
        if answer[0] in (b"QUEUED", b"FULL", b"DISPLACED"):
            word, waiting, work_ms, turn_s, matched_tokens, *session = answer
            told = (word.decode().lower(), waiting, work_ms / 1000, float(turn_s), matched_tokens)
            return Queued(*told, session=session[0] if session else b"")
        if answer[0] == b"HELD":
            hold = Hold.of(answer)
            return Queued("held", hold.in_line, hold.predicted_s, turn_s=hold.predicted_s / 2, hold=hold)
        if answer[0] == b"LIMITED" and question.limits is not None:
            raise question.limits.refusal(answer, question.prompt_tokens)
        return self._bookings.decision(question, answer)

    async def consider(self, question: Question) -> tuple[str, str, Seen]:
        """Compute the decision that ``decide_in_turn`` would make now, with its explanation. Nothing is booked.

        If the request would have to wait, ``Seen.waits`` is set, and the worker is chosen as if no others waited. The
        request gets no ticket. Raises what ``decide`` raises.
        """
        command = self._bookings.decide_command(question, Mode.DRY)
        answer = await self._scripts.call("decide", command, self._scripts.timeouts.request_s)
        return answer[1].decode(), answer[2].decode(), Seen.of(answer[3:])

    async def explain(self, question: Question) -> tuple[str, list[Candidate]]:
        """Compute the worker that ``decide_in_turn`` would choose now, and every candidate."""
        worker_id, _, seen = await self.consider(question)
        return worker_id, seen.candidates

    async def poll(self, waiting: Sequence[str] = (), leaving: Sequence[str] = ()) -> Line:
        """Renew the tickets of ``waiting``, delete those of ``leaving``; POLL_AT_ONCE of both together at most."""
        scripts = self._scripts
        constants = scripts.constants.packed
        args = argv("queue", [*leaving, *waiting], prefix=scripts.prefix, constants=constants, leaving=len(leaving))
        answer = await scripts.call("queue", scripts.packed["queue"].call(args), scripts.timeouts.request_s)
        count, work_ms, room_in_ms, turns, first, *standings = answer
        return Line(
            count,
            work_ms / 1000,
            dict(zip(waiting, map(Standing, standings), strict=True)),
            math.inf if room_in_ms < 0 else room_in_ms / 1000,
            frozenset(ticket.decode() for ticket in turns),
            Next.of(first),
        )
