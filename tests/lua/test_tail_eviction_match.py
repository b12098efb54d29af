"""The match at a worker that evicts by T-LRU: its block set has holes, and routers find what it really holds."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.keyspace import BLOCK, READY

from warmfleet.fleet import Flag
from warmfleet_loadtest.simulator.plugin_pool import PluginPool
from warmfleet_worker.eviction.eviction import Eviction
from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.tail_eviction import TailEviction

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet_worker.eviction.objective import Served

BLOCKS = 160


class Xi:
    """An objective of a given number of blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def xi_tokens(self) -> int:
        return self.blocks * BLOCK

    def note(self, served: Served) -> None: ...


class Worker:
    """A cache with T-LRU. Its requests run one after another, which makes the holes easy to see."""

    def __init__(self, xi_blocks: int) -> None:
        self.now = 0.0
        eviction = Eviction(BLOCK, BLOCKS, TailEviction(BLOCK, Xi(xi_blocks)))
        self.pool = PluginPool(BLOCKS, eviction, clock=lambda: self.now)

    def serve(self, chain: bytes) -> None:
        hashes = split(chain)
        found = self.pool.prefix(hashes, len(hashes))
        self.pool.touch(found)
        blocks = found + self.pool.allocate(len(hashes) - len(found))
        for block, block_hash in list(zip(blocks, hashes, strict=True))[len(found) :]:
            self.pool.insert(block, block_hash)
        tokens = len(hashes) * BLOCK
        self.pool.eviction.freed(Finished(blocks, hashes, tokens, tokens), self.now)
        self.pool.release(reversed(blocks))
        self.now += 1

    def matched(self, chain: bytes) -> int:
        """The tokens that the cache really holds of the prompt."""
        return len(self.pool.prefix(split(chain), len(chain))) * BLOCK

    def gaps(self, chain: bytes) -> bool:
        """Whether the chain has a held block behind a missing block."""
        held = set(self.pool.held())
        return any(block in held for block in split(chain)[self.matched(chain) // BLOCK :])


def split(chain: bytes) -> list[bytes]:
    return [chain[at : at + 8] for at in range(0, len(chain), 8)]


async def decided(keyspace: Keyspace, worker: Worker, number: int, chain: bytes) -> int:
    await keyspace.hold(number, b"".join(worker.pool.held()))
    decision = await keyspace.fleet.bookings.decide(keyspace.ask(chain))
    await keyspace.fleet.bookings.settle(decision.reservation, "failed")
    return decision.matched_tokens


async def test_a_conversation_whose_end_was_given_up_is_matched_exactly(keyspace: Keyspace) -> None:
    await keyspace.workers(1, flags=READY & ~Flag.CLOSED)
    worker, chain = Worker(30), keyspace.chain(100)
    worker.serve(chain)
    worker.serve(keyspace.chain(70))
    left = worker.matched(chain)
    assert 0 < left < 100 * BLOCK
    assert not worker.gaps(chain)
    assert await decided(keyspace, worker, 1, chain) == left


async def test_the_sets_have_holes_so_the_worker_announces_that_they_may(keyspace: Keyspace) -> None:
    """Two conversations share a prefix, and the shorter conversation gives up blocks that the longer one needs."""
    worker, prefix = Worker(40), keyspace.chain(60)
    long, short = keyspace.chain(90, prefix), keyspace.chain(65, prefix)
    worker.serve(long)
    worker.serve(short)
    worker.serve(keyspace.chain(110))
    asked = long[: 8 * 63]  # its budget
    left = worker.matched(asked)
    assert worker.gaps(asked)
    await keyspace.workers(1)
    assert await decided(keyspace, worker, 1, asked) > left, "by bisection alone"
    await keyspace.workers(1, flags=READY & ~Flag.CLOSED)
    assert await decided(keyspace, worker, 1, asked) == left


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", range(3))
async def test_the_match_is_what_is_held_whatever_was_given_up(keyspace: Keyspace, seed: int) -> None:
    rng = random.Random(seed)
    await keyspace.workers(1, flags=READY & ~Flag.CLOSED)
    worker = Worker(rng.randrange(1, 60))
    chains = [keyspace.chain(rng.randrange(1, 40)) for _ in range(3)]
    for _ in range(60):
        old = rng.choice(chains)
        head = old[: 8 * rng.randrange(1, len(old) // 8 + 1)]
        chain = keyspace.chain(min(len(head) // 8 + rng.randrange(0, 30), BLOCKS - 10), head[: 8 * (BLOCKS - 40)])
        chains = [*chains[-12:], chain]
        worker.serve(chain)
    for number, chain in enumerate(chains):
        if number:
            await keyspace.store.delete(keyspace.keys.slot(1), *[key async for key in keyspace.store.scan_iter("*b:*")])
        assert await decided(keyspace, worker, 1, chain) == worker.matched(chain)
