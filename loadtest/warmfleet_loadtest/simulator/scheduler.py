"""vLLM's v1 scheduler, one step at a time and without a clock: the caller decides how long a step lasts.

Each step has a token budget. Running requests come first, in their order: one token for a decoding request, a chunk for
a request whose prompt is not computed yet. The rest of the budget goes to waiting requests, in their order, as long as
their whole prompt fits into free blocks and fewer than ``max_requests`` run. If a running request cannot get a block,
the request that was admitted last loses its blocks and is computed again later (recompute preemption).

As in vLLM, blocks enter the cache when they are scheduled, so a request that is admitted in the same step can already
hit them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from warmfleet_loadtest.simulator.step_costs import StepWork
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_loadtest.simulator.block_pool import BlockPool
    from warmfleet_worker.eviction.eviction import Eviction


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one engine; vLLM's max_num_batched_tokens, max_num_seqs, max_model_len and block_size.

    sorts: waiting requests are ordered by priority, as with ``--scheduling-policy priority``.
    """

    step_tokens: int = 2_048
    max_requests: int = 256
    max_model_len: int = 32_768
    block_tokens: int = 16
    sorts: bool = False


class Leg(Enum):
    """Which part of its work a request does here: all, only the prefill for another engine, or all but the prefill."""

    WHOLE = "whole"
    PREFILL = "prefill"
    DECODE = "decode"
    LOADING = "loading"  # DECODE, and its blocks are on their way
    LOADED = "loaded"  # DECODE, and its blocks have come, or will not come


@dataclass(slots=True, eq=False)
class Request:
    """A sequence. hashes: of its full blocks, prompt and answer alike. priority: the lowest is computed first.

    prefill_cached: takes the place of cached_tokens in ``usage``: the figure of the engine of its prefill. wrong: its
    answer is made from blocks of other tokens.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    answer: Sequence[int]  # token ids of the answer, fixed beforehand: at least max_tokens
    salt: str | None = None
    priority: int = 0
    skip_cache: bool = False
    output_tokens: int = 0
    computed: int = 0
    cached_tokens: int = 0  # prompt tokens found in the cache when it was first scheduled
    preemptions: int = 0
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    entered: int = 0  # the number of its blocks that are in the cache
    last_digest: bytes | None = None
    admitted: bool = False  # True from its first admission, also after a preemption
    leg: Leg = Leg.WHOLE
    prefill_cached: int | None = None
    wrong: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def tokens(self) -> int:
        """The number of known tokens: those of the prompt and those sampled so far."""
        return len(self.prompt) + self.output_tokens

    @property
    def finished(self) -> bool:
        return self.output_tokens >= self.max_tokens

    def slice(self, start: int, end: int) -> list[int]:
        """Return the token ids from ``start`` to ``end``, prompt and answer alike."""
        size = len(self.prompt)
        if end <= size:
            return list(self.prompt[start:end])
        return [*self.prompt[start:size], *self.answer[max(0, start - size) : end - size]]


@dataclass(slots=True)
class Step:
    """The work of a step: the tokens of each request, and their sums for the cost model."""

    tokens: list[tuple[Request, int]] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)


@dataclass(frozen=True, slots=True)
class Output:
    """The new tokens of a request after a step. first: they are the first tokens of its answer.

    failed: the engine gives the request up; there are no tokens.
    """

    request: Request
    token_ids: Sequence[int]
    first: bool
    finished: bool
    failed: bool = False


@dataclass(slots=True)
class Totals:
    """Counters with vLLM's meanings."""

    queries: int = 0  # tokens looked up in the prefix cache
    hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0


class Follower(Protocol):
    """A pool that a scheduler tells when a request has its first token, and when it ends, still holding its blocks."""

    eviction: Eviction

    def first_token(self, request: Request) -> None: ...
    def over(self, request: Request, *, preempted: bool = False) -> None: ...


class Scheduler:
    """Call ``add`` for each request, and ``schedule`` and ``complete`` in turn. ``abort`` may come at any time."""

    def __init__(self, pool: BlockPool, scheme: wire.Scheme, limits: Limits) -> None:
        if limits.block_tokens != scheme.block_tokens:
            raise ValueError("the scheme has another block size than the engine")
        if (pool.blocks - 1) * limits.block_tokens < limits.max_model_len:
            raise ValueError(f"{pool.blocks} blocks cannot hold one request of {limits.max_model_len} tokens")
        self.pool = pool
        self.scheme = scheme
        self.limits = limits
        self.totals = Totals()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        # Called with a request and the range of its blocks that have entered the cache.
        self.on_cached: Callable[[Request, int, int], None] | None = None
        self.follower: Follower | None = None

    def add(self, request: Request) -> None:
        """Queue a request; raises ValueError if it can never run."""
        self.check(request)
        hash_blocks(self.scheme, request)
        place = len(self.waiting)
        while self.limits.sorts and place and self.waiting[place - 1].priority > request.priority:
            place -= 1
        self.waiting.insert(place, request)

    def check(self, request: Request) -> None:
        """Raise ValueError if the request can never run."""
        if not 0 < request.prompt_tokens <= self.limits.max_model_len - request.max_tokens or request.max_tokens < 1:
            raise ValueError(f"{request.prompt_tokens} + {request.max_tokens} tokens do not fit")

    def abort(self, request: Request) -> None:
        """Forget a request, running or waiting; its blocks stay in the cache. Unknown requests are ignored."""
        if request in self.running:
            self._end(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.max_tokens = request.output_tokens  # so that a step under way samples nothing for this request

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    # ------------------------------------------------ a step

    def schedule(self) -> Step | None:
        """Return the next step's work, with its blocks taken; None if there is nothing to do."""
        planned: dict[Request, int] = {}
        budget, preempted = self._schedule_running(planned, self.limits.step_tokens)
        if not preempted:
            self._schedule_waiting(planned, budget)
        if not planned:
            return None
        work = _work(planned)
        for request, tokens in planned.items():
            request.computed += tokens
        return Step(list(planned.items()), work)

    def complete(self, step: Step, now: float = 0.0) -> list[Output]:  # noqa: ARG002 - for schedulers with a clock
        """End a step: sample one token for each request that has all its known tokens computed."""
        outputs = []
        for request, _tokens in step.tokens:
            if request.finished or request.computed < request.tokens:  # aborted, or its prompt is not fully computed
                continue
            index = request.output_tokens
            request.output_tokens += 1
            self.totals.generation_tokens += 1
            hash_blocks(self.scheme, request)
            if index == 0 and self.follower is not None:
                self.follower.first_token(request)
            if request.finished:
                self._end(request)
                self.totals.finished += 1
            outputs.append(Output(request, request.answer[index : index + 1], index == 0, request.finished))
        return outputs

    def next_due(self) -> float | None:
        """Return the time at which outputs that need no step are due; here there are none."""
        return None

    def collect(self, now: float) -> list[Output]:  # noqa: ARG002 - for schedulers with a clock
        """Return outputs that need no step and are due by ``now``; here there are none."""
        return []

    def _schedule_running(self, planned: dict[Request, int], budget: int) -> tuple[int, bool]:
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            tokens = min(request.tokens - request.computed, budget)
            while not self._grow(request, tokens):
                victim = self.running.pop()
                budget += planned.pop(victim, 0)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    return budget, preempted
            planned[request] = tokens
            budget -= tokens
            position += 1
        return budget, preempted

    def _schedule_waiting(self, planned: dict[Request, int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_requests:
            request = self.waiting[0]
            hit = self._fitting(request)
            if hit is None:
                return
            self.waiting.popleft()
            self._admit(request, hit)
            budget -= self._start(request, planned, budget)

    def _fitting(self, request: Request) -> list[int] | None:
        """Return the blocks of a waiting request that are in the cache; None if the rest of it does not fit."""
        size = self.limits.block_tokens
        hit = self._cached(request, 0 if request.skip_cache else (request.tokens - 1) // size)
        needed = -(-request.tokens // size) - len(hit)
        return None if needed + self.pool.idle(hit) > self.pool.free else hit  # the whole sequence must fit

    def _start(self, request: Request, planned: dict[Request, int], budget: int) -> int:
        """Plan the first tokens of an admitted request, at most ``budget``; return their number."""
        tokens = min(request.tokens - request.computed, budget)
        self._grow(request, tokens)
        planned[request] = tokens
        return tokens

    def _admit(self, request: Request, hit: list[int]) -> None:
        self._hold(request, hit)
        self.running.append(request)

    def _hold(self, request: Request, hit: list[int]) -> None:
        """Use blocks of the cache for a request that was waiting."""
        self.pool.touch(hit)
        request.blocks = list(hit)
        request.entered = len(hit)
        request.computed = len(hit) * self.limits.block_tokens
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = request.computed
            self.totals.queries += request.tokens
            self.totals.hits += request.computed
            self.totals.prompt_tokens += request.prompt_tokens

    # ------------------------------------------------ blocks

    def _cached(self, request: Request, limit: int) -> list[int]:
        """Return the first blocks of a request that need not be computed, at most ``limit``."""
        found = self.pool.prefix(request.hashes, limit)
        return found[:-1] if self.scheme.drops else found

    def _grow(self, request: Request, tokens: int) -> bool:
        """Take blocks for ``tokens`` more tokens, and enter full blocks into the cache. False if too few are free."""
        end = request.computed + tokens
        needed = -(-end // self.limits.block_tokens) - len(request.blocks)
        if needed > self.pool.free:
            return False
        if needed > 0:
            request.blocks += self.pool.allocate(needed)
        full = min(end // self.limits.block_tokens, len(request.hashes))
        for index in range(request.entered, full):
            self.pool.insert(request.blocks[index], request.hashes[index])
        if self.on_cached is not None and full > request.entered:
            self.on_cached(request, request.entered, full)
        request.entered = max(request.entered, full)
        return True

    def _preempt(self, request: Request) -> None:
        if self.follower is not None:
            self.follower.over(request, preempted=True)
        self._free(request)
        request.preemptions += 1
        self.totals.preemptions += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request) -> None:
        """Remove a running request that was answered or aborted."""
        self.running.remove(request)
        if self.follower is not None:
            self.follower.over(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        self.pool.release(reversed(request.blocks))
        request.blocks = []
        request.computed = request.entered = 0


def hash_blocks(scheme: wire.Scheme, request: Request) -> None:
    """Hash the blocks of a request that have become full, and whose look-ahead is known."""
    size = scheme.block_tokens
    start = len(request.hashes) * size
    if request.tokens - start < size + scheme.lookahead:
        return
    salt = request.salt if start == 0 else None
    digests = wire.chain_hashes(scheme, request.slice(start, request.tokens), request.last_digest, salt)
    request.hashes += [digest[-wire.HASH_BYTES :] for digest in digests]
    request.last_digest = digests[-1]


def _work(planned: dict[Request, int]) -> StepWork:
    """Sum up the work of a step. Call it while ``computed`` of its requests does not contain this step yet."""
    prefill = prompts = decodes = context = 0
    pairs = 0.0
    for request, tokens in planned.items():
        if request.computed + 1 >= request.tokens and request.output_tokens:
            decodes += 1
            context += request.tokens
        else:
            prompts += 1
            prefill += tokens
            pairs += tokens * (request.computed + tokens / 2)
    return StepWork(prefill, prompts, pairs, decodes, context)
