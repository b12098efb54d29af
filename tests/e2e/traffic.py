"""Open-loop traffic over several replicas, and who was in the fleet while it ran."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from warmfleet_loadtest.measuring.client import Client, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRST_TOKEN, TOKENS = 256, 4_096  # words in any byte-level vocabulary


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: when (seconds since the traffic began), of which kind, and what came back."""

    at_s: float
    kind: str
    reply: Reply


@dataclass
class Traffic:
    """Requests at random times, whatever becomes of those before. next: kind, prompt and answer length for a time."""

    urls: Sequence[str]
    per_s: float
    next: Callable[[float], tuple[str, list[int], int]]
    seed: int = 0
    sent: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.began = time.monotonic()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began

    async def run(self, seconds: float) -> None:
        """For so long; returns when the last answer is there."""
        self.began, due = time.monotonic(), 0.0
        async with Client("demo", 120.0) as client, asyncio.TaskGroup() as tasks:
            while (due := due + self.rng.expovariate(self.per_s)) < seconds:
                await asyncio.sleep(max(0.0, due - self.now_s))
                tasks.create_task(self._one(client, due))

    async def _one(self, client: Client, due: float) -> None:
        kind, prompt, length = self.next(due)
        url = self.urls[self.rng.randrange(len(self.urls))]
        self.sent.append(Sent(due, kind, await client.complete(url, prompt, length, self.now_s - due)))

    def ids(self, count: int) -> list[int]:
        """A prompt that nobody sent before."""
        return [FIRST_TOKEN + self.rng.randrange(TOKENS) for _ in range(count)]

    def waits(self, begin_s: float, end_s: float, kind: str = "") -> list[float]:
        """Sorted seconds from when they were due to the first byte."""
        some = [one for one in self.sent if begin_s <= one.at_s < end_s and kind in (one.kind, "")]
        return sorted(one.reply.ttft_s + one.reply.late_s for one in some if one.reply.error is None)


async def get(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Of a replica: a GET, or a POST of ``body``."""
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if body is None else "POST", url, json=body) as answer,
    ):
        answer.raise_for_status()
        found: dict[str, Any] = await answer.json()
        return found
