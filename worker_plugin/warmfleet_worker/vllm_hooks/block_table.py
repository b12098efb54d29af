"""The engine's block table: vLLM's ``BlockHashToBlockMap`` reports to a ``Transitions`` which hashes come and go.

The class and its two methods are the same in vLLM 0.28 to 0.33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warmfleet_worker.ends import GroupedTransitions
from warmfleet_worker.protocol.wire import HASH_BYTES
from warmfleet_worker.vllm_hooks.swallow_errors import swallow_errors
from warmfleet_worker.vllm_hooks.wrap import first_time, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from warmfleet_worker.tracker import PickHashes, Transitions

    #: ``insert``, ``pop``, and the table of the reported keys.
    Replacements = tuple[Callable[[bytes, Any], None], Callable[[bytes, int], Any], dict[bytes, Any]]


def hook_prefix_cache_reset() -> None:
    """Track the new table that ``BlockPool.reset_prefix_cache`` puts in place of the old one."""
    from vllm.v1.core import block_pool

    if not first_time(block_pool):
        return

    def reset_prefix_cache(original: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
        before = pool.cached_block_hash_to_block
        result = original(pool, *args, **kwargs)
        after = pool.cached_block_hash_to_block
        if after is not before:
            with swallow_errors("could not follow a reset of the prefix cache"):
                tracked = untrack(before)
                if tracked is not None:
                    track(after, *tracked, cleared=True)
        return result

    wrap(block_pool.BlockPool, "reset_prefix_cache", reset_prefix_cache)


def hash_of_key(group: int) -> PickHashes:
    """Make the function from vLLM's table keys to block hashes, for one KV cache group.

    A key is a digest of 16 or 32 bytes and its group's number in 4 bytes. Keys of other groups are left out.
    """
    suffix = group.to_bytes(4, "big", signed=False)

    def pick(keys: Iterable[bytes]) -> list[bytes]:
        return [key[-HASH_BYTES - 4 : -4] for key in keys if key[-4:] == suffix]

    return pick


class WholeBlocks:
    """Tells entries of whole blocks of one KV cache group from the other entries of its pool.

    A pool that hashes in smaller steps than the group's blocks may also keep entries for parts of a block
    (``cache_partial_block``), whose hashes no router computes. Keys do not show this, so the calls are watched.
    """

    def __init__(self, pool: Any, group: int, block_tokens: int) -> None:
        self.suffix = group.to_bytes(4, "big", signed=False)
        self.of_a_part = False  # True while the pool makes the entry of a part
        original = getattr(pool, "cache_partial_block", None)  # vLLM 0.28 makes no such entries
        if original is None:
            return

        def cache_partial_block(request: Any, block: Any, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
            self.of_a_part = num_tokens % block_tokens != 0
            try:
                return original(request, block, num_tokens, *args, **kwargs)
            finally:
                self.of_a_part = False

        pool.cache_partial_block = cache_partial_block


def track(block_map: Any, transitions: Transitions, whole: WholeBlocks | None = None, *, cleared: bool = False) -> None:
    """Make this ``BlockHashToBlockMap`` report to ``transitions`` when a hash appears or disappears.

    Several blocks may have one hash; only the first of them to come and the last to go are reported.
    whole: which entries to report; without it all of them. cleared: this map takes the place of one that was thrown
    away with all its blocks.
    """
    insert, pop, table = _of_all(block_map, transitions) if whole is None else _of_some(block_map, transitions, whole)
    with transitions.lock:
        transitions.table = table
        if isinstance(transitions, GroupedTransitions):
            transitions.whole = block_map._cache  # noqa: SLF001 - the table itself
        block_map.insert, block_map.pop, block_map.tracked = insert, pop, (transitions, whole)
        if cleared:
            transitions.note(None)


def _of_all(block_map: Any, transitions: Transitions) -> Replacements:
    """Make ``insert(key, block)`` and ``pop(key, block_id)`` for this one map; return them and the table to copy.

    They are closures, which cost half as much as methods of a subclass. ``Transitions.note`` is written out in both,
    because the engine's scheduler runs them some hundred times per request.
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

    return insert, pop, table


def _of_some(block_map: Any, transitions: Transitions, whole: WholeBlocks) -> Replacements:
    """Do as ``_of_all`` for a map that also has entries of parts; those of whole blocks get a table of their own.

    Of the other groups, if they are reported at all, all entries are.
    """
    table, base_insert, base_pop = block_map._cache, block_map.insert, block_map.pop  # noqa: SLF001 - the table itself
    reported: dict[bytes, None] = {}
    suffix, lock, note = whole.suffix, transitions.lock, transitions.note
    others = isinstance(transitions, GroupedTransitions)

    def insert(key: bytes, block: Any) -> None:
        own = key[-4:] == suffix
        if key in table or (whole.of_a_part if own else not others):
            base_insert(key, block)
            return
        with lock:
            table[key] = block  # as the base does with a new key
            if own:
                reported[key] = None
            note(key)

    def pop(key: bytes, block_id: int) -> Any:
        own = key[-4:] == suffix
        if key not in reported and (own or not others):
            return base_pop(key, block_id)
        with lock:
            block = base_pop(key, block_id)
            if block is not None and key not in table:
                if own:
                    del reported[key]
                note((key,))
        return block

    return insert, pop, reported


def untrack(block_map: Any) -> tuple[Transitions, WholeBlocks | None] | None:
    """Undo ``track``, so that map and closures do not keep each other in memory.

    Returns the arguments ``transitions`` and ``whole`` of ``track``, or None if the map was not tracked.
    """
    tracked: tuple[Transitions, WholeBlocks | None] | None = vars(block_map).pop("tracked", None)
    if tracked is not None:
        del block_map.insert, block_map.pop
    return tracked
