"""Measures the cost of each call of the fleet's queue for Redis: ``make -s bench NAME=decide ARGS="--queue"``.

For each number of workers and tickets the CPU of one call, in µs:

- ``enter``: a decision that ends with a ticket, and ``leave``: a poll that gives one ticket up.
- ``poll_busy``: a poll while no engine has room. It names no ticket; each ticket that a poll names costs ``named``.
- ``poll_passed_over``: the most that a poll may do: all engines but one are idle, all tickets wait for that one, and
  the 256 that are looked at are passed over.
- ``review``: a ticket in the middle of the line is decided again, in the same state.
- ``turn``: the first ticket is decided when its engine has room, and leaves the queue.

And for each number of workers two looks at 300 tickets that share no beginning:

- ``poll_turns``: all engines are idle and the prompts are small, so that 256 have their turn at once.
- ``poll_barred``: half of the engines are idle, but cannot serve the tickets, which wait for the other half.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.bench.filled_store import BLOCK_TOKENS, FLAGS, SCHEME, FilledStore
from tests.bench.output import say
from tests.support.redis.packed_commands import arguments_of

from warmfleet.fleet import LoadRow, Question, QueueLimits, Spans
from warmfleet.fleet.client import argv
from warmfleet.fleet.script_loader import script_text
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT_S, SPEED_TPS = 0.05, 10_000
FULL_TOKENS = 501  # more than LIMIT_S of prefill
BLOCKS = 1_250  # of the common beginning: 2 s of prefill, so to wait for its holder stays cheaper
OWN_TOKENS = 5  # of each prompt: 256 of them delay those behind by less than that
MOST_TURNS = 256  # of a look
CALLS = 100  # of each kind in a round; their own prompts together fit into LIMIT_S
LOOK_TICKETS, SMALL_TOKENS, LARGE_TOKENS = 300, 30, 3_000  # of the looks, and their prompts
LIFE_MS = 3_600_000  # of tickets, so that none expires while the line is made
WORKERS, TICKETS = (8, 64), (100, 1_000, 10_000)


class Line(FilledStore):
    """A model with a line of tickets that all want the first worker, which holds the beginning of their prompts."""

    def __init__(self, url: str, workers: int, tickets: int) -> None:
        super().__init__(url, workers)
        spans = Spans(lease_ms=LIFE_MS, ticket_ms=LIFE_MS, linger_ms=0)
        self.packing.use(limits=QueueLimits(LIMIT_S, tickets + CALLS, 1.0), spans=spans)
        self.shas["queue"] = str(self.client.script_load(script_text("queue")))
        self.client.flushall()
        self.fleet(random.Random(11))
        self.chain = random.Random(7).randbytes(8 * BLOCKS)
        for at in range(0, len(self.chain), 8):
            self.client.sadd(self.keys.block(self.chain[at : at + 8]), 1)
        self.client.sadd(self.keys.prefix + "s:1", *(self.chain[at : at + 8] for at in range(0, len(self.chain), 8)))
        self.names: list[str] = []

    def booked(self, first: int, others: int) -> None:
        """Book ``first`` tokens at the first worker, and ``others`` at each other worker."""
        self.book([first, *[others] * (self.workers - 1)])

    def book(self, booked: Sequence[int]) -> None:
        """Book ``booked`` tokens at the workers, a number for each."""
        for slot, tokens in enumerate(booked, 1):
            name = self.worker(slot)
            row = LoadRow(
                epoch=1, slot=slot, flags=FLAGS, scheme=SCHEME, speed_tps=SPEED_TPS, blocks=15_000,
                capacity_blocks=20_000, prefill_tokens=tokens, in_flight=int(tokens > 0),
            )  # fmt: skip
            self.write(name, row)

    @staticmethod
    def worker(slot: int) -> str:
        return f"worker-{slot:03d}.0"

    def looks(self) -> dict[str, float]:
        """Return the least us of a poll in each of the two cases."""
        half = self.workers // 2
        unable = tuple(self.worker(slot) for slot in range(half + 1, self.workers + 1))
        plans: Any = {
            "poll_turns": (SMALL_TOKENS, (), [0] * self.workers),
            "poll_barred": (LARGE_TOKENS, unable, [FULL_TOKENS] * half + [0] * (self.workers - half)),
        }
        found = {}
        for case, (tokens, barred, booked) in plans.items():
            self.book([FULL_TOKENS] * self.workers)
            names = self.new_names(LOOK_TICKETS)
            asks = [Question(name, (), tokens, tokens, exclude=barred, barred=barred) for name in names]
            self.burn([self.call("decide", *arguments_of(self.packing.bookings.decide_command(ask))) for ask in asks])
            self.book(booked)
            turns = self.client.execute_command("EVALSHA", *self.poll())[3]
            at_one = -(-LIMIT_S * SPEED_TPS // tokens)  # prompts that one engine takes at once
            assert len(turns) == (0 if barred else min(MOST_TURNS, at_one * self.workers)), "as the case wants it"
            found[case] = min(self.burn([self.poll()] * CALLS) for _ in range(3))
            self.burn([self.poll((), names)])
            assert self.waiting() == 0, "they are gone"
        return found

    def wish(self, name: str) -> list[Any]:
        prompt = BLOCKS * BLOCK_TOKENS + OWN_TOKENS
        ask = Question(name, (Chain(SCHEME, BLOCK_TOKENS, self.chain),), prompt, prompt)
        return self.call("decide", *arguments_of(self.packing.bookings.decide_command(ask)))

    def poll(self, waiting: Sequence[str] = (), leaving: Sequence[str] = ()) -> list[Any]:
        prefix, constants = self.keys.prefix, self.packing.constants.packed
        ids = [*leaving, *waiting]
        return self.call("queue", *argv("queue", ids, prefix=prefix, constants=constants, leaving=len(leaving)))

    def new_names(self, count: int) -> list[str]:
        self.serial += count
        return [f"wf-{number:022d}" for number in range(self.serial - count, self.serial)]

    def enter(self, count: int) -> tuple[list[str], float]:
        """Let ``count`` requests enter while all engines are busy; return their ids and the µs of one."""
        names = self.new_names(count)
        return names, self.burn([self.wish(name) for name in names])

    def waiting(self) -> int:
        return int(self.client.zcard(self.keys.queue2))

    def round(self, tickets: int) -> dict[str, float]:
        """Measure each kind of call CALLS times, and leave the line as it was."""
        self.booked(FULL_TOKENS, FULL_TOKENS)
        late, enter = self.enter(CALLS)
        leave = self.burn([self.poll((), [name]) for name in late])
        busy = self.burn([self.poll()] * CALLS)
        some = random.Random(3).sample(self.names, min(100, tickets))
        named = (self.burn([self.poll(some)] * CALLS) - busy) / len(some)
        self.booked(FULL_TOKENS, 0)
        passed_over = self.burn([self.poll()] * CALLS)
        middle = self.names[tickets // 2 : tickets // 2 + CALLS]
        review = self.burn([self.wish(name) for name in middle]) * CALLS / len(middle)
        assert self.waiting() == tickets, "everybody waits for the first engine"
        self.booked(0, 0)
        turn = self.burn([self.wish(name) for name in self.names[:CALLS]])
        assert self.waiting() == tickets - CALLS, "the first were served"
        self.burn([self.settle_args(name) for name in self.names[:CALLS]])
        del self.names[:CALLS]
        self.booked(FULL_TOKENS, FULL_TOKENS)
        self.names += self.enter(CALLS)[0]
        told = {"enter": enter, "leave": leave, "poll_busy": busy, "named": named}
        return told | {"poll_passed_over": passed_over, "review": review, "turn": turn}


def measured(url: str, workers: int, tickets: int, rounds: int) -> dict[str, float]:
    """Return the least µs of each kind over the rounds."""
    line = Line(url, workers, tickets)
    line.booked(FULL_TOKENS, FULL_TOKENS)
    line.names = line.enter(tickets)[0]
    found = [line.round(tickets) for _ in range(rounds)]
    return {name: round(min(row[name] for row in found), 1) for name in found[0]}


def measured_looks(url: str, workers: int) -> dict[str, float]:
    return {name: round(us, 1) for name, us in Line(url, workers, LOOK_TICKETS).looks().items()}


def run(url: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Return a row for each number of workers and tickets, and one look for each number of workers."""
    rows, looks = [], []
    for workers in WORKERS[:1] if quick else WORKERS:
        for tickets in TICKETS[:1] if quick else TICKETS:
            row = measured(url, workers, tickets, rounds)
            say(f"{workers} workers, {tickets} tickets:", row)
            rows.append({"workers": workers, "tickets": tickets, **row})
        look = measured_looks(url, workers)
        say(f"{workers} workers, a look at {LOOK_TICKETS} tickets:", look)
        looks.append({"workers": workers, **look})
    return {"rows": rows, "looks": looks}
