"""The four states of a cached prefix, shown on a running stack: cold start, stickiness, eviction, recovery."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.background.supervisor import stop
from warmfleet.cli.local.chat import system, user, words

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Callable, Sequence

    from warmfleet.cli.local.chat import Chat, Messages
    from warmfleet.cli.local.stack import Member, Stack

POLL_SECONDS = 0.02  # time between two requests for /workers or /explain, because replicas push nothing
LIMIT_SECONDS = 15.0
AT_ONCE = 8
PREFIX_TOKENS = 1_500
REPORT_SECONDS = 0.5  # length of the pause between two turns; engines report new blocks every 0.1 s
FILLER_TOKENS = 3_000


@dataclass(frozen=True)
class Verdict:
    """Whether the fleet behaved as expected in one state, and the evidence: a sentence with figures."""

    state: str
    passed: bool
    evidence: str


class Walk:
    """Takes a conversation through the states that ``states`` lists. Replicas take turns with its requests."""

    def __init__(self, stack: Stack, chat: Chat, rng: random.Random) -> None:
        self._stack = stack
        self._chat = chat
        self._rng = rng
        self._turn = 0
        self._holder = ""
        self._messages: Messages = []

    async def states(self) -> AsyncIterator[Verdict]:
        """Yield the verdict of each state, as soon as it is known."""
        for state in (self.cold_start, self.stickiness, self.eviction, self.recovery):
            yield await state()

    async def cold_start(self) -> Verdict:
        """Send requests with a new prefix at once; check that most follow the first before its blocks are reported."""
        prefix = system(words(self._rng, PREFIX_TOKENS))
        chats = [[prefix, user(f"Question {number}: {words(self._rng, 12)}?")] for number in range(AT_ONCE)]
        answers = await asyncio.gather(*(self._chat.send(self._replica().url, messages) for messages in chats))
        cold = {answer.worker for answer in answers if answer.matched_tokens < PREFIX_TOKENS // 2}
        followed = [
            answer for answer in answers if answer.worker in cold and answer.matched_tokens >= PREFIX_TOKENS // 2
        ]
        return Verdict(
            "cold start",
            len(cold) <= 2 and len(followed) >= AT_ONCE - 2,
            f"{AT_ONCE} requests at once for one new {PREFIX_TOKENS}-word prefix over {len(self._stack.replicas)} "
            f"replicas: {len(cold)} worker(s) computed it, {len(followed)} requests followed before it was reported",
        )

    async def stickiness(self) -> Verdict:
        """Check that the next turn goes to the worker with the conversation in its cache, although others are idle."""
        self._messages = [system(words(self._rng, PREFIX_TOKENS)), user(f"Hello: {words(self._rng, 20)}?")]
        first = await self._chat.send(self._replica().url, self._messages)
        self._holder = first.worker
        self._messages.append({"role": "assistant", "content": first.text})
        busy = [self._chat.send(self._replica().url, [*self._messages, user(f"Variant {n}?")], 400) for n in range(3)]
        tasks = [asyncio.ensure_future(request) for request in busy]
        load = await self._load_when(lambda rows: rows[self._holder]["in_flight"] >= len(tasks))
        self._messages.append(user(f"Next: {words(self._rng, 20)}?"))
        answer = await self._chat.send(self._replica().url, self._messages)
        await _end(tasks)
        idle = min(row["in_flight"] for row in load.values())
        return Verdict(
            "stickiness",
            answer.worker == self._holder and answer.matched_tokens > 0 and load[self._holder]["in_flight"] > idle,
            f"{self._holder} had {load[self._holder]['in_flight']} requests in flight, another worker {idle}; the next "
            f"turn went to {answer.worker} with {answer.matched_tokens} of {answer.prompt_tokens} tokens matched",
        )

    async def eviction(self) -> Verdict:
        """Evict the conversation from its worker's cache by direct requests, and check that the index shows it."""
        before = (await self._explain())["matched_tokens"]
        async with self._foreign_work(rounds=8) as tasks:
            await asyncio.gather(*tasks)
        after = before
        deadline = time.monotonic() + LIMIT_SECONDS
        while after and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            after = (await self._explain())["matched_tokens"]
        return Verdict(
            "eviction",
            before > 0 and after == 0,
            f"{self._holder} held {before} tokens of the conversation; after requests from elsewhere filled its cache, "
            f"the fleet knows of {after}",
        )

    async def recovery(self) -> Verdict:
        """Check that the next turn leaves a busy worker for another one, and that the turn after it stays there."""
        async with self._foreign_work(rounds=3):
            await self._load_when(lambda rows: rows[self._holder]["foreign_prefill_tokens"] > FILLER_TOKENS // 2)
            first = await self._chat.send(self._replica().url, self._messages)
        await asyncio.sleep(REPORT_SECONDS)
        turn = [*self._messages, {"role": "assistant", "content": first.text}, user("And then?")]
        second = await self._chat.send(self._replica().url, turn)
        return Verdict(
            "recovery",
            first.worker != self._holder
            and second.worker == first.worker
            and second.matched_tokens == second.cached_tokens > 0,
            f"with {self._holder} busy, the conversation moved to {first.worker} ({first.matched_tokens} predicted, "
            f"{first.cached_tokens} cached); its next turn stayed on {second.worker}: {second.matched_tokens} tokens "
            f"predicted, {second.cached_tokens} cached by the engine's own count",
        )

    def _replica(self) -> Member:
        self._turn += 1
        return self._stack.replicas[self._turn % len(self._stack.replicas)]

    async def _explain(self) -> dict[str, Any]:
        return (await self._chat.explain(self._replica().operators, self._messages))[self._holder]

    async def _load_when(self, accepted: Callable[[dict[str, dict[str, Any]]], bool]) -> dict[str, dict[str, Any]]:
        """Return the load of every worker as soon as ``accepted`` holds for it, else the load after LIMIT_SECONDS."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while True:
            models = (await self._chat.get(f"{self._replica().operators}/workers"))["models"]
            rows = {worker["worker_id"]: worker["load"] for model in models for worker in model["workers"]}
            if accepted(rows) or time.monotonic() > deadline:
                return rows
            await asyncio.sleep(POLL_SECONDS)

    @asynccontextmanager
    async def _foreign_work(self, rounds: int) -> AsyncIterator[Sequence[asyncio.Task[Any]]]:
        """Send ``rounds`` long prompts to the conversation's worker, past the routers; cancel open ones at the end."""
        models = (await self._chat.get(f"{self._replica().operators}/workers"))["models"]
        urls = {worker["worker_id"]: worker["url"] for model in models for worker in model["workers"]}
        tasks = [
            asyncio.ensure_future(self._chat.send(urls[self._holder], [user(words(self._rng, FILLER_TOKENS))], 1))
            for _ in range(rounds)
        ]
        try:
            yield tasks
        finally:
            await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the requests that are still open, and ignore how they ended."""
    await stop(tasks)
    await asyncio.gather(*tasks, return_exceptions=True)
