"""The stochastic conversation model of the T-LRU paper, and its eviction policies, one whole conversation at a time.

T-LRU ("tail-optimised LRU", arXiv 2510.15152) gives up, before anything else, what a conversation may lose without its
next prompt taking longer than an objective. The paper's world is simpler than an engine: a prompt takes ``ALPHA_MS``
for each token that is not cached, nothing waits, and conversations share nothing.

Conversations begin at random (Poisson), their turns follow each other after exponential gaps, and after every turn a
conversation ends with a probability that depends on the number of its turns. Those probabilities and the mean lengths
are the published ones of WildChat; the gaps and the form of the lengths (lognormal) are assumed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

ALPHA_MS = 0.1  # for a token that is not cached
BLOCK_TOKENS = 16
NEXT_PROMPT_TOKENS = 200  # the paper's estimate: the mean
CONVERSATION_EVERY_S = 35.3
#: The share of WildChat's conversations that go on after their first, second ... turn; the last holds from there on.
GOES_ON = (0.421, 0.622, 0.688, 0.688, 0.737)
PROMPT_MEAN, PROMPT_SPREAD = 200.0, 1.6  # tokens, and sigma of the logarithm
REPLY_MEAN, REPLY_SPREAD = 441.0, 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt of a conversation and its reply.

    history: tokens of the conversation before it. next_at_s, next_prompt: of the conversation's next turn, infinity and
    0 if it was the last.
    """

    at_s: float
    conversation: int
    history: int
    prompt: int
    reply: int
    next_at_s: float
    next_prompt: int


def turns(count: int, seed: int, gap_s: float) -> list[Turn]:
    """Return the first ``count`` turns of a run, in order of time. gap_s: mean time between turns of a conversation."""
    generator = random.Random(seed)
    made: list[Turn] = []
    now, number = 0.0, 0
    while len(made) < 2 * count or made[count - 1].at_s > now:
        now += generator.expovariate(1 / CONVERSATION_EVERY_S)
        number += 1
        made += _conversation(generator, number, now, gap_s)
        if number % 256 == 0:
            made.sort(key=lambda turn: turn.at_s)
    made.sort(key=lambda turn: turn.at_s)
    return made[:count]


def _conversation(generator: random.Random, number: int, at_s: float, gap_s: float) -> list[Turn]:
    times, lengths = [at_s], [_lengths(generator)]
    while generator.random() < GOES_ON[min(len(times), len(GOES_ON)) - 1]:
        times.append(times[-1] + generator.expovariate(1 / gap_s))
        lengths.append(_lengths(generator))
    made, history = [], 0
    followers = [*zip(times[1:], (prompt for prompt, _ in lengths[1:]), strict=True), (math.inf, 0)]
    for now, (prompt, reply), (next_at_s, next_prompt) in zip(times, lengths, followers, strict=True):
        made.append(Turn(now, number, history, prompt, reply, next_at_s, next_prompt))
        history += prompt + reply
    return made


def _lengths(generator: random.Random) -> tuple[int, int]:
    return _length(generator, PROMPT_MEAN, PROMPT_SPREAD), _length(generator, REPLY_MEAN, REPLY_SPREAD)


def _length(generator: random.Random, mean: float, spread: float) -> int:
    return max(1, round(generator.lognormvariate(math.log(mean) - spread * spread / 2, spread)))
