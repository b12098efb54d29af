"""Which pools of a served model a request's home pools are: rendezvous hashing by the beginning of its prompt. Pure.

Prompts with the same beginning have the same home pools, at every replica, so their blocks are looked for where they
are. A pool that joins or leaves moves only the beginnings that it gets or had: one in n.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.prompt.block_hashes import Chain

HASH_BYTES = 8  # of a block hash in a chain
#: A prompt that is shorter than the depth counts by its first depth / 2, / 4 ... tokens. By its last block a
#: conversation would change its home pools at every turn until it is as long as the depth.
STEP = 2


def key_of(chains: Iterable[Chain], depth_tokens: int) -> bytes:
    """The hash of the prompt's beginning: of its block at the depth, or at the next of the steps below that it reaches.

    Empty if no block hash of the prompt is known: then all pools are as good.
    """
    for chain in chains:
        blocks, depth = len(chain.hashes) // HASH_BYTES, max(1, depth_tokens // chain.block_tokens)
        while depth > blocks and depth > 1:
            depth = max(1, depth // STEP)
        if blocks:
            return chain.hashes[HASH_BYTES * (depth - 1) : HASH_BYTES * depth]
    return b""


def in_order(key: bytes, tags: Iterable[str]) -> list[str]:
    """The tags of pools, the home pools of this key first."""
    return sorted(tags, key=lambda tag: hashlib.sha256(key + tag.encode()).digest(), reverse=True)
