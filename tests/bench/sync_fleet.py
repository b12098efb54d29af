"""The workers and the applier of ``apply_sync``: streams as 64 plugins write them, applied as one replica does."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.support.fleet.reporting_worker import SCHEME

from warmfleet.timing import Timing
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.bench.sync_data import Data

    from warmfleet.fleet import Fleet

BURST = 32  # chunks between two round trips, as the plugin has it

if TYPE_CHECKING:
    Work = Callable[["Worker"], Awaitable[None]]


class Worker:
    """The stream of one engine core. digest, low and high describe the entries written so far."""

    def __init__(self, fleet: Fleet, data: Data, number: int) -> None:
        self.fleet, self.data, self.number = fleet, data, number
        self.worker_id = wire.worker_id_of(f"server-{number:03d}", 0)
        self.stream = fleet.keys.events(self.worker_id)
        self.maxlen = wire.events_maxlen(data.entries)
        self.nonce, self.batch = secrets.token_hex(8), 0
        self.digest, self.ring = wire.Digest(), data.ring(number)
        self.size = len(self.ring) // 8
        self.low = self.high = 0  # the window, as numbers on the ring, which only rise
        self.owed = 0.0  # how many blocks of each kind are due to be written
        self.snapshots: list[float] = []  # seconds
        self.sending = False
        self.lock = asyncio.Lock()  # entries are sent in the order of their numbers

    def entry(self, operation: str, data: bytes | str = b"") -> tuple[Any, ...]:
        self.batch += 1
        fields = wire.entry(self.nonce, self.batch, operation, data)
        limits = ("NOMKSTREAM", "MAXLEN", "~", self.maxlen) if operation != "join" else ()
        return ("XADD", self.stream, *limits, "*", *(part for pair in fields.items() for part in pair))

    def join(self) -> tuple[Any, ...]:
        told = {"schema": wire.SCHEMA, "worker_id": self.worker_id, "server_id": self.worker_id[:-2], "rank": 0}
        told |= {"scheme": SCHEME.as_dict(), "scheme_id": SCHEME.scheme_id, "capacity_blocks": self.data.entries + 2000}
        return self.entry("join", wire.dumps(told | {"max_model_len": 100_000, "version": "1", "closed": True}))

    def change(self, operation: str, packed: bytes) -> tuple[Any, ...]:
        self.digest.add(packed, 1 if operation == "stored" else -1)
        return self.entry(operation, packed)

    def slide(self, count: int) -> list[tuple[Any, ...]]:
        """Write ``count`` stored blocks, and as many removed ones."""
        made = []
        for start in range(0, count, wire.BATCH_BLOCKS):
            step = min(wire.BATCH_BLOCKS, count - start)
            made.append(self.change("stored", self._cut(self.high, step)))
            made.append(self.change("removed", self._cut(self.low, step)))
            self.high, self.low = self.high + step, self.low + step
        return made

    def _cut(self, at: int, count: int) -> bytes:
        at %= self.size
        piece = self.ring[8 * at : 8 * (at + count)]
        return piece + self.ring[: 8 * count - len(piece)]

    def fill(self) -> list[tuple[Any, ...]]:
        """Write the whole table for the first time."""
        whole = self.data.held_heads(self.number) + self.data.fixed[self.number]
        self.high, step = self.size // 2, 8 * wire.BATCH_BLOCKS
        whole += self._cut(0, self.high)
        return [self.change("stored", whole[at : at + step]) for at in range(0, len(whole), step)]

    def table(self) -> bytes:
        window = self._cut(self.low, self.high - self.low)
        return self.data.held_heads(self.number) + self.data.fixed[self.number] + window

    def heartbeat(self) -> tuple[Any, ...]:
        beat = wire.Heartbeat(8, 0, self.digest.count, 0, 0, 10_000, 300, None if self.sending else self.digest)
        return self.entry("heartbeat", beat.encode())

    async def snapshot(self) -> None:
        """Write a snapshot, at most 256 entries ahead of applying. Changes that come due meanwhile wait."""
        self.sending, begun, name = True, time.perf_counter(), secrets.token_hex(4)
        table, step = self.table(), 8 * wire.BATCH_BLOCKS
        count, high, low = self.digest.as_list()
        parts = deque([("begin", wire.dumps({"snapshot": name, "command": None}).encode())])
        parts += [("chunk", name.encode() + table[at : at + step]) for at in range(0, len(table), step)]
        parts.append(("end", wire.dumps({"snapshot": name, "count": count, "high": high, "low": low}).encode()))
        while parts:
            raw = await self.fleet.redis.get(self.fleet.keys.command(self.worker_id))
            room = wire.UNACKNOWLEDGED_ENTRIES - (self.batch - json.loads(raw or "{}").get("applied", 0))
            while parts and room > 0:
                burst = [parts.popleft() for _ in range(min(len(parts), room, BURST))]
                room -= len(burst)
                async with self.lock:
                    await send(self.fleet, [self.entry(*part) for part in burst])
            await asyncio.sleep(wire.FLUSH_SECONDS)
        self.sending = False
        self.snapshots.append(time.perf_counter() - begun)


async def send(fleet: Fleet, entries: list[tuple[Any, ...]]) -> None:
    pipe = fleet.redis.pipeline(transaction=False)
    for entry in entries:
        pipe.execute_command(*entry)
    if None in await pipe.execute():
        raise RuntimeError("a stream is gone")


class Sync:
    """The writers of one phase: changes, and in mode ``resync`` digests and the whole table of one worker in turn."""

    def __init__(self, fleet: Fleet, workers: list[Worker], rate: float) -> None:
        self.fleet, self.workers, self.rate = fleet, workers, rate
        self.turn = 0

    async def run(self, mode: str, done: asyncio.Event) -> None:
        """Write until ``done``, with all parts side by side, as in production."""
        written = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._apply(written))
            await self._write(mode, done)  # a snapshot that has begun is written to its end
            written.set()

    async def _write(self, mode: str, done: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._every(wire.FLUSH_SECONDS, self._flush, done))
            if mode == "resync":
                group.create_task(self._every(wire.HEARTBEAT_SECONDS, self._beat, done))
                group.create_task(self._snapshots(done))

    async def _every(self, period_s: float, work: Work, done: asyncio.Event) -> None:
        """Do ``work`` for each worker once per period, evenly spread."""
        due = time.perf_counter()
        for worker in itertools.cycle(self.workers):
            if done.is_set():
                return
            due += period_s / len(self.workers)
            pause = due - time.perf_counter()
            if pause > 0.002:  # the timer is not more precise
                await asyncio.sleep(pause)
            await work(worker)

    async def _flush(self, worker: Worker) -> None:
        worker.owed += self.rate / len(self.workers) * wire.FLUSH_SECONDS
        count = int(worker.owed)
        if count and not worker.sending and not worker.lock.locked():
            worker.owed -= count
            async with worker.lock:
                await send(self.fleet, worker.slide(count))

    async def _beat(self, worker: Worker) -> None:
        async with worker.lock:
            await send(self.fleet, [worker.heartbeat()])

    async def _apply(self, written: asyncio.Event) -> None:
        while not written.is_set():
            await self.fleet.upkeep.step()
            await asyncio.sleep(Timing.apply_interval_s)

    async def _snapshots(self, done: asyncio.Event) -> None:
        """Let one worker in turn send its whole table."""
        due = time.perf_counter() + wire.HEARTBEAT_SECONDS / 2
        while not done.is_set():
            await asyncio.sleep(0.02)
            if time.perf_counter() >= due:
                due += wire.HEARTBEAT_SECONDS
                self.turn += 1
                await self.workers[self.turn % len(self.workers)].snapshot()

    async def quiet(self) -> None:
        """Wait until all entries are applied and all retired slots are collected."""
        while (await self.fleet.upkeep.step()).blocks or (await self.fleet.upkeep.collect(1000))[1]:
            pass
