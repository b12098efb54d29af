"""Which pools of a served model a request's home pools are: rendezvous hashing by the beginning of its prompt. Pure.

Prompts with the same beginning have the same home pools, at every replica, so their blocks are looked for where they
are. A pool that joins or leaves moves only the beginnings that it gets or had: one in n.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def in_order(key: bytes, tags: Iterable[str]) -> list[str]:
    """The tags of pools, the home pools of this key first."""
    return sorted(tags, key=lambda tag: hashlib.sha256(key + tag.encode()).digest(), reverse=True)
