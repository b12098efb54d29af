"""Counts the prefixes that prompts of one model have in common. A joining worker is warmed with the most used prefixes.

A prompt counts once, for the prefix up to its last piece that an earlier prompt had as well. So all users of one system
prompt count for that prompt, but the turns of a conversation count for different prefixes. All counts are halved every
HALF_LIFE_S, and when there are MAX_COUNTED. A prefix that the trie evicts is not counted any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.prompt.prefix_trie import Mark, Node, Prompt

MAX_COUNTED = 1_024  # most prefixes that are counted; with so many, all counts are halved early
HALF_LIFE_S = 300.0  # time between two halvings of all counts
LEAST = 2.0  # fewest uses of a common prefix; with fewer, it may belong to a single conversation


class PopularPrefixes:
    """Counts how often each prefix came, for one model and tokenizer with template. For the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._identity = ""
        self._counts: WeakKeyDictionary[Mark, float] = WeakKeyDictionary()
        self._halved_at = clock()

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, prompt: Prompt, identity_key: str) -> None:
        """Count a prompt. identity_key: the identity that made its ids; a new identity empties the counts."""
        node = prompt.shared
        if identity_key != self._identity:
            self._identity, self._counts = identity_key, WeakKeyDictionary()
        if node is None:
            return
        self._age()
        counts = self._counts
        if len(counts) >= MAX_COUNTED:
            self._halve()
        mark = node.marked()
        counts[mark] = counts.get(mark, 0.0) + 1.0

    def most_used(self, limit: int) -> list[Node]:
        """Return the last nodes of at most ``limit`` prefixes, most used first, none of which is a part of another."""
        self._age()
        chosen: list[Node] = []
        covered: set[Node] = set()  # the chosen nodes and all nodes above them
        counted = [(count, node) for mark, count in self._counts.items() if (node := mark.node()) is not None]
        for count, node in sorted(counted, key=lambda item: (-item[0], -item[1].tokens)):
            if len(chosen) == limit or count < LEAST:
                break
            if node in covered:
                continue
            chosen.append(node)
            above: Node | None = node
            while above is not None and above not in covered:
                covered.add(above)
                above = above.parent
        return chosen

    def _age(self) -> None:
        now = self._clock()
        while now - self._halved_at >= HALF_LIFE_S:
            self._halved_at = self._halved_at + HALF_LIFE_S if self._counts else now
            self._halve()

    def _halve(self) -> None:
        """Halve all counts and forget those below LEAST, so that there is room for others."""
        counts = self._counts
        for mark, count in list(counts.items()):
            if count < LEAST:
                del counts[mark]
            else:
                counts[mark] = count / 2
