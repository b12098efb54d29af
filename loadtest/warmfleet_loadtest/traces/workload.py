"""Generated workloads for one or two real engines: conversations, questions on shared documents, and both mixed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from warmfleet_loadtest.traces.trace import FIRST_TOKEN, TOKENS, Arrival, Trace


@dataclass(frozen=True, slots=True)
class Mix:
    """A mixed load of conversations, questions on shared documents (document_share) and single requests (single_share).

    rate: requests per second. Pairs are the least and the greatest number.
    """

    rate: float
    seconds: float
    seed: int = 0
    system_prompts: int = 4
    system_tokens: int = 320
    documents: int = 12
    document_tokens: tuple[int, int] = (400, 2_400)
    turn_tokens: tuple[int, int] = (20, 260)
    output_tokens: tuple[int, int] = (4, 48)
    document_share: float = 0.3
    single_share: float = 0.2
    max_turns: int = 8
    think_s: float = 4.0


@dataclass(slots=True)
class _Session:
    number: int
    prompt: list[int]
    ready_at: float
    turns: int = field(default=0)


def mixed(mix: Mix) -> Trace:
    """Make open-loop Poisson arrivals. In a conversation random tokens stand for the answers to earlier turns."""
    generator = random.Random(mix.seed)
    systems = [_tokens(generator, mix.system_tokens) for _ in range(mix.system_prompts)]
    documents = [_tokens(generator, generator.randint(*mix.document_tokens)) for _ in range(mix.documents)]
    sessions: list[_Session] = []
    arrivals: list[Arrival] = []
    now, number = 0.0, 0
    while True:
        now += generator.expovariate(mix.rate)
        if now > mix.seconds:
            return Trace("mixed", tuple(arrivals))
        output_tokens = generator.randint(*mix.output_tokens)
        text = _tokens(generator, generator.randint(*mix.turn_tokens))
        kind = generator.random()
        if kind < mix.document_share:  # some documents are more popular than others
            rank = min(int(generator.paretovariate(0.8)) - 1, mix.documents - 1)
            arrivals.append(Arrival(now, -1, documents[rank] + text, output_tokens))
        elif kind < mix.document_share + mix.single_share:
            prompt = _tokens(generator, generator.randint(*mix.document_tokens))
            arrivals.append(Arrival(now, -1, prompt, output_tokens))
        else:
            session = next((session for session in sessions if session.ready_at <= now), None)
            if session is None:
                number += 1
                session = _Session(number, list(generator.choice(systems)), now)
                sessions.append(session)
            session.prompt = session.prompt + text
            arrivals.append(Arrival(now, session.number, session.prompt, output_tokens))
            session.prompt = session.prompt + _tokens(generator, output_tokens)
            session.turns += 1
            session.ready_at = now + generator.expovariate(1 / mix.think_s)
            if session.turns >= mix.max_turns:
                sessions.remove(session)


def _tokens(generator: random.Random, count: int) -> list[int]:
    return [FIRST_TOKEN + int(generator.random() * TOKENS) for _ in range(count)]
