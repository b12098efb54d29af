"""Eviction policies for whole conversations: LRU, the paper's T-LRU, its rivals and its bound.

A cache holds a number of blocks of each conversation, always its first ones. After a turn the whole conversation is
held (the paper's "forced caching"); if that is too much, ``make_room`` takes blocks from the ends of conversations.
"""

from __future__ import annotations

from math import inf

from tests.bench.tail_conversations import ALPHA_MS, BLOCK_TOKENS, NEXT_PROMPT_TOKENS, Turn

from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.objective import Served
from warmfleet_worker.eviction.tail_eviction import tail_eviction_of

MOST_BLOCKS = 1 << 20  # of a conversation, so that its number and a block's index make a number of their own
THRESHOLD_TOKENS = 1_024  # the paper's Threshold-LRU keeps conversations that are longer


class Lru:
    """Evicts the ends of the conversations whose last turn was the longest ago."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.used = 0
        self.held: dict[int, int] = {}  # blocks of each conversation, the one with the oldest turn first

    def serve(self, turn: Turn) -> int:
        """Answer a turn. Returns the tokens of its prompt that were not cached."""
        had = self.held.pop(turn.conversation, 0)
        self.used -= had
        length = turn.history + turn.prompt + turn.reply
        kept = self.keeps(turn, length) // BLOCK_TOKENS
        if kept:
            self.held[turn.conversation] = kept
            self.used += kept
        self.served(turn, length)
        self.make_room()
        return turn.history + turn.prompt - had * BLOCK_TOKENS

    def keeps(self, _turn: Turn, length: int) -> int:
        return length

    def served(self, turn: Turn, length: int) -> None:
        """A turn is over: note what ``make_room`` needs to know."""

    def make_room(self) -> None:
        while self.used > self.blocks:
            self.take(next(iter(self.held)))

    def take(self, conversation: int, most: int | None = None) -> int:
        """Evict from the end of a conversation until all fits, at most ``most`` blocks. Returns their number."""
        held = self.held[conversation]
        taken = min(self.used - self.blocks, held if most is None else most)
        self.used -= taken
        if taken == held:
            del self.held[conversation]
        else:
            self.held[conversation] = held - taken
        return taken


class ThresholdLru(Lru):
    """Keeps long conversations only."""

    def keeps(self, _turn: Turn, length: int) -> int:
        return length if length > THRESHOLD_TOKENS else 0


class EndedLru(Lru):
    """LRU that learns when a conversation has ended, and evicts the blocks of ended conversations first."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.ended: dict[int, None] = {}

    def served(self, turn: Turn, length: int) -> None:
        super().served(turn, length)
        if turn.next_at_s == inf:
            self.ended[turn.conversation] = None

    def make_room(self) -> None:
        while self.used > self.blocks and self.ended:
            conversation = next(iter(self.ended))
            if conversation in self.held:
                self.take(conversation)
            if conversation not in self.held:
                del self.ended[conversation]
        super().make_room()


class TailLru(Lru):
    """The paper's Algorithm 1: what a conversation holds beyond its history + next prompt - objective goes first.

    The algorithm as printed goes one block below that; here a conversation keeps it, rounded up to blocks. Where the
    algorithm takes a block of each conversation in turn, the longest unused conversation is trimmed first.
    """

    def __init__(self, blocks: int, xi_tokens: int) -> None:
        super().__init__(blocks)
        self.xi_tokens = xi_tokens
        self.spare: dict[int, int] = {}  # blocks of each conversation that go first, the one with the oldest turn first

    def served(self, turn: Turn, length: int) -> None:
        super().served(turn, length)
        self.spare.pop(turn.conversation, None)
        spare = self.held.get(turn.conversation, 0) - self.enough(turn, length)
        if spare > 0:
            self.spare[turn.conversation] = spare

    def enough(self, _turn: Turn, length: int) -> int:
        """The blocks with which the next prompt is expected to meet the objective."""
        return blocks_for(length + NEXT_PROMPT_TOKENS - self.xi_tokens)

    def make_room(self) -> None:
        while self.used > self.blocks and self.spare:
            conversation = next(iter(self.spare))
            self.take(conversation, self.spare[conversation])
        super().make_room()

    def take(self, conversation: int, most: int | None = None) -> int:
        taken = super().take(conversation, most)
        spare = self.spare.get(conversation, 0) - taken
        if spare > 0:
            self.spare[conversation] = spare
        else:
            self.spare.pop(conversation, None)
        return taken


class EndedTailLru(EndedLru, TailLru):
    """Conversations that have ended go first, then what T-LRU would take."""

    def __init__(self, blocks: int, xi_tokens: int) -> None:
        TailLru.__init__(self, blocks, xi_tokens)
        self.ended = {}


class TailBelady(TailLru):
    """Tail-optimised Belady, the paper's bound: knows every conversation's next turn, its time and its prompt."""

    def __init__(self, blocks: int, xi_tokens: int) -> None:
        super().__init__(blocks, xi_tokens)
        self.next_at_s: dict[int, float] = {}

    def served(self, turn: Turn, length: int) -> None:
        super().served(turn, length)
        self.next_at_s[turn.conversation] = turn.next_at_s

    def enough(self, turn: Turn, length: int) -> int:
        return 0 if turn.next_at_s == inf else blocks_for(length + turn.next_prompt - self.xi_tokens)

    def make_room(self) -> None:
        while self.used > self.blocks and self.spare:
            conversation = next(iter(self.spare))
            self.take(conversation, self.spare[conversation])
        while self.used > self.blocks:
            self.take(max(self.held, key=self.next_at_s.__getitem__))


class PluginLru(Lru):
    """The plugin's own ``TailEviction``, which learns the next prompt's length and the turn gap."""

    def __init__(self, blocks: int, target: str) -> None:
        super().__init__(blocks)
        speed = round(1_000 / ALPHA_MS)
        self.eviction = tail_eviction_of(target, lambda: speed, BLOCK_TOKENS, blocks)
        self._now = 0.0

    def serve(self, turn: Turn) -> int:
        self._now = turn.at_s
        prompt = turn.history + turn.prompt
        cached = self.held.get(turn.conversation, 0)
        served = Served(prompt, prompt - cached * BLOCK_TOKENS)
        self.eviction.first_token(served, self._hashes(turn, prompt // BLOCK_TOKENS))
        return super().serve(turn)

    def _hashes(self, turn: Turn, blocks: int) -> list[bytes]:
        """Return the hashes of a conversation's first blocks, which never get other content here."""
        first = turn.conversation * MOST_BLOCKS
        return [b"%d" % number for number in range(first, first + blocks)]

    def served(self, turn: Turn, length: int) -> None:
        super().served(turn, length)
        first, held = turn.conversation * MOST_BLOCKS, self.held.get(turn.conversation, 0)
        numbers, hashes = range(first, first + held), self._hashes(turn, held)
        self.eviction.finished(Finished(numbers, hashes, turn.history + turn.prompt, length), turn.at_s)

    def make_room(self) -> None:
        while self.used > self.blocks:
            oldest, held = next(iter(self.held.items()))
            if self.eviction.is_silent(oldest * MOST_BLOCKS + held - 1, self._now):
                self.take(oldest)
                continue
            given = self.eviction.give_up(self.used - self.blocks, self._is_last)
            for number in given:
                self._drop(number // MOST_BLOCKS)
            if not given:
                self.take(oldest)

    def _is_last(self, number: int, _hash: bytes) -> bool:
        conversation, index = divmod(number, MOST_BLOCKS)
        return index < self.held.get(conversation, 0)

    def _drop(self, conversation: int) -> None:
        """Evict the last block of a conversation."""
        self.used -= 1
        self.held[conversation] -= 1
        if not self.held[conversation]:
            del self.held[conversation]


def blocks_for(tokens: int) -> int:
    return max(0, -(-tokens // BLOCK_TOKENS))
