"""A worker as the store sees it: its entries, and the state of the index that follows from them."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from warmfleet.fleet import Fleet, LoadRow
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterable

    import redis.asyncio as aioredis

SCHEME = wire.Scheme("sha256", wire.default_none_hash("sha256"), 16)
SHA = "ab" * 32


def block(number: int) -> bytes:
    """An 8-byte hash with something in both halves; some bytes are special to naive parsers."""
    return (number * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big")


def blocks(*numbers: int) -> bytes:
    return b"".join(block(number) for number in numbers)


class ReportingWorker:
    """Writes the stream of one engine core, entry by entry."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet, server_id: str = "s", rank: int = 0) -> None:
        self.store, self.fleet, self.keys = store, fleet, fleet.keys
        self.server_id, self.rank = server_id, rank
        self.worker_id = wire.worker_id_of(server_id, rank)
        self.stream = self.keys.events(self.worker_id)
        self.nonce, self.number = "n1", 0

    def announcement(self, **changes: Any) -> dict[str, Any]:
        return {
            "schema": wire.SCHEMA,
            "worker_id": self.worker_id,
            "server_id": self.server_id,
            "rank": self.rank,
            "scheme": SCHEME.as_dict(),
            "scheme_id": SCHEME.scheme_id,
            "capacity_blocks": 1000,
            "max_model_len": 4096,
            "version": "0.33.0",
            "closed": True,
        } | changes

    async def send(self, operation: str, data: bytes | str = b"", *, at: str = "*") -> None:
        self.number += 1
        fields = cast("dict[Any, Any]", wire.entry(self.nonce, self.number, operation, data))
        await self.store.xadd(self.stream, fields, id=at)

    async def join(self, nonce: str | None = None, *, at: str = "*", **changes: Any) -> None:
        self.nonce = nonce or self.nonce
        await self.send("join", wire.dumps(self.announcement(**changes)), at=at)
        await self.store.xadd(self.keys.hello, {"s": f"events:{self.worker_id}"})

    async def heartbeat(
        self, digest: wire.Digest | None = None, *, at: str = "*", paused: bool = False, **changes: int
    ) -> None:
        values = {"running": 1, "waiting": 2, "blocks": 3, "foreign_prefill_tokens": 4, "foreign_decode_tokens": 5}
        values |= {"speed_tps": 6000, "evicted": 7} | changes
        await self.send("heartbeat", wire.Heartbeat(**values, digest=digest, paused=paused).encode(), at=at)

    async def snapshot(self, numbers: Iterable[int], name: str = "5ea50001", command: str | None = None) -> None:
        """Send a snapshot: begin, chunks of 100 blocks, end."""
        every, digest = list(numbers), wire.Digest()
        await self.send("begin", wire.dumps({"snapshot": name, "command": command}))
        for start in range(0, len(every), 100):
            packed = blocks(*every[start : start + 100])
            digest.add(packed)
            await self.send("chunk", name.encode() + packed)
        await self.end(digest, name)

    async def end(self, digest: wire.Digest, name: str = "5ea50001") -> None:
        count, high, low = digest.as_list()
        await self.send("end", wire.dumps({"snapshot": name, "count": count, "high": high, "low": low}))

    async def applied(self) -> None:
        """Apply until the stream is empty."""
        for _ in range(1000):
            if not (await self.fleet.upkeep.apply(self.worker_id)).more:
                return
        raise AssertionError("the stream never ends")

    # ------------------------------------------------ what the index says

    async def row(self) -> LoadRow:
        packed = await cast("Any", self.store.hget(self.keys.load, self.worker_id))
        assert packed, f"{self.worker_id} has no row"
        return LoadRow.unpack(packed)

    async def record(self) -> dict[str, Any]:
        raw = await cast("Any", self.store.hget(self.keys.workers, self.worker_id))
        return cast("dict[str, Any]", json.loads(raw)) if raw else {}

    async def command(self) -> dict[str, Any]:
        raw = await self.store.get(self.keys.command(self.worker_id))
        return cast("dict[str, Any]", json.loads(raw)) if raw else {}

    async def holds(self) -> set[bytes]:
        """The blocks of the worker's live slot, read both ways."""
        return await self.slot_holds((await self.row()).slot)

    async def slot_holds(self, slot: int) -> set[bytes]:
        members = set(await cast("Any", self.store.smembers(self.keys.slot(slot))))
        forward = self.keys.prefix.encode() + b"b:"
        held = set()
        async for key in self.store.scan_iter(match=glob(forward) + b"*", count=1000):
            if await cast("Any", self.store.sismember(key, str(slot))):
                held.add(key[len(forward) :])
        assert held == members, "forward and reverse sets differ"
        return held

    async def digest(self) -> wire.Digest:
        """The digest of the live slot, as the index has it."""
        raw = await cast("Any", self.store.hget(self.keys.digest, self.worker_id))
        return wire.Digest(*struct.unpack(">3I", raw)) if raw else wire.Digest()

    async def waiting(self) -> float | None:
        """The worker's place in `resync`."""
        return await self.store.zscore(self.keys.resync, self.worker_id)

    async def alive_ms(self) -> float:
        """When the worker was last heard (ms); 0 if it is not alive."""
        return await self.store.zscore(self.keys.alive, self.worker_id) or 0.0

    async def retired(self) -> set[int]:
        return {int(slot) for slot in await cast("Any", self.store.smembers(self.keys.retired))}


def digest_of(*numbers: int) -> wire.Digest:
    digest = wire.Digest()
    digest.add(blocks(*numbers))
    return digest


def held(*numbers: int) -> set[bytes]:
    return {block(number) for number in numbers}


def with_load(row: LoadRow, prefill: int, decode: int, in_flight: int) -> bytes:
    """``row``, packed, as if reservations of that much were open on ``s.0``."""
    return replace(row, prefill_tokens=prefill, decode_tokens=decode, in_flight=in_flight).pack("s.0")


def glob(prefix: bytes) -> bytes:
    """``prefix`` as a pattern that matches itself: its braces need no escape, brackets would."""
    return prefix.replace(b"[", b"\\[")
