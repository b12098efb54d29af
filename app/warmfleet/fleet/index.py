"""Reads facts of the index: held blocks, counters, memory, and differences from the engines' block tables."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from warmfleet.fleet.client import pairs, redis_errors
from warmfleet.fleet.connection.packing import pack_command

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from warmfleet.fleet.client import Scripts
    from warmfleet.fleet.workers import WorkerView

LAGS_AT_ONCE = 64  # streams that one call of lua/lag.lua looks at
HOLDS_AT_ONCE = 512  # block hashes in one SMISMEMBER
FILLING = "join"  # ``WorkerTruth.cause`` after a join, until the first snapshot: the index is empty, but not wrong
_DIGEST_COUNT = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class WorkerTruth:
    """The differences between one worker's index and its engine's block table.

    lag_batches, lag_s: entries of its stream that no replica has applied, and the age of the oldest. digest_age_s:
    seconds since checksums of both were last compared; None: never. cause: why the engine shall send all its blocks (a
    snapshot); empty: no difference is known. found, healed: differences so far. resyncs: finished snapshots by cause.
    """

    lag_batches: int = 0
    lag_s: float = 0.0
    digest_age_s: float | None = None
    cause: str = ""
    found: int = 0
    healed: int = 0
    resyncs: Mapping[str, int] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        return self.cause not in ("", FILLING)


@dataclass(frozen=True, slots=True)
class Truth:
    """The size of the index of one pool, and how far it differs from the engines' block tables.

    entries: pairs of a cached block and a worker. retired_slots: former index numbers of workers whose entries are not
    removed yet. counts: by event, see lua/README.md. workers: by worker_id, only those whose engines report blocks.
    """

    entries: int = 0
    retired_slots: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    workers: Mapping[str, WorkerTruth] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of the Redis server, in bytes. limit: 0 without one. policy: the name of its eviction policy."""

    used: int
    limit: int
    policy: str

    @property
    def used_permille(self) -> int:
        """The share of the limit that is used; 0 without a limit."""
        return 1_000 * self.used // self.limit if self.limit else 0


class Index:
    """Reads facts of the index (which worker caches which block), and writes nothing."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def holds(self, slot: int, hashes: Sequence[bytes]) -> list[bool]:
        """Read for each 8-byte block hash whether the worker numbered ``slot`` caches it. Raises FleetUnavailable."""
        answer: list[bool] = []
        with redis_errors():
            for start in range(0, len(hashes), HOLDS_AT_ONCE):
                chunk = list(hashes[start : start + HOLDS_AT_ONCE])
                found = await cast(
                    "Awaitable[list[int]]", self._scripts.redis.smismember(self._scripts.keys.slot(slot), chunk)
                )
                answer += [held == 1 for held in found]
        return answer

    async def counts(self) -> dict[str, int]:
        """Read how often each event of the protocol between plugin and scripts has happened (lua/README.md)."""
        with redis_errors():
            found = await cast("Awaitable[dict[bytes, bytes]]", self._scripts.redis.hgetall(self._scripts.keys.counts))
        return {name.decode(): int(value) for name, value in found.items()}

    async def memory(self) -> Memory:
        """Read the memory of the Redis server. Raises FleetUnavailable."""
        told: bytes = await self._scripts.ask("INFO", "memory")
        info = dict(line.partition(b":")[::2] for line in told.split(b"\r\n"))
        policy = info.get(b"maxmemory_policy", b"").decode("ascii", "replace")
        return Memory(int(info[b"used_memory"]), int(info.get(b"maxmemory", 0)), policy)

    async def truth(self, workers: Sequence[WorkerView]) -> Truth:
        """Read the state of the index for these workers, as Redis has it now. Raises FleetUnavailable."""
        keys = self._scripts.keys
        commands = ("HVALS", keys.digest), ("SCARD", keys.retired), ("HGETALL", keys.counts), ("TIME",)
        answers = await self._scripts.together([("", pack_command(*words)) for words in commands])
        digests, retired, counts, (seconds, micros) = answers
        lags, now_ms = await self._lags(), int(seconds) * 1_000 + int(micros) / 1_000
        return Truth(
            entries=sum(_DIGEST_COUNT.unpack_from(digest)[0] for digest in digests),
            retired_slots=retired,
            counts={name.decode(): int(value) for name, value in pairs(counts).items()},
            workers={
                worker.worker_id: _worker(worker.record.get("truth") or {}, lags.get(worker.worker_id, (0, 0)), now_ms)
                for worker in workers
                if not worker.approximate
            },
        )

    async def _lags(self) -> dict[str, tuple[int, int]]:
        """Read for each worker whose stream is not empty the entries in it, and the age of the oldest in ms."""
        lags: dict[str, tuple[int, int]] = {}
        start, streams = 0, 1
        while start < streams:
            answer = await self._scripts.keep("lag", prefix=self._scripts.prefix, start=start, max_streams=LAGS_AT_ONCE)
            streams, start = answer[0], start + LAGS_AT_ONCE
            for at in range(1, len(answer), 3):
                lags[answer[at].decode()] = (answer[at + 1], answer[at + 2])
        return lags


def _worker(told: Mapping[str, Any], lag: tuple[int, int], now_ms: float) -> WorkerTruth:
    checked = told.get("checked")
    return WorkerTruth(
        lag_batches=lag[0],
        lag_s=lag[1] / 1_000,
        digest_age_s=None if checked is None else max(0.0, (now_ms - checked) / 1_000),
        cause=str(told.get("cause", "")),
        found=int(told.get("found", 0)),
        healed=int(told.get("healed", 0)),
        resyncs=dict(told.get("resyncs") or {}),
    )
