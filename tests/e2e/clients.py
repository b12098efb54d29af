"""Clients that send requests without pause while replicas and engines are killed, and check every answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

if TYPE_CHECKING:
    from warmfleet.cli.local.stack import Member

PREFIXES = 6
WORDS = ("water", "river", "stone", "paper", "light", "table", "green", "sound", "house", "north")
HANG_UP = 0.1  # share of the streams that the client leaves before their end


@dataclass
class Clients:
    """replicas: to which a load balancer would send now. engine_deaths: monotonic times of kills."""

    replicas: list[Member]
    killed: set[str] = field(default_factory=set)
    engine_deaths: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    over: bool = False

    async def run(self, count: int) -> None:
        """Send requests until ``over`` is set; return when every request has ended."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._http:
            await asyncio.gather(*(self._client(random.Random(number)) for number in range(count)))

    async def _client(self, rng: random.Random) -> None:
        while not self.over:
            replica, began = rng.choice(self.replicas), time.monotonic()
            prefix = " ".join(random.Random(rng.randrange(PREFIXES)).choices(WORDS, k=300))
            body = {"model": "demo", "prompt": f"{prefix} {rng.random()}", "ignore_eos": True}
            body |= {"max_tokens": rng.randrange(2, 120), "stream": rng.random() < 0.7}
            seen: list[bytes] = []
            try:
                outcome = await self._ask(replica, body, seen, hang_up=rng.random() < HANG_UP)
            except (aiohttp.ClientError, ConnectionError) as error:
                outcome = f"{type(error).__name__}: {error}"
            if outcome in ("whole", "left"):
                self.outcomes[outcome] += 1
            elif replica.name in self.killed:
                self.outcomes["its replica was killed"] += 1
            elif body["stream"] and seen and any(when > began for when in self.engine_deaths):
                self.outcomes["its engine was killed after the first byte"] += 1
            else:
                self.failures.append(f"{replica.name}: {outcome}")

    async def _ask(self, replica: Member, body: dict[str, Any], seen: list[bytes], *, hang_up: bool) -> str:
        """Send one request. Return ``whole``, ``left`` (by this client), or a description of the failure.

        ``seen`` receives the pieces of a stream as they come.
        """
        async with self._http.post(f"{replica.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return f"{answer.status} {(await answer.text())[:300]}"
            if not body["stream"]:
                text = orjson.loads(await answer.read())["choices"][0]["text"]
                return "whole" if text else "an answer without text"
            async for piece in answer.content.iter_any():
                seen.append(piece)
                if hang_up and len(seen) > 1:
                    answer.close()
                    return "left"
        return "whole" if b"data: [DONE]" in b"".join(seen) else f"cut: {b''.join(seen)[-200:]!r}"
