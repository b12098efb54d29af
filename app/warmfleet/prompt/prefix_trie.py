"""A trie of earlier prompts: each piece of text with its token ids and block hashes, so that only new text costs time.

A node is a piece of text behind the pieces above it. A text is cut by rules under which the ids of its pieces, joined,
are the ids of the whole (``cut_points``). A node does not change once it is in the trie. One lock guards the membership
and order of nodes and the count of bytes. When the trie has more than ``limit_bytes``, the least recently used nodes
leave; a node leaves after all nodes below it.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import orjson

from warmfleet.prompt.block_hashes import MAX_BLOCKS
from warmfleet.protocol.wire import HASH_BYTES, pack_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from warmfleet.prompt.block_hashes import Chain, Hasher, Lora
    from warmfleet.prompt.cut_points import Cuts

NODE_BYTES = 900  # bytes of Python objects per node, beside its text, ids and hashes
HASHER_BYTES = 160  # bytes of Python objects per node and hasher
TOKEN_BYTES = 11  # bytes per token: its id, and the digits of the id once they were needed
ONE_PROMPT = 4  # one prompt may fill one part in four of the trie, the rest is for other prompts


class Node:
    """One piece of text.

    key: the text of the piece, and as much text behind it as decides where the piece ends. size: characters of the
    piece. tokens: the number of ids of this piece and of all above it. hashes: for each hasher, the packed hashes of
    the blocks that this piece fills. ends: for each hasher, the digest of the last block so far. Both are set once,
    before the node is in the trie.
    """

    __slots__ = (
        "__weakref__",
        "_digits",
        "children",
        "ends",
        "hashes",
        "ids",
        "key",
        "latest",
        "parent",
        "size",
        "tokens",
    )

    def __init__(self, parent: Node | None, key: Hashable, size: int, ids: array[int]) -> None:
        self.parent, self.key, self.size, self.ids = parent, key, size, ids
        self.tokens: int = (parent.tokens if parent else 0) + len(ids)
        self.hashes: list[bytes] = []
        self.ends: list[bytes] = []
        self.children: dict[Hashable, Node] = {}
        self._digits: bytes | None = None
        self.latest: Node | None = None  # the child that was found last: ``find`` compares it before it looks for a cut

    @property
    def digits(self) -> bytes:
        """The ids as they stand in a JSON list. Made once."""
        if self._digits is None:
            self._digits = _digits(self.ids)
        return self._digits

    @property
    def cost(self) -> int:
        """The bytes that this node takes, about."""
        key = self.key if isinstance(self.key, str) else repr(self.key)  # the key of a root is a tuple with the salt
        text = len(key) if key.isascii() else 4 * len(key)
        hashes = HASHER_BYTES * len(self.hashes) + sum(map(len, self.hashes))
        return NODE_BYTES + text + TOKEN_BYTES * len(self.ids) + hashes


@dataclass(slots=True)  # never changed, but not frozen: a frozen one is slower to make
class Prompt:
    """One prompt of a request as the engines see it: its ids in pieces, and a chain for each hasher.

    known_tokens: the number of ids that earlier prompts had as well. nodes: the nodes of the first pieces; the last
    piece has none. shared: the last node that an earlier prompt had, or None.
    """

    parts: Sequence[array[int]]
    tokens: int
    chains: tuple[Chain, ...]
    known_tokens: int = 0
    nodes: Sequence[Node] = ()
    shared: Node | None = None

    @property
    def ids(self) -> list[int]:
        """All ids in one list."""
        whole = array("I")
        for part in self.parts:
            whole += part
        return whole.tolist()

    def json(self) -> bytes:
        """The ids as a JSON list. The digits of pieces that an earlier prompt had are not made again."""
        pieces = [node.digits for node in self.nodes] + [_digits(part) for part in self.parts[len(self.nodes) :]]
        return b"[%b]" % b",".join([piece for piece in pieces if piece])


@dataclass(slots=True)  # never changed, but not frozen, as above
class Reading:
    """How a text becomes ids and hashes. Prompts share pieces only if their readings have the same ``key``.

    name: tells apart readings whose pieces must not be shared, beyond the other fields. encode: text → ids without
    special tokens. prefix, suffix: the special tokens around them.
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
        """The key of the root for this reading."""
        return self.name, self.prefix.tobytes(), self.hashers, self.salt, self.lora


class Trie:
    """All nodes, with a bound for their bytes. Several threads use it at once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._top = Node(None, None, 0, array("I"))
        self._used: OrderedDict[Node, int] = OrderedDict()  # node -> its cost in bytes; the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used)

    def find(self, text: str, reading: Reading) -> list[Node]:
        """The longest path of nodes that ``text`` begins with, root first. The root may be new, not yet in the trie."""
        root = self._top.children.get(reading.key) or self._root(reading)
        node, at, path = root, 0, [root]
        while True:
            child = node.latest
            # The type of a key allows a root's key, a tuple. A child is never a root, so its key is text.
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
        """The prompt of a text. Its new pieces are put into the trie. path: the result of ``find``, if at hand."""
        path = self.find(text, reading) if path is None else path
        known, node = len(path), path[-1]
        at = sum([above.size for above in path])
        while (cut := reading.cuts.next(text, at)) is not None:
            node = Node(node, text[at : cut[1]], cut[0] - at, reading.encode(text[at : cut[0]]))
            path.append(node)
            at = cut[0]
        tail = reading.encode(text[at:]) + reading.suffix
        chains = tuple([_chain(k, hasher, path, known, tail, reading) for k, hasher in enumerate(reading.hashers)])
        self._keep(path, known)
        last = path[known - 1]
        parts = [*[piece.ids for piece in path], tail]
        return Prompt(parts, node.tokens + len(tail), chains, last.tokens, path, last if known > 1 else None)

    def _root(self, reading: Reading) -> Node:
        root = Node(self._top, reading.key, 0, reading.prefix)
        for hasher in reading.hashers:
            _hash(hasher, hasher.scheme.none_hash, [root], 0, reading.prefix, reading)
        return root

    def _keep(self, path: Sequence[Node], known: int) -> None:
        """Add the new nodes of ``path``, mark the whole path as used, and evict the oldest nodes above the limit.

        The root is marked last, so that it leaves last.
        """
        with self._lock:
            room = self.limit_bytes // ONE_PROMPT
            for node in path[known:] if path[0] in self._used else (path[0], *path[known:]):
                cost = node.cost
                room -= cost
                if room < 0:
                    break
                self._add(node, cost)
            used = self._used
            for node in reversed(path):
                if node in used:
                    used.move_to_end(node)
            while self.bytes > self.limit_bytes:
                self._evict()

    def _add(self, node: Node, cost: int) -> None:
        parent = node.parent
        if parent is None or node in self._used or node.key in parent.children:
            return  # the node is in the trie, or another thread has added an equal one
        if parent is self._top or parent in self._used:
            parent.children[node.key] = parent.latest = node
            self._used[node] = cost
            self.bytes += cost

    def _evict(self) -> None:
        node, cost = self._used.popitem(last=False)
        self.bytes -= cost
        parent = node.parent
        if parent is not None:
            parent.children.pop(node.key, None)
            if parent.latest is node:
                parent.latest = None


def whole(node: Node) -> tuple[list[int], str | None, Lora]:
    """The ids of a prompt up to the end of this piece, and the salt and the adapter of such prompts."""
    path = [node]
    while (above := path[-1].parent) is not None:
        path.append(above)
    _top, root = path.pop(), path[-1]
    _name, _prefix, _hashers, salt, lora = cast("tuple[Hashable, ...]", root.key)
    ids = array("I")
    for piece in reversed(path):
        ids += piece.ids
    return ids.tolist(), cast("str | None", salt), cast("Lora", lora)


def _digits(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


def _chain(k: int, hasher: Hasher, path: list[Node], known: int, tail: array[int], reading: Reading) -> Chain:
    """The chain, by hasher number ``k``, of a path and the ids behind it. The first ``known`` nodes have hashes."""
    ids = _rest(path[:known], hasher)
    for node in path[known:]:
        ids += node.ids
    packed = [node.hashes[k] for node in path[:known]]
    packed.append(_hash(hasher, path[known - 1].ends[k], path, known, ids + tail, reading))
    return hasher.capped(b"".join(packed), path[-1].tokens + len(tail))


def _rest(path: Sequence[Node], hasher: Hasher) -> array[int]:
    """The ids of a path behind its last full block."""
    blocks, ids = _blocks(path[-1].tokens, hasher), array("I")
    need = path[-1].tokens - blocks * hasher.scheme.block_tokens if blocks < MAX_BLOCKS else 0
    for node in reversed(path):
        if need <= 0:
            break
        ids = node.ids[-need:] + ids
        need -= len(node.ids)
    return ids


def _blocks(tokens: int, hasher: Hasher) -> int:
    return min(tokens // hasher.scheme.block_tokens, MAX_BLOCKS)


def _hash(hasher: Hasher, end: bytes, path: Sequence[Node], known: int, ids: array[int], reading: Reading) -> bytes:
    """Packed hashes of the blocks behind the first ``known`` nodes, made in one call. Each new node gets its share.

    end: the digest of the last block before. ids: all ids behind that block.
    """
    before = done = _blocks(path[known - 1].tokens, hasher) if known else 0
    digests = hasher.digests(end, before, ids, reading.salt, reading.lora)
    packed = pack_hashes(digests)
    for node in path[known:]:
        blocks = _blocks(node.tokens, hasher)
        node.hashes.append(packed[(done - before) * HASH_BYTES : (blocks - before) * HASH_BYTES])
        node.ends.append(digests[blocks - before - 1] if blocks > before else end)
        done = blocks
    return packed
