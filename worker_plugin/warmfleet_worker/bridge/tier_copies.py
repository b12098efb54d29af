"""The blocks that a tier of an engine holds (memory of its host, a disk), as its KV events tell.

An engine copies a block into a tier after it has computed the block, and events about tiers lack what entered a block's
hash besides tokens. So a copy is known by the event that told of the block in the engine's own cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet_worker.bridge.kv_events import BlockKey


class Sink(Protocol):
    """Receives block hashes as they appear and disappear: a ``Tracker``."""

    def stored(self, hashes: bytes) -> object: ...
    def removed(self, hashes: bytes) -> object: ...
    def cleared(self) -> object: ...


class TierCopies:
    """Tells ``sink`` the block hashes that come into a tier and go. limit: most blocks that are known at a time."""

    def __init__(self, sink: Sink, limit: int) -> None:
        self._sink, self._limit = sink, limit
        self._copies: dict[BlockKey, tuple[bytes, int]] = {}  # block hash, and number of copies

    def __len__(self) -> int:
        return len(self._copies)

    def stored(self, key: BlockKey, hash_of: Callable[[BlockKey], bytes]) -> bool:
        """Count one more copy; False if no event told of this block (``hash_of`` returns nothing), or all are too many.

        Several chunks of a tier may hold one block, so each event is a copy.
        """
        block_hash, copies = self._copies.get(key, (b"", 0))
        if not copies:
            block_hash = hash_of(key)
            if not block_hash or len(self._copies) >= self._limit:
                return False
            self._sink.stored(block_hash)
        self._copies[key] = (block_hash, copies + 1)
        return True

    def removed(self, key: BlockKey) -> None:
        block_hash, copies = self._copies.get(key, (b"", 0))
        if copies > 1:
            self._copies[key] = (block_hash, copies - 1)
        elif copies:
            del self._copies[key]
            self._sink.removed(block_hash)

    def clear(self) -> None:
        if self._copies:
            self._copies.clear()
            self._sink.cleared()
