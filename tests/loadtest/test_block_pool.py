"""The block pool against a simple model of it, made of plain lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from warmfleet_loadtest.simulator.block_pool import BlockPool, NoBlocksError

BLOCKS = 9


class Ears:
    """A listener that keeps the stored blocks as a set. Every call must change it."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def stored(self, hashes: bytes) -> None:
        assert hashes not in self.held
        self.held.add(hashes)

    def removed(self, hashes: bytes) -> None:
        self.held.remove(hashes)

    def cleared(self) -> None:
        self.held.clear()


class PoolMachine(RuleBasedStateMachine):
    """Requests take, fill, share and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ears = Ears()
        self.pool = BlockPool(BLOCKS, self.ears)
        self.queue = list(range(1, BLOCKS))  # the free queue, first out first
        self.content: dict[int, bytes] = {}
        self.users: Counter[int] = Counter()
        self.requests: list[list[int]] = []

    @rule(count=st.integers(1, BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(NoBlocksError):
                self.pool.allocate(count)
            return
        expected, self.queue = self.queue[:count], self.queue[count:]
        assert self.pool.allocate(count) == expected
        for block in expected:
            self.content.pop(block, None)
            self.users[block] = 1
        self.requests.append(expected)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), name=st.integers(0, 3))
    def fill(self, data: st.DataObject, name: int) -> None:
        request = data.draw(st.sampled_from(self.requests))
        block = data.draw(st.sampled_from(request))
        if block not in self.content:
            self.content[block] = bytes([name]) * 8
            self.pool.insert(block, bytes([name]) * 8)

    @rule(chain=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True))
    def hit(self, chain: list[int]) -> None:
        found = self.pool.prefix([bytes([name]) * 8 for name in chain], 4)
        known = set(self.content.values())
        depth = next((k for k, name in enumerate(chain) if bytes([name]) * 8 not in known), len(chain))
        assert [self.content[block] for block in found] == [bytes([name]) * 8 for name in chain[:depth]]
        assert self.pool.idle(found) == sum(block in self.queue for block in found)
        if found:
            self.pool.touch(found)
            self.queue = [block for block in self.queue if block not in found]
            self.users.update(found)
            self.requests.append(found)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.pool.release(reversed(request))
        for block in reversed(request):
            self.users[block] -= 1
            if not self.users[block]:
                self.queue = [*self.queue, block] if block in self.content else [block, *self.queue]

    @rule()
    def reset(self) -> None:
        idle = len(self.queue) == BLOCKS - 1
        assert self.pool.reset() is idle
        if idle:
            self.content.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free == len(self.queue)
        assert set(self.pool.held()) == set(self.content.values()) == self.ears.held
        assert len(self.pool.held()) == len(self.ears.held)
        assert self.pool.usage == pytest.approx(1 - len(self.queue) / (BLOCKS - 1))


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


def test_a_prompts_tail_is_evicted_first() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for number, block in enumerate(blocks):
        pool.insert(block, bytes([number]) * 8)
    pool.release(reversed(blocks))
    pool.allocate(2)
    assert pool.held() == [bytes([0]) * 8, bytes([1]) * 8]
    assert pool.evicted == 2


def test_a_copy_keeps_its_hash_alive() -> None:
    ears = Ears()
    pool = BlockPool(3, ears)
    first, second = pool.allocate(2)
    pool.insert(first, b"same____")
    pool.insert(second, b"same____")
    pool.release([first])
    pool.allocate(1)  # evicts the first copy
    assert ears.held == {b"same____"}
    assert pool.prefix([b"same____"], 1) == [second]


def test_a_pool_needs_a_block_to_give() -> None:
    with pytest.raises(ValueError, match="at least two"):
        BlockPool(1)
