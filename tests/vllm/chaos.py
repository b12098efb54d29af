"""Conversations of many clients with a fleet whose Redis and replicas are killed under them."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from tests.support.polling import poll
from tests.vllm.causes import Strikes
from tests.vllm.engine import SERVED_NAME

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.vllm.replicas import Replica
    from tests.vllm.witness import MortalRedis

CLIENTS = 24
SYSTEM_PROMPTS = 4
DUMP_AGE_S = 5.0
HANG_UP = 0.06  # share of the streams that the client leaves in the middle
LEAVE = 0.03  # share of the requests that the client gives up before their answer
WORDS = ("import", "return", "while", "class", "value", "index", "error", "string", "buffer", "module")


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


class Failed(Exception):  # noqa: N818  of a request, not of the test
    """An answer that no client should ever get."""


class Cut(Exception):  # noqa: N818  an expected end
    """The replica died under the request."""


@dataclass
class Load:
    """``total`` requests of ``clients`` clients. replicas: to which a load balancer would send now."""

    replicas: list[Replica]
    total: int
    clients: int = CLIENTS
    begun: int = 0
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)  # values of the header x-warmfleet-reservation
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=2
        )  # shorter than the 5 s after which the replicas close
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            await asyncio.gather(*[self._client(random.Random(number)) for number in range(self.clients)])

    async def _client(self, rng: random.Random) -> None:
        while self.begun < self.total:
            system = f"You are number {rng.randrange(SYSTEM_PROMPTS)}. "
            system += words(100, random.Random(system))
            messages = [{"role": "system", "content": system}]
            for turn in range(rng.randrange(2, 7)):
                if self.begun >= self.total:
                    return
                messages.append({"role": "user", "content": words(rng.randrange(40, 200 if turn else 300), rng)})
                answer = await self._turn(messages, rng)
                if answer is None:
                    break
                messages.append({"role": "assistant", "content": answer})

    async def _turn(self, messages: list[dict[str, str]], rng: random.Random) -> str | None:
        """Send one request, and again elsewhere if its replica dies. Return None if the client gave the request up."""
        self.begun += 1
        dice, stream = rng.random(), rng.random() < 0.6
        body = {"model": SERVED_NAME, "messages": messages, "temperature": 0, "stream": stream, "ignore_eos": True}
        body["max_tokens"] = rng.randrange(8, 40)
        try:
            for attempt in itertools.count():
                replica = self.replicas[(self.begun + attempt) % len(self.replicas)]
                try:
                    if dice < LEAVE:
                        async with asyncio.timeout(rng.uniform(0.005, 0.1)):
                            return await self._ask(replica, body, hang_up=False)
                    return await self._ask(replica, body, hang_up=stream and dice < LEAVE + HANG_UP)
                except Cut:
                    self.outcomes["sent again: the replica was killed"] += 1
                    await asyncio.sleep(0.05)
        except TimeoutError:
            self.outcomes["left before the answer"] += 1
        except Failed as error:
            self.outcomes["FAILED"] += 1
            self.failures.append(str(error))
        finally:
            self.done += 1
        return None

    async def _ask(self, replica: Replica, body: dict[str, Any], *, hang_up: bool) -> str | None:
        """Send one request. Raises Cut if the replica was killed meanwhile, Failed for any other incomplete answer."""
        deaths = replica.deaths
        try:
            async with self._session.post(f"{replica.url}/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    why = f"{answer.status} of {replica.url} at {time.monotonic():.1f}: {await answer.text()}"
                    raise Failed(why[:300])
                self.words[answer.headers["x-warmfleet-reservation"]] += 1
                if not body["stream"]:
                    text = str((await answer.json())["choices"][0]["message"]["content"])
                elif hang_up:
                    await answer.content.readany()
                    self.outcomes["hung up in the middle"] += 1
                    answer.close()
                    return None
                else:
                    text = await streamed(answer)
        except (aiohttp.ClientError, ConnectionError) as error:
            if replica.deaths != deaths or replica.killed:
                raise Cut from error
            raise Failed(f"{type(error).__name__}: {error}, but the replica lives") from error
        self.outcomes["answered"] += 1
        return text


async def streamed(answer: aiohttp.ClientResponse) -> str:
    text, whole = [], False
    async for line in answer.content:
        data = line.removeprefix(b"data: ").strip()
        whole = whole or data == b"[DONE]"
        if data and not whole:
            piece = orjson.loads(data)
            if "error" in piece:
                raise Failed(f"in the stream: {piece}")
            text += [choice["delta"].get("content") or "" for choice in piece["choices"]]
    if not whole:
        raise aiohttp.ClientPayloadError("no [DONE]")
    return "".join(text)


@dataclass
class Chaos:
    """Kills at fixed shares of the load, so that a short run is a small copy of a long one."""

    load: Load
    server: MortalRedis
    replicas: Sequence[Replica]
    lost: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    replica_lost: list[float] = field(default_factory=list)

    @property
    def strikes(self) -> Strikes:
        return Strikes(self.lost, self.back, self.replica_lost)

    async def run(self) -> None:
        plan: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.15, lambda: self._kill_replica(0)),
            (0.30, lambda: self._kill_redis(down_s=2.0)),
            (0.45, lambda: self._kill_replica(1)),
            (0.60, self._kill_both),
        ]
        for share, strike in plan:
            due = int(share * self.load.total)
            await poll(lambda due=due: self.load.done >= due, 3_000, "the load goes on")  # type: ignore[misc]
            await strike()

    async def _kill_replica(self, number: int) -> None:
        """Kill a replica and start it again. It gets requests once it knows the tokenizer and both workers."""
        replica = self.replicas[number]
        self.replica_lost.append(time.monotonic())
        await asyncio.to_thread(replica.kill)
        self.load.replicas = [other for other in self.replicas if other is not replica]
        await asyncio.sleep(0.5)
        replica.start()
        await poll(lambda: asyncio.to_thread(lambda: replica.proven >= 2), 60, "the replica knows the fleet")
        self.load.replicas = list(self.replicas)

    async def _kill_redis(self, *, down_s: float) -> None:
        self.lost.append(time.monotonic())
        await asyncio.to_thread(self.server.kill)
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.server.start)
        self.back.append(time.monotonic())

    async def _kill_both(self) -> None:
        """Kill Redis, which comes back with an old dump, and restart a replica in between."""
        await asyncio.to_thread(self.server.save)
        await asyncio.sleep(DUMP_AGE_S)
        redis = asyncio.create_task(self._kill_redis(down_s=4.0))
        await asyncio.sleep(0.5)
        await self._kill_replica(0)
        await redis
