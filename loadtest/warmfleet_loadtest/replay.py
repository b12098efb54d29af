"""Replay a trace against OpenAI servers and print hit ratio and time to first token.

    python -m warmfleet_loadtest.replay --base-url http://127.0.0.1:8080 --model sim --rows 600 --speed 6
    python -m warmfleet_loadtest.replay --trace my.jsonl.xz --base-url http://a:8080 --base-url http://b:8080 --seeds 3

Requests arrive at the trace's own times divided by --speed, whether or not earlier ones are answered; in agents' traces
a session's next request waits for its previous answer. With several base URLs each request goes to a random one. Times
are wall times; "trace seconds" are wall times multiplied by --speed. Without --trace the tool takes $TRACE, else the
conversation trace if its file is found, else a generated trace of the same shape. The first --skip of the requests
warm up and are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop

from warmfleet_loadtest.measuring.client import Client, Reply, SelfWatch
from warmfleet_loadtest.measuring.figures import after_warm_up, failures, hit_ratio, markdown, over_mean, quantile
from warmfleet_loadtest.traces.trace import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_loadtest.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Target:
    """The servers of a replay, and its speed.

    speed: trace seconds per second. seed: for random URLs and session keys. balance: ``random``, ``session`` or
    ``least`` (see ``Balance``). spell: turns token ids into the prompt that is sent: a list of ids or a text.
    """

    urls: tuple[str, ...]
    model: str
    speed: float = 1.0
    seed: int = 0
    api_key: str | None = None
    balance: str = "random"
    spell: Callable[[Sequence[int]], list[int] | str] = list


class Balance:
    """The client's own balancer: a random URL, one by hash of the session, or the URL with the fewest open requests."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._random = random.Random(target.seed)
        self._under_way = dict.fromkeys(target.urls, 0)

    def take(self, session: str) -> str:
        """Return a URL for a request of this session. Call ``give_back`` with the URL when the request is answered."""
        urls = self._target.urls
        if self._target.balance == "session":
            taken = urls[zlib.crc32(session.encode()) % len(urls)]
        elif self._target.balance == "least":
            taken = min(urls, key=lambda url: (self._under_way[url], self._random.random()))
        else:
            taken = self._random.choice(urls)
        self._under_way[taken] += 1
        return taken

    def give_back(self, url: str) -> None:
        self._under_way[url] -= 1


async def replay(
    trace: Trace, target: Target, on_reply: Callable[[Reply], None] = lambda _reply: None
) -> tuple[list[Reply], dict[str, float]]:
    """Play a trace; return (replies in the trace's order, the client's own health). on_reply: gets each reply."""
    balance = Balance(target)
    replies: list[Reply | None] = [None] * len(trace.arrivals)
    sessions: dict[int, list[int]] = {}
    for index, arrival in enumerate(trace.arrivals):  # an open-loop request is a session of its own
        sessions.setdefault(arrival.session if trace.closed else -index - 1, []).append(index)
    async with Client(target.model, api_key=target.api_key) as client, SelfWatch() as watch:
        start = time.monotonic() + 0.1

        async def play(indices: list[int]) -> None:
            due = start + trace.arrivals[indices[0]].at_s / target.speed
            for index in indices:
                arrival = trace.arrivals[index]
                if arrival.think_s is not None:
                    due = time.monotonic() + arrival.think_s / target.speed
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                session = f"{target.seed}-{arrival.session}"
                url = balance.take(session)
                prompt, late_s = target.spell(arrival.prompt), time.monotonic() - due
                reply = await client.complete(url, prompt, arrival.output_tokens, late_s, session)
                balance.give_back(url)
                replies[index] = reply
                on_reply(reply)

        await asyncio.gather(*(play(indices) for indices in sessions.values()))
        return [reply for reply in replies if reply is not None], watch.report()


def summary(replies: Sequence[Reply], speed: float = 1.0, skip: float = 0.1) -> dict[str, Any]:
    """Return the figures of a replay, with times in wall seconds and the mean TTFT in trace seconds, too."""
    counted = after_warm_up(replies, skip)
    good = [reply for reply in counted if reply.error is None]
    ttft = sorted(reply.ttft_s for reply in good)
    workers = Counter(reply.worker for reply in good if reply.worker)
    failed, examples = failures(replies)
    return {
        "requests": len(counted),
        "errors": failed,
        "error_examples": examples,
        "hit_ratio": round(hit_ratio(good), 4),
        "recomputed_tokens": sum(reply.prompt_tokens - reply.cached_tokens for reply in good),
        "ttft_mean_s": round(statistics.fmean(ttft), 4) if ttft else 0.0,
        **{f"ttft_p{q}_s": round(quantile(ttft, q / 100), 4) for q in (50, 90, 99)},
        "ttft_mean_trace_s": round(speed * statistics.fmean(ttft), 3) if ttft else 0.0,
        "late_p99_ms": round(1e3 * quantile(sorted(reply.late_s for reply in counted), 0.99), 2),
        "workers": dict(workers),
        "busiest_over_mean": round(over_mean([*workers.values()]), 2),
    }


COLUMNS = ("hit_ratio", "recomputed_tokens", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "errors")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a line per row."""
    return markdown(("", *COLUMNS), [(name, *(row[column] for column in COLUMNS)) for name, row in rows.items()])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m warmfleet_loadtest.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--base-url", action="append", required=True, metavar="URL", help="may be repeated")
    add("--model", default="sim", help="served name (default %(default)s)")
    add("--api-key", help="bearer token")
    add("--trace", metavar="FILE", help="conversation, agents or a .jsonl.xz file ($TRACE)")
    add("--rows", type=int, help="play only the first requests (default: all; 600 if generated)")
    add("--speed", type=float, default=6.0, help="trace seconds per second (default %(default)s)")
    add("--seeds", type=int, default=1, help="repetitions, each with other tokens (default %(default)s)")
    add("--skip", type=float, default=0.1, help="share of the requests that warms up (default %(default)s)")
    add("--json", action="store_true", help="print JSON only")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 every request was answered, 1 a request was not answered, 2 wrong arguments."""
    args = parser().parse_args(argv)
    if args.seeds < 1 or args.speed <= 0 or not 0 <= args.skip < 1:
        parser().error("--seeds from 1 on, --speed above 0, --skip from 0 to below 1")
    rows: dict[str, dict[str, Any]] = {}
    for seed in range(args.seeds):
        try:
            # Each seed has other tokens, because the engines still cache the prompts of the seed before.
            trace = open_trace(args.trace, args.rows, seed)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        target = Target(tuple(url.rstrip("/") for url in args.base_url), args.model, args.speed, seed, args.api_key)
        began = time.monotonic()
        replies, client = uvloop.run(replay(trace, target))
        rows[f"{trace.name}, seed {seed}"] = {
            **summary(replies, args.speed, args.skip),
            "wall_s": round(time.monotonic() - began, 1),
            "client": client,
        }
    if not args.json:
        print(table(rows))
    print(json.dumps(rows, indent=None if args.json else 1))
    return 1 if any(row["errors"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
