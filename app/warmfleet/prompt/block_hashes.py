"""Computes the chain of block hashes of a prompt from its token ids, as the engines of one scheme do. Pure."""

from __future__ import annotations

import hashlib
import struct
from array import array
from functools import cache
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from xxhash import xxh3_128

from warmfleet.protocol import cbor, wire
from warmfleet.protocol.wire import DIGEST_BYTES, HASH_BYTES, Scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet.protocol.wire import Media

    Lora = tuple[str, str] | None

MAX_BLOCKS = 8_192  # most blocks in one chain, because lua/decide.lua accepts no more
BLOCKS_AT_ONCE = 512  # most hashes made in one call, which holds the interpreter lock for 0.3 ms
NO_KEYS = cbor.encode(None)  # CBOR of the extra keys (salt, adapter) of most blocks, which have none
TABLE_TOKENS = 262_144  # number of ids whose CBOR form is made in advance, as many as the largest vocabularies have

TEXT_BLOCK_BYTES = 64  # length of a block of text
TEXT_BLOCK_TOKENS = 16  # tokens that a block of text counts as, at about four bytes for each token
#: Prompts for workers whose tokenizer is not known are hashed as text. The seed gives this scheme an id of its own.
TEXT_SCHEME = Scheme("sha256_cbor", hashlib.sha256(b"warmfleet text 1").digest(), TEXT_BLOCK_TOKENS)


class Chain(NamedTuple):
    """The block hashes of a prompt under one scheme, 8 bytes each, joined: of the blocks that an engine that holds them
    all does not compute.

    last: the hash of the block behind these if the prompt ends with it, else nothing. An engine computes it once more
    even if its own cache holds it, but may load it from a tier.
    """

    scheme_id: int
    block_tokens: int
    hashes: bytes
    last: bytes = b""


class Hasher:
    """Computes block hashes of one scheme: equal to those of ``wire.chain_hashes``, four times as fast."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._new = hash_of(scheme.algorithm)
        self._table = _cbor_table() if scheme.algorithm.endswith("_cbor") else ()
        self._digest_bytes = DIGEST_BYTES[scheme.algorithm]
        self._head = b"\x83" + cbor.head(0x40, self._digest_bytes)
        self._array_head = cbor_array_head(scheme.hash_block_tokens)
        self._steps = scheme.steps  # hashes for each block
        self._size, self._ahead = scheme.block_tokens, scheme.lookahead  # tokens in a block; behind it, hashed with it
        self._ahead_head = cbor_array_head(1 + self._ahead) if self._ahead else b""
        self._first = HASH_BYTES if scheme.drops else 0  # where chains begin
        self._blocks_at_once = max(1, BLOCKS_AT_ONCE // self._steps)
        self._words = self._digest_bytes // HASH_BYTES  # words of 8 bytes in a digest; the last word is the block hash

    def chain(
        self, token_ids: Sequence[int], salt: str | None = None, lora: Lora = None, media: Sequence[Media] = ()
    ) -> Chain:
        """Return the chain of a whole prompt. lora: name and path of its adapter. media: its images."""
        ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
        return self.capped(self.packed(self.digests(self.scheme.none_hash, 0, ids, salt, lora, media)), len(ids))

    def blocks(self, tokens: int) -> int:
        """Count the blocks in so many first tokens of a prompt whose hashes these tokens decide; at most MAX_BLOCKS."""
        count = (tokens - self._ahead) // self._size
        return 0 if count < 0 else min(MAX_BLOCKS, count)

    def packed(self, digests: Sequence[bytes]) -> bytes:
        """Return the same as ``wire.pack_hashes`` for these digests, four times as fast."""
        return array("Q", b"".join(digests))[self._words - 1 :: self._words].tobytes()

    def capped(self, packed: bytes, tokens: int) -> Chain:
        """Return the chain, with a block of the prompt's last token apart, because engines always compute that token.

        An engine that computes the last block that it has once more lacks one block of those that it holds: the chain
        begins with the prompt's second block, so that as many of its blocks match.
        """
        size = self.scheme.block_tokens
        end = max(0, (tokens - 1) // size) * HASH_BYTES
        last = b"" if tokens % size or end < self._first else packed[end : end + HASH_BYTES]
        return Chain(self.scheme.scheme_id, size, packed[self._first : end], last)

    def digests(
        self,
        previous: bytes,
        blocks: int,
        ids: array[int],
        salt: str | None,
        lora: Lora,
        media: Sequence[Media] = (),
    ) -> list[bytes]:
        """Compute the full digests of a chain from block number ``blocks`` on, up to MAX_BLOCKS blocks in all.

        previous: the digest of the block before. ids: the tokens from that block on; those behind the last block are
        left out, or hashed with it. The salt is part of a prompt's first block only; lora (name and path of the
        adapter) is part of every block. media: all images of the prompt; each is part of the blocks that it touches.
        """
        size, at_once, ahead = self._size, self._blocks_at_once, self._ahead
        count = min((len(ids) - ahead) // size, MAX_BLOCKS - blocks)
        found: list[bytes] = []
        for start in range(0, count, at_once):
            part = ids[start * size : min(start + at_once, count) * size + ahead]
            parent, its_salt = (previous, None) if blocks + start else (None, salt)
            here = _within(media, (blocks + start) * size, len(part)) if media else ()
            try:
                found += self._cbor_digests(previous, part, its_salt, lora, here)
            except IndexError:  # an id is not in the table, or there is none; the slower function takes every id
                found += wire.chain_hashes(self.scheme, part, parent, its_salt, lora, self._new, here)
            previous = found[-1]
        return found

    def _cbor_digests(
        self, previous: bytes, ids: array[int], salt: str | None, lora: Lora, media: Sequence[Media]
    ) -> list[bytes]:
        # In CBOR, a block is 83 | bytes head, parent | array head, ids | extra keys. Only parent and ids change. With
        # look-ahead, an array of the extra keys and the next ids is in place of the extra keys.
        if not self._table:
            raise IndexError
        join, new, head, size, ahead = b"".join, self._new, self._head, self.scheme.hash_block_tokens, self._ahead
        begin, next_ids = self._ahead_head, ()
        later = begin + (cbor.encode(wire.extra_keys(self.scheme, None, lora)) if lora is not None else NO_KEYS)
        # All ids are looked up in one call. With the 0 at the end, which zip leaves over, the result is always a tuple.
        forms = itemgetter(*ids, 0)(self._table)
        count = (len(ids) - ahead) // size
        if ahead:
            next_ids = tuple(forms[size + number :: size] for number in range(ahead))
        groups = zip(repeat(self._array_head, count), *[iter(forms)] * size, repeat(later), *next_ids, strict=False)
        blocks = list(map(join, groups))
        for number in _touched(media, size, ahead, count) if media else () if salt is None else (0,):
            start, end = number * size, (number + 1) * size
            touching = wire.media_keys(media, start, end + ahead)
            keys = cbor.encode(wire.extra_keys(self.scheme, None if number else salt, lora, touching))
            blocks[number] = join((self._array_head, *forms[start:end], begin, keys, *forms[end : end + ahead]))
        if len(previous) != self._digest_bytes:  # NONE_HASH may be longer than a digest
            head = b"\x83" + cbor.encode(previous)[: -len(previous)]
        digest = new(head + previous + blocks[0]).digest()
        head = self._head
        digests = [digest, *[digest := new(head + digest + block).digest() for block in blocks[1:]]]
        return digests if self._steps == 1 else digests[self._steps - 1 :: self._steps]


def _within(media: Sequence[Media], start: int, length: int) -> list[Media]:
    """Return the images that some of the ``length`` tokens from ``start`` on touch, with offsets from ``start``."""
    return [
        (offset - start, tokens, item)
        for offset, tokens, item in media
        if offset < start + length and offset + tokens > start
    ]


def _touched(media: Sequence[Media], size: int, ahead: int, count: int) -> list[int]:
    """Return the first of ``count`` blocks, which may have a salt, and those that an image touches."""
    found = {0}
    for offset, tokens, _ in media:
        found.update(range(max(0, (offset - ahead) // size), min(count, (offset + tokens - 1) // size + 1)))
    return sorted(found)


def hash_of(algorithm: str) -> Callable[[bytes], Any]:
    """Return the hash function of one of vLLM's algorithm names: SHA-256 or XXH3-128."""
    return xxh3_128 if algorithm.startswith("xxhash") else hashlib.sha256


def text_chain(text: bytes) -> Chain:
    """Return the chain of a text whose tokenizer is not known. A block has 64 bytes and counts as 16 tokens."""
    previous, packed = TEXT_SCHEME.none_hash, []
    count = min((len(text) - 1) // TEXT_BLOCK_BYTES, MAX_BLOCKS) if text else 0
    for start in range(0, count * TEXT_BLOCK_BYTES, TEXT_BLOCK_BYTES):
        previous = hashlib.sha256(previous + text[start : start + TEXT_BLOCK_BYTES]).digest()
        packed.append(previous[-HASH_BYTES:])
    return Chain(TEXT_SCHEME.scheme_id, TEXT_BLOCK_TOKENS, b"".join(packed))


def text_tokens(length: int) -> int:
    """Return the number of tokens that ``length`` bytes of text count as, at least 1."""
    return max(1, length * TEXT_BLOCK_TOKENS // TEXT_BLOCK_BYTES)


def text_block_tokens(length: int, tokens: int) -> int:
    """Return the tokens that a text block counts as, in a prompt of ``length`` bytes and ``tokens`` tokens."""
    return max(1, min(TEXT_BLOCK_TOKENS, tokens * TEXT_BLOCK_BYTES // max(1, length)))


def cbor_array_head(length: int) -> bytes:
    """Return the bytes that begin a CBOR array of ``length`` items."""
    return cbor.encode((0,) * length)[: -length or None]


@cache
def _cbor_table() -> tuple[bytes, ...]:
    """Make the CBOR form of each token id below TABLE_TOKENS: once, because that takes 0.1 s and 10 MB."""
    small = [cbor.encode(number) for number in range(65_536)]
    return (*small, *[struct.pack(">BI", 26, number) for number in range(65_536, TABLE_TOKENS)])
