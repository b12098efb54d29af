"""A fleet that is written straight into the keys, without streams: workers, their blocks and their load."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from warmfleet.fleet import Flag, Fleet, Lease, LoadRow, Question
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

SCHEME, BLOCK = 7, 16
READY = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED


class Keyspace:
    """Workers ``w<n>.0`` (slot n) of one model; all alive, routable and proven unless a test changes them."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet, seed: int = 1) -> None:
        self.store, self.fleet, self.keys = store, fleet, fleet.keys
        self.rng = random.Random(seed)
        self._ids = itertools.count(1)

    async def ticked(self, *, age_ms: int = 0, grace_ms: int = 0, median: int = 10_000) -> None:
        """Write ``tick`` as if the script of this name had run ``age_ms`` ago."""
        now = int(time.time() * 1000)
        await self.store.set(self.keys.tick, f"{now - age_ms} {now + grace_ms} {median} 0")

    async def worker(self, number: int, *, age_ms: int = 0, **row: int) -> str:
        """Write (or overwrite) one worker; ``row``: fields of its load row."""
        name = f"w{number}.0"
        fields = {"epoch": 1, "slot": number, "flags": READY, "scheme": SCHEME, "speed_tps": 10_000}
        load = LoadRow(**({**fields, "capacity_blocks": 10_000} | row))
        await cast("Any", self.store.hset(self.keys.load, name, load.pack(name)))
        await self.store.zadd(self.keys.alive, {name: time.time() * 1000 - age_ms})
        record = wire.dumps({"nonce": "n1", "proof": "pending", "server_id": f"w{number}", "slot": number})
        await cast("Any", self.store.hset(self.keys.workers, name, record))
        server = wire.dumps({"nonce": "s1", "url": f"http://10.0.0.{number}:8000", "models": ["m"], "version": "1"})
        await cast("Any", self.store.hset(self.keys.servers, f"w{number}", server))
        return name

    async def workers(self, count: int, **row: int) -> list[str]:
        await self.ticked()
        return [await self.worker(number, **row) for number in range(1, count + 1)]

    async def change(self, number: int, **row: int) -> None:
        """Overwrite fields of a worker's row and nothing else."""
        name, changed = f"w{number}.0", replace(await self.row(number), **row)
        await cast("Any", self.store.hset(self.keys.load, name, changed.pack(name)))

    async def stop_time(self) -> dict[str, LoadRow]:
        """Let nothing that is booked by now count as computed, nor as time in prefill, however late the next call is.

        Returns the rows as they were.
        """
        rows = await self.rows()
        for name, row in rows.items():
            if row.under_way_tokens or row.since_ms:
                number = int(name.removeprefix("w").removesuffix(".0"))
                await self.change(number, under_way_tokens=0, since_ms=0)
        return rows

    async def row(self, number: int) -> LoadRow:
        return LoadRow.unpack(await cast("Any", self.store.hget(self.keys.load, f"w{number}.0")))

    async def rows(self) -> dict[str, LoadRow]:
        packed = await cast("Any", self.store.hgetall(self.keys.load))
        return {name.decode(): LoadRow.unpack(row) for name, row in packed.items()}

    async def leases(self) -> dict[str, Lease]:
        packed = await cast("Any", self.store.hgetall(self.keys.lease))
        return {name.decode(): Lease.unpack(lease) for name, lease in packed.items()}

    async def hold(self, slot: int, hashes: bytes, depth: int | None = None) -> None:
        """Make a slot hold the first ``depth`` blocks (default: all) of a chain, in forward and reverse set."""
        blocks = [hashes[at : at + 8] for at in range(0, len(hashes), 8)][:depth]
        pipe = self.store.pipeline(transaction=False)
        for block in blocks:
            pipe.sadd(self.keys.block(block), slot)
        if blocks:
            pipe.sadd(self.keys.slot(slot), *blocks)
        await pipe.execute()

    async def done(self, ask: Question) -> None:
        """A request from its decision to its end; its lease does not linger afterwards."""
        await self.fleet.bookings.decide(ask)
        await self.fleet.bookings.settle(ask.reservation, "finished")
        await self.expire(ask.reservation)

    async def expire(self, reservation: str) -> None:
        """Let the reservation's lease expire, and have it reaped."""
        await self.store.zadd(self.keys.leases, {reservation: 1})
        await self.fleet.bookings.settle("wf-nobody", "finished")

    async def drop(self, slot: int, one: bytes) -> None:
        await cast("Any", self.store.srem(self.keys.block(one), slot))
        await cast("Any", self.store.srem(self.keys.slot(slot), one))

    async def speculation(self) -> dict[bytes, dict[int, int]]:
        """Every ``x:`` key: hash -> slot -> count."""
        prefix = self.keys.prefix.encode() + b"x:"
        found = {}
        async for key in self.store.scan_iter(match=prefix.replace(b"{", b"\\{") + b"*", count=1000):
            counts = await cast("Any", self.store.hgetall(key))
            found[key[len(prefix) :]] = {int(slot): int(count) for slot, count in counts.items() if slot.isdigit()}
        return found

    def chain(self, blocks: int, head: bytes = b"") -> bytes:
        """Packed hashes of a new chain of ``blocks`` that starts with ``head``."""
        return head + self.rng.randbytes(8 * blocks - len(head))

    def ask(self, hashes: bytes = b"", extra_tokens: int = 1, **fields: Any) -> Question:
        """A request for a chain and some tokens beyond its full blocks."""
        prompt = len(hashes) // 8 * BLOCK + extra_tokens
        chains: Sequence[Chain] = (Chain(SCHEME, BLOCK, hashes),) if hashes else ()
        defaults: dict[str, Any] = {"reservation": f"wf-{next(self._ids)}", "chains": tuple(chains)}
        return Question(**({**defaults, "prompt_tokens": prompt, "decode_tokens": prompt + 100} | fields))
