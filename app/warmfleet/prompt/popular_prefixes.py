"""Which prefixes the prompts of one model have in common, by how often: what a joining engine is warmed with.

A prompt counts once, at the last piece of it that an earlier prompt had: the users of a system prompt all at its end,
each turn of a conversation somewhere else. Counts are halved in time, and when there are too many; prefixes that the
trie has forgotten are forgotten here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.prompt.prefix_trie import Node, Prompt

MAX_COUNTED = 1_024
HALF_LIFE_S = 300.0
LEAST = 2.0  # uses: less is a conversation that was asked twice


class Uses:
    """Of one model under one identity; used by the event loop alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._identity = ""
        self._counts: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        self._halved_at = clock()

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, prompt: Prompt, identity_key: str) -> None:
        """A prompt was read. identity_key: what made its ids; those of another one are of no use."""
        node = prompt.shared
        if identity_key != self._identity:
            self._identity, self._counts = identity_key, WeakKeyDictionary()
        if node is None:
            return
        self._age()
        counts = self._counts
        if len(counts) >= MAX_COUNTED:
            self._halve()
        counts[node] = counts.get(node, 0.0) + 1.0

    def most_used(self, limit: int) -> list[Node]:
        """The last pieces of at most so many prefixes, the most used first; none that another one begins with."""
        self._age()
        chosen: list[Node] = []
        begun: set[Node] = set()  # pieces of the chosen, and what is above them
        ranked = sorted(self._counts.items(), key=lambda one: (-one[1], -one[0].tokens))
        for node, count in ranked:
            if len(chosen) == limit or count < LEAST:
                break
            if node in begun:
                continue
            chosen.append(node)
            above: Node | None = node
            while above is not None and above not in begun:
                begun.add(above)
                above = above.parent
        return chosen

    def _age(self) -> None:
        now = self._clock()
        while now - self._halved_at >= HALF_LIFE_S:
            self._halved_at = self._halved_at + HALF_LIFE_S if self._counts else now
            self._halve()

    def _halve(self) -> None:
        """What was used once since the last time goes, so at the bound there is room again, now or soon."""
        counts = self._counts
        for node, count in list(counts.items()):
            if count < LEAST:
                del counts[node]
            else:
                counts[node] = count / 2
