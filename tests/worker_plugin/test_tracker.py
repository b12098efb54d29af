"""The tracker: exact transitions, exact cuts while an engine works, a bounded queue, and the engine's cost."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from warmfleet_worker.tracker import Run, Tracker, Transitions
from warmfleet_worker.vllm_hooks.block_table import WholeBlocks, hash_of_key, track, untrack

GROUP_0, GROUP_1 = b"\0\0\0\0", b"\0\0\0\1"


@dataclass(frozen=True)
class Block:
    block_id: int


class BlockMap:
    """vLLM's ``BlockHashToBlockMap`` in miniature: a hash has one block, or a dict when it has several copies.

    tests/vllm compares the tracker with the real one.
    """

    def __init__(self) -> None:
        self._cache: dict[bytes, Block | dict[int, Block]] = {}

    def insert(self, key: bytes, block: Block) -> None:
        held = self._cache.get(key)
        if held is None:
            self._cache[key] = block
        elif isinstance(held, Block):
            self._cache[key] = {held.block_id: held, block.block_id: block}
        else:
            held[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> Block | None:
        held = self._cache.pop(key, None)
        if held is None:
            return None
        if isinstance(held, Block):
            if held.block_id == block_id:
                return held
            self._cache[key] = held
            return None
        block = held.pop(block_id, None)
        if held:
            self._cache[key] = held
        return block


def key_of(number: int, group: bytes = GROUP_0) -> bytes:
    return number.to_bytes(32, "big") + group


def hash_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


def tracked() -> tuple[BlockMap, Transitions]:
    block_map, transitions = BlockMap(), Transitions(hash_of_key(0))
    track(block_map, transitions)
    return block_map, transitions


def replay(held: set[bytes], runs: Any) -> set[bytes]:
    """Apply runs. Each must be a real change, because the digest adds and removes them unseen."""
    for run in runs:
        hashes = [run.packed[at : at + 8] for at in range(0, len(run.packed), 8)]
        assert len(set(hashes)) == len(hashes) <= 128
        if run.operation == "stored":
            assert held.isdisjoint(hashes)
            held |= set(hashes)
        elif run.operation == "removed":
            assert held.issuperset(hashes)
            held -= set(hashes)
        else:
            held.clear()
    return held


def test_only_the_first_copy_appears_and_only_the_last_disappears() -> None:
    block_map, transitions = tracked()
    block_map.insert(key_of(7), Block(1))
    block_map.insert(key_of(7), Block(2))
    assert list(transitions.drain(100)) == [Run("stored", hash_of(7))]
    block_map.pop(key_of(7), 1)
    assert list(transitions.drain(100)) == []
    block_map.pop(key_of(7), 2)
    assert list(transitions.drain(100)) == [Run("removed", hash_of(7))]


def test_popping_a_key_that_is_not_there_is_no_transition() -> None:
    block_map, transitions = tracked()
    block_map.insert(key_of(7), Block(1))
    assert block_map.pop(key_of(8), 1) is None
    assert block_map.pop(key_of(7), 9) is None
    assert list(transitions.drain(100)) == [Run("stored", hash_of(7))]


def test_other_groups_are_left_out() -> None:
    block_map, transitions = tracked()
    for number in range(4):
        block_map.insert(key_of(number, GROUP_1 if number % 2 else GROUP_0), Block(number))
    assert list(transitions.drain(100)) == [Run("stored", hash_of(0) + hash_of(2))]
    assert sorted(transitions.pick(transitions.cut())) == [hash_of(0), hash_of(2)]


def test_runs_keep_their_order_and_hold_at_most_128_blocks() -> None:
    tracker = Tracker()
    tracker.stored(b"".join(map(hash_of, range(300))))
    tracker.removed([hash_of(5), hash_of(6)])
    tracker.cleared()
    tracker.stored(hash_of(5))
    runs = list(tracker.drain(1_000))
    assert [(run.operation, len(run.packed) // 8) for run in runs] == [
        ("stored", 128),
        ("stored", 128),
        ("stored", 44),
        ("removed", 2),
        ("cleared", 0),
        ("stored", 1),
    ]


def test_a_new_map_after_a_reset_is_followed_and_the_old_one_is_let_go() -> None:
    old, transitions = tracked()
    old.insert(key_of(1), Block(1))
    new = BlockMap()
    assert untrack(old) == (transitions, None)
    track(new, transitions, cleared=True)
    new.insert(key_of(2), Block(1))
    old.insert(key_of(3), Block(1))  # nobody listens
    assert [run.operation for run in transitions.drain(100)] == ["stored", "cleared", "stored"]
    assert transitions.cut() == [key_of(2)]
    assert untrack(old) is None


class Pool:
    """vLLM's pool in miniature: entries of whole blocks, and of parts of one (``cache_partial_block``)."""

    def __init__(self) -> None:
        self.map = BlockMap()

    def cache_partial_block(self, request: int, block: Block, num_tokens: int, **_: Any) -> int:
        self.map.insert(key_of(request), block)
        return num_tokens


def test_entries_of_parts_of_a_block_are_left_out() -> None:
    """Blocks of 32 tokens are hashed by 16: only whole blocks are reported, with and without copies."""
    pool, transitions = Pool(), Transitions(hash_of_key(0))
    track(pool.map, transitions, WholeBlocks(pool, 0, 32))
    pool.map.insert(key_of(1), Block(1))
    assert pool.cache_partial_block(2, Block(2), 48, kv_cache_group_id=0) == 48
    pool.cache_partial_block(3, Block(3), 64)  # a part that ends where a block ends
    pool.map.insert(key_of(4, GROUP_1), Block(4))
    pool.map.insert(key_of(1), Block(5))
    assert transitions.cut() == [key_of(1), key_of(3)]
    assert sorted(pool.map._cache) == [key_of(1), key_of(2), key_of(3), key_of(4, GROUP_1)]
    for number, block in ((2, 2), (1, 1), (3, 3), (1, 5)):
        assert pool.map.pop(key_of(number), block) == Block(block)
    assert pool.map.pop(key_of(4, GROUP_1), 4) == Block(4)
    assert list(transitions.drain(100)) == [Run("removed", hash_of(3) + hash_of(1))]
    assert transitions.cut() == []


def test_parts_are_left_out_after_a_reset_too() -> None:
    pool, transitions = Pool(), Transitions(hash_of_key(0))
    track(pool.map, transitions, WholeBlocks(pool, 0, 32))
    pool.map.insert(key_of(1), Block(1))
    tracked_by, pool.map = untrack(pool.map), BlockMap()
    assert tracked_by is not None
    track(pool.map, *tracked_by, cleared=True)
    pool.cache_partial_block(2, Block(2), 16)
    pool.map.insert(key_of(3), Block(3))
    assert [run.operation for run in transitions.drain(100)] == ["stored", "cleared", "stored"]
    assert transitions.cut() == [key_of(3)]


def test_a_full_queue_drops_counts_and_says_so_until_the_next_cut() -> None:
    tracker = Tracker(limit=100)
    tracker.stored(b"".join(map(hash_of, range(150))))
    assert (len(tracker), tracker.dropped, tracker.overflowed) == (100, 50, True)
    assert len(tracker.cut()) == 150
    assert (len(tracker), tracker.dropped, tracker.overflowed) == (0, 50, False)


@pytest.mark.parametrize("seed", range(4))
def test_a_cut_is_exact_while_the_engine_works(seed: int) -> None:
    """A cut and everything queued after it give the table, for 30 cuts while an engine works without pause."""
    block_map, transitions = tracked()
    rng, stop, operations = random.Random(seed), threading.Event(), [0]

    def engine() -> None:
        copies: list[tuple[int, int]] = []
        while not stop.is_set():
            for _ in range(50):
                number, block = rng.randrange(400), rng.randrange(1_000_000)
                block_map.insert(key_of(number), Block(block))
                copies.append((number, block))
                if len(copies) > 300:
                    number, block = copies.pop(rng.randrange(len(copies)))
                    block_map.pop(key_of(number), block)
            operations[0] += 50

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        for _ in range(30):
            held = set(transitions.pick(transitions.cut()))
            before, deadline = operations[0], time.monotonic() + 5
            while operations[0] < before + 200 and time.monotonic() < deadline:
                replay(held, transitions.drain(10_000))
                time.sleep(0.0005)
            assert operations[0] > before
    finally:
        stop.set()
        thread.join()
    replay(held, transitions.drain(1_000_000))
    assert held == {key[24:32] for key in block_map._cache}
    assert operations[0] >= 6_000


def test_the_engine_pays_less_than_the_budget() -> None:
    """250 stored + 250 evicted (one 4,000-token request): at most 0.15 ms of the engine's CPU are added.

    That is 1.5 times what vLLM's own insert and pop of them take (0.10 ms where the budget was set). Both are timed in
    turn, and the median of the pairs counts: the machine's pace, which may change by half, is in both.
    """

    def cost_ns(block_map: BlockMap, keys: list[bytes]) -> int:
        begin = time.thread_time_ns()
        for key in keys:
            block_map.insert(key, Block(1))
        for key in keys:
            block_map.pop(key, 1)
        return time.thread_time_ns() - begin

    bare, (block_map, transitions) = BlockMap(), tracked()
    parts = [[os.urandom(32) + GROUP_0 for _ in range(250)] for _ in range(400)]
    ratios = []
    for keys in parts:
        alone = cost_ns(bare, keys)
        ratios.append(cost_ns(block_map, keys) / alone)
        transitions.cut()
    assert statistics.median(ratios) < 2.5
