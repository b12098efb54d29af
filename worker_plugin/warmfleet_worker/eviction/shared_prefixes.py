"""Finds the blocks that several conversations have in common: a system prompt, a document that many ask about."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ENDS = 16_384  # maximum of blocks kept, each with its last follower; the one not seen for longest is forgotten
#: A conversation alone goes on in two ways after a block: with the answer as it was generated, and with the answer as
#: the template repeats it in the next prompt. So three different ways mean several conversations.
SHARED_CHANGES = 2


class SharedPrefixes:
    """Counts how often prompts went on differently after a block. The end of a shared prefix stays marked as such.

    Only the first new block of each request is noted, which costs two look-ups per request.
    """

    def __init__(self) -> None:
        # By the hash of a block: the hash of the block that last followed it, and how often the following block
        # changed. The block noted last stands last.
        self._ends: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._shared: set[bytes] = set()  # hashes of blocks whose successor changed often enough

    def note(self, known: bytes, new: bytes) -> None:
        """Note that a request went on with the block ``new`` after ``known``, the last block of it that was cached."""
        following, changes = self._ends.pop(known, (new, 0))
        changes += following != new
        self._ends[known] = (new, changes)
        if changes >= SHARED_CHANGES:
            self._shared.add(known)
        if len(self._ends) > MAX_ENDS:
            self._shared.discard(self._ends.popitem(last=False)[0])

    def ends_at(self, block_hash: bytes) -> bool:
        """Tell whether several conversations share the prefix that ends with this block."""
        return block_hash in self._shared

    def length(self, hashes: Sequence[bytes]) -> int:
        """Count the blocks of a chain up to the last block at which a shared prefix ends."""
        if not self._shared.isdisjoint(hashes):
            for index in range(len(hashes) - 1, -1, -1):
                if hashes[index] in self._shared:
                    return index + 1
        return 0
