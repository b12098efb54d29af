"""The uncached tokens that T-LRU adds or saves against plain LRU, counted while the engine runs.

Beside the real cache a shadow of it is kept, in which plain LRU evicts: block hashes only, of a large cache a sample.
Each request is looked up in both. While T-LRU leaves clearly more tokens uncached, T-LRU is stopped: it can make an
engine thrash that is close to thrashing, and then the engine's own uncached tokens do not show the cause.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_HASHES = 16_384  # most hashes in a ShadowLru; of a larger cache every second, fourth ... block is followed
MEMORY_REQUESTS = 128  # number of later requests after which a request counts about a third in the sums
STOP, GO_ON = 0.03, 0.01  # share of uncached tokens by which T-LRU is worse than LRU: above STOP it stops, until GO_ON


class ShadowLru:
    """The block hashes that plain LRU would hold in a cache of ``blocks`` blocks."""

    def __init__(self, blocks: int) -> None:
        self._one_in = 1  # a power of two: the shadow follows every block whose hash is a multiple of it
        while blocks > MOST_HASHES * self._one_in:
            self._one_in *= 2
        self._size = blocks // self._one_in
        self._held: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first

    def leading(self, hashes: Sequence[bytes]) -> int:
        """Count the leading blocks of a chain that are held; with a sample, up to midway between two sampled blocks."""
        held, mask = self._held, self._one_in - 1
        if not mask:
            return next((index for index, block_hash in enumerate(hashes) if block_hash not in held), len(hashes))
        seen = 0
        for index, block_hash in enumerate(hashes):
            if not hash(block_hash) & mask:
                if block_hash not in held:
                    return (seen + index) // 2
                seen = index + 1
        return len(hashes)

    def use(self, hashes: Sequence[bytes]) -> None:
        """Note that a request uses these blocks; of one request the last block is evicted first."""
        held, mask = self._held, self._one_in - 1
        for block_hash in reversed(hashes):
            if not (mask and hash(block_hash) & mask):
                held[block_hash] = None
                held.move_to_end(block_hash)
        while len(held) > self._size:
            held.popitem(last=False)


class LruAccount:
    """Compares the uncached tokens of each request with those that it would have had under plain LRU."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._shadow = ShadowLru(blocks)
        self._lost = self._lru = 0.0  # sums of uncached tokens: T-LRU's beyond plain LRU's, plain LRU's
        self.losing = False

    def first_token(self, hashes: Sequence[bytes], prompt_tokens: int, uncached_tokens: int) -> None:
        """Count a request that has its first token. hashes: of the full blocks of its prompt."""
        reusable = hashes[: (prompt_tokens - 1) // self._block_tokens]  # an engine always computes the last token
        lru = prompt_tokens - self._shadow.leading(reusable) * self._block_tokens
        kept = 1 - 1 / MEMORY_REQUESTS
        self._lost = kept * self._lost + uncached_tokens - lru
        self._lru = kept * self._lru + lru
        self.losing = self._lost > (GO_ON if self.losing else STOP) * self._lru
        self._shadow.use(hashes)

    def finished(self, hashes: Sequence[bytes]) -> None:
        """Note the blocks of a finished request. hashes: of its full blocks."""
        self._shadow.use(hashes)
