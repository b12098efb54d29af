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

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from warmfleet.blocks import Hasher, Lora, Tip
    from warmfleet.cuts import Cuts
    from warmfleet.fleet import Chain

NODE_BYTES = 900  # of objects, beside text, ids and hashes
TOKEN_BYTES = 4
ONE_PROMPT = 4  # a prompt may fill this part of the trie: the rest belongs to others


class Node:
    """One piece. key: its text and as much behind it as says that it ends there. hashes, tips: one for each hasher."""

    __slots__ = ("children", "hashes", "ids", "key", "latest", "parent", "size", "tips", "tokens")

    def __init__(
        self,
        parent: Node | None,
        key: Hashable,
        size: int,
        ids: array[int],
        hashes: tuple[bytes, ...],
        tips: tuple[Tip, ...],
    ) -> None:
        self.parent, self.key, self.size, self.ids, self.hashes, self.tips = parent, key, size, ids, hashes, tips
        self.tokens: int = (parent.tokens if parent else 0) + len(ids)
        self.children: dict[Hashable, Node] = {}
        self.latest: Node | None = None  # the child that was met last: compared before any cut is looked for

    @property
    def cost(self) -> int:
        """Bytes, about."""
        text = 4 * len(self.key) if isinstance(self.key, str) and not self.key.isascii() else self.size
        return NODE_BYTES + text + TOKEN_BYTES * len(self.ids) + sum(map(len, self.hashes))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request as the engines see it: ids in pieces, and a chain for each hasher."""

    parts: tuple[array[int], ...]
    tokens: int
    chains: tuple[Chain, ...]

    @property
    def ids(self) -> list[int]:
        whole = array("I")
        for part in self.parts:
            whole += part
        return whole.tolist()


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
        self._top = Node(None, None, 0, array("I"), (), ())
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
        at = sum(one.size for one in path)
        while (cut := reading.cuts.next(text, at)) is not None:
            ids = reading.encode(text[at : cut[0]])
            node = _grown(node, text[at : cut[1]], cut[0] - at, ids, reading)
            path.append(node)
            at = cut[0]
        self._keep(path, known)
        tail = reading.encode(text[at:]) + reading.suffix
        tokens = node.tokens + len(tail)
        chains = tuple(
            hasher.capped(
                b"".join(
                    [*[one.hashes[k] for one in path], hasher.extend(node.tips[k], tail, reading.salt, reading.lora)[0]]
                ),
                tokens,
            )
            for k, hasher in enumerate(reading.hashers)
        )
        return Prompt((*[one.ids for one in path], tail), tokens, chains)

    def _root(self, reading: Reading) -> Node:
        return _grown(self._top, reading.key, 0, reading.prefix, reading)

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
        if parent is not None and node not in self._used and node.key not in parent.children:
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


def _grown(parent: Node, key: Hashable, size: int, ids: array[int], reading: Reading) -> Node:
    tips = parent.tips or tuple(hasher.start for hasher in reading.hashers)
    grown = [
        hasher.extend(tip, ids, reading.salt, reading.lora) for hasher, tip in zip(reading.hashers, tips, strict=True)
    ]
    return Node(parent, key, size, ids, tuple(packed for packed, _ in grown), tuple(tip for _, tip in grown))
