"""The history of a chaos run: the index as MONITOR showed it (``witness``), and each engine by its journal."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.vllm.engine import BLOCK_TOKENS
from tests.vllm.witness import DECIDE_KEYS, credits_blocks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from pathlib import Path

    from tests.vllm.witness import MortalRedis

from warmfleet.fleet import SCRIPT_ARGS
from warmfleet.fleet.rows import LEASE, Stage
from warmfleet_worker.protocol.wire import reservation_of

TICK_GAP_S = 0.25  # longer than between two ticks of a healthy fleet, 0.025 to 0.05 s
FIRST_HASHES = len(SCRIPT_ARGS["decide"]) + 2  # index of the first hashes in ARGV, after scheme and block size


class Spells:
    """The times at which things appeared and disappeared: seconds, or positions in a log. They never go back."""

    def __init__(self) -> None:
        self._changes: defaultdict[Hashable, tuple[list[float], list[bool]]] = defaultdict(lambda: ([], []))

    def change(self, what: Hashable, when: float, *, there: bool) -> None:
        times, states = self._changes[what]
        if not states or states[-1] != there:
            times.append(when)
            states.append(there)

    def last(self, what: Hashable, when: float) -> tuple[bool, float | None]:
        """Whether the item was present at ``when``, and the time of its last change before (None: it never was)."""
        times, states = self._changes.get(what, ([], []))
        at = bisect_right(times, when) - 1
        return (states[at], times[at]) if at >= 0 else (False, None)

    def there(self, what: Hashable, when: float) -> bool:
        return self.last(what, when)[0]

    def all_gone(self, when: float) -> None:
        for what in list(self._changes):
            self.change(what, when, there=False)


@dataclass(frozen=True)
class Booking:
    """A decision as Redis executed it. place: position in the log. at: seconds. matched: predicted blocks."""

    reservation: str
    place: int
    at: float
    slot: int
    worker_id: str
    matched: int
    chain: tuple[bytes, ...]


@dataclass
class Index:
    """The index over time, where positions in the log are the times.

    blocks: (slot, hash). leases: ids of reservations that count for blocks which they will make. restored: of these,
    those that a dump brought back.
    """

    blocks: Spells = field(default_factory=Spells)
    leases: Spells = field(default_factory=Spells)
    told: dict[str, float] = field(default_factory=dict)  # reservation -> seconds when its outcome was settled
    restored: set[str] = field(default_factory=set)
    bookings: dict[str, Booking] = field(default_factory=dict)
    makers: defaultdict[tuple[int, bytes], list[Booking]] = field(default_factory=lambda: defaultdict(list))
    progress: dict[str, int] = field(default_factory=dict)  # reservation -> cached tokens, as the plugin reported it
    ticks: list[float] = field(default_factory=list)  # seconds
    place: int = 0

    @classmethod
    def of(cls, server: MortalRedis) -> Index:
        index = cls()
        for life in server.lives:
            index.blocks.all_gone(index.place)
            index.leases.all_gone(index.place)
            for slot, hashes in life.held.items():
                for held_block in hashes:
                    index.blocks.change((slot, held_block), index.place, there=True)
            for lease in life.leases:
                index.leases.change(lease, index.place, there=True)
            index.restored |= life.leases
            asked: list[bytes] = []
            for at, command in server.commands(life):
                index.place += 1
                if command[0] == b"EVALSHA":
                    asked = command[3 + DECIDE_KEYS :] if int(command[2]) == DECIDE_KEYS else []  # ARGV of decide
                    if command[3].endswith(b":tick"):
                        index.ticks.append(at)
                elif command[0] == b"XADD":
                    index._progress(json.loads(command[-1]))
                elif command[1].endswith(b":lease"):
                    index._lease(at, command, asked)
                else:
                    _, _, block = command[1].partition(b":b:")
                    index.blocks.change((int(command[2]), block), index.place, there=command[0] == b"SADD")
        return index

    def _progress(self, items: list[tuple[str, int, int]]) -> None:
        self.progress.update({reservation: cached for reservation, cached, _ in items})

    def _lease(self, at: float, command: list[bytes], asked: list[bytes]) -> None:
        reservation = command[2].decode()
        self.leases.change(reservation, self.place, there=command[0] == b"HSET" and credits_blocks(command[3]))
        if command[0] == b"HDEL":
            self.told.setdefault(reservation, at)
        elif LEASE.unpack_from(command[3])[6] == Stage.STARTED:
            self.told.pop(reservation, None)  # a settle deletes the lease and writes it again
        if command[0] == b"HSET" and asked and asked[1] == command[2] and reservation not in self.bookings:
            _, slot, _, _, matched, _, _, length = LEASE.unpack_from(command[3])
            worker = command[3][LEASE.size : LEASE.size + length].decode()
            chain = split(asked[FIRST_HASHES]) if len(asked) > FIRST_HASHES else ()
            made = Booking(reservation, self.place, at, slot, worker, matched // BLOCK_TOKENS, chain)
            self.bookings[reservation] = made
            for block in chain:
                self.makers[slot, block].append(made)

    def stalled(self, begin: float, end: float) -> float:
        """Return the seconds between the two in which no replica ran its upkeep, for instance for want of CPU."""
        ticks = self.ticks[bisect_right(self.ticks, begin) : bisect_right(self.ticks, end)]
        gaps = [later - tick for tick, later in pairwise([begin, *ticks, end])]
        return sum(gap for gap in gaps if gap > TICK_GAP_S)

    def makers_of(self, booking: Booking, block: bytes) -> list[Booking]:
        """Return the reservations, latest first, that were to make ``block`` there when ``booking`` was made."""
        return [
            maker
            for maker in reversed(self.makers[booking.slot, block])
            if maker.place < booking.place and self.leases.there(maker.reservation, booking.place)
        ]


@dataclass
class Stay:
    """A request in an engine, by its journal. cached: blocks that it found when it was first scheduled."""

    reservation: str
    came: float
    chain: tuple[bytes, ...]
    looked: float = 0.0
    cached: int = 0
    ran: float | None = None
    preempted: float | None = None
    ended: float | None = None
    probe: bool = False  # a probe of a replica, which no decision sent there


@dataclass
class Engine:
    """An engine's journal. blocks: the hashes in its table over time, in seconds."""

    blocks: Spells = field(default_factory=Spells)
    stays: dict[str, Stay] = field(default_factory=dict)
    flights: list[tuple[float, int]] = field(
        default_factory=list
    )  # (seconds, +1 for the beginning of a request, -1 for its end)
    table: set[bytes] = field(default_factory=set)
    preemptions: int = 0

    @classmethod
    def of(cls, journal: Path) -> Engine:
        engine = cls()
        ids: dict[str, Stay] = {}
        with journal.open() as lines:
            for line in lines:
                at, what, *rest = json.loads(line)
                if what == "table":
                    engine._changed(at, *rest)
                elif what == "add":
                    engine._came(at, ids, *rest)
                elif what == "run":
                    for block in rest[0]:
                        if block in ids and ids[block].ran is None:
                            ids[block].ran = at
                elif rest[0] in ids:
                    engine._noted(ids[rest[0]], at, what, rest)
        return engine

    def _changed(self, at: float, appeared: list[str], gone: list[str]) -> None:
        for there, hashes in ((True, appeared), (False, gone)):
            for block in map(bytes.fromhex, hashes):
                self.blocks.change(block, at, there=there)
        self.table = (self.table | set(map(bytes.fromhex, appeared))) - set(map(bytes.fromhex, gone))

    def _came(self, at: float, ids: dict[str, Stay], request_id: str, tokens: int, chain: list[str]) -> None:
        ours = reservation_of(request_id)
        name = ours[0] if ours else request_id
        usable = chain[: (tokens - 1) // BLOCK_TOKENS]  # an engine always computes the last token
        ids[request_id] = Stay(name, at, tuple(map(bytes.fromhex, usable)), probe=".probe" in request_id)
        self.flights.append((at, 1))
        if ours:
            self.stays[name] = ids[request_id]

    def _noted(self, stay: Stay, at: float, what: str, rest: Sequence[object]) -> None:
        if what == "look" and stay.ran is None:
            stay.looked, stay.cached = at, int(str(rest[1])) // BLOCK_TOKENS
            held = next((n for n, block in enumerate(stay.chain) if block not in self.table), len(stay.chain))
            assert stay.cached == held, f"{stay.reservation}: found {stay.cached} blocks, the table has {held}"
        elif what == "preempt":
            stay.preempted = at
            self.preemptions += 1
        elif what == "end":
            stay.ended = at
            self.flights.append((at, -1))


def split(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + 8] for at in range(0, len(packed), 8))


class Concurrency:
    """The number of requests in the engines over time, running or waiting."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._times, self._counts, count = [0.0], [0], 0
        for at, change in sorted(flight for engine in engines for flight in engine.flights):
            count += change
            self._times.append(at)
            self._counts.append(count)

    def at(self, when: float) -> int:
        return self._counts[bisect_right(self._times, when) - 1]
