"""The tagged blocks, which T-LRU gives up before all others, in the order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Tags:
    """The blocks to evict early: those of ended conversations, then those that a next request can miss; oldest first.

    A tag is the number of a block and the hash that it had, and is valid only as long as the block keeps that hash. So
    there are at most as many tags as blocks.
    """

    def __init__(self) -> None:
        # OrderedDict, because a plain dict searches for its first key through all keys deleted before it.
        self._ended: OrderedDict[int, bytes] = OrderedDict()
        self._beyond: OrderedDict[int, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended) + len(self._beyond)

    def tag(self, blocks: Iterable[tuple[int, bytes]], *, ended: bool) -> None:
        """Tag blocks that have no tag yet; they are given up in the order of ``blocks``."""
        (self._ended if ended else self._beyond).update(blocks)

    def keep(self, numbers: Sequence[int]) -> None:
        """Take the tags off these blocks."""
        for tags in (self._ended, self._beyond):
            if tags and not tags.keys().isdisjoint(numbers):  # one C call, usually false
                for number in numbers:
                    tags.pop(number, None)

    def take(self, count: int, valid: Callable[[int, bytes], bool], *, ended_only: bool = False) -> list[int]:
        """Remove the oldest tags until ``count`` of their blocks are ``valid``; return these blocks' numbers.

        valid: tells whether the block of this number is free and still has this hash.
        ended_only: take only blocks of ended conversations.
        """
        taken: list[int] = []
        for tags in (self._ended,) if ended_only else (self._ended, self._beyond):
            while tags and len(taken) < count:
                number, block_hash = tags.popitem(last=False)
                if valid(number, block_hash):
                    taken.append(number)
        return taken
