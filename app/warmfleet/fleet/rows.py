"""The packed records that scripts and routers share: of a worker's load, of a reservation, of a session.

Fields and flags are declared only here: ``layout`` makes their positions and formats for scripts, and the tables of
lua/README.md are made of the comments beside the declarations.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Annotated, TypeAlias, get_type_hints

#: Types of a packed record's numbers, by their letters in Python's ``struct``. Numbers come before all other fields.
U32: TypeAlias = Annotated[int, "I"]
I32: TypeAlias = Annotated[int, "i"]
U16: TypeAlias = Annotated[int, "H"]
U8: TypeAlias = Annotated[int, "B"]
F64: TypeAlias = Annotated[float, "d"]

TENANT_BYTES = 8
JUDGED = 2**31  # added to a lease's matched_tokens once the engine has told the cached number; no prompt is so long


def numbers_of(record: type) -> dict[str, str]:
    """Return the names of the packed numbers of a record, in order, with the letter of each."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


class Flag(IntEnum):
    """Bits of a worker's state. Not an IntFlag: an operation on an IntFlag takes 1 µs, on an int 30 ns."""

    SERVER = 1  # its API server is alive
    URL = 2  # its URL answered the probe
    PROVEN = 4  # its identity was verified, so its blocks may be matched
    DRAINING = 8  # the operator drains it, so it gets no new request
    APPROXIMATE = 16  # its engine lacks the plugin, so the index knows only what routers sent it
    CLOSED = 32  # its set of blocks is prefix-closed: it holds each block's predecessors
    PARTIAL = 64  # some of its blocks may be missing in the index, as memory of Redis was short
    HOSTILE = 128  # its stream broke the rules of the protocol, so it must join anew
    UNHEARD = 256  # its heartbeats are missing, but its engine answers replicas over HTTP
    EJECTED = 512  # it failed requests that others served, so it gets none for a while
    TRIAL = 1024  # after an ejection it gets one request at a time, until it has served one
    PAUSED = 2048  # its last heartbeat or check said that its engine was paused or put to sleep
    LEARNED = 4096  # its speed was learned from first tokens, as its heartbeats tell none
    MISNAMED = 8192  # it does not serve the model name of its pool
    SETS = 16384  # it reports further sets of blocks: a tier, or the ends that all KV cache groups support
    ENDS = 32768  # its engine reports the ends of requests, and its last right tally came a moment ago


class Stage(IntEnum):
    """How far a reservation has come."""

    BOOKED = 0  # its prefill is ahead or under way
    STARTED = 1  # its first token came
    LINGERING = 2  # finished: its blocks count as held by the worker until the engine has reported them
    TOMBSTONE = 3  # it ended before it was booked, so a late decide must book nothing
    ENDED = 4  # its engine has reported its end: it has no load, and waits for settle until it expires


class Place(IntEnum):
    """Whether a session has a place, which is the right to keep its context in an engine's cache."""

    OUT = 0  # it has no place and waits for none
    IN = 1  # it has a place
    NEW = 2  # held: it waits in the line for its first place
    PAUSED = 3  # held: it lost its place, as the cache became too small, and waits in the line for another


@dataclass(frozen=True, slots=True)
class LoadRow:
    """The load and the facts of a worker that scripts read. Booked tokens are sums over open reservations.

    In Redis the worker_id follows the numbers, so that a script which reads all rows has the ids, too.
    """

    epoch: U32 = 0  # number that no other row ever had: a lease that names another epoch is not part of this load
    prefill_tokens: I32 = 0  # booked prompt tokens that are still to be computed, and loads as tokens of the same time
    decode_tokens: I32 = 0  # booked tokens that requests add to the cache: unmatched prompt tokens and answers
    in_flight: I32 = 0  # number of open reservations
    slot: U32 = 0  # number of the worker's incarnation, by which the index names it
    flags: U16 = 0  # sum of the Flag values that are true of the worker
    scheme: U32 = 0  # id of the scheme by which the engine hashes blocks
    speed_tps: U32 = 0  # prefill tokens per second of prefill, measured by the worker, or learned; 0: not known
    foreign_prefill_tokens: U32 = 0  # tokens to be computed for requests that did not come through the routers
    foreign_decode_tokens: U32 = 0  # tokens in the cache of such requests that decode
    blocks: U32 = 0  # number of cached blocks; of an approximate worker as Redis guesses them
    capacity_blocks: U32 = 0  # blocks that fit its cache; a claim above 4 times the fleet's median is cut to that
    busy_share: U16 = 0  # share of its time in prefill up to since_ms, times 65,535; older time counts less
    evicted: U16 = 0  # blocks evicted since the last heartbeat; of an approximate worker, as guessed, in about 5 s
    under_way_tokens: U32 = 0  # most prompt tokens that the prefill under way may have
    since_ms: U32 = 0  # time when a prefill last began or ended, by Redis' clock in ms modulo 2**32

    def pack(self, worker_id: str) -> bytes:
        return ROW.pack(*(getattr(self, field.name) for field in fields(self))) + worker_id.encode()

    @classmethod
    def unpack(cls, packed: bytes) -> LoadRow:
        return cls(*ROW.unpack_from(packed))


@dataclass(frozen=True, slots=True)
class Lease:
    """A reservation: its load, and its checkpoints (block hashes by whose keys ``x:`` decisions find its blocks).

    In Redis the numbers are followed by the length of the worker_id (one byte), the worker_id, and the checkpoints (8
    bytes each).
    judged: its match was compared with what the engine had cached; ``matched_tokens`` is the cached number then.
    """

    epoch: U32  # epoch of the load row on which it is booked
    slot: U32  # slot of the worker when it was booked
    prefill_tokens: U32  # what of prefill_tokens is still booked for it; in stage ENDED tokens of the answer
    decode_tokens: U32  # tokens that it adds to the cache
    matched_tokens: U32  # predicted match in tokens; once judged, the tokens that were cached (in Redis plus 2**31)
    prompt_tokens: U32  # prompt's length; 0: unknown, because Redis lost this lease and a replica rebuilt it
    stage: U8  # how far it has come: Stage
    worker_id: str
    checkpoints: tuple[bytes, ...] = ()
    judged: bool = False

    def pack(self) -> bytes:
        worker_id = self.worker_id.encode()
        matched = self.matched_tokens + JUDGED * self.judged
        numbers = (self.epoch, self.slot, self.prefill_tokens, self.decode_tokens, matched)
        head = LEASE.pack(*numbers, self.prompt_tokens, self.stage, len(worker_id))
        return head + worker_id + b"".join(self.checkpoints)

    @classmethod
    def unpack(cls, packed: bytes) -> Lease:
        epoch, slot, prefill, decode, matched, prompt, stage, length = LEASE.unpack_from(packed)
        end = LEASE.size + length
        checkpoints = tuple(packed[at : at + 8] for at in range(end, len(packed), 8))
        worker_id = packed[LEASE.size : end].decode()
        judged, matched = divmod(matched, JUDGED)
        return cls(epoch, slot, prefill, decode, matched, prompt, stage, worker_id, checkpoints, bool(judged))


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session in the ledger (lua/parts/shared/sessions.lua). Times are of Redis' clock, in ms.

    In Redis the numbers are followed by ``tenant``, ``tail`` and ``reservation``, of fixed lengths.
    """

    first_ms: F64  # when it came first: its place in the line
    since_ms: F64  # when its last request began or ended; of a held session, since when it waits
    heard_ms: F64  # when a request of it that waits was last heard of; 0: no request of it waits
    slot: U32  # of the engine that has its context, by the row's slot
    tokens: U32  # of its last prompt and answer
    shared_tokens: U32  # how much of its first prompt some worker had cached: others have that, too
    booked_tokens: U32  # of the load row's decode_tokens, what its running requests have booked
    gap_ms: U32  # mean time between an answer and its next request; 0: not known
    told_ms: U32  # the wait that was predicted when it began to wait
    blocks: U16  # full blocks of its last prompt
    running: U16  # its requests under way
    place: U8  # Place
    kind: U8  # how it was known at first: Kind
    traits: U8  # sum of the Trait values that are true of it
    priority: U8  # class of its last request; 0 first
    tenant: bytes = bytes(TENANT_BYTES)
    tail: bytes = bytes(8)  # hash of the last full block of its last prompt
    reservation: bytes = b""  # of its last request

    @classmethod
    def unpack(cls, packed: bytes) -> SessionRecord:
        texts = packed[SESSION.size :]
        return cls(*(*SESSION.unpack_from(packed), texts[:8], texts[8:16], texts[16:]))


class Kind(IntEnum):
    """How a session was known at its first request. Redis learns of each kind how many turn out to be agents."""

    PLAIN = 0  # neither of the others
    TOOLS = 1  # the request declared tools
    NAMED = 2  # the client named the session, and declared no tools


class Trait(IntEnum):
    """Bits of a session's traits."""

    STEPPED = 1  # an answer of it has ended
    CALLED = 2  # its last answer ended in tool calls
    JUDGED = 4  # its kind has learned from it whether it is an agent
    PLACED = 8  # it had a place once
    USES_TOOLS = 16  # an answer of it ended in tool calls once


ROW = struct.Struct(">" + "".join(numbers_of(LoadRow).values()))
LEASE = struct.Struct(">" + "".join(numbers_of(Lease).values()) + "B")
SESSION = struct.Struct(">" + "".join(numbers_of(SessionRecord).values()))
