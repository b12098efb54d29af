"""Learns how much longer a conversation's next prompt is than the conversation so far, and how late that prompt comes.

A request continues a conversation if its prompt begins with the whole prompt of an earlier request. The earlier request
is found by the hash of its prompt's last block, so it does not matter if its answer comes back changed (a chat template
may drop the answer's reasoning).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ASSUMED_TOKENS = 200  # the mean prompt of chats in the T-LRU paper; used until enough is measured
MIN_SAMPLES = 16
MEMORY_SAMPLES = 256  # approximate number of latest turns over which a mean is taken
MAX_WAITING = 16_384  # most conversations whose next prompt is waited for; beyond it the oldest is forgotten
MAX_LOOKUPS = 1_024  # most blocks of a prompt that are looked up, from its end; takes a few ten microseconds


@dataclass(frozen=True, slots=True)
class _Turn:
    """A finished request that may be continued. tokens: of its prompt and its answer. at: monotonic seconds."""

    tokens: int
    at: float


class Mean:
    """The mean of all samples at first, and later of about the last MEMORY_SAMPLES, older ones counting less."""

    def __init__(self) -> None:
        self.samples = 0
        self.value = 0.0

    def add(self, sample: float) -> None:
        self.samples = min(self.samples + 1, MEMORY_SAMPLES)
        self.value += (sample - self.value) / self.samples


class NextPrompt:
    """Learns from finished requests by how many tokens conversations grow, and after how many seconds."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._waiting: OrderedDict[bytes, _Turn] = (
            OrderedDict()
        )  # by the hash of the prompt's last full block, oldest first
        self._growth, self._gap_s = Mean(), Mean()

    @property
    def growth_tokens(self) -> int:
        """Return Q̂, the tokens by which the next prompt is expected to be longer than the conversation now."""
        return round(self._growth.value) if self._growth.samples >= MIN_SAMPLES else ASSUMED_TOKENS

    @property
    def gap_s(self) -> float | None:
        """Mean seconds between the ends of two turns of a conversation; None: not measured yet."""
        return self._gap_s.value if self._gap_s.samples >= MIN_SAMPLES else None

    def finished(
        self,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        tokens: int,
        now: float,
        shared: Callable[[bytes], bool] = lambda _hash: False,
    ) -> None:
        """Learn from a finished request. hashes: of its full blocks. tokens: of prompt and answer.

        shared: tells whether several conversations contain a block, which then does not show which of them goes on.
        """
        last = min(prompt_tokens // self._block_tokens, len(hashes)) - 1
        waiting = self._waiting
        # The prompt's own last block is left out: a conversation found by it has sent this very prompt before.
        earlier = hashes[max(0, last - MAX_LOOKUPS) : max(0, last)]
        # One C call shows that a first turn's prompt matches no waiting conversation.
        for block_hash in () if waiting.keys().isdisjoint(earlier) else reversed(earlier):
            turn = waiting.get(block_hash)
            if turn is not None and not shared(block_hash):
                del waiting[block_hash]
                self._growth.add(max(0, prompt_tokens - turn.tokens))
                self._gap_s.add(now - turn.at)
                break
        if last >= 0:
            waiting.pop(hashes[last], None)
            waiting[hashes[last]] = _Turn(tokens, now)
            if len(waiting) > MAX_WAITING:
                waiting.popitem(last=False)
