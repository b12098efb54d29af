"""What changes in an engine's block table, queued for the publisher.

The engine's thread calls the tracker at every appearance and disappearance of a block hash; the publisher's
thread drains the queue and now and then copies the whole table. Two rules make the copy exact:

1. a change of the table and its record in the queue happen under one lock;
2. ``cut`` copies the table and drops the queue under the same lock: every earlier change is in the copy,
   every later one is in the queue.

Nothing else ever happens under that lock: no I/O, no loop, no log line. The copy is one C call, which would hold
the GIL, hence the engine, for as long without a lock. The queue is bounded: when it is full, records are dropped
and counted, and ``overflowed`` stays set until the next cut.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.wire import BATCH_BLOCKS, HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

#: Records that wait for the publisher: about 25 MB of keys at worst, minutes of an engine's work.
QUEUE_RECORDS = 262_144


def hash_of_key(group: int) -> Pick:
    """How vLLM's table keys (32-byte digest + 4-byte group) become block hashes; keys of other groups are left out."""
    suffix = group.to_bytes(4, "big", signed=False)

    def pick(keys: Iterable[bytes]) -> list[bytes]:
        return [key[-HASH_BYTES - 4 : -4] for key in keys if key[-4:] == suffix]

    return pick


def hash_itself(keys: Iterable[bytes]) -> list[bytes]:
    """The pick of a table whose keys are 8-byte hashes already."""
    return list(keys)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive changes of one kind: ``stored`` or ``removed`` with 1 to BATCH_BLOCKS hashes, or ``cleared``."""

    operation: str
    packed: bytes = b""


class Transitions:
    """The queue between an engine's table and the publisher. For a table that somebody else owns; see Tracker."""

    def __init__(self, pick: Pick = hash_itself, limit: int = QUEUE_RECORDS) -> None:
        self.lock = threading.Lock()
        self.table: Mapping[bytes, Any] = {}
        self.pick = pick
        self.dropped = 0  # records lost to a full queue, ever
        self.overflowed = False
        self.limit = limit
        # A stored key as it is, a removed key as a 1-tuple (cheaper than any object), None for cleared.
        # Always the same object: ``track`` holds on to it.
        self.records: deque[bytes | tuple[bytes] | None] = deque()

    def note(self, record: bytes | tuple[bytes] | None) -> None:
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
        """The engine has thrown its table away and goes on with this new one."""
        with self.lock:
            self.table = table
            self.note(None)

    def __len__(self) -> int:
        """Records that wait."""
        return len(self.records)

    # ------------------------------------------------ the publisher's side

    def drain(self, limit: int) -> Iterator[Run]:
        """Take up to ``limit`` records off the queue, as runs in their order."""
        records = self.records
        taken = [records.popleft() for _ in range(min(limit, len(records)))]
        for kind, run in groupby(taken, type):
            if kind is bytes:
                yield from self._runs("stored", run)  # type: ignore[arg-type]  # by its kind
            elif kind is tuple:
                yield from self._runs("removed", [key for (key,) in run])  # type: ignore[misc]  # as above
            else:
                yield Run("cleared")

    def cut(self) -> Sequence[bytes]:
        """The table's keys now; everything queued so far is dropped, because it is contained."""
        with self.lock:
            keys = list(self.table)
            self.records.clear()
            self.overflowed = False
        return keys

    def _runs(self, operation: str, keys: Iterable[bytes]) -> Iterator[Run]:
        hashes = self.pick(keys)
        for start in range(0, len(hashes), BATCH_BLOCKS):
            yield Run(operation, b"".join(hashes[start : start + BATCH_BLOCKS]))


class Tracker(Transitions):
    """Transitions with a table of its own, for engines that report what they do (the simulator).

    ``stored`` and ``removed`` take packed 8-byte hashes or an iterable of them; repetitions change nothing.
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


def track(block_map: Any, transitions: Transitions, *, cleared: bool = False) -> None:
    """Make this ``BlockHashToBlockMap`` of vLLM tell ``transitions`` when a hash appears or disappears.

    Only 0 -> 1 and 1 -> 0 copies of a hash count. ``insert(key, block)`` and ``pop(key, block_id)`` of this one object
    are replaced by closures, half the cost of a subclass; ``note`` is written out in both, because the engine's
    scheduler runs them some hundred times per request. The class is the same in vLLM 0.28 to 0.33.
    cleared: this map takes the place of one that was thrown away with all it held.
    """
    table, base_insert, base_pop = block_map._cache, block_map.insert, block_map.pop  # noqa: SLF001 - the table itself
    records, append = transitions.records, transitions.records.append
    acquire, release = transitions.lock.acquire, transitions.lock.release  # half the cost of ``with``
    limit, overflow = transitions.limit, transitions.overflow

    def insert(key: bytes, block: Any) -> None:
        if key in table:
            base_insert(key, block)
            return
        acquire()
        try:
            table[key] = block  # what the base does with a new key
            if len(records) < limit:
                append(key)
            else:
                overflow()
        finally:
            release()

    def pop(key: bytes, block_id: int) -> Any:
        acquire()
        try:
            block = base_pop(key, block_id)
            if block is not None and key not in table:
                if len(records) < limit:
                    append((key,))
                else:
                    overflow()
        finally:
            release()
        return block

    with transitions.lock:
        transitions.table = table
        block_map.insert, block_map.pop, block_map.transitions = insert, pop, transitions
        if cleared:
            transitions.note(None)


def untrack(block_map: Any) -> Transitions | None:
    """Undo ``track``: the closures and the map hold each other. Returns the map's transitions, None if it had none."""
    transitions: Transitions | None = vars(block_map).pop("transitions", None)
    if transitions is not None:
        del block_map.insert, block_map.pop
    return transitions


def _split(hashes: bytes | Iterable[bytes]) -> Iterable[bytes]:
    if isinstance(hashes, bytes):
        return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
    return hashes


if TYPE_CHECKING:
    from collections.abc import Callable

    Pick = Callable[[Iterable[bytes]], list[bytes]]
