"""The two halves of a virtual engine: the plugin's own publishers, called when they are due."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from warmfleet.fleet import Proof
from warmfleet.timing import Timing
from warmfleet_loadtest.simulator.engine_core import load_of
from warmfleet_loadtest.simulator.virtual_clock import VirtualEngine
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.bench.virtual_store import VirtualStore

    from warmfleet.fleet import Fleet
    from warmfleet_loadtest.engine import EngineConfig
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.virtual_clock import Clock, VirtualFleet
    from warmfleet_worker.load import Load

MODEL = "sim"
SOON_S = wire.PROGRESS_FLUSH_SECONDS / 4  # the wait of a publisher's thread that is woken
LEAST_S = 1e-3  # between two steps of a publisher that has more to do


class VirtualWorker:
    """Engine ``number`` of a fleet. Call ``join`` once, then ``keep_going``."""

    def __init__(
        self, store: VirtualStore, config: EngineConfig, number: int, pool: str = MODEL, *, forgets: bool = True
    ) -> None:
        """forgets: False for an engine that evicts in vLLM's order whatever sessions end or yield."""
        self._pool = pool
        self.tracker = Tracker()
        scheduler = config.scheduler(self.tracker, lambda: store.clock.now)
        if not forgets:
            scheduler.follower = None
        self.engine = VirtualEngine(scheduler, config.costs)
        self.server_id = f"s{number:02d}"
        self.worker_id = wire.worker_id_of(self.server_id, 0)
        self._woken = False
        self._fleet: VirtualFleet | None = None
        yielded = scheduler.follower.eviction.yield_sessions if scheduler.follower is not None else None
        announced = self._core_config(config, store.url)
        more: dict[str, Any] = {}
        tier = getattr(scheduler, "tier", None)  # of tests.bench.virtual_tiers
        if tier is not None and tier.told:
            announced = replace(announced, sets={wire.CPU: tier.announced})
            more = {"sets": {wire.CPU: tier.tracker}, "ps_per_byte": lambda: {wire.CPU: tier.ps_per_byte}}
        self._core = WorkerPublisher(announced, self.tracker, self._load, yielded=yielded, **more)
        self._server = ServerPublisher(self._server_config(number, store.url))
        for half in (self._core, self._server):
            half._stream.client.close()
            half._stream.client = store.sync

    def _core_config(self, config: EngineConfig, url: str) -> PublisherConfig:
        limits = config.limits
        return PublisherConfig(
            redis_url=url,
            model=self._pool,
            worker_id=self.worker_id,
            server_id=self.server_id,
            rank=0,
            scheme=config.scheme,
            capacity_blocks=config.blocks,
            max_model_len=limits.max_model_len,
            version="virtual",
            closed=not config.ttft_target,
        )

    def _server_config(self, number: int, url: str) -> ServerConfig:
        address = f"http://127.0.0.1:{10_000 + number}"
        return ServerConfig(
            redis_url=url,
            model=self._pool,
            server_id=self.server_id,
            url=address,
            models=(MODEL,),
            version="virtual",
            artifacts={},
            facts={},
        )

    def _load(self) -> Load:
        return load_of(self.engine.scheduler, self.engine.meter.speed_tps)

    async def join(self, fleet: Fleet, clock: Clock) -> None:
        """Announce both halves, apply that, and prove the worker as a probe would. It takes 0.2 virtual seconds."""
        self._server._round()
        self._core.step(clock.now)
        for _ in range(4):
            await fleet.upkeep.step()
            clock.now += 0.05
        raw: Any = await fleet.redis.hget(fleet.keys.workers, self.worker_id)
        if raw is None:
            raise RuntimeError(f"nobody has taken notice of {self.worker_id}")
        await fleet.probes.prove(self.worker_id, json.loads(raw)["nonce"], Proof("proven", "virtual"))

    def keep_going(self, fleet: VirtualFleet) -> None:
        """Keep both halves publishing from now on."""
        self._fleet = fleet
        fleet.at(fleet.clock.now, self._when_due, duty=True)
        fleet.at(fleet.clock.now, self._beat, duty=True)

    def prefilled(self, reservation: str, request: Request, now: float) -> None:
        """Let the publisher wake and report the end of a prefill."""
        self._core.progress(reservation, request.cached_tokens, request.prompt_tokens)
        if not self._woken and self._fleet:
            self._woken = True
            self._fleet.at(now + SOON_S, self._awake, duty=True)

    async def _awake(self, now: float) -> None:
        self._woken = False
        self._core.step(now)

    async def _when_due(self, now: float) -> None:
        if now >= self._core._due.next():
            self._core.step(now)
        if self._fleet:
            self._fleet.at(max(self._core._due.next(), now + LEAST_S), self._when_due, duty=True)

    async def _beat(self, now: float) -> None:
        self._server._round()
        if self._fleet:
            self._fleet.at(now + wire.HEARTBEAT_SECONDS, self._beat, duty=True)


class StockWorker:
    """An engine without the plugin: a replica's checks register it, and nothing else is known of it."""

    def __init__(self, config: EngineConfig, number: int) -> None:
        self._config = config
        self._url = f"http://127.0.0.1:{10_000 + number}"
        self.engine = VirtualEngine(config.scheduler(None), config.costs)
        self.worker_id = f"127.0.0.1-{10_000 + number}"
        self._fleet: VirtualFleet | None = None
        self._register: Callable[[], Awaitable[object]] | None = None

    async def join(self, fleet: Fleet, clock: Clock) -> None:
        """Register it as its first check does. It takes 0.2 virtual seconds, as long as a worker with the plugin."""
        scheme = self._config.scheme
        record = {"scheme_id": scheme.scheme_id, "scheme": scheme.as_dict(), "url": self._url, "models": [MODEL]}
        self._register = partial(fleet.workers.register, self.worker_id, record, self._config.blocks)
        await self._register()
        clock.now += 0.2

    def keep_going(self, fleet: VirtualFleet) -> None:
        """Keep checking it from now on."""
        self._fleet = fleet
        fleet.at(fleet.clock.now, self._check, duty=True)

    def prefilled(self, reservation: str, request: Request, now: float) -> None:
        """The end of a prefill is not reported."""

    async def _check(self, now: float) -> None:
        if self._register and self._fleet:
            await self._register()
            self._fleet.at(now + Timing.health_interval_s, self._check, duty=True)
