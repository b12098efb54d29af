"""Engines with a tier in CPU memory, on the virtual clock: vLLM's OffloadingConnector as far as placement sees it.

Each block of a prompt is copied to the tier when it is computed (write-through). A prompt's beginning that the GPU
lacks is loaded from the tier before the rest is computed: loads are asynchronous, so that other requests go on, and
stand in line for one link. The tier evicts the least recently used prompt, its end first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

from warmfleet.fleet import client
from warmfleet.fleet.script_loader import script_text
from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.simulator.plugin_pool import PluginPool
from warmfleet_loadtest.simulator.scheduler import Output, Request, Scheduler, Step
from warmfleet_worker.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from warmfleet_loadtest.simulator.block_pool import BlockPool
    from warmfleet_loadtest.simulator.scheduler import Limits
    from warmfleet_worker.protocol import wire

TOKEN_BYTES = 131_072  # of an 8B model's KV: 32 layers, 8 heads of 128 numbers of 2 bytes, keys and values
#: How decide prices what a tier holds, and where a bench puts another rule.
RULE = "min(loading + max(0, loading - s.wait[i] / s.speed[i]), lambda * useful / s.speed[i])"
ROOM = "most = max(most, min(tier.blocks, 1.5 * gpu))"  # how tick counts a tier as room for sessions
WEIGHTED = "(1 - {}) * lambda * useful / s.speed[i]"


class Tier:
    """The blocks in a tier, with the time of its link. told: the plugin reports them."""

    def __init__(self, blocks: int, block_tokens: int, token_bytes: int, bytes_per_s: float, *, told: bool) -> None:
        self.blocks, self.token_bytes, self.told, self.bytes_per_s = blocks, token_bytes, told, bytes_per_s
        self.block_s = block_tokens * token_bytes / bytes_per_s
        self.tracker = Tracker()
        self.loaded = 0  # blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()

    @property
    def announced(self) -> dict[str, int]:
        return {"capacity_blocks": self.blocks, "bytes_per_token": self.token_bytes}

    @property
    def ps_per_byte(self) -> int:
        return round(1e12 / self.bytes_per_s)

    def use(self, hashes: Sequence[bytes], *, store: bool = False) -> None:
        """Note a use of a prompt's beginning, its first block last. store: copy the blocks that the tier lacks."""
        for one in reversed(hashes):
            if one in self._held:
                self._held.move_to_end(one)
            elif store:
                self._held[one] = None
                self.tracker.stored([one])
        while len(self._held) > self.blocks:
            self.tracker.removed([self._held.popitem(last=False)[0]])

    def after(self, hashes: Sequence[bytes], start: int, limit: int) -> int:
        """Return how many blocks of a chain the tier holds without a gap from ``start`` on, up to ``limit``."""
        end = start
        while end < min(limit, len(hashes)) and hashes[end] in self._held:
            end += 1
        return end - start


@dataclass(slots=True)
class Load:
    """A load under way. blocks: of the request that will be in the GPU when it ends."""

    ends: float
    request: Request
    blocks: int


class TieredScheduler(Scheduler):
    """vLLM's scheduler with a tier. clock: the time of the simulation."""

    def __init__(
        self, pool: BlockPool, scheme: wire.Scheme, limits: Limits, tier: Tier, clock: Callable[[], float]
    ) -> None:
        super().__init__(pool, scheme, limits)
        self.tier = tier
        self._clock = clock
        self._loads: deque[Load] = deque()
        self._link_free = 0.0
        self.on_cached = self._computed

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._loads)

    def schedule(self) -> Step | None:
        self.collect(self._clock())
        return super().schedule()

    def next_due(self) -> float | None:
        return self._loads[0].ends if self._loads else None

    def collect(self, now: float) -> list[Output]:
        """Let the requests run whose loads have ended."""
        while self._loads and self._loads[0].ends <= now:
            self._run(self._loads.popleft())
        return []

    def _schedule_waiting(self, planned: dict[Request, int], budget: int) -> None:
        size = self.limits.block_tokens
        while self.waiting and budget > 0 and len(self.running) + len(self._loads) < self.limits.max_requests:
            request = self.waiting[0]
            limit = (request.tokens - 1) // size
            hit = self._cached(request, limit)
            more = self.tier.after(request.hashes, len(hit), limit)
            if -(-request.tokens // size) - len(hit) + self.pool.idle(hit) > self.pool.free:
                return
            self.tier.use(request.hashes[:limit])
            if more:
                self.waiting.popleft()
                self._load(request, hit, more)
                continue
            self.waiting.popleft()
            self._admit(request, hit)
            tokens = min(request.tokens - request.computed, budget)
            self._grow(request, tokens)
            planned[request] = tokens
            budget -= tokens

    def _load(self, request: Request, hit: list[int], more: int) -> None:
        self.pool.touch(hit)
        request.blocks = [*hit, *self.pool.allocate(more)]
        request.entered = len(hit)
        self._link_free = max(self._clock(), self._link_free) + more * self.tier.block_s
        self.tier.loaded += more
        self._loads.append(Load(self._link_free, request, len(hit) + more))

    def _run(self, load: Load) -> None:
        request, blocks = load.request, load.blocks
        for index in range(request.entered, blocks):
            self.pool.insert(request.blocks[index], request.hashes[index])
        request.entered, request.computed = blocks, blocks * self.limits.block_tokens
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = request.computed
            self.totals.queries += request.tokens
            self.totals.hits += request.computed
            self.totals.prompt_tokens += request.prompt_tokens
        self.running.append(request)

    def _computed(self, request: Request, _start: int, end: int) -> None:
        self.tier.use(request.hashes[: min(end, request.prompt_tokens // self.limits.block_tokens)], store=True)


@dataclass(frozen=True, slots=True)
class TieredConfig(EngineConfig):
    """An engine with a tier. tier_times: blocks of the tier per block of the GPU. token_bytes: of its model's KV."""

    tier_times: float = 4.0
    token_bytes: int = TOKEN_BYTES
    bytes_per_s: float = 25e9
    told: bool = True

    def scheduler(self, listener: Tracker | None = None, clock: Callable[[], float] | None = None) -> Scheduler:
        if clock is None:
            raise ValueError("an engine with a tier needs a clock")
        pool = PluginPool(self.blocks, self._eviction(), listener, clock)
        tier = Tier(
            round(self.tier_times * self.blocks),
            self.limits.block_tokens,
            self.token_bytes,
            self.bytes_per_s,
            told=self.told,
        )
        made = TieredScheduler(pool, self.scheme, self.limits, tier, clock)
        made.follower = pool
        return made


@contextmanager
def counted_at(weight: float | None) -> Iterator[None]:
    """Let decide count a token in a tier as ``weight`` tokens on the GPU; None: by the seconds of its load."""
    if weight is None:
        yield
        return
    with _changed("decide", RULE, WEIGHTED.format(weight)):
        yield


@contextmanager
def room_uncounted() -> Iterator[None]:
    """Let the ledger of sessions count the GPU alone as room."""
    with _changed("tick", ROOM, ""):
        yield


@contextmanager
def _changed(script: str, rule: str, other: str) -> Iterator[None]:
    def text(name: str) -> str:
        told = script_text(name)
        if name == script and rule not in told:
            raise ValueError(f"{script} has another rule for tiers than this bench knows")
        return told.replace(rule, other)

    with patch.object(client, "script_text", text):
        yield


def tiers_of(schedulers: Iterable[Scheduler]) -> list[Tier]:
    return [scheduler.tier for scheduler in schedulers if isinstance(scheduler, TieredScheduler)]
