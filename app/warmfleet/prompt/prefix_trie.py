"""A trie of earlier prompts: texts with their token ids and block hashes, so that only new text costs time.

A text is cut into pieces by rules under which the ids of the pieces, joined, are the ids of the whole (``cut_points``).
A node holds a run of consecutive pieces, which follow the pieces of the nodes above it; so one comparison finds a long
known beginning. If a new prompt shares only the first pieces of a node, the node is replaced by two: the shared pieces,
and the rest. Texts, ids and hashes of a node never change. A lock guards the membership and order of nodes,
their parents, children and marks, and the count of bytes. When the trie has more than ``limit_bytes``, the least
recently used nodes are evicted; a node is evicted after all nodes below it.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, cast
from weakref import ref

import orjson

from warmfleet.prompt.block_hashes import MAX_BLOCKS
from warmfleet.protocol.wire import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from warmfleet.prompt.block_hashes import Chain, Hasher, Lora
    from warmfleet.prompt.cut_points import Cuts
    from warmfleet.protocol.wire import Media

NODE_BYTES = 900  # bytes of Python objects per node, beside its text, ids and hashes
PIECE_BYTES = 260  # bytes of Python objects per piece
HASHER_BYTES = 90  # bytes of Python objects per node or piece, and hasher
TOKEN_BYTES = 11  # bytes per token, for its id, and for the digits of the id once a request needed them
ENDING_BYTES = 600  # bytes of Python objects per Ending (a prompt's text behind its last piece)
MAX_ENDING = 2_048  # most characters of an ending that is kept; only texts with few places to cut have longer endings
ONE_PROMPT = 4  # divisor of ``limit_bytes``: a single prompt may fill a fourth of the trie

NO_IDS = array("I")


class Piece(NamedTuple):
    """Where a piece of text ends. Positions and tokens are counted from the beginning of the prompt.

    decided_at: texts that are equal up to here have the same piece (``Cuts.next``). ends: for each hasher, the digest
    of the last block that is full at the end of this piece.
    """

    end: int
    decided_at: int
    tokens: int
    ends: tuple[bytes, ...]


class Mark:
    """A position at the end of a node, which stays valid when the node is split; ``popular_prefixes`` counts by marks.

    node: a weak reference to the node that ends at this position.
    """

    __slots__ = ("__weakref__", "node")

    def __init__(self, node: Node) -> None:
        self.node = ref(node)


class Ids:
    """Token ids, and their text in a JSON list."""

    __slots__ = ("_digits", "ids")

    def __init__(self, ids: array[int]) -> None:
        self.ids = ids
        self._digits: bytes | None = None

    @property
    def digits(self) -> bytes:
        """The ids as text in a JSON list, made at the first call."""
        if self._digits is None:
            self._digits = _digits(self.ids)
        return self._digits


class Ending(Ids):
    """The text of a prompt behind its last piece, kept in case the same prompt comes again.

    suffix: the special tokens at the end of ``ids``. packed: for each hasher, the packed hashes of the blocks behind
    the last full one of the node.
    """

    __slots__ = ("packed", "suffix", "text")

    def __init__(self, text: str, ids: array[int], suffix: array[int], packed: list[bytes]) -> None:
        super().__init__(ids)
        self.text, self.suffix, self.packed = text, suffix, packed

    @property
    def cost(self) -> int:
        """The approximate size of this ending in bytes."""
        hashes = HASHER_BYTES * len(self.packed) + sum(map(len, self.packed))
        return ENDING_BYTES + _text_bytes(self.text) + TOKEN_BYTES * len(self.ids) + hashes

    def matches(self, text: str, at: int, suffix: array[int]) -> bool:
        """Return whether the rest of ``text`` from ``at`` on is this ending's text, with the same special tokens."""
        return len(text) - at == len(self.text) and text.startswith(self.text, at) and suffix == self.suffix


class Node(Ids):
    """Consecutive pieces. A root has none, only the special token ids that begin every prompt of its ``Reading``.

    parent: the node above. key: the key of this node among the parent's children: the text that decides where the
    first piece ends, or a root's ``Reading.key``. text: of the pieces, plus the text behind them that decides where
    they end. end, tokens: number of the prompt's characters and ids up to the end of this node. hashes: for each
    hasher, the packed hashes of the blocks that become full in this node. ends: for each hasher, the digest of the last
    full block. origin: the node whose first pieces this node has, until it replaces that node; else None. ending: of
    the last prompt that ended behind this node.
    """

    __slots__ = (
        "__weakref__", "children", "end", "ending", "ends", "hashes", "key", "latest", "mark", "origin", "parent",
        "pieces", "text", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        run: tuple[Hashable, str, Sequence[Piece]],
        ids: array[int],
        hashes: list[bytes],
        ends: tuple[bytes, ...],
    ) -> None:
        super().__init__(ids)
        self.parent = parent
        self.key, self.text, self.pieces = run
        self.hashes, self.ends = hashes, ends
        self.end: int = self.pieces[-1].end if self.pieces else 0
        self.tokens: int = (parent.tokens if parent else 0) + len(ids)
        self.children: dict[Hashable, Node] = {}
        self.latest: Node | None = None  # the child used last, which ``find`` tries first
        self.mark: Mark | None = None
        self.origin: Node | None = None
        self.ending: Ending | None = None

    @classmethod
    def of(cls, parent: Node, text: str, pieces: Sequence[Piece], ids: array[int], hashes: list[bytes]) -> Node:
        """Make a node of these pieces. text: the prompt's text from the parent's end on, at least to the last cut."""
        begin = parent.end
        run = text[: pieces[0].decided_at - begin], text[: max([piece.decided_at for piece in pieces]) - begin], pieces
        return cls(parent, run, ids, hashes, pieces[-1].ends)

    @property
    def cost(self) -> int:
        """The approximate size of this node in bytes."""
        key = self.key if isinstance(self.key, str) else repr(self.key)  # the key of a root is a tuple with the salt
        text = _text_bytes(self.text) + (_text_bytes(key) if len(self.pieces) != 1 else 0)
        ending = self.ending.cost if self.ending is not None else 0
        objects = ending + PIECE_BYTES * len(self.pieces) + HASHER_BYTES * len(self.hashes) * (1 + len(self.pieces))
        return NODE_BYTES + objects + text + TOKEN_BYTES * len(self.ids) + sum(map(len, self.hashes))

    def common(self, text: str) -> int:
        """Return the number of this node's first pieces that a prompt's text has as well."""
        done = begin = self.parent.end if self.parent else 0
        for number, piece in enumerate(self.pieces):
            if not text.startswith(self.text[done - begin : piece.decided_at - begin], done):
                return number
            done = piece.end
        return len(self.pieces)

    def first(self, count: int, hashers: Sequence[Hasher]) -> Node:
        """Make a node of the first ``count`` pieces, to replace this node."""
        parent = cast("Node", self.parent)
        pieces = self.pieces[:count]
        ids = self.ids[: pieces[-1].tokens - parent.tokens]
        hashes = [
            packed[: HASH_BYTES * (hasher.blocks(pieces[-1].tokens) - hasher.blocks(parent.tokens))]
            for packed, hasher in zip(self.hashes, hashers, strict=True)
        ]
        return Node.of(parent, self.text, pieces, ids, hashes)

    def behind(self, head: Node) -> Node:
        """Make a node of this node's pieces without the first ones, which ``head`` has."""
        hashes = [packed[len(first) :] for packed, first in zip(self.hashes, head.hashes, strict=True)]
        begin = cast("Node", head.parent).end
        text, pieces = self.text[head.end - begin :], self.pieces[len(head.pieces) :]
        return Node.of(head, text, pieces, self.ids[len(head.ids) :], hashes)

    def marked(self) -> Mark:
        """Return the position of this node's end; it stays valid if the node is split."""
        if self.mark is None:
            self.mark = Mark(self)
        return self.mark


@dataclass(slots=True)  # never changed, but not frozen, because frozen ones are slower to make
class Prompt:
    """A prompt of a request as the engines see it: its ids in parts, and a chain for each hasher.

    known_tokens: the number of ids taken from earlier prompts. nodes: the trie's nodes that have the first parts, in
    order (the last may be an Ending). shared: the last node that an earlier prompt had, too, or None. image_tokens: the
    number of ids that stand for images. named_images: a client named an image by an id of its own. learned_images:
    identifiers of the images that are known from reports.
    """

    parts: Sequence[array[int]]
    tokens: int
    chains: tuple[Chain, ...]
    known_tokens: int = 0
    nodes: Sequence[Node | Ending] = ()
    shared: Node | None = None
    image_tokens: int = 0
    named_images: bool = False
    learned_images: frozenset[str] = frozenset()

    @property
    def ids(self) -> list[int]:
        """All ids in one list."""
        whole = array("I")
        for part in self.parts:
            whole += part
        return whole.tolist()

    def json(self) -> list[bytes]:
        """Write the ids as a JSON list, in parts to be joined, with the digits that earlier prompts' nodes keep."""
        made = [b"["]
        for node in self.nodes:
            if node.ids:
                made += (node.digits, b",")
        for ids in self.parts[len(self.nodes) :]:
            if ids:
                made += (_digits(ids), b",")
        made[max(1, len(made) - 1) :] = [b"]"]  # in place of the last comma
        return made


@dataclass(slots=True)  # never changed, but not frozen, for the same reason as Prompt
class Reading:
    """How a text becomes token ids and block hashes. Prompts share nodes only if their readings have the same ``key``.

    name: stands in the key for the tokenizer and the cut rules. encode: text → ids without
    special tokens. prefix, suffix: the special tokens around them. media: finds the images in the parts of a prompt's
    ids, if it has any; equal texts must mean equal images. key: of this reading's root in the trie.
    """

    name: Hashable
    encode: Callable[[str], array[int]]
    cuts: Cuts
    prefix: array[int] = field(default_factory=lambda: array("I"))
    suffix: array[int] = field(default_factory=lambda: array("I"))
    hashers: tuple[Hasher, ...] = ()
    salt: str | None = None
    lora: Lora = None
    media: Callable[[Sequence[array[int]]], Sequence[Media]] | None = None
    key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.name, self.prefix.tobytes(), self.hashers, self.salt, self.lora


class Trie:
    """The prefix tree of tokenised prompts, with a bound for its bytes. Several threads use it at once."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._top = Node(None, (None, "", ()), NO_IDS, [], ())
        self._used: OrderedDict[Node, int] = OrderedDict()  # node -> its cost in bytes; the least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used)

    def find(self, text: str, reading: Reading) -> list[Node]:
        """Return the nodes whose pieces ``text`` begins with, root first: the longest path in the trie.

        The root and the last node may be new, the latter with first pieces of a node in the trie; ``read`` adds them.
        """
        node = self._top.children.get(reading.key) or self._root(reading)
        path = [node]
        while True:
            at, child = node.end, node.latest
            if child is None or not text.startswith(child.text, at):
                cut = reading.cuts.next(text, at) if node.children else None
                child = node.children.get(text[at : cut[1]]) if cut else None
                if child is None:
                    return path
                if not text.startswith(child.text, at):
                    head = child.first(child.common(text), reading.hashers)
                    head.origin = child
                    return [*path, head]
            path.append(child)
            node = child

    def read(self, text: str, reading: Reading, path: list[Node] | None = None) -> Prompt:
        """Make the prompt of a text, and put its new pieces into the trie. path: result of ``find``, if at hand."""
        path = self.find(text, reading) if path is None else path
        last = path[-1]
        ending = last.ending
        if ending is not None and ending.matches(text, last.end, reading.suffix):
            return self._known(path, ending, reading)
        at, tokens, ids = last.end, last.tokens, array("I")
        cuts: list[tuple[int, int, int]] = []  # of each new piece: end, decided_at and tokens, as in Piece
        while (cut := reading.cuts.next(text, at)) is not None:
            ids += reading.encode(text[at : cut[0]])
            at = cut[0]
            cuts.append((*cut, tokens + len(ids)))
        tail = reading.encode(text[at:] if at else text)
        if reading.suffix:
            tail += reading.suffix
        total = tokens + len(ids) + len(tail)
        media = reading.media([*[node.ids for node in path], ids, tail]) if reading.media is not None else ()
        if not cuts and last is path[0] and last in self._used:  # a prompt without a cut is not stored
            short = [
                _chain(k, hasher, path, _packed(k, path, tail, reading, media)[1], total)
                for k, hasher in enumerate(reading.hashers)
            ]
            return Prompt([last.ids, tail], total, tuple(short), tokens, path)
        chains, all_packed, hashes, ends = [], [], [], []
        for k, hasher in enumerate(reading.hashers):
            packed, hashes_of_node, ends_of_pieces = _hashed(k, path, ids + tail, cuts, reading, media)
            chains.append(_chain(k, hasher, path, packed, total))
            all_packed.append(packed[len(hashes_of_node) :])
            hashes.append(hashes_of_node)
            ends.append(ends_of_pieces)
        if cuts:
            of_pieces = zip(*ends, strict=True) if ends else repeat(())
            pieces = [Piece(*cut, digests) for cut, digests in zip(cuts, of_pieces, strict=False)]
            path.append(Node.of(last, text[last.end :], pieces, ids, hashes))
        kept = len(path) > 1 and len(text) - at <= MAX_ENDING
        ending = Ending(text[at:], tail, reading.suffix, all_packed) if kept else None
        self._keep(path, last, reading.hashers, ending)
        parts = [*[node.ids for node in path], tail]
        nodes: list[Node | Ending] = [*path] if ending is None else [*path, ending]
        return Prompt(parts, total, tuple(chains), tokens, nodes, last if last is not path[0] else None)

    def _known(self, path: list[Node], ending: Ending, reading: Reading) -> Prompt:
        """Return the prompt of a text that an earlier prompt had in full."""
        last, hashers = path[-1], reading.hashers
        total = last.tokens + len(ending.ids)
        chains = [_chain(k, hasher, path, ending.packed[k], total) for k, hasher in enumerate(hashers)]
        self._keep(path, last, hashers)
        parts = [*[node.ids for node in path], ending.ids]
        return Prompt(parts, total, tuple(chains), total, (*path, ending), last)

    def _root(self, reading: Reading) -> Node:
        hashers, ids = reading.hashers, reading.prefix
        made = [hasher.digests(hasher.scheme.none_hash, 0, ids, reading.salt, reading.lora) for hasher in hashers]
        ends = [new[-1] if new else hasher.scheme.none_hash for new, hasher in zip(made, hashers, strict=True)]
        hashes = [hasher.packed(new) for new, hasher in zip(made, hashers, strict=True)]
        return Node(self._top, (reading.key, "", ()), ids, hashes, tuple(ends))

    def _keep(self, path: Sequence[Node], last: Node, hashers: Sequence[Hasher], ending: Ending | None = None) -> None:
        """Add the new nodes of ``path``, mark the whole path as used, and evict the oldest nodes above the limit.

        last: the last node that ``find`` has found. ending: a new ending behind the path. The root is marked as used
        last, so that it is evicted last.
        """
        with self._lock:
            room, used, root = self.limit_bytes // ONE_PROMPT, self._used, path[0]
            if root not in used:
                room -= (cost := root.cost)
                if room >= 0:
                    self._add(root, cost)
            if last.origin is not None and last not in used:
                self._split(last, last.origin)
            if (new := path[-1]) is not last:
                self._add_beginning(new, room, hashers)
            if ending is not None and new in used:
                grown = ending.cost - (new.ending.cost if new.ending is not None else 0)
                new.ending = ending
                used[new] += grown
                self.bytes += grown
            node: Node | None = new
            while node is not None:  # up by ``parent``, not by ``path``, which another thread's split may have outdated
                if node in used:
                    used.move_to_end(node)
                    if node.parent is not None:
                        node.parent.latest = node
                node = node.parent
            while self.bytes > self.limit_bytes:
                self._evict()

    def _add_beginning(self, node: Node, room: int, hashers: Sequence[Hasher]) -> None:
        """Add a node of as many first pieces of ``node`` as fit into about ``room`` bytes."""
        cost = node.cost
        if cost > room:
            count = len(node.pieces) * max(0, room) // cost
            if not count:
                return
            node = node.first(count, hashers)
            cost = node.cost
        self._add(node, cost)

    def _add(self, node: Node, cost: int) -> None:
        parent = node.parent
        if parent is None or node in self._used or node.key in parent.children:
            return  # the node is in the trie, or another thread has added a node with the same key
        if parent is self._top or parent in self._used:
            parent.children[node.key] = node
            self._used[node] = cost
            self.bytes += cost

    def _split(self, head: Node, node: Node) -> None:
        """Replace ``node`` by ``head``, which has its first pieces, and a new node below it with the others."""
        cost, parent = self._used.pop(node, None), node.parent
        if cost is None or parent is None:
            return  # the node was evicted, or another thread has split it
        head.parent, head.origin = parent, None
        tail = node.behind(head)
        tail.children, tail.latest, tail.ending = node.children, node.latest, node.ending
        for child in tail.children.values():
            child.parent = tail
        tail.mark, node.mark = node.mark, None
        if tail.mark is not None:
            tail.mark.node = ref(tail)
        head.children[tail.key] = tail
        parent.children[head.key] = head
        if parent.latest is node:
            parent.latest = head
        self.bytes -= cost
        for part in (tail, head):
            self._used[part] = part.cost
            self.bytes += self._used[part]

    def _evict(self) -> None:
        node, cost = self._used.popitem(last=False)
        self.bytes -= cost
        parent = node.parent
        if parent is not None:
            parent.children.pop(node.key, None)
            if parent.latest is node:
                parent.latest = None


def whole(node: Node) -> tuple[list[int], str | None, Lora]:
    """Return the ids of a prompt up to the end of this node, and the salt and the adapter of such prompts."""
    path = [node]
    while (above := path[-1].parent) is not None:
        path.append(above)
    _top, root = path.pop(), path[-1]
    _name, _prefix, _hashers, salt, lora = cast("tuple[Hashable, ...]", root.key)
    ids = array("I")
    for part in reversed(path):
        ids += part.ids
    return ids.tolist(), cast("str | None", salt), cast("Lora", lora)


def _digits(ids: array[int]) -> bytes:
    return orjson.dumps(ids.tolist())[1:-1]


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _chain(k: int, hasher: Hasher, path: Sequence[Node], packed: bytes, tokens: int) -> Chain:
    """Make the chain of a path and of the packed hashes behind it. k: number of the hasher."""
    if len(path) > 1 or path[0].tokens:
        packed = b"".join([*[node.hashes[k] for node in path], packed])
    return hasher.capped(packed, tokens)


def _hashed(
    k: int,
    path: Sequence[Node],
    new: array[int],
    cuts: Sequence[tuple[int, int, int]],
    reading: Reading,
    media: Sequence[Media],
) -> tuple[bytes, bytes, list[bytes]]:
    """Hash the ids behind a path with hasher number ``k``. cuts: as in ``read``.

    Returns (hashes of all full blocks behind the path's last full block; those of them that end in the new pieces, for
    the new node; for each new piece the digest of the last full block).
    """
    hasher, last = reading.hashers[k], path[-1]
    before, end = hasher.blocks(last.tokens), last.ends[k]
    digests, packed = _packed(k, path, new, reading, media)
    filled, ends = 0, []
    for _, _, tokens in cuts:
        filled = hasher.blocks(tokens) - before
        ends.append(digests[filled - 1] if filled else end)
    return packed, packed[: HASH_BYTES * filled], ends


def _packed(
    k: int, path: Sequence[Node], new: array[int], reading: Reading, media: Sequence[Media]
) -> tuple[list[bytes], bytes]:
    """Hash the ids behind the last full block of a path with hasher number ``k``; return digests and block hashes."""
    hasher, last = reading.hashers[k], path[-1]
    ids = _open_block(path, hasher) + new if last.tokens else new
    digests = hasher.digests(last.ends[k], hasher.blocks(last.tokens), ids, reading.salt, reading.lora, media)
    return digests, hasher.packed(digests)


def _open_block(path: Sequence[Node], hasher: Hasher) -> array[int]:
    """Return the ids of a path behind its last full block."""
    blocks, ids = hasher.blocks(path[-1].tokens), array("I")
    need = path[-1].tokens - blocks * hasher.scheme.block_tokens if blocks < MAX_BLOCKS else 0
    for node in reversed(path):
        if need <= 0:
            break
        ids = node.ids[-need:] + ids
        need -= len(node.ids)
    return ids
