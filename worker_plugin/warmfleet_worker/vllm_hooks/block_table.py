"""The engine's block table: vLLM's ``BlockHashToBlockMap`` reports to a ``Transitions`` which hashes come and go.

The class and its two methods are the same in vLLM 0.28 to 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet_worker.protocol.wire import HASH_BYTES
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet_worker.tracker import PickHashes, Transitions


def hook_prefix_cache_reset() -> None:
    """Follow ``BlockPool.reset_prefix_cache``, which throws the table away and goes on with a new one."""
    from vllm.v1.core import block_pool

    if not first_time(block_pool):
        return

    def reset_prefix_cache(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        before = pool.cached_block_hash_to_block
        result = original(pool, *args, **kwargs)
        after = pool.cached_block_hash_to_block
        if after is not before:
            with swallow_errors("could not follow a reset of the prefix cache"):
                transitions = untrack(before)
                if transitions is not None:
                    track(after, transitions, cleared=True)
        return result

    wrap(block_pool.BlockPool, "reset_prefix_cache", reset_prefix_cache)


def hash_of_key(group: int) -> PickHashes:
    """A function from vLLM's table keys to block hashes, for one KV cache group.

    A key is a digest of 16 or 32 bytes and the number of its group in 4. Keys of other groups are left out.
    """
    suffix = group.to_bytes(4, "big", signed=False)

    def pick(keys: Iterable[bytes]) -> list[bytes]:
        return [key[-HASH_BYTES - 4 : -4] for key in keys if key[-4:] == suffix]

    return pick


def track(block_map: Any, transitions: Transitions, *, cleared: bool = False) -> None:
    """Make this ``BlockHashToBlockMap`` report to ``transitions`` when a hash appears or disappears.

    A hash may have several copies; only the first one that comes and the last one that goes are reported.
    ``insert(key, block)`` and ``pop(key, block_id)`` of this one object are replaced by closures, which cost half as
    much as a subclass. ``Transitions.note`` is written out in both, because the engine's scheduler runs them some
    hundred times per request.
    cleared: this map takes the place of one that was thrown away with all its blocks.
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
            table[key] = block  # as the base does with a new key
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
    """Undo ``track``, so that map and closures do not keep each other in memory.

    Returns the map's ``Transitions``, or None if it was not tracked.
    """
    transitions: Transitions | None = vars(block_map).pop("transitions", None)
    if transitions is not None:
        del block_map.insert, block_map.pop
    return transitions
