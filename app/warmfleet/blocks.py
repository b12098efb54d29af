"""Token ids → the chain of block hashes of one prompt, as the engines of one scheme compute it. Pure."""

from __future__ import annotations

import hashlib
import struct
from functools import cache
from typing import TYPE_CHECKING

from warmfleet.fleet.reservations import Chain
from warmfleet_worker import cbor, wire
from warmfleet_worker.wire import HASH_BYTES, Scheme

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BLOCKS = 8_192  # of one chain: what decide accepts
TABLE_TOKENS = 262_144  # ids with a ready CBOR form: the largest vocabularies in use

TEXT_BLOCK_BYTES = 64  # counted as 16 tokens: four bytes of text make about one token
TEXT_BLOCK_TOKENS = 16
#: Workers whose tokenizer nobody knows are matched by text. The seed makes the scheme's id its own.
TEXT_SCHEME = Scheme("sha256_cbor", hashlib.sha256(b"warmfleet text 1").digest(), TEXT_BLOCK_TOKENS)


class Hasher:
    """Block hashes of one scheme, equal to ``wire.chain_hashes`` and three times as fast."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._table = _cbor_table() if scheme.algorithm == "sha256_cbor" else ()
        self._array_head = b"\x58\x20", cbor_array_head(scheme.block_tokens)

    def chain(self, token_ids: Sequence[int], salt: str | None = None, lora: tuple[str, str] | None = None) -> Chain:
        """The chain of a prompt, capped as the engine caps: its last token is always computed."""
        size = self.scheme.block_tokens
        count = min((len(token_ids) - 1) // size, MAX_BLOCKS) if token_ids else 0
        if count and self._table and max(token_ids) < len(self._table):
            packed = self._cbor_chain(token_ids, count, salt, lora)
        else:
            packed = wire.pack_hashes(wire.chain_hashes(self.scheme, token_ids[: count * size], None, salt, lora))
        return Chain(self.scheme.scheme_id, size, packed)

    def _cbor_chain(
        self, token_ids: Sequence[int], count: int, salt: str | None, lora: tuple[str, str] | None
    ) -> bytes:
        # One block is 83 | bytes head, parent | array head, ids | extra keys; only parent and ids change.
        size, form, sha256, join = self.scheme.block_tokens, self._table.__getitem__, hashlib.sha256, b"".join
        head, array = b"\x83" + self._array_head[0], self._array_head[1]
        tail = cbor.encode(wire.extra_keys(self.scheme, salt, lora))
        rest = cbor.encode(wire.extra_keys(self.scheme, None, lora))
        previous, packed = self.scheme.none_hash, []
        for start in range(0, count * size, size):
            ids = join(map(form, token_ids[start : start + size]))
            previous = sha256(head + previous + array + ids + tail).digest()
            packed.append(previous[-HASH_BYTES:])
            tail = rest
        return join(packed)


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
