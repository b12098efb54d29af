"""Which blocks several conversations have in common: a system prompt, a document that many ask about."""

from __future__ import annotations

MAX_ENDS = 16_384  # blocks after which prompts have gone on; the one not seen for longest is forgotten
#: A conversation alone goes on in two ways after a block: with the answer as it was generated, and with the answer as
#: the template repeats it in the next prompt. So three different ways mean several conversations.
SHARED_CHANGES = 2


class SharedPrefixes:
    """Counts after which block prompts have gone on differently. A block that is the end of a shared prefix stays so.

    Only the first new block of each request is noted, so it costs two look-ups a request.
    """

    def __init__(self) -> None:
        # By the hash of a block: the hash of the block that last followed it, and how often that was another than
        # before. The one noted last stands last.
        self._ends: dict[bytes, tuple[bytes, int]] = {}

    def note(self, known: bytes, new: bytes) -> None:
        """A request went on with the block ``new`` after ``known``, the last block that was in the cache before."""
        following, changes = self._ends.pop(known, (new, 0))
        self._ends[known] = (new, changes + (following != new))
        if len(self._ends) > MAX_ENDS:
            del self._ends[next(iter(self._ends))]

    def ends_at(self, block_hash: bytes) -> bool:
        """Whether several conversations share the prefix that ends with this block."""
        found = self._ends.get(block_hash)
        return found is not None and found[1] >= SHARED_CHANGES
