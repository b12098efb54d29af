"""Finds a prompt's home pools, the two that its requests try first: by rendezvous hashing with a key of the prompt.

The key is the block hash at a depth (tokens from the start) at which few conversations are alike. A beginning (the
blocks up to a depth) that many conversations share, such as a system prompt, is no key, because it would send them all
to the same two pools. So a replica counts the latest conversations with each beginning. If they are more than
the share HOT of an average pool's, the key is a block a quarter deeper, and so on, until the prompt ends. A growing
conversation keeps its key, because the key does not depend on the prompt's length once the prompt is longer than the
depth. All turns count as one conversation.

A prompt belongs to a known conversation if it has all known beginnings of it, even if the prompt is longer.

Prompts with the same key have the same home pools, at every replica, so requests find the blocks of earlier ones. With
n pools, a pool that joins or leaves moves one key in n. A pool's share of the keys is its share of all weights, and a
changed weight moves only the keys by which that share grows or shrinks (weighted rendezvous hashing, Schindelhauer and
Schomaker 2005).
"""

from __future__ import annotations

import hashlib
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from warmfleet.prompt.block_hashes import Chain

HOME_PREFIX_TOKENS = 1_024  # depth of the first block tried as a prompt's key: deeper than most system prompts
DIGEST_BYTES = 8  # length of a digest by which pools are ordered
BEYOND = 2.0 ** (8 * DIGEST_BYTES)


def in_order(key: bytes, weights: Mapping[str, int]) -> list[str]:
    """Return the tags of pools in the key's order of preference (rendezvous hashing). weights: by tag, above 0."""

    def late(tag: str) -> float:
        digest = hashlib.sha256(key + tag.encode()).digest()[:DIGEST_BYTES]
        return -log((int.from_bytes(digest, "big") + 0.5) / BEYOND) / weights[tag]

    return sorted(weights, key=late)


HASH_BYTES = 8  # length of a block hash in a chain
HOT = 0.5  # a beginning is too common for a key with over this share of an average pool's conversations (hot)
DEEPER = 4  # each further depth is a quarter deeper; twice as deep would exceed many prompts
COOL = 0.5  # a hot beginning may be a key again below this share of the count that made it hot
LEAST = 8.0  # fewest conversations by which a beginning can be hot
WINDOW = 512  # number of prompts after which all counts are halved, which also bounds their number
FORGOTTEN = 0.5  # largest halved count that is dropped
MAX_DEPTHS = 24  # most depths tried for a prompt; the last is 200 times the first


class Beginnings:
    """Counts how many of the latest conversations with one model share each beginning."""

    def __init__(self) -> None:
        self._counts: dict[bytes, float] = {}  # last block hash of a beginning -> number of conversations
        self._goes_on: set[bytes] = set()  # beginnings that a longer known beginning continues
        self._hot: set[bytes] = set()
        self._total = 0.0
        self._until_halved = WINDOW

    def __len__(self) -> int:
        return len(self._counts)

    def key(self, chains: Iterable[Chain], depth_tokens: int, pools: int, *, counted: bool = True) -> bytes:
        """Count a prompt and return its key; empty if no block hash of the prompt is known.

        depth_tokens: first depth tried. pools: number of pools. counted: False for a prompt that is only explained.
        """
        chain = next((chain for chain in chains if chain.hashes), None)
        if chain is None:
            return b""
        beginnings = _beginnings(chain, depth_tokens)
        if counted:
            self._count(beginnings, pools)
        limit = self._limit(pools)
        for key in beginnings:
            if self._counts.get(key, 0.0) <= limit and key not in self._hot:
                return key
            if counted:
                self._hot.add(key)
        return chain.hashes[-HASH_BYTES:]

    def _count(self, beginnings: list[bytes], pools: int) -> None:
        self._until_halved -= 1
        if not self._until_halved:
            self._halve(pools)
        counts = self._counts
        known = next((at for at, key in enumerate(beginnings) if key not in counts), len(beginnings))
        if known == len(beginnings):
            return
        if not known or beginnings[known - 1] in self._goes_on:  # a new conversation
            self._total += 1.0
            for key in beginnings[:known]:
                counts[key] += 1.0
        for key in beginnings[known:]:
            counts[key] = 1.0
        self._goes_on.update(beginnings[max(0, known - 1) : -1])

    def _limit(self, pools: int) -> float:
        return max(LEAST, HOT * self._total / pools)

    def _halve(self, pools: int) -> None:
        self._until_halved = WINDOW
        self._total /= 2
        self._counts = {key: count / 2 for key, count in self._counts.items() if count / 2 > FORGOTTEN}
        self._goes_on &= self._counts.keys()
        cool = COOL * self._limit(pools)
        self._hot = {key for key in self._hot if self._counts.get(key, 0.0) > cool}


def _beginnings(chain: Chain, depth_tokens: int) -> list[bytes]:
    """Return the block hashes of a prompt at each depth that it reaches."""
    found: list[bytes] = []
    depth, blocks = max(1, depth_tokens // chain.block_tokens), len(chain.hashes) // HASH_BYTES
    while depth <= blocks and len(found) < MAX_DEPTHS:
        found.append(chain.hashes[HASH_BYTES * (depth - 1) : HASH_BYTES * depth])
        depth += max(1, depth // DEEPER)
    return found
