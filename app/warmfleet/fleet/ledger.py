"""The ledger of sessions: which agents' conversations have a place in the engines' caches, and which wait for one.

Its rules are in lua/parts/decide/session.lua and lua/parts/tick/sessions.lua.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.fleet.client import argv, pairs
from warmfleet.fleet.codes import Standing
from warmfleet.fleet.rows import SESSION, LoadRow, Place, SessionRecord, Trait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet.client import Scripts

ENGINE = struct.Struct(">ddB")  # as lua/parts/shared/sessions.lua packs it
RECORD_BYTES = SESSION.size + 16  # tenant and tail behind the numbers
HOLD_AT_ONCE = 128  # most sessions in one poll


@dataclass(frozen=True, slots=True)
class Hold:
    """A held request: its session waits in the line for a place. ahead: sessions before it, of in_line.

    paused: the session had a place and lost it. predicted_s: the wait until its turn.
    """

    session: bytes
    ahead: int
    in_line: int
    predicted_s: float
    paused: bool

    @classmethod
    def of(cls, answer: Sequence[Any]) -> Hold:
        """Read the answer HELD of ``decide``."""
        _, session, ahead, in_line, predicted_ms, paused = answer
        return cls(session, ahead, in_line, predicted_ms / 1000, paused == 1)


@dataclass(frozen=True, slots=True)
class HoldStanding:
    """The state of a held session. TURN: it has a place, so the request is to be decided again."""

    standing: Standing
    ahead: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class HoldLine:
    """The line as a poll finds it. in_line: sessions of all replicas."""

    in_line: int
    standings: dict[bytes, HoldStanding]


@dataclass(frozen=True, slots=True)
class Session:
    """A session in the ledger. Times in seconds before the reading. tokens: of its context; own_tokens: beyond those
    with which most sessions begin."""

    session: bytes
    place: Place
    worker_id: str
    tokens: int
    running: int
    came_s: float
    since_s: float
    calls_tools: bool


@dataclass(frozen=True, slots=True)
class EngineLedger:
    """The places at one engine, in tokens. taken: by sessions that have a place; capacity: for sessions altogether."""

    worker_id: str
    taken_tokens: int
    capacity_tokens: int
    has_time: bool
    inside: int
    idle: int


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The whole ledger at one moment; empty while it does not bind."""

    engines: tuple[EngineLedger, ...] = ()
    sessions: tuple[Session, ...] = ()

    @property
    def held(self) -> tuple[Session, ...]:
        """The sessions that wait for a place; first those that came first."""
        found = [each for each in self.sessions if each.place in (Place.NEW, Place.PAUSED)]
        return tuple(sorted(found, key=lambda each: (each.place == Place.NEW, -each.came_s)))


class Ledger:
    """Reads the ledger, and polls for the held sessions of this replica."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def poll(self, held: Sequence[bytes] = (), leaving: Sequence[bytes] = ()) -> HoldLine:
        """Keep the sessions of ``held`` in the line, and take those of ``leaving`` out of it; HOLD_AT_ONCE together."""
        scripts = self._scripts
        args = argv("hold", [*leaving, *held], prefix=scripts.prefix, leaving=len(leaving))
        in_line, *told = await scripts.call("hold", scripts.packed["hold"].call(args), scripts.timeouts.request_s)
        stands = [HoldStanding(Standing(told[at]), told[at + 1], told[at + 2] / 1000) for at in range(0, len(told), 3)]
        return HoldLine(in_line, dict(zip(held, stands, strict=True)))

    async def read(self) -> LedgerView:
        """Read all of the ledger. Raises FleetUnavailable."""
        scripts = self._scripts
        keys = scripts.keys
        places = pairs(await scripts.ask("HGETALL", keys.places))
        if not places:
            return LedgerView()
        records = pairs(await scripts.ask("HGETALL", keys.sessions))
        seconds, micros = await scripts.ask("TIME")
        now_ms = int(seconds) * 1000 + int(micros) / 1000
        names = {
            LoadRow.unpack(row).slot: name.decode()
            for name, row in pairs(await scripts.ask("HGETALL", keys.load)).items()
        }
        sessions = []
        for session, packed in records.items():
            if len(packed) < RECORD_BYTES:
                continue
            record = SessionRecord.unpack(packed)
            place, calls = Place(record.place), bool(record.traits & Trait.CALLED)
            came_s, since_s = (now_ms - record.first_ms) / 1000, (now_ms - record.since_ms) / 1000
            worker = names.get(record.slot, "") if place is Place.IN or record.running else ""
            sessions.append(Session(session, place, worker, record.tokens, record.running, came_s, since_s, calls))
        engines = []
        for slot, packed in places.items():
            name = names.get(int(slot), "") if slot else ""
            if name:
                taken, capacity, has_time = ENGINE.unpack(packed)
                own = [each for each in sessions if each.place is Place.IN and each.worker_id == name]
                idle = sum(not each.running for each in own)
                engines.append(EngineLedger(name, int(taken), int(capacity), has_time == 1, len(own), idle))
        return LedgerView(tuple(engines), tuple(sessions))
