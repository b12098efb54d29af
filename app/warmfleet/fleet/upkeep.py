"""Upkeep: workers' streams into the index, the fleet's clock, and what is left of the gone. Any replica may do it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.client import ScriptClient
from warmfleet.protocol.wire import BATCH_BLOCKS, WORKER_TTL_SECONDS

SNAPSHOT_SHARE = 0.25  # of what a tick grants
_APPLY_CONTROL = 2  # what `apply` says when the next entry is not its own


@dataclass(frozen=True, slots=True)
class Pace:
    """Limits of upkeep. No single call takes Redis longer than about half a millisecond."""

    min_gap_ms: int = 25  # between two ticks of the whole fleet
    ttl_ms: int = int(WORKER_TTL_SECONDS * 1000)
    forget_ms: int = 600_000  # a worker silent that long is forgotten
    max_streams: int = 64  # looked at in one tick
    short_ms: int = 60_000  # memory stays short at least so long: snapshots that do not fit are tried once a minute
    max_blocks: int = BATCH_BLOCKS  # applied or collected in one call
    max_entries: int = 16  # of an API server, or of control, in one call
    applies: int = 256  # calls in one step, whatever the tick grants
    share_permille: int = 300  # of Redis's time that applying may take, all replicas together
    call_us: int = 40  # what a call of apply is taken to cost: scripts cannot time themselves on every server
    entry_us: int = 15
    block_us: float = 2.0  # measured 1.7 to 2.0 warm
    collects: int = 8
    audit_blocks: int = 128  # compared in one call
    audit_gap_ms: int = 25  # between two such calls of the whole fleet: 1 % of Redis while a walk is under way


@dataclass(frozen=True, slots=True)
class Tick:
    """ran: false if another tick was too recent; then the rest says nothing. grace: nobody expires now.

    short: memory is; nothing is inserted. retired: slots to collect. forget: workers that are due. granted_us: Redis's
    time for applying. backlog: streams (``events:<id>``, ``server:<id>``); snapshots: those whose snapshot fills.
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
    """What one call took from a stream; ``more``: something is left in it."""

    entries: int
    blocks: int
    more: bool
    cost_us: float = 0.0  # of Redis's time, by estimate


@dataclass(frozen=True, slots=True)
class Audited:
    """What one call of ``audit`` did: blocks compared, whether they differ, whether a walk is under way."""

    blocks: int
    differs: bool
    walking: bool


class Upkeep(ScriptClient):
    """Every method is one script (``apply`` at most two) and raises FleetUnavailable if Redis is away or slow."""

    pace = Pace()
    used_permille = -1  # of the server's memory limit, as last read; -1: not known
    short = False  # what the last tick said: memory is short
    grace = False  # and: heartbeats could not be heard, so nobody expires

    async def tick(self) -> Tick:
        """Who has a backlog, who is to be forgotten; commands snapshots. Cheap and gated: call it often."""
        pace = self.pace
        limits = (pace.min_gap_ms, pace.ttl_ms, pace.forget_ms, pace.max_streams)
        memory = (self.used_permille, pace.short_ms)
        answer = await self._upkeep("tick", *limits, *memory, pace.share_permille)
        ran, grace, retired, short, granted_us, *names = answer
        self.short, self.grace = bool(short), bool(grace)
        kinds: dict[str, list[str]] = {"events": [], "server": [], "snapshot": [], "forget": []}
        for name in names:
            kind, _, rest = name.decode().partition(":")
            kinds[kind].append(rest)
        backlog = [f"{kind}:{rest}" for kind in ("server", "events") for rest in kinds[kind]]
        snapshots = [f"events:{rest}" for rest in kinds["snapshot"]]
        fixed = bool(ran), bool(grace), self.short, retired
        return Tick(*fixed, tuple(backlog), tuple(kinds["forget"]), granted_us, tuple(snapshots))

    async def apply(self, worker_id: str) -> Applied:
        """Apply the next entries of an engine core's stream."""
        entries, blocks, following, suspect = await self._upkeep("apply", worker_id, self.pace.max_blocks)
        calls = 1
        if suspect:
            self.suspected.set()
        if following == _APPLY_CONTROL:
            calls = 2
            limits = (self.pace.max_entries, self.pace.ttl_ms)
            also, _, following = await self._upkeep("apply_control", worker_id, *limits)
            entries += also
        return Applied(entries, blocks, bool(following), self._cost_us(calls, entries, blocks))

    async def apply_server(self, server_id: str) -> Applied:
        """Apply the next entries of an API server's stream."""
        limits = (self.pace.max_entries, self.pace.ttl_ms)
        entries, more = await self._upkeep("apply_server", server_id, *limits)
        return Applied(entries, 0, bool(more), self._cost_us(1, entries, 0))

    async def collect(self, max_blocks: int | None = None) -> tuple[int, int]:
        """Remove entries of retired slots: (removed, slots left)."""
        removed, left = await self._upkeep("collect", max_blocks or self.pace.max_blocks)
        return removed, left

    async def audit(self, interval_s: float) -> Audited:
        """Compare a piece of one worker's index with its digest; every worker's once in ``interval_s`` seconds."""
        limits = (self.pace.audit_blocks, round(interval_s * 1000), self.pace.audit_gap_ms)
        blocks, differs, walking = await self._upkeep("audit", *limits)
        return Audited(blocks, bool(differs), bool(walking))

    async def forget(self, worker_id: str, silent_ms: int = 0) -> bool:
        """Delete all that is known of a worker, with its API server if that has no other; false if there was nothing.

        silent_ms: only if it has been silent for that long and nothing of it is unread; 0: anyhow.
        """
        return bool(await self._upkeep("forget", worker_id, silent_ms))

    async def step(self) -> int:
        """One round of maintenance, bounded: tick, a fair share of every backlog, collect. Returns blocks applied."""
        try:
            tick = await self.tick()
            for worker_id in tick.forget:
                await self.forget(worker_id, self.pace.forget_ms)
            blocks = await self._drain(tick)
        except FleetUnavailable:
            await self.collect()  # whatever was refused: this makes room
            raise
        left = (
            tick.retired
        )  # the more there are the more go, so that they cannot be made faster than they are collected
        for _ in range(min(max(self.pace.collects, left // self.pace.collects), self.pace.applies) if left else 0):
            _, left = await self.collect()
            if not left:
                break
        return blocks

    async def _drain(self, tick: Tick) -> int:
        """Apply the streams in turn, one call each, until none is left or what the tick granted is spent.

        What lives goes first, but a snapshot that fills gets the last quarter: without progress it is asked for anew.
        """
        live, filling = deque(tick.backlog), deque(tick.snapshots)
        blocks, left_us = 0, float(tick.granted_us)
        for _ in range(self.pace.applies):
            if left_us <= 0 or not (live or filling):
                break
            last_quarter = left_us <= tick.granted_us * SNAPSHOT_SHARE
            waiting = filling if filling and (last_quarter or not live) else live
            stream = waiting.popleft()
            kind, _, name = stream.partition(":")
            applied = await (self.apply(name) if kind == "events" else self.apply_server(name))
            blocks, left_us = blocks + applied.blocks, left_us - applied.cost_us
            if applied.more:
                waiting.append(stream)
            await asyncio.sleep(0)  # requests first: this loop has all the time in the world
        return blocks

    def _cost_us(self, calls: int, entries: int, blocks: int) -> float:
        pace = self.pace
        return calls * pace.call_us + entries * pace.entry_us + blocks * pace.block_us

    async def _upkeep(self, script: str, *args: str | int) -> Any:
        return await self.keep(script, self._prefix, *args)
