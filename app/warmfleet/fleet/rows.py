"""The two packed records that scripts and routers share: one load row per worker, one lease per reservation.

lua/README.md tables their fields. The scripts name every position, format, flag and stage that they use, and
tests/lua/test_layouts.py compares them with this module.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from enum import IntEnum

_ROW = struct.Struct(">IiiiIHIIIIIIHHII")
_LEASE = struct.Struct(">6I2B")
JUDGED = 2**31  # added to the matched_tokens of a packed lease whose match was compared; no prompt is as long


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

    BOOKED = 0
    STARTED = 1
    LINGERING = 2  # finished: holds no load, but its speculation until the engine's own report arrives
    TOMBSTONE = 3  # ended before it was booked: a late decide books nothing


@dataclass(frozen=True, slots=True)
class LoadRow:
    """What the scripts read of a worker. Tokens are sums over open reservations; speed is tokens per busy second.

    In Redis the worker_id follows, so that a script which reads all rows has the names, too.
    """

    epoch: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    in_flight: int = 0
    slot: int = 0
    flags: int = 0
    scheme: int = 0
    speed_tps: int = 0
    foreign_prefill_tokens: int = 0
    foreign_decode_tokens: int = 0
    blocks: int = 0
    capacity_blocks: int = 0
    busy_share: int = 0  # 65,535ths of its time that were spent in prefill until since_ms, older time counting less
    evicted: int = 0
    under_way_tokens: int = 0  # prompt tokens that the prefill under way has at most
    since_ms: int = 0  # Redis' clock in ms modulo 2**32 when a prefill last began or ended

    def pack(self, worker_id: str) -> bytes:
        return _ROW.pack(*(getattr(self, field.name) for field in fields(self))) + worker_id.encode()

    @classmethod
    def unpack(cls, packed: bytes) -> LoadRow:
        return cls(*_ROW.unpack_from(packed))


@dataclass(frozen=True, slots=True)
class Lease:
    """One reservation: its share of its worker's load, and the checkpoints at which it counts in ``x:``.

    judged: its match was compared with what the engine had cached, which ``matched_tokens`` is since then.
    """

    epoch: int
    slot: int
    prefill_tokens: int
    decode_tokens: int
    matched_tokens: int
    prompt_tokens: int
    stage: int
    worker_id: str
    checkpoints: tuple[bytes, ...] = ()
    judged: bool = False

    def pack(self) -> bytes:
        worker_id = self.worker_id.encode()
        matched = self.matched_tokens + JUDGED * self.judged
        numbers = (self.epoch, self.slot, self.prefill_tokens, self.decode_tokens, matched)
        head = _LEASE.pack(*numbers, self.prompt_tokens, self.stage, len(worker_id))
        return head + worker_id + b"".join(self.checkpoints)

    @classmethod
    def unpack(cls, packed: bytes) -> Lease:
        epoch, slot, prefill, decode, matched, prompt, stage, length = _LEASE.unpack_from(packed)
        end = _LEASE.size + length
        checkpoints = tuple(packed[at : at + 8] for at in range(end, len(packed), 8))
        worker_id = packed[_LEASE.size : end].decode()
        judged, matched = divmod(matched, JUDGED)
        return cls(epoch, slot, prefill, decode, matched, prompt, stage, worker_id, checkpoints, bool(judged))
