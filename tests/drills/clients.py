"""Clients with kept connections, plain HTTP/1.1, that never send a request again."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.drills.fleet import MODEL

if TYPE_CHECKING:
    from tests.drills.fleet import Fleet, Replica

ANSWER_S = 120.0  # every fault is much shorter
CONNECT_S = 5.0
PREFIXES = 4
WORDS = ("water", "river", "stone", "paper", "light", "table", "green", "sound", "house", "north")
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class AnswerError(Exception):
    """The answer is an error, or it is not whole."""


@dataclass
class Asked:
    """A request, until its answer has ended. first_s: seconds to the first byte of the answer's body."""

    replica: Replica
    began: float
    first_s: float | None = None
    failure: str = ""

    def came(self) -> None:
        if self.first_s is None:
            self.first_s = time.monotonic() - self.began


@dataclass
class Clients:
    """A connection goes to a ready replica, as a balancer of connections would choose, and stays there."""

    fleet: Fleet
    pause: tuple[float, float] = (0.0, 0.1)  # seconds between an answer and the next request, at least and at most
    asked: list[Asked] = field(default_factory=list)
    over: bool = False
    prefixes: int = PREFIXES  # beginnings that prompts share

    async def run(self, count: int) -> None:
        """Send requests until ``over`` is set; return when every answer has ended."""
        await asyncio.gather(*(self._client(random.Random(number)) for number in range(count)))

    async def _client(self, rng: random.Random) -> None:
        while not self.over:
            ready = [replica for replica in self.fleet.replicas if replica.ready]
            replica = rng.choice(ready or self.fleet.replicas)
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection("127.0.0.1", replica.port)
            except (OSError, TimeoutError):  # nothing was sent: a balancer takes another replica
                await asyncio.sleep(0.05)
                continue
            try:
                await self._requests(rng, replica, reader, writer)
            finally:
                writer.transport.abort()

    async def _requests(
        self, rng: random.Random, replica: Replica, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send one request after another, until the replica ends the connection."""
        while not self.over and not reader.at_eof():
            one = Asked(replica, time.monotonic())
            self.asked.append(one)
            try:
                async with asyncio.timeout(ANSWER_S):
                    keeps = await _ask(one, rng, reader, writer, self.prefixes)
            except (OSError, EOFError, AnswerError, TimeoutError) as error:
                one.failure = f"{'lost with ' * replica.killed}{replica.name}: {type(error).__name__} {error}"
                return
            if not keeps:
                return
            await asyncio.sleep(rng.uniform(*self.pause))


async def _ask(
    one: Asked, rng: random.Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prefixes: int
) -> bool:
    """Send one request and read its answer; returns whether the connection stays open. Raises AnswerError."""
    stream = rng.random() < 0.5
    prefix = " ".join(random.Random(rng.randrange(prefixes)).choices(WORDS, k=300))
    body = {"model": MODEL, "prompt": f"{prefix} {rng.random()}", "ignore_eos": True, "stream": stream}
    data = json.dumps(body | {"max_tokens": rng.randrange(2, 60)}).encode()
    writer.write(REQUEST % (len(data), data))
    head = await reader.readuntil(b"\r\n\r\n")
    if length := re.search(rb"\r\ncontent-length: (\d+)\r\n", head, re.IGNORECASE):
        answer = await reader.readexactly(int(length[1]))
        whole = b'"text"' in answer
    else:
        answer = await _chunks(one, reader)
        whole = b"data: [DONE]" in answer
    if not head.startswith(b"HTTP/1.1 200 "):
        raise AnswerError(f"{head[:40]!r} {answer[:300]!r}")
    one.came()
    if not whole or b'"error"' in answer:
        raise AnswerError(f"cut: {answer[-300:]!r}")
    return b"\r\nconnection: close\r\n" not in head.lower()


async def _chunks(one: Asked, reader: asyncio.StreamReader) -> bytes:
    """The bytes of a chunked body."""
    pieces: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
        one.came()
    await reader.readexactly(2)
    return b"".join(pieces)
