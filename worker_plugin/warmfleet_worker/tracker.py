"""The changes of an engine's block table, queued for the publisher.

The engine's thread notes every block hash that appears or disappears. The publisher's thread drains the queue, and
for a snapshot it copies the whole table. Two rules make the copy exact:

1. a change of the table and its record in the queue happen under one lock;
2. ``cut`` copies the table and empties the queue under the same lock, so that every earlier change is in the copy
   and every later change is in the queue.

Nothing else happens under that lock: no I/O, no loop, no log line. The copy is one C call, which would hold the GIL,
and with it the engine, for as long without a lock. The queue is bounded: when it is full, records are dropped and
counted, and ``overflowed`` stays set until the next cut.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.wire import BATCH_BLOCKS, HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    #: Turns keys of a block table into block hashes, and leaves out the keys that are not published.
    PickHashes = Callable[[Iterable[bytes]], list[bytes]]
    #: A stored key as it is, a removed key as a 1-tuple (cheaper than any object), None for cleared.
    Record = bytes | tuple[bytes] | None

#: Most changes that may wait for the publisher: about 25 MB of keys, minutes of an engine's work.
QUEUE_RECORDS = 262_144


def hash_itself(keys: Iterable[bytes]) -> list[bytes]:
    """Return the keys as they are: the ``PickHashes`` of a table whose keys are block hashes already."""
    return list(keys)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive changes of one kind: ``stored`` or ``removed`` with 1 to BATCH_BLOCKS hashes, or ``cleared``."""

    operation: str
    packed: bytes = b""


class Transitions:
    """A queue of changes of an engine's block table, which the publisher empties. The table belongs to the engine."""

    def __init__(self, pick: PickHashes = hash_itself, limit: int = QUEUE_RECORDS) -> None:
        self.lock = threading.Lock()
        self.table: Mapping[bytes, Any] = {}
        self.pick = pick
        self.dropped = 0  # changes lost since the start, because the queue was full
        self.overflowed = False
        self.limit = limit
        # Never replaced, because ``vllm_hooks.block_table.track`` keeps a reference to it.
        self.records: deque[Record] = deque()

    def note(self, record: Record) -> None:
        """Queue one change. The caller holds ``lock`` and has changed the table. Never blocks, never raises."""
        records = self.records
        if len(records) < self.limit:
            records.append(record)
        else:
            self.overflow()

    def overflow(self) -> None:
        """Count one change that the queue has no room for."""
        self.dropped += 1
        self.overflowed = True

    def replace(self, table: Mapping[bytes, Any]) -> None:
        """Use ``table`` from now on, because the engine has thrown its old table away."""
        with self.lock:
            self.table = table
            self.note(None)

    def __len__(self) -> int:
        """The number of waiting records."""
        return len(self.records)

    # ------------------------------------------------ the publisher's side

    def drain(self, limit: int) -> Iterator[Run]:
        """Take up to ``limit`` records off the queue and yield them as runs, in their order."""
        for kind, run in groupby(self._take(limit), type):
            if kind is bytes:
                yield from self._runs("stored", run)  # type: ignore[arg-type]  # by its kind
            elif kind is tuple:
                yield from self._runs("removed", [key for (key,) in run])  # type: ignore[misc]  # as above
            else:
                yield Run("cleared")

    def cut(self) -> Sequence[bytes]:
        """Copy the table's keys as they are now, and empty the queue, because the copy contains everything queued."""
        with self.lock:
            keys = list(self.table)
            self.records.clear()
            self.overflowed = False
        return keys

    def _take(self, limit: int) -> list[Record]:
        records = self.records
        return [records.popleft() for _ in range(min(limit, len(records)))]

    def drop(self) -> None:
        """Empty the queue, because nothing in it is to be published."""
        with self.lock:
            self.records.clear()
            self.overflowed = False

    def _runs(self, operation: str, keys: Iterable[bytes]) -> Iterator[Run]:
        hashes = self.pick(keys)
        for start in range(0, len(hashes), BATCH_BLOCKS):
            yield Run(operation, b"".join(hashes[start : start + BATCH_BLOCKS]))


class Tracker(Transitions):
    """Transitions with a table of its own, for an engine that calls ``stored`` and ``removed`` (the simulator does).

    Both take packed 8-byte hashes or an iterable of hashes. A hash that is stored or removed twice counts once.
    """

    def __init__(self, limit: int = QUEUE_RECORDS) -> None:
        super().__init__(limit=limit)
        self._held: dict[bytes, None] = {}
        self.table = self._held

    def stored(self, hashes: bytes | Iterable[bytes]) -> None:
        for block_hash in _split(hashes):
            with self.lock:
                if block_hash not in self._held:
                    self._held[block_hash] = None
                    self.note(block_hash)

    def removed(self, hashes: bytes | Iterable[bytes]) -> None:
        for block_hash in _split(hashes):
            with self.lock:
                if block_hash in self._held:
                    del self._held[block_hash]
                    self.note((block_hash,))

    def cleared(self) -> None:
        self._held = {}
        self.replace(self._held)


class Findings(Transitions):
    """What an engine finds in a place that others change, too: it knows no table, so nothing can be copied.

    A loss is no reason for a snapshot: the next find of the block tells the same.
    """

    def found(self, keys: Iterable[bytes]) -> None:
        with self.lock:
            for key in keys:
                self.note(key)

    def missed(self, key: bytes) -> None:
        with self.lock:
            self.note((key,))

    def overflow(self) -> None:
        self.dropped += 1


def _split(hashes: bytes | Iterable[bytes]) -> Iterable[bytes]:
    if isinstance(hashes, bytes):
        return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    return hashes
