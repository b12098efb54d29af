"""CPU of a router replica per request: ``python -m tests.bench.bench_router`` prints one JSON object as its last line.

It starts a real replica, the embedded store and fast simulated engines as processes of their own; one client keeps a
number of requests under way. The bench counts the CPU time of the replica alone (the scheduler's clock), less the time
that an idle replica uses. ``us_500``: chats of 500 tokens that no cache has seen. ``us_10k_warm``: the next turn of a
chat of 10,000 tokens, 650 of them new. ``us_chunk``: one streamed chunk, from answers of 8 and of 200 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from tests.bench.bench_identity import NEW_TOKENS, Talk

from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.stack import Plan, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

CHARACTERS_PER_TOKEN = 4.6  # mean of the words below with the demo's tokenizer
IDLE_S = 10.0


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


class Bench:
    def __init__(self, stack: Stack, client: aiohttp.ClientSession, together: int) -> None:
        self.url, self.client, self.model = stack.replicas[0].url, client, stack.names[0]
        self.places = asyncio.Semaphore(together)
        child = stack.replicas[0].child
        assert child is not None
        self.pid = child.process.pid
        self.idle = 0.0

    async def rest(self) -> None:
        """Return the share of a core that the replica uses without requests."""
        started, spent = time.monotonic(), cpu_s(self.pid)
        await asyncio.sleep(IDLE_S)
        self.idle = (cpu_s(self.pid) - spent) / (time.monotonic() - started)

    def body(self, talk: Talk, *, stream: bool, tokens: int) -> bytes:
        more = {"model": self.model, "max_tokens": tokens, "stream": stream, "ignore_eos": True}
        return json.dumps(json.loads(talk.body()) | more).encode()

    async def send(self, body: bytes, *, stream: bool = False) -> int:
        """Send one request; return its prompt tokens, or the chunks of its stream."""
        headers = {"content-type": "application/json"}
        path = f"{self.url}/v1/chat/completions"
        async with self.places, self.client.post(path, data=body, headers=headers) as answer:
            content = await answer.read()
            assert answer.status == 200, content
            assert answer.headers["x-warmfleet-reservation"] == "booked", "the store was too slow: no decision"
            return content.count(b"data: ") if stream else int(answer.headers["x-warmfleet-prompt-tokens"])

    async def us(self, talks: Sequence[Talk], *, stream: bool = False, tokens: int = 1) -> tuple[float, float]:
        """Return the CPU µs of the replica per request, and the mean of the values that ``send`` returns."""
        bodies = [self.body(talk, stream=stream, tokens=tokens) for talk in talks]
        started, spent = time.monotonic(), cpu_s(self.pid)
        seen = await asyncio.gather(*(self.send(body, stream=stream) for body in bodies))
        lasted = time.monotonic() - started
        spent = cpu_s(self.pid) - spent - self.idle * lasted
        print(f"  {len(talks) / lasted:.0f} requests/s", file=sys.stderr)
        return spent / len(talks) * 1e6, sum(seen) / len(seen)


async def measure(stack: Stack, together: int, count: int) -> dict[str, float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return await table(Bench(stack, client, together), count)


async def table(bench: Bench, count: int) -> dict[str, float]:
    per_token = CHARACTERS_PER_TOKEN
    await bench.us([Talk(seed + 10_000, 500, per_token, 250) for seed in range(100)])  # warm up
    await bench.rest()
    print("short chats ...", file=sys.stderr)
    result: dict[str, float] = {"background_us_per_s": round(bench.idle * 1e6)}
    us, tokens = await bench.us([Talk(seed + 20_000, 500, per_token, 250) for seed in range(count)])
    result |= {"us_500": round(us), "tokens_500": round(tokens)}
    print("long chats, a turn each ...", file=sys.stderr)
    talks = [Talk(seed + 30_000, 10_000 - NEW_TOKENS, per_token) for seed in range(count // 2)]
    await bench.us(talks)
    for talk in talks:
        talk.add(NEW_TOKENS - 50)
        talk.add(50)
    us, tokens = await bench.us(talks)
    result |= {"us_10k_warm": round(us), "tokens_10k": round(tokens)}
    print("streams ...", file=sys.stderr)
    short, few = await bench.us([Talk(seed, 100, per_token) for seed in range(40)], stream=True, tokens=8)
    long, many = await bench.us([Talk(seed, 100, per_token) for seed in range(40)], stream=True, tokens=200)
    result["us_chunk"] = round((long - short) / (many - few), 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests of each kind")
    parser.add_argument("--together", type=int, default=16, help="requests under way at a time")
    parser.add_argument("--step-time", default="fast", help="of the simulated engines: a preset, or a factor")
    options = parser.parse_args()
    os.environ["WARMFLEET_DECIDE_TIMEOUT_S"] = "2"  # a busy machine must not pass for a Redis that is away
    print("starting the stack ...", file=sys.stderr)
    plan = Plan(engines=EngineOptions(count=2, blocks=200_000, step_time=options.step_time), replicas=1)
    with Stack(plan) as stack:
        print(json.dumps(asyncio.run(measure(stack, options.together, options.requests))))


if __name__ == "__main__":
    main()
