"""Let agents talk to OpenAI servers, and print how many sessions an hour are served.

    python -m warmfleet_loadtest.agents --base-url http://127.0.0.1:8080 --at-once 60
    python -m warmfleet_loadtest.agents --base-url http://127.0.0.1:8080 --rate 0.4 --burst 40 --burst-at 100

A step of a session is a chat that declares a tool; the next step comes some time (the gap) after its answer, with the
tool's result. With --at-once a session begins when another ends. With --rate sessions begin at random times, and
--burst more together at --burst-at. All times are trace seconds: wall seconds multiplied by --speed. Every second a
line of JSON tells the figures so far; the last line has those without the first --skip of the time. `recomputed` is
the tokens that were computed again, over the necessary ones: no cache has what a step adds to the prompt and answer
before it, nor the first text of a session.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import uvloop

from warmfleet_loadtest.measuring.client import Client, Reply, SelfWatch
from warmfleet_loadtest.measuring.figures import failures, quantile
from warmfleet_loadtest.replay import Balance, Target
from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
from warmfleet_loadtest.traces.agents import TOOLS, Agents, chats, generated, messages, result
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, FIRST_TOKEN, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_loadtest.traces.agents import Step
    from warmfleet_loadtest.traces.trace import Trace

START_S = 60.0  # within which the first sessions of a closed loop begin
FAILED_S = 1.0  # wall seconds from a failure until the next session may begin
TOLD_S = 1.0  # wall seconds between two lines of figures
RECENT_S = 30.0  # trace seconds over which the figures so far are taken
BINS = 24  # of the median TTFT over time


@dataclass(frozen=True, slots=True)
class Load:
    """When sessions begin, in trace seconds: at_once of them run at a time; or rate begin a second, and burst together.

    gaps: factor of all gaps. skip: the first share of the time, which warms up.
    """

    seconds: float
    at_once: int = 0
    rate: float = 0.0
    burst: int = 0
    burst_at_s: float = 0.0
    gaps: float = 1.0
    skip: float = 0.3

    def begins(self, seed: int) -> list[float]:
        """Return when sessions begin that do not follow another one."""
        source = random.Random(f"begins {seed}")
        if self.at_once:
            return sorted(source.uniform(0.0, START_S) for _ in range(self.at_once))
        times, now = [self.burst_at_s] * self.burst, source.expovariate(self.rate)
        while now < self.seconds:
            times.append(now)
            now += source.expovariate(self.rate)
        return sorted(times)


@dataclass(slots=True)
class Sent:
    """A step that was sent, with times in trace seconds. waited_s: until its answer began, or else the run ended.

    known: tokens of the session's last prompt and answer that fill blocks; -1 at its first step.
    """

    at_s: float
    known: int
    waited_s: float = -1.0
    reply: Reply | None = None


@dataclass(slots=True)
class Played:
    """The steps of a run in the order in which they were sent, and its sessions' (end, duration) in trace seconds."""

    steps: list[Sent] = field(default_factory=list)
    ended: list[tuple[float, float]] = field(default_factory=list)
    open_sessions: int = 0


class Player:
    """Plays a load to its end; ``played`` grows meanwhile. named: clients name their sessions, and say which end."""

    def __init__(self, agents: Agents, load: Load, target: Target, *, named: bool = False) -> None:
        self.played = Played()
        self.load = load
        self._agents, self._target, self._named = agents, target, named
        self._balance = Balance(target)
        self._sessions = agents.endless(target.seed)
        self._numbers = itertools.count()
        self._began = 0.0

    def now(self) -> float:
        """Return the trace seconds since the begin."""
        return (time.monotonic() - self._began) * self._target.speed

    async def run(self, told: Callable[[Sent], object] = lambda _sent: None) -> dict[str, float]:
        """Play; return the client's own health. told: called with each answered step."""
        target, self._began = self._target, time.monotonic()
        async with Client(target.model, api_key=target.api_key) as client, SelfWatch() as watch:
            tasks = [asyncio.create_task(self._line(at, client, told)) for at in self.load.begins(target.seed)]
            await asyncio.sleep(self.load.seconds / target.speed)
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            for sent in self.played.steps:
                sent.waited_s = sent.waited_s if sent.waited_s >= 0 else self.load.seconds - sent.at_s
            for error in done:
                if isinstance(error, Exception):
                    raise error
            return watch.report()

    async def _line(self, at_s: float, client: Client, told: Callable[[Sent], object]) -> None:
        """Play a session; in a closed loop, one after the other."""
        await asyncio.sleep(at_s / self._target.speed)
        while True:
            self.played.open_sessions += 1
            await self._session(next(self._sessions), client, told)
            self.played.open_sessions -= 1
            if not self.load.at_once:
                return

    async def _session(self, steps: Sequence[Step], client: Client, told: Callable[[Sent], object]) -> None:
        name, began, known, text = f"{self._target.seed}-{next(self._numbers)}", self.now(), -1, ""
        talk = messages(self._agents.system, steps[0].text)
        for step in steps:
            await asyncio.sleep(step.gap_s * self.load.gaps / self._target.speed)
            sent = Sent(self.now(), known)
            self.played.steps.append(sent)
            if known >= 0:
                talk += result(text, step.text)
            last = step is steps[-1]
            url = self._balance.take(name)
            sent.reply = reply = await client.chat(
                url,
                _chat(talk, last=last),
                step.answer_tokens,
                self._headers(name, last=last),
                partial(self._begun, sent),
            )
            self._balance.give_back(url)
            told(sent)
            if reply.error is not None:
                await asyncio.sleep(FAILED_S)
                return
            text, whole = reply.text, reply.prompt_tokens + reply.output_tokens - 1
            known = whole // BLOCK_TOKENS * BLOCK_TOKENS
        self.played.ended.append((self.now(), self.now() - began))

    def _begun(self, sent: Sent) -> None:
        sent.waited_s = self.now() - sent.at_s

    def _headers(self, name: str, *, last: bool) -> dict[str, str]:
        if not self._named:
            return {}
        return {"X-Session-ID": name} | ({"X-Warmfleet-Conversation": "ended"} if last else {})


def _chat(talk: list[dict[str, Any]], *, last: bool) -> dict[str, Any]:
    return {"messages": talk, "tools": TOOLS} | ({"tool_choice": "none"} if last else {})


# ---------------------------------------------------------------- figures


def waiting(played: Played) -> int:
    """Return how many steps wait for their first token."""
    return sum(sent.waited_s < 0 and sent.reply is None for sent in played.steps)


def figures(played: Played, load: Load, since_s: float, until_s: float) -> dict[str, Any]:
    """Return the figures of the steps that came, and of the sessions that ended, between two times."""
    steps = [sent for sent in played.steps if since_s <= sent.at_s < until_s]
    ttft = sorted(sent.waited_s for sent in steps if sent.waited_s >= 0)
    lasted = sorted(lasted_s for at_s, lasted_s in played.ended if since_s <= at_s < until_s)
    computed, necessary = work(played.steps, steps)
    failed, examples = failures(sent.reply for sent in played.steps if sent.reply is not None)
    return {
        "sessions_per_hour": round(3_600 * len(lasted) / max(1e-9, until_s - since_s), 1),
        "session_p50": round(quantile(lasted, 0.5), 2),
        "session_p95": round(quantile(lasted, 0.95), 2),
        "mean_ttft": round(statistics.fmean(ttft), 3) if ttft else 0.0,
        **{f"p{q}_ttft": round(quantile(ttft, q / 100), 3) for q in (50, 90, 99)},
        "recomputed": round(computed / necessary - 1, 3) if necessary else 0.0,
        "sessions": len(lasted),
        "steps": len(ttft),
        "at_once": load.at_once,
        "failed": failed,
        "error_examples": examples,
    }


def work(every: Sequence[Sent], steps: Sequence[Sent]) -> tuple[int, int]:
    """Return how many tokens were computed, and were necessary, for the answered ones of ``steps``."""
    # A first step finds at most the system prompt in the cache.
    shared = max((sent.reply.cached_tokens for sent in every if sent.known < 0 and sent.reply), default=0)
    computed = necessary = 0
    for sent in steps:
        if sent.reply is not None and sent.reply.error is None:
            computed += sent.reply.prompt_tokens - sent.reply.cached_tokens
            necessary += sent.reply.prompt_tokens - (sent.known if sent.known >= 0 else shared)
    return computed, necessary


def medians(played: Played, seconds: float) -> list[float]:
    """Return the median TTFT of the steps that came in each of BINS equal times."""
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for sent in played.steps:
        if sent.waited_s >= 0:
            bins[min(BINS - 1, int(BINS * sent.at_s / seconds))].append(sent.waited_s)
    return [round(statistics.median(ttft), 3) if ttft else 0.0 for ttft in bins]


# ---------------------------------------------------------------- the command


@cache
def speller() -> Callable[[Sequence[int]], str]:
    """Return a function that turns token ids into a text, a word for each id; the engines read a word as one token."""
    words = [word for _token_id, word in PromptTokenizer.load().words]
    return lambda ids: "".join(words[token_id - FIRST_TOKEN] for token_id in ids)


def open_closed(name: str, seed: int = 0) -> Trace:
    """Open a trace of sessions, or make one for the name ``generated``. Raises OSError, ValueError."""
    trace = generated(seed=seed) if name == "generated" else open_trace(name, seed=seed)
    if not trace.closed:
        raise ValueError(f"{trace.name} has no sessions whose steps wait for each other")
    return trace


async def _play(player: Player) -> dict[str, float]:
    async def tell() -> None:
        while True:
            await asyncio.sleep(TOLD_S)
            now = player.now()
            found = figures(player.played, player.load, max(0.0, now - RECENT_S), now)
            found |= {"at_s": round(now, 1), "ended": len(player.played.ended)}
            found |= {"open_sessions": player.played.open_sessions, "waiting": waiting(player.played)}
            print(json.dumps(found), flush=True)

    telling = asyncio.create_task(tell())
    try:
        return await player.run()
    finally:
        telling.cancel()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m warmfleet_loadtest.agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--base-url", action="append", required=True, metavar="URL", help="may be repeated")
    add("--model", default="sim", help="served name (default %(default)s)")
    add("--api-key", help="bearer token")
    add("--trace", default="generated", metavar="FILE", help="agents, a .jsonl.xz file, or generated (default)")
    add("--speed", type=float, default=5.0, help="trace seconds per second (default %(default)s)")
    add("--seconds", type=float, default=500.0, help="of the run, in trace seconds (default %(default)s)")
    add("--at-once", type=int, default=0, help="sessions that run at a time")
    add("--rate", type=float, default=0.3, help="sessions that begin in a trace second (default %(default)s)")
    add("--burst", type=int, default=0, help="sessions more")
    add("--burst-at", type=float, default=100.0, help="trace seconds (default %(default)s)")
    add("--gaps", type=float, default=1.0, help="factor of all gaps")
    add("--skip", type=float, default=0.3, help="share of the time that warms up (default %(default)s)")
    add("--named", action="store_true", help="name sessions (X-Session-ID), and say which step is the last")
    add("--seed", type=int, default=0)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 every request was answered, 1 a request was not answered, 2 wrong arguments."""
    args = parser().parse_args(argv)
    try:
        agents = chats(open_closed(args.trace, args.seed), speller())
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    target = Target(tuple(url.rstrip("/") for url in args.base_url), args.model, args.speed, args.seed, args.api_key)
    load = Load(args.seconds, args.at_once, args.rate, args.burst, args.burst_at, args.gaps, args.skip)
    player = Player(agents, load, target, named=args.named)
    client = uvloop.run(_play(player))
    found = figures(player.played, load, args.skip * args.seconds, args.seconds)
    found |= {"at_s": args.seconds, "ended": len(player.played.ended), "open_sessions": player.played.open_sessions}
    found |= {"waiting": 0, "medians": medians(player.played, args.seconds), "client": client}
    print(json.dumps(found), flush=True)
    return int(found["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
