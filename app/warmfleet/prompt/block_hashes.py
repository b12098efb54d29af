"""Token ids → the chain of block hashes of one prompt, as the engines of one scheme compute it. Pure."""

from __future__ import annotations

import hashlib
import struct
from array import array
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from warmfleet.protocol import cbor, wire
from warmfleet.protocol.wire import DIGEST_BYTES, HASH_BYTES, Scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Lora = tuple[str, str] | None

MAX_BLOCKS = 8_192  # of one chain: what decide accepts
BLOCKS_AT_ONCE = 512  # in one call that holds the interpreter: 0.3 ms
NO_KEYS = cbor.encode(None)
TABLE_TOKENS = 262_144  # ids with a ready CBOR form: the largest vocabularies in use

TEXT_BLOCK_BYTES = 64  # counted as 16 tokens: four bytes of text make about one token
TEXT_BLOCK_TOKENS = 16
#: Workers whose tokenizer nobody knows are matched by text. The seed makes the scheme's id its own.
TEXT_SCHEME = Scheme("sha256_cbor", hashlib.sha256(b"warmfleet text 1").digest(), TEXT_BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Chain:
    """The block hashes of one prompt under one scheme: packed, 8 bytes each, capped as the engine caps."""

    scheme_id: int
    block_tokens: int
    hashes: bytes


class Hasher:
    """Block hashes of one scheme, equal to ``wire.chain_hashes`` and four times as fast."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._new = hash_of(scheme.algorithm)
        self._table = _cbor_table() if scheme.algorithm.endswith("_cbor") else ()
        self._head = b"\x83" + cbor.head(0x40, DIGEST_BYTES[scheme.algorithm])
        self._array_head = cbor_array_head(scheme.block_tokens)

    def chain(self, token_ids: Sequence[int], salt: str | None = None, lora: Lora = None) -> Chain:
        """The chain of a prompt."""
        ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        return self.capped(wire.pack_hashes(self.digests(self.scheme.none_hash, 0, ids, salt, lora)), len(ids))

    def capped(self, packed: bytes, tokens: int) -> Chain:
        """As the engine caps a prompt's blocks: its last token is always computed."""
        size = self.scheme.block_tokens
        return Chain(self.scheme.scheme_id, size, packed[: max(0, (tokens - 1) // size) * HASH_BYTES])

    def digests(self, previous: bytes, blocks: int, ids: array[int], salt: str | None, lora: Lora) -> list[bytes]:
        """Full digests of a chain from block number ``blocks`` on, at most MAX_BLOCKS in all.

        previous: the digest before; ids: from there on. salt counts in a prompt's first block only. lora: (name, path)
        of the adapter, in every block.
        """
        size, found = self.scheme.block_tokens, list[bytes]()
        count = min(len(ids) // size, MAX_BLOCKS - blocks)
        for start in range(0, count, BLOCKS_AT_ONCE):
            part = ids[start * size : min(start + BLOCKS_AT_ONCE, count) * size]
            first = blocks + start == 0
            found += self._digests(previous, part, salt if first else None, lora, first=first)
            previous = found[-1]
        return found

    def _digests(self, previous: bytes, ids: array[int], salt: str | None, lora: Lora, *, first: bool) -> list[bytes]:
        try:
            if self._table:
                return self._cbor_digests(previous, ids, salt, lora)
        except IndexError:  # an id beyond the table
            pass
        return wire.chain_hashes(self.scheme, ids, None if first else previous, salt, lora, self._new)

    def _cbor_digests(self, previous: bytes, ids: array[int], salt: str | None, lora: Lora) -> list[bytes]:
        # One block is 83 | bytes head, parent | array head, ids | extra keys; only parent and ids change.
        join, new, head, size = b"".join, self._new, self._head, self.scheme.block_tokens
        later = cbor.encode(wire.extra_keys(self.scheme, None, lora)) if lora is not None else NO_KEYS
        forms = itemgetter(*ids, 0)(self._table)[:-1]  # of every id, in one call; the 0: of one id it would be no tuple
        groups = zip(repeat(self._array_head), *[iter(forms)] * size, repeat(later), strict=False)
        blocks = list(map(join, groups))
        if salt is not None:
            first = cbor.encode(wire.extra_keys(self.scheme, salt, lora))
            blocks[0] = blocks[0][: len(blocks[0]) - len(later)] + first
        previous = new(b"\x83" + cbor.encode(previous) + blocks[0]).digest()  # a NONE_HASH may be longer than a digest
        digests = [previous]
        for block in blocks[1:]:
            previous = new(head + previous + block).digest()
            digests.append(previous)
        return digests


def hash_of(algorithm: str) -> Callable[[bytes], Any]:
    """What makes the hashes of one of vLLM's algorithms: SHA-256 or XXH3-128."""
    return xxh3_128 if algorithm.startswith("xxhash") else hashlib.sha256


def text_chain(text: bytes) -> Chain:
    """The chain of a text whose tokenizer is unknown: 64 bytes make a block that counts as 16 tokens."""
    previous, packed = TEXT_SCHEME.none_hash, []
    count = min((len(text) - 1) // TEXT_BLOCK_BYTES, MAX_BLOCKS) if text else 0
    for start in range(0, count * TEXT_BLOCK_BYTES, TEXT_BLOCK_BYTES):
        previous = hashlib.sha256(previous + text[start : start + TEXT_BLOCK_BYTES]).digest()
        packed.append(previous[-HASH_BYTES:])
    return Chain(TEXT_SCHEME.scheme_id, TEXT_BLOCK_TOKENS, b"".join(packed))


def text_tokens(length: int) -> int:
    """Tokens that ``length`` bytes of text count as, at least 1."""
    return max(1, length * TEXT_BLOCK_TOKENS // TEXT_BLOCK_BYTES)


def text_block_tokens(length: int, tokens: int) -> int:
    """Tokens of one text block of a prompt that is known to have so many: at most what is counted else."""
    return max(1, min(TEXT_BLOCK_TOKENS, tokens * TEXT_BLOCK_BYTES // max(1, length)))


def cbor_array_head(length: int) -> bytes:
    return cbor.encode((0,) * length)[: -length or None]


@cache
def _cbor_table() -> tuple[bytes, ...]:
    """The CBOR form of every token id below TABLE_TOKENS, made once (0.1 s, 10 MB)."""
    small = [cbor.encode(number) for number in range(65_536)]
    return (*small, *[struct.pack(">BI", 26, number) for number in range(65_536, TABLE_TOKENS)])
