"""A block pool that evicts in the plugin's own order, as the plugin lets vLLM's pool do it.

See ``warmfleet_worker.eviction.eviction``: when an allocation would evict blocks that a later prompt may need, blocks
that nobody is expected to need are moved to the front of the free queue first.
"""

from __future__ import annotations

import time
from itertools import takewhile
from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.block_pool import BlockPool
from warmfleet_worker.eviction.finished import Finished
from warmfleet_worker.eviction.objective import Served
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet_loadtest.simulator.block_pool import Listener
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_worker.eviction.eviction import Eviction


class PluginPool(BlockPool):
    """A ``BlockPool`` in which ended and paused sessions go first, and with T-LRU what a next request can miss.

    The scheduler calls its methods ``first_token`` and ``over`` (see ``Follower``). clock: monotonic seconds.
    """

    def __init__(
        self,
        blocks: int,
        eviction: Eviction,
        listener: Listener | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(blocks, listener)
        self.eviction = eviction
        self._clock = clock

    def first_token(self, request: Request) -> None:
        tail = self.eviction.tail
        if tail is not None:
            served = Served(request.prompt_tokens, request.prompt_tokens - request.cached_tokens)
            tail.first_token(served, request.hashes[: request.prompt_tokens // tail.block_tokens])

    def over(self, request: Request, *, preempted: bool = False) -> None:
        finished = Finished(
            request.blocks[: request.entered],
            request.hashes[: request.entered],
            request.prompt_tokens,
            request.tokens,
            ended=wire.conversation_ended(request.request_id),
            request_id=request.request_id,
            cached_tokens=request.cached_tokens,
            preempted=preempted,
        )
        self.eviction.freed(finished, self._clock())

    def allocate(self, count: int) -> list[int]:
        if self.eviction.chooses:
            self._give_up(count)
        return super().allocate(count)

    def _give_up(self, count: int) -> None:
        """Before ``count`` blocks are taken, move blocks to the free queue's front, to be evicted first."""
        now, silent = self._clock(), self.eviction.is_silent
        for _ in takewhile(lambda block: self._hash_of[block] is None or silent(block, now), self._free):
            count -= 1
            if count <= 0:
                return
        for block in reversed(self.eviction.give_up(count, self._is_free)):
            self._free.move_to_end(block, last=False)

    def _is_free(self, block: int, block_hash: bytes) -> bool:
        return block in self._free and self._hash_of[block] == block_hash
