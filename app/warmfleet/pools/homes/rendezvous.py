"""Which pools of a served model a request's home pools are: rendezvous hashing by the beginning of its prompt. Pure.

Prompts with the same beginning have the same home pools, at every replica, so their blocks are looked for where they
are. A pool that joins or leaves moves only the beginnings that it gets or had: one in n. A pool gets as large a share
of the beginnings as its weight is of all weights, and a weight that changes moves only what that share gains or loses
(weighted rendezvous hashing, Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

import hashlib
from math import log
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGEST_BYTES = 8  # that count
BEYOND = 2.0 ** (8 * DIGEST_BYTES)


def in_order(key: bytes, weights: Mapping[str, int]) -> list[str]:
    """The tags of pools, the home pools of this key first. weights: by tag, above 0."""

    def late(tag: str) -> float:
        digest = hashlib.sha256(key + tag.encode()).digest()[:DIGEST_BYTES]
        return -log((int.from_bytes(digest, "big") + 0.5) / BEYOND) / weights[tag]

    return sorted(weights, key=late)
