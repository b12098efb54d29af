"""The prefixes that all KV cache groups of a hybrid model support: which blocks may be the last of such a prefix.

An engine with several groups can reuse a prefix if each group holds all that it needs of it: full attention each block,
a sliding window the blocks of the last window, a state (Mamba, linear attention) the block whose end is the prefix'
end. So the supported lengths are an intersection. ``Ends`` keeps their last blocks, the *ends*, by what the engine's
block table reports: keys that come and go, and chains, which tell what block precedes another.

Everything here runs in the publisher's thread. Each change costs as many steps as the largest window has blocks at
most, and a batch of changes at one place costs them once. Predecessors are kept only of blocks that are held.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from warmfleet_worker.protocol.wire import HASH_BYTES
from warmfleet_worker.tracker import Transitions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from warmfleet_worker.tracker import PickHashes, Record

GROUP_BYTES = 4  # the number of its group, at the end of a key
WHOLE_PREFIX = 2**31  # as ``Rule.blocks``: all blocks from the first on


@dataclass(frozen=True, slots=True)
class Rule:
    """The need of groups of one kind of a prefix: its last ``blocks`` blocks, or all from its first on.

    groups: the numbers of these groups, each of which needs them. block_tokens: tokens in their blocks. chunk_tokens:
    if not 0, only blocks behind the last multiple of so many tokens are needed (chunked local attention).
    """

    groups: tuple[int, ...]
    block_tokens: int
    blocks: int = 1
    chunk_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of an engine. main: of the group by which routers match, whose blocks are the ends. align_tokens: only
    prefixes of a multiple of so many tokens are reused.
    """

    main: Rule
    others: tuple[Rule, ...]
    align_tokens: int

    def chained(self) -> frozenset[int]:
        """Return the groups whose chains must be told, because it matters which block precedes another, or where."""
        needs = [rule for rule in self.others if rule.blocks > 1]
        placed = self.align_tokens != self.main.block_tokens or any(rule.chunk_tokens for rule in self.others)
        return frozenset(number for rule in [*needs, *[self.main] * placed] for number in rule.groups)


class Chain(NamedTuple):
    """Hashes of consecutive blocks of one group, which may be stored next. first: number of the first of them, counted
    from 0. If that is not 0, its predecessor is not known.
    """

    group: int
    first: int
    hashes: Sequence[bytes]


class _Held:
    """The blocks that all groups of one rule hold. ``run`` has for each the number of blocks that are held without a
    gap up to this one, at most as many as are needed; a prompt's first block counts as that many.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule, self.most = rule, rule.blocks
        self.run: dict[bytes, int] = {}
        self._groups = len(rule.groups)
        self._by_group: dict[bytes, int] = {}  # of blocks that some of the groups hold: how many do
        self._parents: dict[bytes, bytes] = {}  # predecessors; empty: none
        self._children: dict[bytes, list[bytes]] = {}
        self.touched: dict[bytes, None] = {}

    def add(self, block: bytes, parent: bytes | None) -> None:
        """parent: the block's predecessor, empty if it is the first; None if it is not known."""
        if self._groups > 1:
            count = self._by_group[block] = self._by_group.get(block, 0) + 1
            if parent is not None and self.most > 1 and block not in self._parents:
                self._parents[block] = parent
            if count < self._groups:
                return
        elif parent is not None and self.most > 1:
            self._parents[block] = parent
        self.run[block] = 0
        self.touched[block] = None
        known = self._parents.get(block)
        if known:
            self._children.setdefault(known, []).append(block)

    def remove(self, block: bytes) -> None:
        if self._groups > 1:
            count = self._by_group.pop(block, 0) - 1
            if count > 0:
                self._by_group[block] = count
        else:
            count = 0
        if self.run.pop(block, None) is not None:
            self.touched[block] = None
            parent = self._parents.get(block)
            if parent:
                siblings = self._children[parent]
                siblings.remove(block)
                if not siblings:
                    del self._children[parent]
        if count <= 0:
            self._parents.pop(block, None)

    def parent(self, block: bytes) -> bytes | None:
        return self._parents.get(block)

    def settle(self) -> list[bytes]:
        """Bring ``run`` up to date behind all changes since the last call; returns the blocks whose run changed."""
        run, children, parents, most = self.run, self._children, self._parents, self.most
        if most == 1:
            changed = list(self.touched)
            run.update((block, 1) for block in changed if block in run)
            self.touched.clear()
            return changed
        changed, queue = list(self.touched), deque(self.touched)
        self.touched.clear()
        while queue:
            block = queue.popleft()
            before = run.get(block)
            if before is not None:
                parent = parents.get(block)
                now = most if parent == b"" else 1 if parent is None else min(most, run.get(parent, 0) + 1)
                if now == before:
                    continue
                run[block] = now
                changed.append(block)
            queue.extend(children.get(block, ()))
        return changed

    def clear(self) -> dict[bytes, bytes]:
        """Forget all blocks; returns their predecessors."""
        parents = dict(self._parents)
        for kept in (self.run, self._by_group, self._parents, self._children, self.touched):
            kept.clear()
        return parents


class Ends(Transitions):
    """The ends of an engine's table as they come and go. A further set of blocks (``wire.ENDS``)."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules = rules
        self._held = [_Held(rule) for rule in (rules.main, *rules.others)]
        self._main = self._held[0]
        self._of_group = {
            number.to_bytes(GROUP_BYTES, "big"): held for held in self._held for number in held.rule.groups
        }
        self._chained = rules.chained()
        self._placed = bool(self._chained.intersection(rules.main.groups))
        self._places: dict[bytes, int] = {}  # of the main group's blocks: tokens up to the end of the block
        self.table = self._ends = dict[bytes, None]()
        self._chain: Chain | None = None
        self._positions: dict[bytes, int] = {}  # in this chain, by hash
        self._popped: tuple[bytes, bytes | None] = (b"", None)  # the key that went last, and its block's predecessor

    def follow(self, records: Iterable[Record | Chain]) -> None:
        """Take records of the engine's table, in their order, and note which ends come and go by them."""
        for record in records:
            kind = type(record)
            if kind is bytes:
                self._stored(record)  # type: ignore[arg-type]  # by its kind
            elif kind is tuple:
                self._removed(*record)  # type: ignore[misc]  # as above
            elif kind is Chain:
                self._chain, self._positions = record, {}  # type: ignore[assignment]  # as above
            else:
                for held in self._held:
                    held.clear()
                self._places.clear()
                self._ends.clear()
                self.note(None)
        self._settle()

    def rebuild(self, keys: Iterable[bytes], whole: Iterable[bytes]) -> None:
        """Begin anew with these keys of the main group, and with those of the other groups in the whole table.

        Of blocks whose records were lost the place is not known.
        """
        parents = {id(held): held.clear() for held in self._held}
        places, self._places = self._places, {}
        for is_main, some in ((True, keys), (False, whole)):
            for key in some:
                held = self._of_group.get(key[-GROUP_BYTES:])
                if held is not None and (held is self._main) == is_main:
                    block = key[-GROUP_BYTES - HASH_BYTES : -GROUP_BYTES]
                    held.add(block, parents[id(held)].get(block))
                    if is_main and block in places:
                        self._places[block] = places[block]
        self.table = self._ends = {}
        self._chain = None
        dropped = self.dropped
        self._settle()
        self.records.clear()  # as in a cut, the table has it all
        self.dropped, self.overflowed = dropped, False

    def _stored(self, key: bytes) -> None:
        suffix = key[-GROUP_BYTES:]
        held = self._of_group.get(suffix)
        if held is None:
            return
        block, parent = key[-GROUP_BYTES - HASH_BYTES : -GROUP_BYTES], None
        chain = self._chain
        if chain is not None and int.from_bytes(suffix, "big") == chain.group:
            positions = self._positions
            if not positions:
                positions.update((block_hash[-HASH_BYTES:], at) for at, block_hash in enumerate(chain.hashes))
            at = positions.get(block)
            if at is not None and (at or not chain.first):
                parent = chain.hashes[at - 1][-HASH_BYTES:] if at else b""
                if held is self._main:
                    self._places[block] = (chain.first + at + 1) * held.rule.block_tokens
        if parent is None and self._popped[0] == key:  # its block was moved
            parent = self._popped[1]
        held.add(block, parent)

    def _removed(self, key: bytes) -> None:
        held = self._of_group.get(key[-GROUP_BYTES:])
        if held is not None:
            block = key[-GROUP_BYTES - HASH_BYTES : -GROUP_BYTES]
            self._popped = key, held.parent(block)
            held.remove(block)
            if held is self._main and block not in held.run:
                self._places.pop(block, None)

    def _settle(self) -> None:
        """Note which blocks have become ends and which are none any more, as far as anything changed."""
        changed: dict[bytes, None] = {}
        for held in self._held:
            changed.update(dict.fromkeys(held.settle()))
        ends, note = self._ends, self.note
        for block in changed:
            is_end = self._is_end(block)
            if is_end != (block in ends):
                if is_end:
                    ends[block] = None
                    note(block)
                else:
                    del ends[block]
                    note((block,))

    def _is_end(self, block: bytes) -> bool:
        if block not in self._main.run:
            return False
        place = self._places.get(block, 0)
        if self._placed and (place == 0 or place % self._rules.align_tokens):
            return False
        for held in self._held:
            rule = held.rule
            need = place % rule.chunk_tokens // rule.block_tokens if rule.chunk_tokens else held.most
            if held.run.get(block, 0) < need:
                return False
        return True


class GroupedTransitions(Transitions):
    """The changes of a table of several groups. Routers match by one of them; all of them together decide the ends.

    ``whole`` is the engine's table with the keys of all groups, also of parts of blocks; ``table`` has the keys of
    whole blocks only, as far as they are of the main group.
    """

    def __init__(self, pick: PickHashes, rules: Rules) -> None:
        super().__init__(pick)
        self.ends = Ends(rules)
        self.whole: Mapping[bytes, Any] = {}

    def note_chain(self, group: int, first: int, hashes: Sequence[bytes]) -> None:
        """Queue which blocks precede each other, before they are stored."""
        with self.lock:
            self.note(Chain(group, first, hashes))  # type: ignore[arg-type]  # only ``_take`` sees it

    def _take(self, limit: int) -> list[Record]:
        taken: list[Any] = super()._take(limit)
        try:
            self.ends.follow(taken)
        except Exception:
            self.overflow()  # a snapshot follows, by which both sets are made anew
            raise
        return [record for record in taken if type(record) is not Chain]

    def cut(self) -> Sequence[bytes]:
        with self.lock:
            keys, whole = list(self.table), list(self.whole)
            self.records.clear()
            self.overflowed = False
        self.ends.rebuild(keys, whole)
        return keys
