"""Agents as chats: sessions whose steps are of a trace in a closed loop, or generated with the same statistics."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, Arrival, Trace, block

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SYSTEM_BLOCKS = 17  # of a generated agent's system prompt
LONGEST = 7_936  # tokens of a generated prompt
TOOL = {"name": "bash", "description": "Run a command.", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": TOOL}]


@dataclass(frozen=True, slots=True)
class Step:
    """A model call. text: what the prompt has behind the answer before. gap_s: between that answer and this step."""

    text: str
    answer_tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of agents that have one system prompt. context_tokens: mean of prompt and answer beyond that prompt."""

    name: str
    system: str
    sessions: tuple[tuple[Step, ...], ...]
    system_tokens: int
    context_tokens: float

    def at_once(self, overcommit: float, engines: int, blocks: int) -> int:
        """Return how many sessions have contexts ``overcommit`` times as large as all caches."""
        room = blocks * BLOCK_TOKENS - self.system_tokens
        return max(1, round(overcommit * engines * room / self.context_tokens))

    def endless(self, seed: int) -> Iterator[tuple[Step, ...]]:
        """Yield sessions without end, in an order by the seed. Each has a text of its own behind the system prompt."""
        for number in count():
            if number % len(self.sessions) == 0:
                order = random.Random(f"{seed} {number}").sample(self.sessions, len(self.sessions))
            first, *later = order[number % len(order)]
            yield Step(f"Task {seed}-{number}.{first.text}", first.answer_tokens, 0.0), *later


def chats(trace: Trace, spell: Callable[[Sequence[int]], str]) -> Agents:
    """Turn the sessions of a closed trace into chats. spell: turns token ids into a text.

    In place of the trace's answers the chats have those of the engine, of as many tokens.
    """
    found: dict[int, list[Arrival]] = {}
    for arrival in trace.arrivals:
        found.setdefault(arrival.session, []).append(arrival)
    firsts = [session[0].prompt for session in found.values()]
    same = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*firsts, strict=False)))
    system = same // BLOCK_TOKENS * BLOCK_TOKENS
    sizes = [len(arrival.prompt) + arrival.output_tokens - system for arrival in trace.arrivals]
    sessions = tuple(tuple(_steps(session, system, spell)) for session in found.values())
    return Agents(trace.name, spell(firsts[0][:system]), sessions, system, statistics.fmean(sizes))


def _steps(session: Sequence[Arrival], known: int, spell: Callable[[Sequence[int]], str]) -> Iterator[Step]:
    for arrival in session:
        new = arrival.prompt[min(known, len(arrival.prompt) - 1) :]
        yield Step(spell(new), arrival.output_tokens, arrival.think_s or 0.0)
        known = len(arrival.prompt) + arrival.output_tokens


def messages(system: str, text: str) -> list[dict[str, Any]]:
    """Return the messages of a session's first step."""
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def result(answer: str, text: str) -> list[dict[str, Any]]:
    """Return the messages that a later step adds: the answer before, which called a tool, and the tool's result."""
    return [{"role": "assistant", "content": answer}, {"role": "tool", "tool_call_id": "call", "content": text}]


def generated(number: int = 300, seed: int = 0) -> Trace:
    """Make sessions with the statistics of the agents' trace: 10 steps, 540 tokens at first, 160 more a step."""
    generator, fresh = random.Random(seed), count(100)
    system = [token for identifier in range(SYSTEM_BLOCKS) for token in block(identifier, seed)]
    arrivals: list[Arrival] = []
    for session in range(number):
        text, size = list(system), len(system) + generator.lognormvariate(5.5, 0.4)
        for step in range(max(2, min(30, round(generator.lognormvariate(2.3, 0.4))))):
            while len(text) < size:
                text += block(next(fresh), seed)
            answer = max(1, round(generator.lognormvariate(3.46, 0.6)))
            think_s = generator.lognormvariate(0.9, 0.85) if step else None
            arrivals.append(Arrival(float(session), session, text[: int(size)], answer, think_s))
            size = min(size + generator.lognormvariate(4.78, 0.75), LONGEST)
    return Trace("generated agents", tuple(arrivals), closed=True, scale=4.0)
