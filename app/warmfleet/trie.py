"""Prompt trie: ids and hashes of earlier prompts, by pieces of their text: a turn costs what is new in it.

A node is a piece of text behind the pieces above it; a text is cut by rules that make the pieces' ids join to the ids
of the whole (``cuts``). Nodes never change once they are in; one lock guards who is in, in which order, and the bytes.
The least recently used leave when there are more than ``limit_bytes``; a node leaves after all below it.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import orjson

from warmfleet.blocks import MAX_BLOCKS, Tip
from warmfleet_worker.wire import HASH_BYTES, pack_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from warmfleet.blocks import Hasher, Lora
    from warmfleet.cuts import Cuts
    from warmfleet.fleet import Chain

NODE_BYTES = 900  # of objects, beside text, ids and hashes
TOKEN_BYTES = 11  # an id, and its digits once they are asked for
ONE_PROMPT = 4  # a prompt may fill this part of the trie: the rest belongs to others


class Node:
    """One piece. key: its text and as much behind it as says that it ends there. tokens: with all above it.

    hashes, tips: one for each hasher; set once, before the node is in the trie.
    """

    __slots__ = ("_digits", "children", "hashes", "ids", "key", "latest", "parent", "size", "tips", "tokens")

    def __init__(self, parent: Node | None, key: Hashable, size: int, ids: array[int]) -> None:
        self.parent, self.key, self.size, self.ids = parent, key, size, ids
        self.tokens: int = (parent.tokens if parent else 0) + len(ids)
        self.hashes: list[bytes] = []
        self.tips: list[Tip] = []
        self.children: dict[Hashable, Node] = {}
        self._digits: bytes | None = None
        self.latest: Node | None = None  # the child that was met last: compared before any cut is looked for

    @property
    def digits(self) -> bytes:
        """The ids as they stand in a JSON list; written once."""
        if self._digits is None:
            self._digits = _digits(self.ids)
        return self._digits

    @property
    def cost(self) -> int:
        """Bytes, about."""
        text = 4 * self.size if isinstance(self.key, str) and not self.key.isascii() else self.size
        return NODE_BYTES + text + TOKEN_BYTES * len(self.ids) + sum(map(len, self.hashes))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request as the engines see it: ids in pieces, and a chain for each hasher.

    known_tokens: of these, how many were known before. nodes: the first of the pieces, as far as they are kept.
    """

    parts: Sequence[array[int]]
    tokens: int
    chains: tuple[Chain, ...]
    known_tokens: int = 0
    nodes: Sequence[Node] = ()

    @property
    def ids(self) -> list[int]:
        whole = array("I")
        for part in self.parts:
            whole += part
        return whole.tolist()

    def json(self) -> bytes:
        """The ids as a JSON list, at the cost of those that no earlier prompt had."""
        pieces = [node.digits for node in self.nodes] + [_digits(part) for part in self.parts[len(self.nodes) :]]
        return b"[%b]" % b",".join([piece for piece in pieces if piece])


@dataclass(frozen=True, slots=True)
class Reading:
    """How a text becomes ids and hashes. encode: text → ids without specials; prefix, suffix: the specials around them.

    name: whatever else tells readings apart whose pieces must not be shared.
    """

    name: Hashable
    encode: Callable[[str], array[int]]
    cuts: Cuts
    prefix: array[int] = field(default_factory=lambda: array("I"))
    suffix: array[int] = field(default_factory=lambda: array("I"))
    hashers: tuple[Hasher, ...] = ()
    salt: str | None = None
    lora: Lora = None

    @property
    def key(self) -> Hashable:
        return self.name, self.prefix.tobytes(), self.hashers, self.salt, self.lora


class Trie:
    """Bounded by bytes; used by many threads at once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._top = Node(None, None, 0, array("I"))
        self._used: OrderedDict[Node, int] = OrderedDict()  # -> its cost; the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used)

    def find(self, text: str, reading: Reading) -> list[Node]:
        """The longest known path: the root first. The root may be new."""
        root = self._top.children.get(reading.key) or self._root(reading)
        node, at, path = root, 0, [root]
        while True:
            child = node.latest
            if child is None or not text.startswith(child.key, at):  # type: ignore[arg-type]
                cut = reading.cuts.next(text, at) if node.children else None
                child = node.children.get(text[at : cut[1]]) if cut else None
                if child is None:
                    return path
                node.latest = child
            path.append(child)
            at += child.size
            node = child

    def read(self, text: str, reading: Reading, path: list[Node] | None = None) -> Prompt:
        """The prompt; its new pieces are kept. path: what ``find`` has just returned."""
        path = self.find(text, reading) if path is None else path
        known, node = len(path), path[-1]
        at = sum([one.size for one in path])
        while (cut := reading.cuts.next(text, at)) is not None:
            node = Node(node, text[at : cut[1]], cut[0] - at, reading.encode(text[at : cut[0]]))
            path.append(node)
            at = cut[0]
        tail = reading.encode(text[at:]) + reading.suffix
        chains = tuple([_chain(k, hasher, path, known, tail, reading) for k, hasher in enumerate(reading.hashers)])
        self._keep(path, known)
        return Prompt([*[one.ids for one in path], tail], node.tokens + len(tail), chains, path[known - 1].tokens, path)

    def _root(self, reading: Reading) -> Node:
        root = Node(self._top, reading.key, 0, reading.prefix)
        for hasher in reading.hashers:
            _hash(hasher, hasher.start, [root], reading.prefix, reading)
        return root

    def _keep(self, path: Sequence[Node], known: int) -> None:
        """Add what is new, move the path to the young end (the root last, so that it leaves last), evict the oldest."""
        with self._lock:
            room = self.limit_bytes // ONE_PROMPT
            for node in path[known:]:
                room -= node.cost
                if room < 0:
                    break
                self._add(node)
            self._add(path[0])
            for node in reversed(path):
                if node in self._used:
                    self._used.move_to_end(node)
            while self.bytes > self.limit_bytes:
                self._evict()

    def _add(self, node: Node) -> None:
        parent = node.parent
        if parent is None or node in self._used or node.key in parent.children:
            return  # known, or another thread was first
        if parent is self._top or parent in self._used:
            parent.children[node.key] = parent.latest = node
            self._used[node] = node.cost
            self.bytes += node.cost

    def _evict(self) -> None:
        node, cost = self._used.popitem(last=False)
        self.bytes -= cost
        parent = node.parent
        if parent is not None:
            parent.children.pop(node.key, None)
            if parent.latest is node:
                parent.latest = None


def _digits(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


def _chain(k: int, hasher: Hasher, path: list[Node], known: int, tail: array[int], reading: Reading) -> Chain:
    """The chain by hasher ``k`` of a path, of which the first ``known`` nodes are hashed already, and its tail."""
    tip, new = path[known - 1].tips[k], path[known:]
    ids = tip.rest[:]
    for node in new:
        ids += node.ids
    packed = [node.hashes[k] for node in path[:known]]
    packed.append(_hash(hasher, tip, new, ids + tail, reading))
    return hasher.capped(b"".join(packed), path[-1].tokens + len(tail))


def _hash(hasher: Hasher, tip: Tip, nodes: Sequence[Node], ids: array[int], reading: Reading) -> bytes:
    """Packed hashes of what is behind ``tip``, in one go; each of ``nodes`` gets its share. ids: behind the tip."""
    digests, size, done = hasher.digests(tip, ids, reading.salt, reading.lora), hasher.scheme.block_tokens, tip.blocks
    packed = pack_hashes(digests)
    for node in nodes:
        blocks = min(node.tokens // size, tip.blocks + len(digests))
        node.hashes.append(packed[(done - tip.blocks) * HASH_BYTES : (blocks - tip.blocks) * HASH_BYTES])
        rest = (
            ids[(blocks - tip.blocks) * size : node.tokens - tip.blocks * size] if blocks < MAX_BLOCKS else array("I")
        )
        node.tips.append(Tip(digests[blocks - tip.blocks - 1] if blocks > tip.blocks else tip.digest, blocks, rest))
        done = blocks
    return packed
