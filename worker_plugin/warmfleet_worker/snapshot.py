"""A full copy of the block table on its way to Redis: begin, chunks, end."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_worker.tracker import PickHashes


class Snapshot:
    """All block hashes of an engine, in chunks made one by one: a pass over a million keys would hold the GIL too long.

    command_id: of the fleet's command that asked for the snapshot; None if the fleet did not ask.
    """

    def __init__(self, keys: Sequence[bytes], pick: PickHashes, command_id: str | None) -> None:
        self.id = secrets.token_hex(4)
        self.digest = wire.Digest()
        self._keys = keys
        self._pick = pick
        self._command_id = command_id
        self._position = 0

    @property
    def finished(self) -> bool:
        """Return True if all chunks have been made, and ``end`` is next."""
        return self._position >= len(self._keys)

    def begin(self) -> str:
        return wire.dumps({"snapshot": self.id, "command": self._command_id})

    def chunk(self) -> bytes:
        """Make the next chunk; empty if none of its keys belongs to the published KV cache group."""
        keys = self._keys[self._position : self._position + wire.BATCH_BLOCKS]
        self._position += len(keys)
        packed = b"".join(self._pick(keys))
        self.digest.add(packed)
        return self.id.encode() + packed if packed else b""

    def end(self) -> str:
        digest = self.digest
        return wire.dumps({"snapshot": self.id, "count": digest.count, "high": digest.high, "low": digest.low})
