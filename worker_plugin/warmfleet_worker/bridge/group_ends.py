"""The prefixes that all KV cache groups of an engine support (``ends``), as its KV events tell.

Events of another group than the followed one name blocks by the same hashes, and tell what kind of group it is. If the
kind, or the size of its blocks, is not known here, no prefix is promised.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from warmfleet_worker.bridge.tier_copies import TierCopies
from warmfleet_worker.ends import GROUP_BYTES, WHOLE_PREFIX, Chain, Ends, Rule, Rules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from warmfleet_worker.bridge.kv_events import BlockKey, Removed, Stored
    from warmfleet_worker.tracker import Record

logger = logging.getLogger("warmfleet")

WHOLE = frozenset({"full_attention", "mla_attention"})
WINDOWS = frozenset({"sliding_window", "sliding_window_mla"})
STATE = "mamba"


class Group(NamedTuple):
    """A KV cache group as its events tell: vLLM's name of its kind, the tokens of its window, and of its blocks."""

    kind: str
    window: int
    block_tokens: int


def rules_of(groups: Mapping[int, Group], main: int, block_tokens: int) -> Rules | None:
    """Return the needs of these groups, beside the one that routers match by; None if some are not known."""
    others = []
    for number, group in sorted(groups.items()):
        if group.kind in WHOLE:
            blocks = WHOLE_PREFIX
        elif group.kind in WINDOWS and group.window > 0:
            blocks = max(1, -(-(group.window - 1) // block_tokens))
        elif group.kind == STATE:
            blocks = 1
        else:
            return None
        if group.block_tokens != block_tokens:
            return None
        others.append(Rule((number,), block_tokens, blocks))
    return Rules(Rule((main,), block_tokens), tuple(others), block_tokens)


class GroupEnds:
    """Follows the blocks of all groups. ``ends`` is the set of blocks up to which all groups support a prefix; nothing
    is in it if the rules (None) are not known. limit: most blocks of another group that are known at a time.
    """

    def __init__(self, rules: Rules | None, groups: Mapping[int, Group], main: int, limit: int) -> None:
        self.ends = Ends(rules or Rules(Rule((main,), 1), (), 1))
        self._works = rules is not None
        self._main = _suffix(main)
        self._records: list[Record | Chain] = []
        self._copies = {number: TierCopies(_Sink(self, number), limit) for number in groups}
        self._parent: bytes | None = None

    def stored(self, block_hash: bytes) -> None:
        """Note a block of the followed group."""
        self._records.append(block_hash + self._main)

    def removed(self, block_hash: bytes) -> None:
        self._records.append((block_hash + self._main,))

    def cleared(self) -> None:
        for copies in self._copies.values():
            copies.clear()
        self._records = [None]

    def other_stored(
        self,
        event: Stored,
        hash_of: Callable[[BlockKey], bytes],
        before: Callable[[BlockKey], bytes | None],
        fresh: set[BlockKey],
    ) -> int:
        """Note blocks of another group; return the number of those that are left out.

        hash_of: the hash of a block of the followed group; empty if no event told of it. before: that of the block
        before; empty if there is none, None if it is not known. fresh: the blocks of the followed group that have just
        been stored. An event that begins a prompt and names all its blocks may only repeat that they are reused, and
        then names blocks that this group has given up: of these only fresh ones count.
        """
        copies, left_out = self._copies.get(event.group), 0
        if copies is None:
            return len(event.keys)
        repeats = event.parent is None and len(event.keys) * event.block_tokens >= len(event.token_ids)
        for key in event.keys:
            if repeats and key not in fresh:
                left_out += 1
                continue
            self._parent = before(key)
            left_out += not copies.stored(key, hash_of)
        return left_out

    def other_removed(self, event: Removed) -> None:
        copies = self._copies.get(event.group)
        if copies is not None:
            for key in event.keys:
                copies.removed(key)

    def settle(self) -> None:
        """Bring ``ends`` up to date with all that was noted."""
        records, self._records = self._records, []
        if records and self._works:
            with self.ends.lock:
                self.ends.follow(records)

    def note(self, group: int, block_hash: bytes, *, stored: bool) -> None:
        """Note that a block of another group has come or gone."""
        key = block_hash + _suffix(group)
        if stored and self._parent is not None:
            chain = (self._parent, block_hash) if self._parent else (block_hash,)
            self._records.append(Chain(group, len(chain) - 1, chain))
        self._records.append(key if stored else (key,))


class _Sink:
    """Passes on the blocks of one of the other groups."""

    def __init__(self, ends: GroupEnds, group: int) -> None:
        self._ends, self._group = ends, group

    def stored(self, hashes: bytes) -> None:
        self._ends.note(self._group, hashes, stored=True)

    def removed(self, hashes: bytes) -> None:
        self._ends.note(self._group, hashes, stored=False)

    def cleared(self) -> None:
        """Do nothing: ``GroupEnds.cleared`` notes that all groups are empty."""


def _suffix(group: int) -> bytes:
    return group.to_bytes(GROUP_BYTES, "big")
