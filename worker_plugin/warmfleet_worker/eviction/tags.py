"""The blocks that are given up first, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Tags:
    """Blocks of ended conversations come first, then those beyond the budget of their conversation; oldest tag first.

    A tag is the number of a block and the hash that it had: it holds only as long as the block keeps that hash. So
    there are at most as many tags as blocks.
    """

    def __init__(self) -> None:
        self._ended: dict[int, bytes] = {}
        self._beyond: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._ended) + len(self._beyond)

    def tag(self, blocks: Iterable[tuple[int, bytes]], *, ended: bool) -> None:
        """Tag blocks, which come in the order in which they are to be given up. An earlier tag of theirs is void."""
        chosen, other = (self._ended, self._beyond) if ended else (self._beyond, self._ended)
        for number, block_hash in blocks:
            other.pop(number, None)
            chosen.pop(number, None)  # or it would keep its old place
            chosen[number] = block_hash

    def keep(self, numbers: Iterable[int]) -> None:
        """Take the tags off these blocks."""
        numbers = list(numbers)
        for tags in (self._ended, self._beyond):
            if tags and not tags.keys().isdisjoint(numbers):  # one C call, and the usual end
                for number in numbers:
                    tags.pop(number, None)

    def take(self, count: int, valid: Callable[[int, bytes], bool]) -> list[int]:
        """Take up to ``count`` blocks off the tags, in their order, passing over those that are no longer ``valid``.

        valid: whether the block of this number is free and still has this hash. Void tags are dropped on the way.
        """
        taken: list[int] = []
        for tags in (self._ended, self._beyond):
            while tags and len(taken) < count:
                number = next(iter(tags))
                if valid(number, tags.pop(number)):
                    taken.append(number)
        return taken
