"""A set of blocks that an engine core reports, and how far it has been published.

Each engine core has a main set, which routers match. It may have further sets beside that: blocks in a tier that the
engine loads from, or the lengths that all its KV cache groups support (``wire.ENDS``, ``wire.CPU``, ``wire.DISK``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Findings, Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from warmfleet_worker.tracker import Transitions


class BlockSet:
    """kind: of a further set; empty: the main set. digest: of the set that has been published. Of a place that several
    engines change (``Findings``) only changes are published: no copy, no digest.

    ``copying`` is True from ``copy`` until the whole copy has been taken; ``pieces`` then yields the copy, not changes.
    """

    def __init__(self, transitions: Transitions, kind: str = "") -> None:
        self.transitions, self.kind = transitions, kind
        self.digest = wire.Digest()
        self._shared = isinstance(transitions, Findings)
        self._copy: Sequence[bytes] | None = None
        self._position = 0

    @property
    def copying(self) -> bool:
        return self._copy is not None

    def drop_changes(self) -> None:
        """Drop what waits, because the whole set is sent soon, or nothing is in it."""
        if self._shared:
            return
        self.transitions.drop()
        self._copy = None

    def copy(self) -> None:
        """Send the whole set next, as it is now: a further set follows each snapshot of the main one."""
        if not self._shared:
            self._copy, self._position = self.transitions.cut(), -1

    def pieces(self, limit: int) -> Iterator[Run]:
        """Take up to ``limit`` entries of the copy: ``cleared``, then ``stored`` for all its keys."""
        while self._copy is not None and limit > 0:
            limit -= 1
            if self._position < 0:
                self._position = 0
                yield Run("cleared")
            keys = self._copy[self._position : self._position + wire.BATCH_BLOCKS]
            self._position += len(keys)
            if self._position >= len(self._copy):
                self._copy = None
            packed = b"".join(self.transitions.pick(keys))
            if packed:
                yield Run("stored", packed)

    def published(self, run: Run) -> str:
        """Count the run in the digest, and return the name of its operation."""
        if run.operation == "cleared":
            self.digest = wire.Digest()
        elif not self._shared:
            self.digest.add(run.packed, 1 if run.operation == "stored" else -1)
        return f"{run.operation}.{self.kind}" if self.kind else run.operation
