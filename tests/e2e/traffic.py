"""Open-loop traffic over several replicas, and the workers of the fleet while it runs."""

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

FIRST_TOKEN, TOKENS = 256, 4_096  # ids that stand for words in every byte-level vocabulary


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its answer. at_s: seconds after the traffic began."""

    at_s: float
    kind: str
    reply: Reply


@dataclass
class Traffic:
    """Requests at random times that do not depend on the answers.

    next: called with a time, it returns kind, prompt and answer length of the request that is due then.
    """

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
        """Send requests for ``seconds``; return when the last answer is there."""
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
        """Return the token ids of a new random prompt."""
        return [FIRST_TOKEN + self.rng.randrange(TOKENS) for _ in range(count)]

    def waits(self, begin_s: float, end_s: float, kind: str = "") -> list[float]:
        """Return the seconds from the due time to the first byte, sorted, of the requests due in this time."""
        some = [sent for sent in self.sent if begin_s <= sent.at_s < end_s and kind in (sent.kind, "")]
        return sorted(sent.reply.ttft_s + sent.reply.late_s for sent in some if sent.reply.error is None)


async def get(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET ``url``, or POST ``body`` to it; return the JSON of the answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.request("GET" if body is None else "POST", url, json=body) as answer,
    ):
        answer.raise_for_status()
        found: dict[str, Any] = await answer.json()
        return found
