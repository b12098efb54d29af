"""Arrivals for more engines than a trace has requests for: the trace laid over itself, and shapes that traces lack.

Each copy of a trace begins it at another place. What the prompts of three sessions or more begin with is a system
prompt and the same in all copies; all other text differs from copy to copy. With another seed the copies begin at other
places, and their text is another, so that it belongs to other pools.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from tests.bench.virtual_rivals import rotated

from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, FIRST_TOKEN, TOKENS, Arrival, Trace, block

if TYPE_CHECKING:
    from collections.abc import Sequence

SYSTEM_PROMPT = 3  # a text with which this many sessions begin is a system prompt
SHIFT = 977  # between the tokens of two copies
GOLDEN = (5**0.5 - 1) / 2  # multiples of it, without their whole part, are spread evenly
WORDS = tuple(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS))  # each token is one object


class Blocks:
    """The complete blocks of a trace's prompts as numbers: equal numbers have equal text before and in them.

    system: numbers below this belong to system prompts.
    """

    def __init__(self, trace: Trace) -> None:
        paths = [_pieces(arrival.prompt) for arrival in trace.arrivals]
        known: dict[tuple[int, tuple[int, ...]], int] = {}
        sessions: list[set[int]] = []
        chains: list[list[int]] = []
        for arrival, path in zip(trace.arrivals, paths, strict=True):
            node, chain = -1, []
            for piece in path:
                node = known.setdefault((node, piece), len(known))
                if node == len(sessions):
                    sessions.append(set())
                if len(sessions[node]) < SYSTEM_PROMPT:
                    sessions[node].add(arrival.session)
                chain.append(node)
            chains.append(chain)
        shared = [node for node, those in enumerate(sessions) if len(those) >= SYSTEM_PROMPT]
        own = [node for node, those in enumerate(sessions) if len(those) < SYSTEM_PROMPT]
        self.system = len(shared)
        self.count = len(sessions)
        number = {node: at for at, node in enumerate((*shared, *own))}
        self._chains = {
            id(arrival.prompt): tuple(number[node] for node in chain)
            for arrival, chain in zip(trace.arrivals, chains, strict=True)
        }

    def chain(self, prompt: Sequence[int], copy: int) -> tuple[int, ...]:
        """Return the block numbers of a prompt of the trace in the copy of this number."""
        chain, own = self._chains[id(prompt)], copy * self.count
        return tuple(number if number < self.system else number + own for number in chain) if copy else chain

    def shared_blocks(self, prompt: Sequence[int]) -> int:
        """Return how many blocks a prompt begins with that belong to a system prompt."""
        return sum(number < self.system for number in self._chains[id(prompt)])


def _pieces(prompt: Sequence[int]) -> list[tuple[int, ...]]:
    whole = len(prompt) // BLOCK_TOKENS
    return [tuple(prompt[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]) for at in range(whole)]


def copies(trace: Trace, number: int, seed: int = 0) -> list[tuple[int, Arrival]]:
    """Return ``number`` copies of all arrivals in order of time, each with its copy; prompts are the trace's own.

    Copies of equal number have the same text, so those of a seed s are numbered from s * number on.
    """
    sessions = 1 + max(arrival.session for arrival in trace.arrivals)
    made = [
        (copy + seed * number, replace(arrival, session=arrival.session + copy * sessions))
        for copy in range(number)
        for arrival in rotated(trace, (copy + seed * GOLDEN % 1) / number).arrivals
    ]
    return sorted(made, key=lambda pair: pair[1].at_s)


def overlaid(trace: Trace, number: int, seed: int = 0) -> Trace:
    """Return the trace with ``number`` copies of it, each with other text in its sessions."""
    if number == 1 and not seed:
        return trace
    blocks = Blocks(trace)
    arrivals = tuple(
        replace(arrival, prompt=_retold(arrival.prompt, blocks.shared_blocks(arrival.prompt), copy))
        if copy
        else arrival
        for copy, arrival in copies(trace, number, seed)
    )
    return replace(trace, name=f"{trace.name} x {number}", arrivals=arrivals)


def _retold(prompt: Sequence[int], shared: int, copy: int) -> list[int]:
    cut, shift = shared * BLOCK_TOKENS, copy * SHIFT - FIRST_TOKEN
    return [*prompt[:cut], *(WORDS[(token + shift) % TOKENS] for token in prompt[cut:])]


# ---------------------------------------------------------------- shapes that the public traces lack


@dataclass(frozen=True, slots=True)
class Shape:
    """Conversations behind system prompts. Lengths are in blocks of 512 tokens.

    system: of each system prompt. prompts: how many there are; each is taken by its weight 1 / rank. first, turn: mean
    of a session's first message and of a later one. again: the share of requests that have a further turn.
    """

    system: int
    prompts: int
    first: float
    turn: float
    again: float
    rate: float = 3.0  # requests a second


SHAPES = {
    "rag": Shape(system=16, prompts=200, first=2.0, turn=1.0, again=0.0),  # a question about a document
    "one-prompt": Shape(system=16, prompts=1, first=6.0, turn=2.0, again=0.6),  # everybody has the same 8,192 tokens
    "chat": Shape(system=1, prompts=1, first=6.0, turn=3.0, again=0.7),  # short conversations
}


def shaped(name: str, rows: int, seed: int = 0) -> Trace:
    """Return ``rows`` requests of a shape of SHAPES."""
    shape, generator = SHAPES[name], random.Random(seed)
    fresh, sessions = count(1), count()
    systems = [[next(fresh) for _ in range(shape.system)] for _ in range(shape.prompts)]
    weights = [1 / rank for rank in range(1, shape.prompts + 1)]
    waiting: list[tuple[float, int, list[int]]] = []
    arrivals: list[Arrival] = []
    now = 0.0
    while len(arrivals) < rows:
        now += generator.expovariate(shape.rate)
        waiting.sort()
        if waiting and waiting[0][0] <= now:
            _due, session, ids = waiting.pop(0)
            ids = ids + [next(fresh) for _ in range(_blocks(generator, shape.turn))]
        else:
            session = next(sessions)
            first = _blocks(generator, shape.first)
            ids = [*generator.choices(systems, weights)[0], *(next(fresh) for _ in range(first))]
        prompt = [token for identifier in ids for token in block(identifier)]
        arrivals.append(Arrival(now, session, prompt[: len(prompt) - generator.randrange(BLOCK_TOKENS)], 10))
        if generator.random() < shape.again and len(ids) < 200:
            waiting.append((now + generator.lognormvariate(3.5, 0.7), session, ids))
    return Trace(name, tuple(arrivals))


def _blocks(generator: random.Random, mean: float) -> int:
    return max(1, round(generator.expovariate(1 / mean)))
