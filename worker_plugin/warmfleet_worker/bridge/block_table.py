"""The blocks that one engine holds, as its KV events tell, under the block hashes that routers compute.

Routers look a prompt up by a chain of hashes over its tokens. Routers cannot always compute an engine's own hashes
(random seed, pickle, not vLLM). So the bridge computes the chain itself, in one scheme for all engines:
an event names the tokens of its blocks and the block before them, and the table keeps the chain of every known block.

A published block is proved: an event has named the block, and every block before it is known down to the begin of
its prompt. Everything else is counted under a reason and left out.

**Copies.** An engine may hold a block several times and reports each copy's removal. A stored event means one more
copy, except where it begins a prompt: a client can make vLLM repeat such events for blocks that are there already
(``kv_cache_report_mode``). Such events count once, so the table may miss a copy, but never counts too many.

**Doubt.** After lost events no block is certain to be cached still; the chains stay known. A later event proves the
blocks that it names, and all blocks before them, because an engine computes a block on top of all earlier blocks. A
block whose count may miss a copy is likewise kept in doubt, not forgotten, when its count falls to 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet_worker.bridge.group_ends import Group, GroupEnds, rules_of
from warmfleet_worker.bridge.kv_events import Cleared, Offloaded, Removed, Stored
from warmfleet_worker.bridge.tier_copies import TierCopies
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from warmfleet_worker.bridge.kv_events import BlockKey, Event
    from warmfleet_worker.bridge.tier_copies import Sink
    from warmfleet_worker.ends import Ends

ALGORITHM = "sha256_cbor"
LEAST_BLOCK_TOKENS = 16  # least tokens in a published block: smaller pages, such as SGLang's of one token, are joined
SPARE_BLOCKS = 1_024  # the table keeps at most twice the pages of the engine's cache, plus this number
TIER_SIZE = 64  # most blocks of a tier that are kept, divided by those of the engine's cache


def scheme_of(page_tokens: int, lookahead: int = 0) -> wire.Scheme:
    """Return the scheme under which blocks of an engine with pages of this size are published."""
    block_tokens = page_tokens * -(-LEAST_BLOCK_TOKENS // page_tokens)
    extra_keys = f"{wire.LOOKAHEAD}{lookahead}" if lookahead else "tagged"
    return wire.Scheme(ALGORITHM, wire.default_none_hash(ALGORITHM), block_tokens, extra_keys)


@dataclass(slots=True)
class Block:
    """A block (or page) whose chain is known.

    digest: of the chain up to its last whole block. tail: the tokens after that block, if pages are smaller than
    blocks. block_hash: of the block that this page completes; empty if it completes none. copies: number of copies
    that the engine certainly holds. doubted: the engine may hold more copies.
    """

    digest: bytes
    tail: tuple[int, ...]
    block_hash: bytes
    parent: BlockKey | None
    copies: int = 0
    doubted: bool = False


class BlockTable:
    """Applies events in order, and tells ``sink`` every block hash that appears or disappears.

    capacity: pages of the engine's cache. group: the KV cache group that is followed. lora_path: returns an adapter's
    path by its name, None if it is not known. lookahead: number of tokens behind a block that its hash covers; blocks
    of an event with another number are left out. tiers: receives the blocks of each tier, by kind. groups: the engine's
    other KV cache groups, by number. unproved: number of blocks left out, by reason.
    """

    def __init__(
        self,
        sink: Sink,
        page_tokens: int,
        capacity: int,
        group: int = 0,
        lora_path: Callable[[str], str | None] = lambda _name: None,
        lookahead: int = 0,
        tiers: Mapping[str, Sink] | None = None,
        groups: Mapping[int, Group] | None = None,
    ) -> None:
        self.scheme = scheme_of(page_tokens, lookahead)
        self.lookahead = lookahead  # as the last event told
        self.unproved: Counter[str] = Counter()
        self.groups_told: dict[int, Group] = {}  # further KV cache groups of the engine, of which events told
        self.tiers_told = dict[str, bool]()  # kinds of tiers that events told of, and whether all events ``loads_last``
        self._tiers = {kind: TierCopies(each, TIER_SIZE * capacity) for kind, each in (tiers or {}).items()}
        self._sink = sink
        self._page_tokens = page_tokens
        self._group = group
        self._lora_path = lora_path
        self._left: dict[BlockKey, bytes] = {}  # hashes of blocks that left the engine's cache last
        self._limit = 2 * capacity + SPARE_BLOCKS
        rules = rules_of(groups, group, self.scheme.block_tokens) if groups else None
        self._group_ends = GroupEnds(rules, groups, group, self._limit) if groups else None
        self._fresh: set[BlockKey] = set()  # blocks of which a copy was added by the present events
        self._blocks: dict[BlockKey, Block] = {}
        self._held: Counter[bytes] = Counter()  # block hash -> number of the engine's blocks that have it
        self._in_doubt = 0  # number of known blocks that the engine may no longer hold

    @property
    def held(self) -> set[bytes]:
        """The block hashes that are published."""
        return set(self._held)

    def __len__(self) -> int:
        """The number of published block hashes."""
        return len(self._held)

    @property
    def ends(self) -> Ends | None:
        """The blocks up to which all groups support a prefix; None if no other groups are known."""
        return None if self._group_ends is None else self._group_ends.ends

    def apply(self, events: Iterable[Event]) -> None:
        """Apply the events of a batch: those of other groups behind those that tell of the blocks themselves."""
        later: list[Event] = []
        self._fresh.clear()
        for event in events:
            if isinstance(event, Cleared):
                later.clear()
                self.clear()
            elif event.group != self._group:
                later.append(event)
            elif isinstance(event, Stored):
                self._stored(event)
            elif isinstance(event, Offloaded):
                self._offloaded(event)
            elif event.place:
                self._removed_from_tier(event)
            else:
                self._removed(event)
        for event in later:
            self._of_another_group(event)
        if self._group_ends is not None:
            self._group_ends.settle()

    def _of_another_group(self, event: Event) -> None:
        ends = self._group_ends
        if isinstance(event, Stored):
            self.groups_told[event.group] = Group(event.kind, event.window, event.block_tokens)
            left_out = ends.other_stored(event, self._hash_of, self._before, self._fresh) if ends is not None else 0
            if left_out:
                self.unproved["group"] += left_out
        elif isinstance(event, Removed) and not event.place and ends is not None:
            ends.other_removed(event)

    def _before(self, key: BlockKey) -> bytes | None:
        """Return the hash of the block before; empty if there is none, None if it is not known."""
        block = self._blocks.get(key)
        if block is None:
            return None
        if block.parent is None:
            return b""
        before = self._blocks.get(block.parent)
        return before.block_hash if before is not None and before.block_hash else None

    def clear(self) -> None:
        """Empty the table, because the engine's cache is empty: no block is in doubt any more.

        vLLM says the same whether its tiers are empty, too, or not. So they count as empty.
        """
        self._clear_tiers()
        self._blocks.clear()
        self._held.clear()
        self._in_doubt = 0
        self._sink.cleared()
        if self._group_ends is not None:
            self._group_ends.cleared()

    def doubt(self) -> None:
        """Publish no known block after lost events, because the engine may have evicted any of them."""
        for block in self._blocks.values():
            block.copies, block.doubted = 0, True
        self._clear_tiers()
        self._in_doubt = len(self._blocks)
        self._held.clear()
        self._sink.cleared()
        if self._group_ends is not None:
            self._group_ends.cleared()
            self._group_ends.settle()

    # ------------------------------------------------ stored

    def _stored(self, event: Stored) -> None:
        if event.block_tokens != self._page_tokens:
            self._leave_out(event, "block_size")  # such as the partial blocks of hybrid models
            return
        if len(event.token_ids) != len(event.keys) * self._page_tokens:
            self._leave_out(event, "tokens")
            return
        self.lookahead = len(event.behind[0]) if event.behind else 0
        if any(len(behind) != self.scheme.lookahead for behind in event.behind or ((),)):
            self._leave_out(event, "lookahead")
            return
        lora = self._lora(event)
        if lora is None and (event.lora is not None or event.lora_unnamed):
            self._leave_out(event, "adapter")
            return
        before = None
        if event.parent is not None:
            before = self._blocks.get(event.parent)
            if before is None:
                self._leave_out(event, "parent")
                return
            self._prove_all_before(event.parent)
        parent = event.parent
        for index, key in enumerate(event.keys):
            block = self._blocks.get(key)
            if block is None:
                block = self._known(event, index, parent, before, lora)
                if block is None:
                    self.unproved["extra_keys"] += len(event.keys) - index
                    return
                self._blocks[key] = block
                self._in_doubt += 1
            if self._count(block, event):
                self._fresh.add(key)
            before, parent = block, key
        self._keep_bound()

    def _lora(self, event: Stored) -> tuple[str, str] | None:
        path = self._lora_path(event.lora) if event.lora is not None else None
        return None if event.lora is None or path is None else (event.lora, path)

    def _known(
        self, event: Stored, index: int, parent: BlockKey | None, before: Block | None, lora: tuple[str, str] | None
    ) -> Block | None:
        """Compute the chain of a new block; None if its hash has a part that routers do not know, such as an image."""
        start, size = index * self._page_tokens, self._page_tokens
        salt, provable = _salt(event, index, begins=before is None)
        tokens = (*(before.tail if before else ()), *event.token_ids[start : start + size])
        behind = event.behind[index] if event.behind else ()
        if not provable or not all(type(token) is int and 0 <= token < 2**32 for token in (*tokens, *behind)):
            return None
        digest = before.digest if before else b""
        if salt is not None and len(tokens) < self.scheme.block_tokens:
            return None  # a salt is hashed with a whole block, which this page only begins
        chain = wire.chain_hashes(self.scheme, (*tokens, *behind), digest or None, salt, lora)
        tail = tokens[len(chain) * self.scheme.block_tokens :]
        block_hash = chain[-1][-wire.HASH_BYTES :] if chain and not tail else b""
        return Block(chain[-1] if chain else digest, tail, block_hash, parent)

    def _count(self, block: Block, event: Stored) -> bool:
        """Count one more copy of a block, or return False: an event that begins a prompt may be repeated, so it adds no
        second copy.
        """
        if event.parent is None and block.copies:
            block.doubted = True
            return False
        self._add_copy(block)
        return True

    def _add_copy(self, block: Block) -> None:
        block.copies += 1
        if block.copies == 1:
            self._in_doubt -= 1
            if block.block_hash:
                self._held[block.block_hash] += 1
                if self._held[block.block_hash] == 1:
                    self._sink.stored(block.block_hash)
                    if self._group_ends is not None:
                        self._group_ends.stored(block.block_hash)

    def _prove_all_before(self, key: BlockKey) -> None:
        """Note that the engine holds all blocks before this one, because it computes a block on top of them."""
        if not self._in_doubt:
            return
        chain, at = [], self._blocks.get(key)
        for _ in range(len(self._blocks)):  # bounded, in case an engine names parents in a circle
            if at is None:
                break
            if not at.copies:
                chain.append(at)
            at = self._blocks.get(at.parent) if at.parent is not None else None
        for block in reversed(chain):
            self._add_copy(block)

    # ------------------------------------------------ removed

    def _removed(self, event: Removed) -> None:
        for key in event.keys:
            block = self._blocks.get(key)
            if block is None:
                continue
            if block.copies:
                block.copies -= 1
                if not block.copies:
                    self._in_doubt += 1
                    self._disappear(block)
            if not block.copies and not block.doubted:
                del self._blocks[key]
                self._in_doubt -= 1
                if (self._tiers or self._group_ends is not None) and block.block_hash:
                    self._note_left(key, block.block_hash)

    def _disappear(self, block: Block) -> None:
        if block.block_hash:
            self._held[block.block_hash] -= 1
            if not self._held[block.block_hash]:
                del self._held[block.block_hash]
                self._sink.removed(block.block_hash)
                if self._group_ends is not None:
                    self._group_ends.removed(block.block_hash)

    # ------------------------------------------------ tiers

    def _offloaded(self, event: Offloaded) -> None:
        if self._page_tokens == self.scheme.block_tokens:  # else a block of several pages may be there in part
            self.tiers_told[event.tier] = event.loads_last and self.tiers_told.get(event.tier, True)
        tier = self._tiers.get(event.tier)
        if tier is not None:
            self.unproved["tier"] += sum(not tier.stored(key, self._hash_of) for key in event.keys)

    def _removed_from_tier(self, event: Removed) -> None:
        for key in event.keys if event.place in self._tiers else ():
            self._tiers[event.place].removed(key)

    def _hash_of(self, key: BlockKey) -> bytes:
        """Return the hash of a known block; empty if the block is not known."""
        block = self._blocks.get(key)
        return self._left.get(key, b"") if block is None else block.block_hash

    def _note_left(self, key: BlockKey, block_hash: bytes) -> None:
        """Keep the hash for a while: an engine may tell of a copy later than of the removal of the block itself."""
        self._left.pop(key, None)
        self._left[key] = block_hash
        if len(self._left) > self._limit:
            del self._left[next(iter(self._left))]

    def _clear_tiers(self) -> None:
        for tier in self._tiers.values():
            tier.clear()

    # ------------------------------------------------ bounds

    def _leave_out(self, event: Stored, reason: str) -> None:
        self.unproved[reason] += len(event.keys)

    def _keep_bound(self) -> None:
        """If more than ``_limit`` blocks are known, forget the oldest in doubt; if that is not enough, all blocks."""
        if len(self._blocks) <= self._limit:
            return
        in_doubt = [key for key, block in self._blocks.items() if not block.copies]
        for key in in_doubt[: max(len(in_doubt) // 2, len(self._blocks) - self._limit)]:
            del self._blocks[key]
            self._in_doubt -= 1
        if len(self._blocks) > self._limit:  # more than the engine can hold: removals must have been lost
            self.unproved["overflow"] += len(self._blocks)
            self.clear()


def _salt(event: Stored, index: int, *, begins: bool) -> tuple[str | None, bool]:
    """Find (the salt of this block, whether its hash can be computed). begins: the block begins a prompt."""
    extra = list(event.extra_keys[index] or ()) if event.extra_keys else []
    if event.lora is not None and extra[:1] == [event.lora]:
        extra = extra[1:]
    if event.salt is not None and begins:
        extra = [*extra, event.salt]
    if not extra:
        return None, True
    if begins and len(extra) == 1 and isinstance(extra[0], str):
        return extra[0], True
    return None, False  # media or embeddings, whose bytes routers do not know
