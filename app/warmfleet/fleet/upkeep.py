"""Upkeep: apply workers' streams to the index, run ``tick``, delete workers that are gone.

All replicas do upkeep, and need not agree who does what: each stream entry is applied exactly once, by one atomic step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.client import argv
from warmfleet.fleet.codes import Next
from warmfleet.fleet.connection.packing import pack_bytes, pack_command, pack_int, pack_text
from warmfleet.fleet.connection.reply_errors import RefusedCall
from warmfleet.protocol.wire import BATCH_BLOCKS, WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet.client import Scripts
    from warmfleet.fleet.connection.packing import Argument

logger = logging.getLogger("warmfleet.fleet.upkeep")

SNAPSHOT_SHARE = 0.25  # least part of a tick's granted time for streams with a snapshot (all blocks of an engine)
AWAITED_STREAMS = 128  # most streams in one XREAD; with more, a heartbeat comes at once, so waiting is useless


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of upkeep, by which no single call takes Redis longer than about half a millisecond."""

    min_gap_ms: int = 25  # least time between two ticks of the whole fleet
    rest_gap_ms: int = 600  # min_gap_ms for replicas at rest (no recent request for the model)
    ttl_ms: int = int(WORKER_TTL_SECONDS * 1000)
    forget_ms: int = 600_000  # silence after which a worker is forgotten
    max_streams: int = 64  # most streams that one tick looks at
    rest_streams: int = 160  # max_streams for a tick at rest, because such ticks are rarer
    short_ms: int = (
        60_000  # least time for which memory counts as short, so that a snapshot that does not fit is rarely tried
    )
    max_blocks: int = BATCH_BLOCKS  # most block hashes that one call applies or collects
    max_entries: int = 16  # most stream entries in one call of apply_control or apply_server
    rest_applies: int = 8  # most streams that a replica at rest applies in one write, which takes Redis 0.5 ms
    applies: int = 256  # most calls of apply in one step, however much time the tick grants
    share_permille: int = 300  # share of Redis' time, in thousandths, that all replicas together may take to apply
    call_us: int = 40  # estimated Redis time in us per call; below: per entry, per block
    entry_us: int = 15
    block_us: float = 2.0  # measured: 1.7 to 2.0 us with warm CPU caches
    collects: int = 8  # usual calls of collect in one step; more if many slots wait for the removal of their entries
    audit_blocks: int = 128  # most block hashes that audit compares in one call
    audit_gap_ms: int = 25  # least time between two audits of the fleet, so that they take 1 % of Redis' time


@dataclass(frozen=True, slots=True)
class Tick:
    """The result of a tick.

    ran: False if another replica's tick was too recent; then only grace and short are set. grace: silent workers do not
    expire now (all routers were away). short: Redis is short of memory, so no block is inserted. retired: number of
    slots whose index entries are to be removed. backlog: streams that are not empty (``events:<worker_id>``,
    ``server:<server_id>``). snapshots: streams of workers that send all their blocks. forget: workers to be deleted.
    granted_us: Redis' time in us that this replica may take to apply.
    """

    ran: bool
    grace: bool
    short: bool = False
    retired: int = 0
    backlog: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    granted_us: int = 0
    snapshots: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of one apply. more: entries are left in the stream. cost_us: estimated time of Redis.

    control: some of the entries were for ``apply_control``, such as a join.
    """

    entries: int
    blocks: int
    more: bool
    cost_us: float = 0.0
    control: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step of upkeep.

    blocks: number of block hashes that were applied. busy: call ``step`` again soon: work is left or blocks were
    applied. stirred: workers sent more than heartbeats.
    """

    blocks: int
    busy: bool
    stirred: bool


@dataclass(frozen=True, slots=True)
class Audited:
    """The result of one call of ``audit``. walking: some worker has been compared in part."""

    blocks: int
    differs: bool
    walking: bool


class Upkeep:
    """Calls of the upkeep scripts: each method but ``step`` calls one (``apply``: two). All raise FleetUnavailable.

    last_tick: the result of the last tick, incomplete if another replica's tick was too recent (``Tick.ran``).
    suspected: set when an apply of this replica saw a sign that a worker hashes otherwise, so that a probe is due.
    """

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self.pace = Pace()
        self.last_tick = Tick(ran=False, grace=False)
        self.suspected = asyncio.Event()
        self._may_wait = True
        self._ticking: tuple[object, bytes] = (None, b"")  # the last tick's inputs, and its command
        self._wait: tuple[Sequence[str], float, bytes] = ((), 0.0, b"")  # streams, seconds and command of the last wait

    async def tick(self, *, rest: bool = False, used_permille: int = -1) -> Tick:
        """Call lua/tick.lua. A tick within ``min_gap_ms`` of the fleet's last one does nothing.

        used_permille: used share of Redis' memory limit, in thousandths; -1: not known.
        """
        scripts, now = self._scripts, (self.pace, rest, used_permille)
        constants = scripts.constants.packed
        if self._ticking[0] != (now, constants):
            self._ticking = (now, constants), self._tick_command(*now)
        answer = await scripts.call("tick", self._ticking[1], scripts.timeouts.upkeep_s)
        ran, grace, retired, short, granted_us, *names = answer
        kinds: dict[str, list[str]] = {"events": [], "server": [], "snapshot": [], "forget": []}
        for name in names:
            kind, _, told = name.decode().partition(":")
            kinds[kind].append(told)
        backlog = [f"{kind}:{name}" for kind in ("server", "events") for name in kinds[kind]]
        snapshots = [f"events:{name}" for name in kinds["snapshot"]]
        self.last_tick = Tick(
            ran=bool(ran),
            grace=bool(grace),
            short=bool(short),
            retired=retired,
            backlog=tuple(backlog),
            forget=tuple(kinds["forget"]),
            granted_us=granted_us,
            snapshots=tuple(snapshots),
        )
        return self.last_tick

    def _tick_command(self, pace: Pace, rest: bool, used_permille: int) -> bytes:
        args = argv(
            "tick",
            prefix=self._scripts.prefix,
            min_gap_ms=pace.rest_gap_ms if rest else pace.min_gap_ms,
            ttl_ms=pace.ttl_ms,
            forget_ms=pace.forget_ms,
            max_streams=pace.rest_streams if rest else pace.max_streams,
            used_permille=used_permille,
            short_ms=pace.short_ms,
            share_permille=pace.share_permille,
            constants=self._scripts.constants.packed,
        )
        return self._scripts.packed["tick"].call(args)

    async def apply(self, worker_id: str) -> Applied:
        """Apply the next entries of an engine core's stream."""
        answer = await self._upkeep("apply", worker_id=worker_id, max_blocks=self.pace.max_blocks)
        return await self._applied(worker_id, answer)

    async def apply_server(self, server_id: str) -> Applied:
        """Apply the next entries of an API server's stream."""
        pace = self.pace
        return self._applied_server(
            await self._upkeep("apply_server", server_id=server_id, max_entries=pace.max_entries, ttl_ms=pace.ttl_ms)
        )

    async def _applied(self, worker_id: str, answer: Sequence[int]) -> Applied:
        """Return the result of ``apply``, and of ``apply_control`` for the entries that ``apply`` left."""
        pace, calls = self.pace, 1
        entries, blocks, following, suspect = answer
        if suspect:
            self.suspected.set()
        control = following == Next.CONTROL
        if control:
            calls = 2
            answer = await self._upkeep(
                "apply_control", worker_id=worker_id, max_entries=pace.max_entries, ttl_ms=pace.ttl_ms
            )
            control_entries, _, following = answer
            entries += control_entries
        return Applied(entries, blocks, following != Next.NOTHING, self._cost_us(calls, entries, blocks), control)

    def _applied_server(self, answer: Sequence[int]) -> Applied:
        entries, more = answer
        return Applied(entries, 0, bool(more), self._cost_us(1, entries, 0))

    async def collect(self, max_blocks: int | None = None) -> tuple[int, int]:
        """Remove index entries of former incarnations of workers; return (removed entries, incarnations left)."""
        removed, left = await self._upkeep("collect", max_blocks=max_blocks or self.pace.max_blocks)
        return removed, left

    async def audit(self, interval_s: float) -> Audited:
        """Compare a piece of one worker's index with its checksums, so that all are compared every ``interval_s``."""
        blocks, differs, walking = await self._upkeep(
            "audit",
            max_blocks=self.pace.audit_blocks,
            period_ms=round(interval_s * 1000),
            min_gap_ms=self.pace.audit_gap_ms,
        )
        return Audited(blocks, bool(differs), bool(walking))

    async def forget(self, worker_id: str, silent_ms: int = 0) -> bool:
        """Delete a worker's data in Redis, and its API server's if the server has no other worker.

        Returns False if nothing was deleted.
        silent_ms: delete only after this much silence, and if the worker's stream is empty; 0: in any case.
        """
        return bool(await self._upkeep("forget", worker_id=worker_id, silent_ms=silent_ms))

    async def step(self, *, rest: bool = False, used_permille: int = -1) -> Step:
        """Do a bounded round of upkeep: tick, apply from every backlog in turn, collect.

        rest: the model is at rest in this replica: heartbeats may wait, and are applied several at a time.
        used_permille: as for ``tick``.
        """
        try:
            tick = await self.tick(rest=rest, used_permille=used_permille)
            for worker_id in tick.forget:
                await self.forget(worker_id, self.pace.forget_ms)
            done = await (self._drain_at_rest(tick) if rest else self._drain(tick))
        except FleetUnavailable:
            await self.collect()  # Redis may be full, and collect frees memory
            raise
        left = await self._collect_retired(tick.retired)
        blocks = sum(applied.blocks for applied in done)
        busy = bool(blocks or left)
        return Step(blocks, busy, stirred=busy or bool(tick.forget) or any(applied.control for applied in done))

    async def await_events(self, streams: Sequence[str], seconds: float) -> None:
        """Return when one of these streams or ``hello`` has an entry, or after ``seconds``. Raises FleetUnavailable.

        streams: names as in ``Tick``. Applied entries are trimmed, so any entry in a stream must be applied. Returns at
        once if there are more than AWAITED_STREAMS, if a stream is of a wrong type (``apply_control`` deletes it), or
        if this Redis user may not wait: the caller then polls at its usual interval.
        """
        if len(streams) > AWAITED_STREAMS or not self._may_wait:
            return
        if self._wait[:2] != (streams, seconds):
            self._wait = (streams, seconds, self._wait_command(streams, seconds))
        try:
            await self._scripts.block(self._wait[2], seconds)
        except RefusedCall as error:
            if error.word == "NOPERM":
                self._may_wait = False
                logger.warning(
                    "events are polled, as this Redis user may not wait for them; see warmfleet acl: %s", error
                )
            else:
                logger.debug("cannot wait for events: %s", error)

    def _wait_command(self, streams: Sequence[str], seconds: float) -> bytes:
        own = self._scripts.keys
        keys = [own.hello, *(own.prefix + name for name in streams)]
        milliseconds = round(seconds * 1000)
        return pack_command("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", *keys, *["0"] * len(keys))

    async def _collect_retired(self, slots: int) -> int:
        """Call collect, more often if more slots are retired, so that collecting keeps up with retiring.

        Returns the number of slots that are left.
        """
        calls = min(max(self.pace.collects, slots // self.pace.collects), self.pace.applies)
        while slots and calls:
            _, slots = await self.collect()
            calls -= 1
        return slots

    async def _drain(self, tick: Tick) -> list[Applied]:
        """Apply the streams in turn, one call each, until all are empty or the granted time is spent.

        Streams of workers that send a snapshot come last, but get SNAPSHOT_SHARE of the time, because a snapshot
        without progress would be commanded anew.
        """
        live, filling = deque(tick.backlog), deque(tick.snapshots)
        done, left_us = list[Applied](), float(tick.granted_us)
        for _ in range(self.pace.applies):
            if left_us <= 0 or not (live or filling):
                break
            last_quarter = left_us <= tick.granted_us * SNAPSHOT_SHARE
            waiting = filling if filling and (last_quarter or not live) else live
            stream = waiting.popleft()
            kind, _, name = stream.partition(":")
            applied = await (self.apply(name) if kind == "events" else self.apply_server(name))
            done.append(applied)
            left_us -= applied.cost_us
            if applied.more:
                waiting.append(stream)
            await asyncio.sleep(0)  # let other tasks of the event loop, such as requests, run before the next call
        return done

    async def _drain_at_rest(self, tick: Tick) -> list[Applied]:
        """Apply each stream once, several in one write, until the granted time is spent."""
        streams, done, left_us = [*tick.backlog, *tick.snapshots], list[Applied](), float(tick.granted_us)
        while streams and left_us > 0:
            some, streams = streams[: self.pace.rest_applies], streams[self.pace.rest_applies :]
            answers = await self._scripts.together([self._apply_call(stream) for stream in some])
            for (kind, _, name), answer in zip((stream.partition(":") for stream in some), answers, strict=True):
                applied = await self._applied(name, answer) if kind == "events" else self._applied_server(answer)
                done.append(applied)
                left_us -= applied.cost_us
        return done

    def _apply_call(self, stream: str) -> tuple[str, bytes]:
        """Return the script that applies the next entries of a stream, and its packed call."""
        pace, (kind, _, name) = self.pace, stream.partition(":")
        script, limits = (
            ("apply", (pace.max_blocks,)) if kind == "events" else ("apply_server", (pace.max_entries, pace.ttl_ms))
        )
        head = self._scripts.packed[script].head(2 + len(limits))
        return script, b"".join((head, pack_bytes(self._scripts.prefix), pack_text(name), *map(pack_int, limits)))

    def _cost_us(self, calls: int, entries: int, blocks: int) -> float:
        pace = self.pace
        return calls * pace.call_us + entries * pace.entry_us + blocks * pace.block_us

    async def _upkeep(self, script: str, **values: Argument) -> Any:
        return await self._scripts.keep(script, prefix=self._scripts.prefix, **values)
