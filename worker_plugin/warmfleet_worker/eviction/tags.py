"""The tagged blocks, which T-LRU gives up before others, in the order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Tags:
    """The blocks that a next request can miss, oldest first.

    A tag is the number of a block and the hash that it had, and is valid only as long as the block keeps that hash. So
    there are at most as many tags as blocks.
    """

    def __init__(self) -> None:
        # OrderedDict, because a plain dict searches for its first key through all keys deleted before it.
        self._tags: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tags)

    def tag(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Tag blocks that have no tag yet; they are given up in the order of ``blocks``."""
        self._tags.update(blocks)

    def keep(self, numbers: Sequence[int]) -> None:
        """Take the tags off these blocks."""
        if self._tags and not self._tags.keys().isdisjoint(numbers):  # one C call, usually false
            for number in numbers:
                self._tags.pop(number, None)

    def take(self, count: int, valid: Callable[[int, bytes], bool]) -> list[int]:
        """Remove the oldest tags until ``count`` of their blocks are ``valid``; return these blocks' numbers.

        valid: tells whether the block of this number is free and still has this hash.
        """
        taken: list[int] = []
        while self._tags and len(taken) < count:
            number, block_hash = self._tags.popitem(last=False)
            if valid(number, block_hash):
                taken.append(number)
        return taken
