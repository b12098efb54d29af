"""The pools of a served model, and where its servers are: two hashes in Redis, which routers and workers share.

A served model ``llama`` has one pool ``llama``, or several: ``llama``, ``llama#1``, ``llama#2``. Each pool has all keys
of a fleet for itself. The two hashes here are the only keys that belong to the served model as a whole; the tag in
their braces is the model's name without ``#``:

- ``pools``, the registry: a pool's tag -> its state. ``warmfleet pools`` writes the registry; if Redis has lost it,
  routers write back what they last read. Without a registry the model has the pools that each router's
  WARMFLEET_MODELS names.
- ``placement``: a server's name -> its pool and its capacity. Each server writes its own field.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import wire

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVING, DRAINING = "serving", "draining"
MAX_POOLS = 256  # most pools of one served model, because every router replica runs a round of upkeep for each
KEPT_MS = 24 * 3_600_000  # age of ``seen_ms`` at which a server's entry in ``placement`` is removed


def served_model(tag: str) -> str:
    """Return the name of the served model that a pool belongs to."""
    return tag.partition("#")[0]


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool in the registry. since_ms: when it got its state.

    draining: the pool gets no new server, and no new request unless no other pool can serve it. moving: its servers
    move to other pools now, some at a time, while the others serve; otherwise each moves when it is restarted.
    """

    tag: str
    draining: bool = False
    moving: bool = False
    since_ms: int = 0

    def encode(self) -> str:
        state = {"state": DRAINING if self.draining else SERVING, "since_ms": self.since_ms}
        return wire.dumps(state | ({"move": 1} if self.moving else {}))


def read_pool(tag: str, packed: bytes | str | None) -> PoolEntry | None:
    """Read a pool's field of the registry; None if the field is missing or malformed."""
    value = _object(packed)
    state = value.get("state")
    if state not in (SERVING, DRAINING):
        return None
    draining, since = state == DRAINING, value.get("since_ms")
    return PoolEntry(tag, draining, draining and bool(value.get("move")), since if isinstance(since, int) else 0)


def read_registry(name: str, fields: Mapping[bytes, bytes]) -> tuple[PoolEntry, ...]:
    """Read the pools of the served model ``name`` in a fixed order; a field that is none of its pools is left out."""
    found = []
    for packed_tag, packed in fields.items():
        tag = packed_tag.decode("utf-8", "replace")
        entry = read_pool(tag, packed)
        if entry is not None and served_model(tag) == name and _is_tag(tag):
            found.append(entry)
    return tuple(sorted(found, key=lambda entry: (len(entry.tag), entry.tag))[:MAX_POOLS])


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a server is. seen_ms: when one of its processes last wrote this. blocks: the capacity of each rank.

    moved_ms: when it last went to another pool while it ran; 0: never. pinned: its WARMFLEET_MODEL names the pool.
    """

    pool: str
    host: str = ""
    seen_ms: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    moved_ms: int = 0
    pinned: bool = False

    @property
    def capacity_blocks(self) -> int:
        """The capacity of all its ranks; 0 while none has reported its own."""
        return sum(self.blocks.values())

    def encode(self) -> str:
        place = {"pool": self.pool, "host": self.host, "seen_ms": self.seen_ms, "blocks": dict(self.blocks)}
        more = {"moved_ms": self.moved_ms} if self.moved_ms else {}
        return wire.dumps(place | more | ({"pinned": 1} if self.pinned else {}))


def read_placement(packed: bytes | str | None) -> Placement | None:
    """Read a server's field of ``placement``; None if the field is missing or malformed."""
    value = _object(packed)
    pool, host, seen, blocks = (value.get(name) for name in ("pool", "host", "seen_ms", "blocks"))
    if not (isinstance(pool, str) and _is_tag(pool) and isinstance(host, str) and isinstance(seen, int)):
        return None
    told = blocks.items() if isinstance(blocks, dict) else ()
    sizes = {rank: size for rank, size in told if isinstance(size, int) and size > 0}
    moved = value.get("moved_ms")
    return Placement(pool, host[:64], seen, sizes, moved if isinstance(moved, int) else 0, bool(value.get("pinned")))


def weight(pool: str, key: str) -> int:
    """Return the weight of ``pool`` for ``key`` in rendezvous hashing; the pool of the greatest weight is the first."""
    return int.from_bytes(hashlib.blake2b(f"{pool}\0{key}".encode(), digest_size=8).digest(), "big")


def _is_tag(tag: str) -> bool:
    try:
        wire.model_tag(tag)
    except wire.WireError:
        return False
    return True


def _object(packed: bytes | str | None) -> dict[str, Any]:
    try:
        value = json.loads(packed) if packed else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
