"""A second implementation of the fleet's queue, in Python: flows with virtual times, and the order of their tickets."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from warmfleet.fleet import Decision, Queued, QueueLimits, Standing

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet import Question

CLASS, LENGTH = 2**44, 2**20
LIMIT_S, SPEED = 0.1, 10_000  # so 1,000 tokens of prefill are what a worker may have
LAG = SPEED  # a second of work: a served flow is behind its class by that much at most, or by its largest ticket
LEAST_S = 1e-6  # room of a worker without work
TICKET_ARRIVAL = slice(26, 42)  # first bytes of a ticket's record: 16 digits of µs
SUFFIXES = ("", ":tickets", ":leases", ":flows", ":lengths", ":served", ":clock")


@dataclass
class Ticket:
    reservation: str
    replica: int
    flow: tuple[int, int]  # class, tenant
    tokens: int
    barred: tuple[str, ...] = ()
    arrival_us: int = 0  # as Redis noted it


class Workers:
    """The workers as tickets take their room, one after another: the least loaded first, in the order of the rows."""

    def __init__(self, booked: dict[str, int]) -> None:
        self.base = {name: tokens / SPEED for name, tokens in booked.items()}
        self.room = {name: LIMIT_S - tokens / SPEED for name, tokens in booked.items()}
        for name, tokens in booked.items():
            self.room[name] = self.room[name] if tokens else max(LIMIT_S, LEAST_S)

    def free(self, barred: tuple[str, ...] = ()) -> list[str]:
        return [name for name, room in self.room.items() if room > 1e-9 and name not in barred]

    def take(self, ticket: Ticket) -> bool:
        free = self.free(ticket.barred)
        if free:
            name, seconds = min(free, key=lambda candidate: self.base[candidate]), ticket.tokens / SPEED
            self.room[name] -= seconds
            self.base[name] += seconds
        return bool(free)


@dataclass
class QueueModel:
    """The tickets of the model. patience: as of QueueLimits."""

    patience: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    time: dict[tuple[int, int], int] = field(default_factory=dict)
    served: dict[tuple[int, int], int] = field(default_factory=dict)
    clock: dict[int, int] = field(default_factory=dict)
    largest: dict[int, int] = field(default_factory=dict)

    def enter(self, ticket: Ticket) -> None:
        if all(other.flow != ticket.flow for other in self.tickets):
            start = max(self.clock.get(ticket.flow[0], 0), self.served.pop(ticket.flow, 0))
            self.time[ticket.flow] = start
        self.tickets.append(ticket)

    def leave(self, ticket: Ticket, done: int | None = None) -> None:
        flow, level = ticket.flow, ticket.flow[0]
        if done is not None:
            waiting = {other.flow for other in self.tickets if other.flow[0] == level}
            self.clock[level] = max(self.clock.get(level, 0), self.time[flow]) + math.ceil(done / len(waiting))
            self.largest[level] = max(done, math.floor(self.largest.get(level, 0) - done / 16))
            behind = self.clock[level] - max(LAG, self.largest[level])
            self.time[flow] = max(self.time[flow] + done, behind)
            self.served = {f: t for f, t in self.served.items() if f[0] != level or t > self.clock[level]}
        self.tickets.remove(ticket)
        if all(other.flow != flow for other in self.tickets):
            time = self.time.pop(flow)
            if time > self.clock.get(level, 0):
                self.served[flow] = time
        if not self.tickets:
            self.served, self.clock, self.largest = {}, {}, {}

    def place(self, ticket: Ticket) -> tuple[float, str]:
        return ticket.arrival_us + self.patience * ticket.tokens * (1_000_000 // SPEED), ticket.reservation

    def line(self, flow: tuple[int, int]) -> list[Ticket]:
        return sorted((other for other in self.tickets if other.flow == flow), key=self.place)

    def turns(self, workers: Workers) -> list[Ticket]:
        """Return the tickets whose turn it is, in order, and let each take the room that it needs."""
        lines = {flow: self.line(flow) for flow in {other.flow for other in self.tickets}}
        first = {flow: self.place(line[0])[0] for flow, line in lines.items()}
        time, found = dict(self.time), []
        while lines and workers.free():
            flow = min(lines, key=lambda candidate: (candidate[0], time[candidate], first[candidate], candidate))
            ticket = lines[flow].pop(0)
            if workers.take(ticket):
                found.append(ticket)
                time[flow] += ticket.tokens
            if not lines[flow]:
                del lines[flow]
        return found

    def displaced_by(self, flow: tuple[int, int]) -> Ticket | None:
        """The ticket that gives way when the queue is full; None if none does."""
        lengths: dict[tuple[int, int], int] = {}
        for other in self.tickets:
            lengths[other.flow] = lengths.get(other.flow, 0) + 1
        longest = max(lengths, key=lambda candidate: (candidate[0], lengths[candidate], bytes([65 + candidate[1]])))
        if (longest[0], lengths[longest]) <= (flow[0], lengths.get(flow, 0) + 1):
            return None
        return self.line(longest)[-1]


class CheckedQueue:
    """A keyspace with a queue, and the model beside it."""

    def __init__(self, keyspace: Keyspace, tickets: int, patience: float = 0.0) -> None:
        self.keyspace, self.model = keyspace, QueueModel(patience)
        keyspace.fleet.use(limits=QueueLimits(LIMIT_S, tickets, patience))
        keyspace.fleet.use(
            spans=type(keyspace.fleet.constants.spans)(lease_ms=3_600_000, ticket_ms=3_600_000, linger_ms=0)
        )
        self.displaced: set[str] = set()

    async def workers(self) -> Workers:
        """The workers as they are. Nothing that is booked there counts as computed by now, nor as time in prefill."""
        rows = await self.keyspace.stop_time()
        booked = {name: row.prefill_tokens for name, row in sorted(rows.items())}
        return Workers(booked)

    async def decide(self, ticket: Ticket, waited_ms: int = 0) -> Decision | Queued:
        question = self.question(ticket, waited_ms)
        seconds, us = await self.keyspace.store.time()
        answer = await self.keyspace.fleet.queue.decide_in_turn(question)
        if not ticket.arrival_us:
            record = await cast(
                "Any", self.keyspace.store.hget(self.keyspace.keys.queue2 + ":tickets", ticket.reservation)
            )
            ticket.arrival_us = int(record[TICKET_ARRIVAL]) if record else 1_000_000 * seconds + us
        return answer

    def question(self, ticket: Ticket, waited_ms: int = 0) -> Question:
        level, tenant = ticket.flow
        return self.keyspace.ask(
            reservation=ticket.reservation,
            prompt_tokens=ticket.tokens,
            decode_tokens=0,
            exclude=ticket.barred,
            tenant=bytes([65 + tenant]) * 8,
            priority=level - 8,
            waited_ms=waited_ms,
            barred=ticket.barred,
        )

    async def foretold(self, question: Question) -> tuple[str, bool, float]:
        """Foretell a decision in the form of ``came_true``. Asserts that nothing was written."""
        before = await self.written()
        worker_id, _, seen = await self.keyspace.fleet.queue.consider(question)
        assert await self.written() == before
        return "" if seen.waits else worker_id, seen.waits, seen.turn_s

    async def written(self) -> int:
        """The number of changes that the server has made since its start. It saves nothing to disk."""
        return int((await cast("Any", self.keyspace.store.info("persistence")))["rdb_changes_since_last_save"])

    async def turns(self) -> set[str]:
        line = await self.keyspace.fleet.queue.poll([other.reservation for other in self.model.tickets])
        return {ticket for ticket, standing in line.standings.items() if standing is Standing.TURN}

    async def check(self) -> None:
        """Assert that Redis holds exactly what the model holds."""
        store, queue, model = self.keyspace.store, self.keyspace.keys.queue2, self.model
        members = await self.zset("")
        assert len(members) <= self.keyspace.fleet.constants.limits.tickets
        tickets = await cast("Any", store.hgetall(f"{queue}:tickets"))
        waiting = {name.decode() for name, record in tickets.items() if record}
        assert waiting == {other.reservation for other in model.tickets} == {member[25:].decode() for member in members}
        assert {name.decode() for name in tickets} - waiting <= self.displaced
        assert set(await self.zset(":leases")) == set(tickets)
        flows = {flow[16:]: time for flow, time in (await self.zset(":flows")).items()}
        assert flows == {name(flow): flow[0] * CLASS + time for flow, time in model.time.items()}
        served = {name(flow): flow[0] * CLASS + time for flow, time in model.served.items()}
        assert await self.zset(":served") == served
        lengths = Counter(other.flow for other in model.tickets)
        assert await self.zset(":lengths") == {name(flow): flow[0] * LENGTH + n for flow, n in lengths.items()}
        clock = await cast("Any", store.hgetall(f"{queue}:clock"))
        assert int(clock.get(b"work_us", 0)) == sum(other.tokens * (1_000_000 // SPEED) for other in model.tickets)

    async def zset(self, suffix: str) -> dict[bytes, int]:
        found = await cast(
            "Any", self.keyspace.store.zrange(self.keyspace.keys.queue2 + suffix, 0, -1, withscores=True)
        )
        return {member: round(score) for member, score in found}

    async def gone(self) -> None:
        """Assert that no key of the queue is left."""
        left = [suffix for suffix in SUFFIXES if await self.keyspace.store.exists(self.keyspace.keys.queue2 + suffix)]
        assert left == []


def came_true(answer: Decision | Queued) -> tuple[str, bool, float]:
    """The worker, whether the request waits or is refused, and the price of its turn."""
    return ("", True, answer.turn_s) if isinstance(answer, Queued) else (answer.worker_id, False, 0.0)


def name(flow: tuple[int, int]) -> bytes:
    return bytes([65 + flow[0]]) + bytes([65 + flow[1]]) * 8
