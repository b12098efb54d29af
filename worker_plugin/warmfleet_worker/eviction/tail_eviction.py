"""T-LRU ("Tail-Optimized Caching for LLM Inference", arXiv 2510.15152), in a lazy form.

The next request of a conversation is L + Q̂ tokens long: the conversation so far, and what its next prompt adds. If all
but ξ of them are cached, its first token comes in time. So when a request is finished, its blocks beyond L + Q̂ - ξ
tokens are tagged, those at the end first. Tagged blocks stay in the cache; only when an allocation would evict a block
are tagged blocks given up in its place. Everything else stays LRU.

Two things are added to the paper's rule:

- A prefix that several conversations share is never tagged: the next request that needs it may be another's.
- The oldest blocks go before any tagged one if nobody has used them for two mean turn gaps (times from one turn of a
  conversation to the next): it has probably ended. So a cache that holds blocks for longer than that stays LRU.

Nothing of a conversation that is known to have ended is tagged, because it goes first of all (``sessions``).
"""

from __future__ import annotations

import sys
from itertools import repeat
from operator import eq
from typing import TYPE_CHECKING

from warmfleet_worker.eviction.lru_account import LruAccount
from warmfleet_worker.eviction.next_prompt import NextPrompt
from warmfleet_worker.eviction.objective import AdaptiveObjective, objective_of
from warmfleet_worker.eviction.shared_prefixes import SharedPrefixes
from warmfleet_worker.eviction.tags import Tags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_worker.eviction.finished import Finished
    from warmfleet_worker.eviction.objective import Objective, Served

SILENT_GAPS = 2  # number of mean turn gaps of silence after which a conversation counts as ended


class TailEviction:
    """Chooses the blocks that an engine gives up first. Every method runs on the engine's thread, and none waits.

    Blocks have numbers; a block may get new content, and then has another hash. The memory used is bounded by the
    engine's blocks and by the constants of the parts. tagged: number of blocks since the start.
    """

    def __init__(self, block_tokens: int, objective: Objective, account: LruAccount | None = None) -> None:
        self.block_tokens = block_tokens
        self.objective = objective
        self._account = account  # stops T-LRU while it loses against plain LRU
        self.next_prompt = NextPrompt(block_tokens)
        self.tags = Tags()
        self.tagged = 0
        self._shared = SharedPrefixes()
        self._used_at: dict[int, float] = {}  # monotonic seconds at which the last user of a block was finished
        self._known: dict[int, bytes] = {}  # block number -> hash, of all finished requests' blocks

    @property
    def compares(self) -> bool:
        """Tell whether ``first_token`` needs the hashes; to collect those of a long prompt doubles its cost."""
        return self._account is not None

    def first_token(self, served: Served, hashes: Sequence[bytes]) -> None:
        """Learn from a request with its first token. hashes: of its prompt's full blocks; empty if they are unknown."""
        self.objective.note(served)
        if self._account is not None and hashes:
            self._account.first_token(hashes, served.prompt_tokens, served.uncached_tokens)

    def finished(self, request: Finished, now: float) -> None:
        """Decide which blocks of a finished request are tagged; ``now`` in monotonic seconds. All of them are full."""
        numbers, hashes = request.numbers, request.hashes
        if self._account is not None:
            self._account.finished(hashes)
        known = len(numbers)
        for is_known in map(eq, map(self._known.get, reversed(numbers)), reversed(hashes)):
            if is_known:
                break
            known -= 1
        if known < len(numbers):
            self._known.update(zip(numbers[known:], hashes[known:], strict=True))
            if known:
                self._shared.note(hashes[known - 1], hashes[known])
        self._used_at.update(zip(numbers, repeat(now), strict=False))
        self.next_prompt.finished(hashes, request.prompt_tokens, request.tokens, now, self._shared.ends_at)
        kept = len(numbers) if request.ended else min(len(numbers), self.budget_blocks(request.tokens))
        if kept < len(numbers):
            kept = max(kept, self._shared.length(hashes))
        self.tags.keep(numbers)
        self.tags.tag(zip(reversed(numbers[kept:]), reversed(hashes[kept:]), strict=True))
        self.tagged += len(numbers) - kept

    def budget_blocks(self, tokens: int) -> int:
        """Return how many blocks of a conversation of ``tokens`` must stay cached to keep its next request in time."""
        xi = self.objective.xi_tokens()
        if not xi:
            return sys.maxsize
        return max(0, -((xi - tokens - self.next_prompt.growth_tokens) // self.block_tokens))

    def is_silent(self, number: int, now: float) -> bool:
        """Tell whether this free block's conversation has probably ended: then it is evicted before tagged ones."""
        gap = self.next_prompt.gap_s
        return gap is not None and now - self._used_at.get(number, now) > SILENT_GAPS * gap

    def give_up(self, count: int, valid: Callable[[int, bytes], bool]) -> list[int]:
        """Return the numbers of up to ``count`` tagged blocks that are given up in place of others, in order.

        valid: tells whether the block of this number is free and still has this hash.
        """
        return [] if self._account is not None and self._account.losing else self.tags.take(count, valid)


def tail_eviction_of(target: str, speed_tps: Callable[[], int], block_tokens: int, blocks: int) -> TailEviction:
    """Make T-LRU for a target (see ``objective_of``) in a cache of ``blocks`` blocks; raises ValueError.

    For a target in seconds T-LRU always runs; for the adaptive objective it stops while it does worse than plain LRU.
    """
    objective = objective_of(target, speed_tps)
    account = LruAccount(blocks, block_tokens) if isinstance(objective, AdaptiveObjective) else None
    return TailEviction(block_tokens, objective, account)
