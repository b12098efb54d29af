"""The two packed records that scripts and routers share: one load row per worker, one lease per reservation.

Fields and flags stand here and nowhere else: ``layout`` tells scripts their positions and formats by name, and the
tables of lua/README.md are made of the comments beside them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Annotated, TypeAlias, get_type_hints

#: The numbers of a packed record, by their letters in Python's ``struct``. They come first, then the other fields.
U32: TypeAlias = Annotated[int, "I"]
I32: TypeAlias = Annotated[int, "i"]
U16: TypeAlias = Annotated[int, "H"]
U8: TypeAlias = Annotated[int, "B"]

JUDGED = 2**31  # added to the matched_tokens of a packed lease whose match was compared; no prompt is as long


def numbers_of(record: type) -> dict[str, str]:
    """The names of the packed numbers of a record, in order, with the letter of each."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


class Flag(IntEnum):
    """State of a worker, one bit each. No IntFlag: an operation on one takes a microsecond, on a number 30 ns."""

    SERVER = 1  # its API server is alive
    URL = 2  # its URL answered the probe
    PROVEN = 4  # its identity is right: its blocks may be matched
    DRAINING = 8  # the operator drains it: it gets no new request
    APPROXIMATE = 16  # an engine without the plugin: the index knows only what routers sent it
    CLOSED = 32  # its set of blocks is prefix-closed: it holds each block's predecessors
    PARTIAL = 64  # memory was short: some of its blocks may be missing in the index
    HOSTILE = 128  # its stream broke the rules
    UNHEARD = 256  # its heartbeats are missing, but its engine answers replicas over HTTP
    EJECTED = 512  # it failed requests that others served: it gets none for a while
    TRIAL = 1024  # after that it gets one request at a time, until it serves one
    PAUSED = 2048  # somebody paused its engine or put it to sleep: its last heartbeat or check said so
    LEARNED = 4096  # its speed was learned from first tokens, as its heartbeats tell none
    MISNAMED = 8192  # it does not serve its pool's name


class Stage(IntEnum):
    """How far a reservation has come."""

    BOOKED = 0  # its prefill is ahead or under way
    STARTED = 1  # its first token came
    LINGERING = 2  # finished: it holds no load, but its checkpoints until the engine's own report arrives
    TOMBSTONE = 3  # it ended before it was booked: a late decide books nothing


@dataclass(frozen=True, slots=True)
class LoadRow:
    """The load and the facts of a worker that scripts read. Booked tokens are sums over open reservations.

    In Redis the worker_id follows, so that a script which reads all rows has the names, too.
    """

    epoch: U32 = 0  # a number of its own for each row that was ever made: a lease of another epoch owes it nothing
    prefill_tokens: I32 = 0  # prompt tokens to be computed
    decode_tokens: I32 = 0  # context that requests add to the cache: what their match lacks, and their answers
    in_flight: I32 = 0  # open reservations
    slot: U32 = 0  # the incarnation
    flags: U16 = 0  # the sum of what is true of the worker: Flag
    scheme: U32 = 0  # how the engine hashes blocks
    speed_tps: U32 = 0  # prefill tokens a busy second, measured by the worker, or learned; 0: not known
    foreign_prefill_tokens: U32 = 0  # tokens to be computed of requests that came past the routers
    foreign_decode_tokens: U32 = 0  # resident context of such requests that decode
    blocks: U32 = 0  # blocks that are held; of an approximate worker: blocks in its mirror
    capacity_blocks: U32 = 0  # that the cache has room for: 4 times the fleet's median at most, whatever it claims
    busy_share: U16 = 0  # 65,535ths of its time that were spent in prefill until since_ms, older time counting less
    evicted: U16 = 0  # blocks evicted since the last heartbeat; by an approximate worker's mirror in about 5 s
    under_way_tokens: U32 = 0  # prompt tokens that the prefill under way has at most
    since_ms: U32 = 0  # Redis' clock in ms modulo 2**32 when a prefill last began or ended

    def pack(self, worker_id: str) -> bytes:
        return ROW.pack(*(getattr(self, field.name) for field in fields(self))) + worker_id.encode()

    @classmethod
    def unpack(cls, packed: bytes) -> LoadRow:
        return cls(*ROW.unpack_from(packed))


@dataclass(frozen=True, slots=True)
class Lease:
    """A reservation: its share of its worker's load, and the checkpoints at which it counts in ``x:``.

    In Redis the numbers are followed by the length of the worker_id (one byte), the worker_id, and the checkpoints (8
    bytes each).
    judged: its match was compared with what the engine had cached, which ``matched_tokens`` is since then.
    """

    epoch: U32  # of the row on which it is booked
    slot: U32  # of the worker when it was booked
    prefill_tokens: U32  # still booked
    decode_tokens: U32  # context that it adds to the cache
    matched_tokens: U32  # the match that was predicted; once it was compared: what was cached, plus 2**31
    prompt_tokens: U32  # 0: a replica booked it anew, which does not know them
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


ROW = struct.Struct(">" + "".join(numbers_of(LoadRow).values()))
LEASE = struct.Struct(">" + "".join(numbers_of(Lease).values()) + "B")
