"""An API server as the store sees it: its entries, and its record that follows from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from tests.support.fleet.reporting_worker import SHA

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet


MANIFEST = {"tokenizer.json": {"sha256": SHA, "bytes": 5, "chunks": [SHA, "cd" * 32]}}


class ReportingServer:
    """Writes the stream of one API server."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet) -> None:
        self.store, self.fleet, self.keys = store, fleet, fleet.keys
        self.stream = self.keys.server("s")
        self.nonce, self.number = "m1", 0

    def announcement(self, **changes: Any) -> dict[str, Any]:
        return {
            "schema": wire.SCHEMA,
            "server_id": "s",
            "url": "http://10.0.0.7:8000",
            "models": [self.keys.tag.replace("~", "/"), "lora-a"],
            "artifacts": MANIFEST,
            "facts": {"empty": [], "none": None, "share": 0.25, "text": 'a "quote" 0x10, NaN'},
            "version": "0.33.0",
        } | changes

    async def send(self, operation: str, data: str | bytes = b"", *, at: str = "*") -> None:
        self.number += 1
        await self.store.xadd(self.stream, cast("Any", wire.entry(self.nonce, self.number, operation, data)), id=at)

    async def join(self, nonce: str = "m1", **changes: Any) -> None:
        self.nonce = nonce
        await self.send("join", wire.dumps(self.announcement(**changes)))

    async def applied(self) -> None:
        while (await self.fleet.upkeep.apply_server("s")).more:
            pass

    async def record(self) -> dict[str, Any]:
        raw = await cast("Any", self.store.hget(self.keys.servers, "s"))
        return cast("dict[str, Any]", json.loads(raw)) if raw else {}

    async def alive_ms(self) -> float | None:
        return await self.store.zscore(self.keys.alive_servers, "s")
