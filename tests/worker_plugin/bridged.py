"""An engine without sockets for the tests of the bridge: real hashes, a real block pool, vLLM's events as bytes.

Its hashes have a random seed, as those of vLLM 0.28, so nothing else can compute them. The truth is therefore told in
the chain that routers compute.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgpack

from warmfleet_loadtest.simulator.block_pool import BlockPool
from warmfleet_loadtest.simulator.kv_events import KvEvents
from warmfleet_loadtest.simulator.scheduler import Limits, Request, Scheduler
from warmfleet_worker.bridge.block_table import scheme_of
from warmfleet_worker.bridge.sequence import ReplayError
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 16
CANONICAL = scheme_of(PAGE)


class SilentEvents(KvEvents):
    """KV events that are taken, not sent."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._block_tokens, self._lookahead = scheduler.limits.block_tokens, scheduler.scheme.lookahead
        self._events: list[dict[str, Any]] = []
        scheduler.pool.on_copy_removed = self.copy_removed
        scheduler.pool.listener = self
        scheduler.on_cached = self.cached

    def take(self) -> list[dict[str, Any]]:
        taken, self._events = self._events, []
        return taken


class ScriptedEngine:
    """Publishes a batch per step. kept: how many of them it can replay; truths: its table after each of them.

    lookahead: the number of tokens behind a block that its hash covers.
    """

    def __init__(
        self, seed: int, blocks: int = 24, kept: int = 10_000, *, replays: bool = True, lookahead: int = 0
    ) -> None:
        self.kept, self.replays = kept, replays
        self.told = scheme_of(PAGE, lookahead)
        self.reply_loses: set[int] = set()
        self._random = random.Random(seed)
        self._blocks = blocks
        self._heads = [[self._random.randrange(9_000) for _ in range(4 * PAGE)] for _ in range(3)]
        self.start()

    def start(self) -> None:
        """Begin a new process: an empty cache, another seed, batches from 0 on."""
        scheme = wire.Scheme("sha256", self._random.randbytes(32), PAGE, self.told.extra_keys)
        limits = Limits(step_tokens=64, max_model_len=(self._blocks - 1) * PAGE)
        self.scheduler = Scheduler(BlockPool(self._blocks), scheme, limits)
        self.events = SilentEvents(self.scheduler)
        self.batches: list[bytes] = []
        self.truths: list[set[bytes]] = []
        self._canonical: dict[bytes, bytes] = {}

    # ------------------------------------------------ what it does

    def serve(self) -> Iterator[None]:
        """Serve one random prompt that often has a head or a length in common with others; yield after every batch."""
        head = self._random.choice(self._heads)
        own = [self._random.randrange(9_000) for _ in range(self._random.choice((0, 0, 5, PAGE, 40, 100)))]
        salt = self._random.choice((None, None, None, "tenant"))
        request = Request("r", [*head, *own], self._random.choice((1, 3, 20)), range(20_000, 20_100), salt)
        self.scheduler.add(request)
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.complete(step)
            self._name(request)
            if self.publish():
                yield

    def reset(self) -> None:
        self.scheduler.pool.reset()
        self.publish()

    def report_hits(self) -> None:
        """A client of vLLM makes it tell of blocks that are held already (``kv_cache_report_mode``)."""
        request = Request("full", self._random.choice(self._heads), 1, [1])
        self.scheduler.add(request)
        self.scheduler.waiting.clear()
        held = len(self.scheduler.pool.prefix(request.hashes, len(request.hashes)))
        if held:
            self.events.cached(request, 0, held)
        self.publish()

    def publish(self) -> bool:
        events = self.events.take()
        if events:
            self.batches.append(msgpack.packb([float(len(self.batches)) + self._random.random(), events, 0]))
            self.truths.append({self._canonical[block] for block in self.scheduler.pool.held()})
        return bool(events)

    def _name(self, request: Request) -> None:
        """Remember the chain that routers compute for the blocks of a request."""
        tokens = request.slice(0, len(request.hashes) * PAGE + self.told.lookahead)
        chain = wire.chain_hashes(self.told, tokens, salt=request.salt)
        self._canonical |= {own: true[-8:] for own, true in zip(request.hashes, chain, strict=True)}

    # ------------------------------------------------ what the bridge gets

    @property
    def newest(self) -> tuple[int, bytes]:
        return len(self.batches) - 1, self.batches[-1]

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        if not self.replays:
            raise ReplayError("none")
        loses, self.reply_loses = self.reply_loses, set()
        for number in range(max(start, len(self.batches) - self.kept), len(self.batches)):
            if number not in loses:
                yield number, self.batches[number]
