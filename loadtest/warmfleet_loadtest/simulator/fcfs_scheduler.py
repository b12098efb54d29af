"""First come, first served: one prefill at a time, in the order of arrival, and decoding that costs nothing.

It has the interface of the step scheduler and the same block pool. No real engine works so, but published simulations
do, whose figures can be compared with those of this scheduler.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.scheduler import Output, Request, Scheduler, Step, hash_blocks
from warmfleet_loadtest.simulator.step_costs import StepWork

if TYPE_CHECKING:
    from warmfleet_loadtest.simulator.block_pool import BlockPool
    from warmfleet_loadtest.simulator.scheduler import Limits
    from warmfleet_worker.protocol import wire


class FcfsScheduler(Scheduler):
    """Computes one prompt at a time; decoding slows no other request down. decode_s: seconds per token of an answer."""

    def __init__(self, pool: BlockPool, scheme: wire.Scheme, limits: Limits, decode_s: float = 0.02) -> None:
        super().__init__(pool, scheme, limits)
        self.decode_s = decode_s
        self._due: list[tuple[float, int, Request]] = []
        self._order = count()

    def schedule(self) -> Step | None:
        if not self.waiting or len(self.running) >= self.limits.max_requests:
            return None
        request = self.waiting[0]
        size = self.limits.block_tokens
        hit = self._cached(request, (request.prompt_tokens - 1) // size)
        whole = -(-(request.prompt_tokens + request.max_tokens) // size)
        if whole - len(hit) + self.pool.idle(hit) > self.pool.free:
            return None
        self.waiting.popleft()
        self._admit(request, hit)
        request.blocks += self.pool.allocate(whole - len(hit))
        tokens = request.prompt_tokens - request.computed
        self._grow(request, tokens)
        request.computed += tokens
        return Step([(request, tokens)], StepWork(tokens, 1, 0.0, 0, 0))

    def complete(self, step: Step, now: float = 0.0) -> list[Output]:
        """End the prefill; return the answer's first token. The others come together, after ``decode_s`` per token."""
        ((request, _tokens),) = step.tokens
        if request.finished:  # aborted
            return []
        request.output_tokens = 1
        self.totals.generation_tokens += 1
        if self.follower is not None:
            self.follower.first_token(request)
        heapq.heappush(self._due, (now + self.decode_s * (request.max_tokens - 1), next(self._order), request))
        return [Output(request, request.answer[:1], first=True, finished=request.max_tokens == 1)]

    def next_due(self) -> float | None:
        """Return the time at which the next answer will be complete; None if no request is decoding."""
        return self._due[0][0] if self._due else None

    def collect(self, now: float) -> list[Output]:
        """Return the rest of all answers that are complete by ``now``."""
        outputs = []
        while self._due and self._due[0][0] <= now:
            _at, _order, request = heapq.heappop(self._due)
            if request not in self.running:  # aborted
                continue
            tokens = request.answer[1 : request.max_tokens]
            request.output_tokens = request.max_tokens
            self.totals.generation_tokens += len(tokens)
            hash_blocks(self.scheme, request)
            self._grow(request, request.tokens - 1 - request.computed)
            self._end(request)
            self.totals.finished += 1
            if tokens:
                outputs.append(Output(request, tokens, first=False, finished=True))
        return outputs
