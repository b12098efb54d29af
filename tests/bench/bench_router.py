"""CPU of a router replica per request: ``python -m tests.bench.bench_router`` prints one JSON object as its last line.

A real replica, the embedded store and simulated engines as processes of their own; one client sends requests one after
another. The CPU time of the replica alone is counted (the scheduler's clock), less what it spends on its background
work in the same time. ``us_500``: cold chats of 500 tokens. ``us_10k_warm``: the next turn of a chat of 10,000 tokens,
650 of them new. ``us_chunk``: one streamed chunk, from answers of 8 and of 200 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from tests.bench.bench_identity import NEW_TOKENS, Talk

from warmfleet.cli.engines import EngineOptions
from warmfleet.cli.stack import Plan, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

CHARACTERS_PER_TOKEN = 4.6  # of the words below, with the demo's tokenizer
IDLE_S = 10.0


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


class Bench:
    def __init__(self, stack: Stack, client: httpx.Client) -> None:
        self.url, self.client, self.model = stack.replicas[0].url, client, stack.names[0]
        child = stack.replicas[0].child
        assert child is not None
        self.pid = child.process.pid
        started, spent = time.monotonic(), cpu_s(self.pid)
        time.sleep(IDLE_S)
        self.idle = (cpu_s(self.pid) - spent) / (time.monotonic() - started)

    def send(self, talk: Talk, *, stream: bool = False, tokens: int = 1) -> int:
        """Prompt tokens, or characters of a stream."""
        body = json.loads(talk.body()) | {"model": self.model, "max_tokens": tokens, "stream": stream}
        body |= {"ignore_eos": True}
        with self.client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as answer:
            content = answer.read()
            assert answer.status_code == 200, content
            assert answer.headers["x-warmfleet-reservation"] == "booked", "the store was too slow: no decision"
            return content.count(b"data: ") if stream else int(answer.headers["x-warmfleet-prompt-tokens"])

    def us(self, talks: Sequence[Talk], *, stream: bool = False, tokens: int = 1) -> tuple[float, float]:
        """CPU µs of the replica per request, and the mean of what ``send`` returns."""
        started, spent = time.monotonic(), cpu_s(self.pid)
        seen = [self.send(talk, stream=stream, tokens=tokens) for talk in talks]
        spent = cpu_s(self.pid) - spent - self.idle * (time.monotonic() - started)
        return spent / len(talks) * 1e6, sum(seen) / len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="requests of each kind")
    count = parser.parse_args().requests
    os.environ["WARMFLEET_DECIDE_TIMEOUT_S"] = "2"  # a busy machine may not count as a store that is away
    print("starting the stack ...", file=sys.stderr)
    plan = Plan(engines=EngineOptions(count=4, blocks=20_000), replicas=1)
    with Stack(plan) as stack, httpx.Client(timeout=60) as client:
        bench, per_token = Bench(stack, client), CHARACTERS_PER_TOKEN
        for seed in range(30):
            bench.send(Talk(seed + 10_000, 500, per_token, 250))
        print("short chats ...", file=sys.stderr)
        result: dict[str, float] = {"background_us_per_s": round(bench.idle * 1e6)}
        us, tokens = bench.us([Talk(seed + 20_000, 500, per_token, 250) for seed in range(count)])
        result |= {"us_500": round(us), "tokens_500": round(tokens)}
        print("long chats, a turn each ...", file=sys.stderr)
        talks = [Talk(seed + 30_000, 10_000 - NEW_TOKENS, per_token) for seed in range(count // 2)]
        for talk in talks:
            bench.send(talk)
            talk.add(NEW_TOKENS - 50)
            talk.add(50)
        us, tokens = bench.us(talks)
        result |= {"us_10k_warm": round(us), "tokens_10k": round(tokens)}
        print("streams ...", file=sys.stderr)
        short, few = bench.us([Talk(seed, 100, per_token) for seed in range(40)], stream=True, tokens=8)
        long, many = bench.us([Talk(seed, 100, per_token) for seed in range(40)], stream=True, tokens=200)
        result["us_chunk"] = round((long - short) / (many - few), 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
