"""The fleet-wide queue: its order is in Redis (lua/parts/shared/fair_queue.lua), requests wait in their replicas."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal

from warmfleet.fleet.reservations import BOOK, DRY, TELL, Reservations, Seen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet.fleet.reservations import Ask, Candidate, Decision

POLL_AT_ONCE = 512  # lua/queue.lua takes no more
FIRST_CLASS, LAST_CLASS = -8, 7  # of priorities; beyond them they are cut
TENANT_BYTES = 8
NOBODY = bytes(TENANT_BYTES)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """max_engine_wait_s: booked prefill from which on a worker is saturated; 0: no queue. tickets: of all replicas."""

    max_engine_wait_s: float = 0.0
    tickets: int = 1_024


@dataclass(frozen=True, slots=True)
class Place:
    """What a request's place in the queue follows from. tenant: 8 bytes. waited_ms: since it first came.

    barred: workers that can never serve it. Who is excluded from one decision only, since it failed a moment ago, is
    not among them: the ticket would pass it over for as long as it waits. may_wait: else it gets no ticket, and takes
    nobody's.
    """

    tenant: bytes = NOBODY
    priority: int = 0
    waited_ms: int = 0
    barred: tuple[str, ...] = ()
    may_wait: bool = True


@dataclass(frozen=True, slots=True)
class Queued:
    """Nothing is booked. ``queued``: it has a ticket; ``full``: it has none; ``displaced``: another took its place.

    work_s: what the whole fleet needs for the prompts that wait.
    """

    outcome: Literal["queued", "full", "displaced"]
    waiting: int
    work_s: float


class Standing(IntEnum):
    """What becomes of a ticket. UNKNOWN: it expired, or Redis lost it."""

    WAITS = 0
    TURN = 1
    DISPLACED = 2
    UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Line:
    """The queue as a poll finds it: tickets of all replicas, tokens of their prompts, what the fleet needs for them."""

    waiting: int
    tokens: int
    work_s: float
    standings: Mapping[str, Standing]


class Queue(Reservations):
    """``decide_in_turn`` takes a ticket where ``decide`` would overload; ``poll`` keeps tickets and gives them up."""

    limits = QueueLimits()
    block_tokens: Mapping[int, int] = {}  # of the schemes in use, by scheme id: how large a worker's cache is

    async def decide_in_turn(self, ask: Ask, place: Place, *, tell: bool = False) -> Decision | Queued:
        """As ``decide``, but a request that must wait gets a ticket, under its reservation's id. Ask again with the
        same id when it is its turn."""
        answer = await self.run("decide", *self.turn_args(ask, place, TELL if tell else BOOK))
        if answer[0] in (b"QUEUED", b"FULL", b"DISPLACED"):
            return Queued(answer[0].decode().lower(), answer[1], answer[2] / 1000)
        return self._decision(ask, answer)

    async def consider(self, ask: Ask) -> tuple[str, str, Seen]:
        """What ``decide_in_turn`` would choose now, why, and what it would see. Books nothing. Errors as ``decide``."""
        answer = await self.run("decide", *self.turn_args(ask, Place(), DRY))
        return answer[1].decode(), answer[2].decode(), Seen.of(answer[3:])

    async def explain(self, ask: Ask) -> tuple[str, list[Candidate]]:
        """What it would choose now, and every worker it would weigh."""
        worker_id, _, seen = await self.consider(ask)
        return worker_id, seen.candidates

    def turn_args(self, ask: Ask, place: Place, mode: int = BOOK) -> list[Any]:
        """What ``decide_in_turn`` gives the script."""
        limits, priority = self.limits, min(max(place.priority, FIRST_CLASS), LAST_CLASS) - FIRST_CLASS
        bounds = limits.max_engine_wait_s, self._sizes(), limits.tickets if place.may_wait else 0
        queue = (place.tenant, priority, *bounds, place.waited_ms, self.spans.ticket_ms, ",".join(place.barred))
        return self._ask_args(ask, mode, queue)

    async def poll(self, waiting: Sequence[str] = (), leaving: Sequence[str] = ()) -> Line:
        """Keep the tickets of ``waiting``, give up those of ``leaving``; POLL_AT_ONCE of both together at most."""
        lives = self.spans.worker_ttl_ms, self.spans.ticket_ms
        fixed: tuple[Any, ...] = (*lives, self.limits.max_engine_wait_s, self._sizes(), len(leaving))
        count, tokens, work_ms, *states = await self.run("queue", *fixed, *leaving, *waiting)
        return Line(count, tokens, work_ms / 1000, dict(zip(waiting, map(Standing, states), strict=True)))

    def _sizes(self) -> str:
        return ",".join(f"{scheme}={tokens}" for scheme, tokens in self.block_tokens.items())
