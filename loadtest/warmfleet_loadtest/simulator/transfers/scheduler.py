"""A scheduler whose requests may keep their blocks for another engine, or get them from one, as vLLM's does.

A request of the leg ``prefill`` leaves its blocks pinned when it has finished. A request of the leg ``decode`` takes
all its blocks when it is scheduled, and waits, without holding up requests behind it, until they are filled; then it
computes its last token again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.scheduler import Leg, Scheduler
from warmfleet_loadtest.tokens.prompt_tokenizer import WRONG_ID

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet_loadtest.simulator.block_pool import BlockPool
    from warmfleet_loadtest.simulator.scheduler import Limits, Request
    from warmfleet_worker.protocol import wire


class TransferScheduler(Scheduler):
    """keep: called with a finished request and its blocks, which stay pinned until they are given to ``unpin``.

    fetch: called with a request and its number of blocks that are in the cache; ends with ``loaded`` or ``abort``.
    spoilt: called for each request that will be answered from wrong blocks.
    """

    def __init__(self, pool: BlockPool, scheme: wire.Scheme, limits: Limits) -> None:
        super().__init__(pool, scheme, limits)
        self.keep: Callable[[Request, list[int]], None] = lambda _request, blocks: self.unpin(blocks)
        self.fetch: Callable[[Request, int], None] = lambda request, _held: self.loaded(request, came=False)
        self.spoilt: Callable[[Request], None] = lambda _request: None

    def abort(self, request: Request) -> None:
        if request in self.waiting:
            self._free(request)
        super().abort(request)

    def loaded(self, request: Request, *, came: bool, wrong: bool = False) -> None:
        """Go on with a request, whose blocks came or have to be computed. wrong: they are those of other tokens."""
        if request not in self.waiting:  # aborted
            return
        request.leg = Leg.LOADED
        if not came:
            return
        size = self.limits.block_tokens
        request.computed = request.prompt_tokens - 1
        request.cached_tokens = request.prompt_tokens
        start, full = request.entered, min(request.prompt_tokens // size, len(request.hashes))
        if wrong:
            self._spoil(request)
            self.pool.wrong.update(request.blocks[start:])
        for index in range(start, full):
            self.pool.insert(request.blocks[index], request.hashes[index])
        if self.on_cached is not None and full > start:
            self.on_cached(request, start, full)
        request.entered = max(start, full)

    def unpin(self, blocks: list[int]) -> None:
        """Give back the blocks of a request of the leg ``prefill``."""
        self.pool.release(reversed(blocks))

    def _schedule_waiting(self, planned: dict[Request, int], budget: int) -> None:
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.limits.max_requests:
                return
            if request.leg == Leg.LOADING:
                continue
            if request.leg == Leg.LOADED:
                self.running.append(request)
            else:
                hit = self._fitting(request)
                if hit is None:
                    return
                if request.leg == Leg.DECODE:
                    self._load(request, hit)
                    continue
                self._admit(request, hit)
            self.waiting.remove(request)
            budget -= self._start(request, planned, budget)

    def _load(self, request: Request, hit: list[int]) -> None:
        """Take all blocks of a request, and have those filled that are not in the cache."""
        self._hold(request, hit)
        needed = -(-request.prompt_tokens // self.limits.block_tokens) - len(hit)
        request.blocks += self.pool.allocate(needed)
        request.leg = Leg.LOADING
        self.fetch(request, len(hit))

    def _hold(self, request: Request, hit: list[int]) -> None:
        super()._hold(request, hit)
        if not self.pool.wrong.isdisjoint(hit):
            self._spoil(request)

    def _grow(self, request: Request, tokens: int) -> bool:
        before = len(request.blocks)
        grown = super()._grow(request, tokens)
        if request.wrong:
            self.pool.wrong.update(request.blocks[before:])
        return grown

    def _spoil(self, request: Request) -> None:
        if not request.wrong:
            request.wrong = True
            request.answer = (WRONG_ID,) * len(request.answer)
            self.spoilt(request)

    def _preempt(self, request: Request) -> None:
        super()._preempt(request)
        if request.leg == Leg.LOADED:
            request.leg = Leg.WHOLE  # computed again here

    def _end(self, request: Request) -> None:
        if request.leg != Leg.PREFILL or not request.finished:
            super()._end(request)
            return
        blocks = list(request.blocks)
        self.pool.touch(blocks)
        super()._end(request)
        self.keep(request, blocks)
