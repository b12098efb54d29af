"""Arrivals from a public trace, or from a generator with the same statistics.

A trace holds block ids and lengths, but no text. One block of a trace (512 or 64 tokens) becomes one block of 16
tokens, so that sharing is unchanged and prompts are short enough for a few cores. Equal ids give equal tokens. The
first two tokens of a block spell its id, so blocks with different ids differ within two tokens.
"""

from __future__ import annotations

import json
import lzma
import os
import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 16  # number of tokens of a replayed block
FIRST_TOKEN, TOKENS = 256, 4_096  # the 4,096 token ids from 256 on are words in any byte-level vocabulary
SHARED = "../shared/traces"  # a folder beside the checkout; the traces are no part of this repository
DECODE_S = 0.02  # trace seconds to decode a token of an answer, as in published simulations


@dataclass(frozen=True, slots=True)
class Public:
    """A public trace, and the settings for its benches.

    rows: the number of requests that are played, from the first on. speed: trace seconds per second. blocks: in the
    cache of each of eight engines. step_time: a preset of ``step_costs``; for fcfs mode ``-fcfs`` is added to it.
    """

    file: str
    rows: int
    speed: float
    blocks: int
    step_time: str


PUBLIC = {
    "conversation": Public("mooncake_conversation_2400.jsonl.xz", 2_400, 6.0, 1_953, "trace"),
    "agents": Public("sweagent_cost_2_1.jsonl.xz", 2_955, 4.0, 1_024, "agents"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace.

    at_s: when it arrives, in the trace's own time. think_s: in a closed loop, the time from the session's previous
    answer to this request, used instead of at_s.
    """

    at_s: float
    session: int
    prompt: Sequence[int]
    output_tokens: int
    think_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order. closed: a session's next request waits for its previous answer.

    scale: the number of tokens of the original trace that one token of an arrival stands for.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    closed: bool = False
    scale: float = 32.0


def block(identifier: int, seed: int = 0) -> list[int]:
    """Return the 16 tokens of a trace's block. Equal identifiers give equal tokens, so that prompts share prefixes."""
    generator = random.Random(identifier + (seed << 40))
    head = [identifier // TOKENS + 977 * seed, identifier + 977 * seed]
    tail = [int(generator.random() * TOKENS) for _ in range(BLOCK_TOKENS - 2)]
    return [FIRST_TOKEN + token % TOKENS for token in head + tail]


def shared(name: str) -> Path:
    """Return the path of a trace in PUBLIC. The file may be missing."""
    return Path(__file__).resolve().parents[3] / SHARED / PUBLIC[name].file


def find(path: str | None = None) -> Path | None:
    """Find the trace that ``path`` or $TRACE names (a file, or a name in PUBLIC), else the conversation trace.

    None if the conversation trace is missing, because one can be generated. Raises FileNotFoundError for other traces.
    """
    named = path or os.environ.get("TRACE") or "conversation"
    found = shared(named) if named in PUBLIC else Path(named)
    if found.is_file():
        return found
    if named == "conversation":
        return None
    raise FileNotFoundError(f"no trace at {found}")


def open_trace(path: str | None = None, rows: int | None = None, seed: int = 0) -> Trace:
    """Load the trace that ``find`` finds, with tokens by ``seed``, or generate one of the same shape.

    A generated trace has different arrivals for each seed. Raises FileNotFoundError, or ValueError for another format.
    """
    found = find(path)
    return generate(rows or 600, seed) if found is None else load(found, rows, seed)


def load(path: Path, rows: int | None = None, seed: int = 0) -> Trace:
    """Read the first ``rows`` requests. Raises ValueError for a file of another format."""
    try:
        with lzma.open(path, "rt") as lines:
            header = json.loads(next(lines, ""))
            size, closed = int(header["block"]), str(header.get("timing", "")).startswith("synthetic")
            reader = _Reader(size, closed, seed)
            arrivals = tuple(reader.arrival(json.loads(line)) for line in islice(lines, rows))
    except (lzma.LZMAError, EOFError, LookupError, TypeError, ValueError) as error:
        wanted = "lines of JSON in .xz, the first a header with a block size, the others requests"
        raise ValueError(f"{path} is no trace ({wanted}): {error!r}") from error
    return Trace(str(header.get("name", path.name)), arrivals, closed, size / BLOCK_TOKENS)


class _Reader:
    """Turns rows into arrivals. A row names only the blocks that its prompt adds to the session's previous prompt."""

    def __init__(self, size: int, closed: bool, seed: int) -> None:
        self._size = size
        self._closed = closed
        self._seed = seed
        self._blocks: dict[int, list[int]] = {}
        self._ids: dict[int, list[int]] = {}
        self._last: dict[int, tuple[float, int]] = {}

    def arrival(self, row: dict[str, Any]) -> Arrival:
        session, size = row["s"], self._size
        ids = self._ids[session] = self._ids.get(session, [])[: row["k"]] + row["new"]
        prompt: list[int] = []
        for identifier in ids:
            if identifier not in self._blocks:
                self._blocks[identifier] = block(identifier, self._seed)
            prompt += self._blocks[identifier]
        partial = row["in"] % size  # tokens of the last block, if that is not full
        if partial:
            del prompt[len(prompt) - BLOCK_TOKENS + max(1, round(partial * BLOCK_TOKENS / size)) :]
        think = None
        if self._closed and session in self._last:
            then, tokens = self._last[session]
            think = max(0.0, row["t"] - then - DECODE_S * tokens)  # the gap between requests less the decoding
        self._last[session] = (row["t"], row["out"])
        return Arrival(row["t"], session, prompt, max(1, round(row["out"] * BLOCK_TOKENS / size)), think)


def generate(rows: int, seed: int = 0) -> Trace:
    """Make a trace like the conversation's: 3 requests a second, lognormal lengths, a quarter of them later turns.

    Every prompt starts with the same block. A later turn extends its session's prompt by the answer and new text.
    """
    generator = random.Random(seed)
    fresh = iter(range(1, 1 << 24))
    open_sessions: list[tuple[float, int, list[int], int]] = []  # (when, session, ids, turn)
    arrivals: list[Arrival] = []
    now, sessions = 0.0, 0
    while len(arrivals) < rows:
        now += generator.expovariate(3.0)
        due = [turn for turn in open_sessions if turn[0] <= now]
        if due and generator.random() < 0.8:
            turn = min(due)
            open_sessions.remove(turn)
            _at, session, ids, number = turn
            ids = ids + [next(fresh) for _ in range(_blocks(generator, 0.7, 1.0))]
        else:
            session, number = sessions, 1
            sessions += 1
            ids = [0, *(next(fresh) for _ in range(_blocks(generator, 2.6, 1.0)))]
        prompt = [token for identifier in ids for token in block(identifier, seed)]
        output_tokens = max(1, min(64, round(generator.lognormvariate(2.0, 0.8))))
        length = len(prompt) - generator.randrange(BLOCK_TOKENS)
        arrivals.append(Arrival(now, session, prompt[:length], output_tokens))
        if generator.random() < (0.24 if number == 1 else 0.35):
            open_sessions.append((now + generator.lognormvariate(4.4, 0.7), session, ids, number + 1))
    return Trace("generated conversation", tuple(arrivals))


def _blocks(generator: random.Random, mean_log: float, spread: float) -> int:
    return max(1, min(240, round(generator.lognormvariate(mean_log, spread))))
