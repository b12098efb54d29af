"""What a publisher is told, what it says of itself, and when its next duties are due."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

from warmfleet_worker.protocol import wire

LOAD_CHECK_SECONDS = 0.25  # foreign load that moved by 10 % is reported this fast
COMMAND_DELAY_SECONDS = 0.5  # after a heartbeat, its answer may be there
SMALL_TOKENS = 256
RECENT_SECONDS = 2.0  # 1 and 4 were measured, too
RECENT_WORK_SECONDS = 1.0  # no more of it than the engine does in so long: an idle engine must not look saturated
UNKNOWN_TPS = 10_000
LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine is doing now. Requests, tokens, tokens, tokens per second (0: not measured)."""

    running: int = 0
    waiting: int = 0
    foreign_prefill_tokens: int = 0
    foreign_decode_tokens: int = 0
    speed_tps: int = 0

    def differs_from(self, told: Load) -> bool:
        """Foreign load has moved by a tenth or more since it was told, and by more than a small request."""
        pairs = (
            (told.foreign_prefill_tokens, self.foreign_prefill_tokens),
            (told.foreign_decode_tokens, self.foreign_decode_tokens),
        )
        return any(abs(now - before) > max(before // 10, SMALL_TOKENS) for before, now in pairs)


class Recent:
    """Foreign prefill as it is told: what there is now, or what there was lately on average if that is more.

    Most foreign prompts begin and end between two looks, and who sends past the fleet goes on with it: what it will
    bring to this engine cannot go elsewhere, so the fleet's requests should.
    """

    def __init__(self) -> None:
        self._mean, self._at = 0.0, -math.inf

    def told(self, load: Load, now: float) -> Load:
        """``load`` as it is ``now`` (monotonic seconds), with its foreign prefill smoothed."""
        now_tokens = load.foreign_prefill_tokens
        kept = math.exp(-min(now - self._at, 2 * LOAD_CHECK_SECONDS) / RECENT_SECONDS)  # after a gap it weighs no more
        most = RECENT_WORK_SECONDS * (load.speed_tps or UNKNOWN_TPS)
        self._mean, self._at = min(kept * self._mean + (1 - kept) * now_tokens, most), now
        lately = int(self._mean) if self._mean >= LEAST_TOKENS else 0
        return replace(load, foreign_prefill_tokens=max(now_tokens, lately))


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """What an engine core says of itself when it joins. closed: its block set is prefix-closed."""

    redis_url: str
    model: str
    worker_id: str
    server_id: str
    rank: int
    scheme: wire.Scheme
    capacity_blocks: int
    max_model_len: int
    version: str
    closed: bool = True

    def join(self) -> str:
        return wire.dumps(
            {
                "schema": wire.SCHEMA,
                "worker_id": self.worker_id,
                "server_id": self.server_id,
                "rank": self.rank,
                "scheme": self.scheme.as_dict(),
                "scheme_id": self.scheme.scheme_id,
                "capacity_blocks": self.capacity_blocks,
                "max_model_len": self.max_model_len,
                "version": self.version,
                "closed": int(self.closed),
            }
        )


@dataclass(frozen=True, slots=True)
class PublisherState:
    """A copy of the publisher's counters. number: of the last entry made; applied: as the fleet acknowledged it."""

    joined: bool = False
    acknowledged: bool = False
    draining: bool = False
    stopped: str | None = None  # why it stopped for good
    joins: int = 0
    snapshots: int = 0
    number: int = 0
    applied: int = 0
    dropped: int = 0  # transitions and hashes that never reached Redis
    errors: int = 0  # failed calls to Redis


@dataclass(frozen=True, slots=True)
class Command:
    """What the fleet tells this worker: who it takes it for, what it has applied, perhaps something to do."""

    nonce: str
    applied: int
    id: str | None
    do: str
    joined: tuple[int, int] = (0, 0)  # stream id of that process's join

    @classmethod
    def parse(cls, raw: object) -> Command:
        """Raises ValueError for anything but a command."""
        try:
            value = json.loads(raw)  # type: ignore[arg-type]  # a TypeError is caught below
            identity = value.get("id")
            joined = wire.entry_id(value.get("joined", "0-0"))
            named = identity and str(identity)
            return cls(str(value["nonce"]), int(value["applied"]), named, str(value.get("do")), joined)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"not a command: {error}") from error


@dataclass(slots=True)
class Rival:
    """Another process that has joined later under our name. It may be dead, and only its join came late."""

    nonce: str = ""
    since: float = 0.0  # when we first read of it
    applied: int = 0
    read: float = 0.0  # when that was its applied number

    def writes(self, command: Command, now: float) -> bool:
        """Something of it was applied later than a heartbeat's time: what a dead one had sent has come by then."""
        if command.nonce != self.nonce:
            self.nonce, self.since, self.applied, self.read = command.nonce, now, command.applied, now
        late = self.read - self.since >= wire.HEARTBEAT_SECONDS
        moved, self.applied, self.read = command.applied != self.applied, command.applied, now
        return moved and late

    def silent(self, now: float) -> bool:
        """It has had a whole TTL to write."""
        return now - self.since >= wire.WORKER_TTL_SECONDS


@dataclass(slots=True)
class Due:
    """When what is next, in monotonic seconds."""

    flush: float = 0.0
    heartbeat: float = 0.0
    load: float = 0.0
    command: float = 0.0
    answer: float = float("inf")

    def next(self) -> float:
        return min(self.flush, self.heartbeat, self.load, self.command)

    def after_heartbeat(self, now: float) -> None:
        """Both the load it told and the command it may have caused are fresh for a while."""
        self.heartbeat = now + wire.HEARTBEAT_SECONDS
        self.after_look(now)
        self.command = now
        self.answer = now + COMMAND_DELAY_SECONDS

    def after_look(self, now: float) -> None:
        self.load = now + LOAD_CHECK_SECONDS

    def after_command(self, now: float, *, sending: bool, acknowledged: bool) -> None:
        """Read it again every 100 ms while a snapshot waits for it, else 0.5 s after a heartbeat."""
        if sending:
            self.command = now + wire.FLUSH_SECONDS
        elif not acknowledged:
            self.command = now + COMMAND_DELAY_SECONDS
        else:
            self.command, self.answer = self.answer, float("inf")
