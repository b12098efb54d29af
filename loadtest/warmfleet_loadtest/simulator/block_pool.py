"""The prefix cache of one engine: a fixed number of blocks, reference counts, a free queue in order of eviction.

It behaves as vLLM's ``BlockPool``. A block that no request uses goes into the free queue and keeps its content until it
is allocated again, so a free block can still be hit. Blocks without a hash go to the front of the queue (last in,
first out), blocks with a hash to its end (least recently used first). Several blocks may hold the same hash: a prompt
that ends at a block boundary computes its last block again. A listener is called only when the first copy of a hash
comes and when its last copy goes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Listener(Protocol):
    """Is called with every block hash (8 bytes) that appears in the pool or disappears from it, as ``Tracker`` is."""

    def stored(self, hashes: bytes) -> object: ...
    def removed(self, hashes: bytes) -> object: ...
    def cleared(self) -> object: ...


class NoBlocksError(Exception):
    """``allocate`` was asked for more blocks than are free."""


class BlockPool:
    """``blocks`` blocks, of which block 0 is never handed out (vLLM's null block)."""

    def __init__(self, blocks: int, listener: Listener | None = None) -> None:
        if blocks < 2:
            raise ValueError("a pool needs at least two blocks: block 0 is never handed out")
        self.blocks = blocks
        self.listener = listener
        self.on_copy_removed: Callable[[bytes], object] | None = None  # called with the hash of every evicted block
        self.wrong: set[int] = set()  # blocks whose content belongs to other tokens than their hash says
        self.evicted = 0  # blocks whose content was lost to make room, since the start
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._references = [0] * blocks
        self._hash_of: list[bytes | None] = [None] * blocks
        self._holders: dict[bytes, dict[int, None]] = {}

    # ------------------------------------------------ questions

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool that running requests hold, 0..1."""
        return 1.0 - len(self._free) / (self.blocks - 1)

    def held(self) -> list[bytes]:
        """Return every hash that a request could hit now; several blocks with one hash count once."""
        return list(self._holders)

    def holds(self, block_hash: bytes) -> bool:
        """Return whether a request could hit this block now."""
        return block_hash in self._holders

    def prefix(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Return the blocks of the longest held prefix of a chain, at most ``limit``; of several copies the oldest."""
        found = []
        for block_hash in hashes[:limit]:
            holders = self._holders.get(block_hash)
            if holders is None:
                break
            found.append(next(iter(holders)))
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are in the free queue, which gets shorter when a request uses them."""
        return sum(not self._references[block] for block in blocks)

    # ------------------------------------------------ changes

    def touch(self, blocks: Iterable[int]) -> None:
        """Count one more request that uses these blocks."""
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks from the front of the free queue and evict their content; raises NoBlocksError."""
        if count > len(self._free):
            raise NoBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def insert(self, block: int, block_hash: bytes) -> None:
        """Note that the content of a used block is complete, so that requests may hit it from now on."""
        self._hash_of[block] = block_hash
        holders = self._holders.get(block_hash)
        if holders is not None:
            holders[block] = None
            return
        self._holders[block_hash] = {block: None}
        if self.listener is not None:
            self.listener.stored(block_hash)

    def release(self, blocks: Iterable[int]) -> None:
        """Count one request less that uses these blocks, listed in the order of eviction: the prompt's end first."""
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all content; refused (False) while a request holds blocks, as vLLM refuses it."""
        if len(self._free) != self.blocks - 1:
            return False
        self._holders = {}
        self._hash_of = [None] * self.blocks
        if self.listener is not None:
            self.listener.cleared()
        return True

    def _forget(self, block: int) -> None:
        self.wrong.discard(block)
        block_hash = self._hash_of[block]
        if block_hash is None:
            return
        self._hash_of[block] = None
        self.evicted += 1
        holders = self._holders[block_hash]
        del holders[block]
        if not holders:
            del self._holders[block_hash]
            if self.listener is not None:
                self.listener.removed(block_hash)
        if self.on_copy_removed is not None:
            self.on_copy_removed(block_hash)
