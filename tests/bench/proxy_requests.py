"""The requests of ``bench_proxy``, by kind. The same seed makes the same requests."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from tests.bench.proxy_client import request

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "demo"
CHARACTERS_PER_TOKEN = 4.6  # mean of the words below with the demo's tokenizer
SMALL_BYTES, LARGE_BYTES = 200, 40_000
SHORT_TOKENS, LONG_TOKENS, NEW_TOKENS = 500, 10_000, 650
STREAM_CHUNKS, LONG_CHUNKS, GAP_MS = 18, 200, 5
KNOWN = 64  # prompts whose beginnings routers and engines know
WORDS = Path(__file__).with_name("words.txt").read_text().split()
_RNG = random.Random(1)
SENTENCES = [
    " ".join(_RNG.choices(WORDS, k=_RNG.randint(6, 18))) + _RNG.choice((". ", ", ", ".\n")) for _ in range(2_000)
]

Messages = list[dict[str, str]]


def talk(seed: str, tokens: int, message_tokens: int = 500) -> Messages:
    """A conversation of about ``tokens`` tokens. Other seeds differ from their first word on."""
    rng, left, messages = random.Random(seed), int(tokens * CHARACTERS_PER_TOKEN), Messages()
    while left > 0:
        length = min(left, int(message_tokens * CHARACTERS_PER_TOKEN))
        text = f"{seed} {len(messages)} " + "".join(rng.choices(SENTENCES, k=length // 40))
        messages.append({"role": "assistant" if len(messages) % 2 else "user", "content": text[:length]})
        left -= length
    return messages


def body(messages: Messages, chunks: int = 0, gap_ms: int = 0, *, stamped: bool = False) -> bytes:
    """A request's body. chunks: of the stub's streamed answer; 0 = a plain answer. stamped: with times."""
    more = {"stream": True} if chunks else {}
    mark = f"stub:{chunks}:{gap_ms}{':stamped' * stamped}"
    given = {"model": MODEL, "stop": mark, "messages": messages, "max_tokens": 16, **more}
    return orjson.dumps(given)


def small(seed: str) -> Messages:
    """A message that makes a plain body of SMALL_BYTES."""
    text = f"{seed}: {SENTENCES[zlib.crc32(seed.encode()) % len(SENTENCES)] * 20}"
    message = {"role": "user", "content": ""}
    message["content"] = text.replace("\n", " ")[: SMALL_BYTES - len(body([message]))]
    return [message]


def large(seed: str) -> Messages:
    """Messages that make a body of about LARGE_BYTES."""
    return talk(seed, int(LARGE_BYTES / CHARACTERS_PER_TOKEN * 0.99), 1_000)


def known_large(number: int) -> Messages:
    return large(f"known {number % KNOWN}")


def known_talk(number: int) -> Messages:
    return talk(f"talk {number % KNOWN}", LONG_TOKENS - NEW_TOKENS)


def next_turn(seed: str, number: int) -> Messages:
    """A known conversation and two new messages."""
    new = talk(seed, NEW_TOKENS, NEW_TOKENS - 50)
    return [*known_talk(number), {**new[0], "role": "assistant"}, {**new[-1], "role": "user"}]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request. messages: of a seed, and the request's number in its burst. share: of ``--requests``.

    together: how many requests are under way at a time.
    """

    key: str
    messages: Callable[[str, int], Messages]
    share: float = 1.0
    chunks: int = 0
    gap_ms: int = 0
    together: int = 16

    def requests(self, seed: str, count: int) -> list[bytes]:
        made = (self.messages(f"{seed} {number}", number) for number in range(count))
        return [request(body(messages, self.chunks, self.gap_ms)) for messages in made]


PLAIN = (
    Kind("200b", lambda seed, _number: small(seed)),
    Kind("500t", lambda seed, _number: talk(seed, SHORT_TOKENS, 250)),
    Kind("40kb_cold", lambda seed, _number: large(seed), 0.3),
    Kind("40kb_warm", lambda _seed, number: known_large(number), 0.5),
    Kind("10kt_cold", lambda seed, _number: talk(seed, LONG_TOKENS), 0.3),
    Kind("10kt_warm", next_turn, 0.4),
)
STREAMED = tuple(Kind(f"{kind.key}_stream", kind.messages, kind.share / 2, STREAM_CHUNKS) for kind in PLAIN)
#: The difference between these two is the price of a chunk.
SLOW = (
    Kind("slow_short", PLAIN[0].messages, 0.5, STREAM_CHUNKS, GAP_MS, 64),
    Kind("slow_long", PLAIN[0].messages, 0.5, LONG_CHUNKS, GAP_MS, 64),
)
KINDS = (*PLAIN, *STREAMED, *SLOW)
