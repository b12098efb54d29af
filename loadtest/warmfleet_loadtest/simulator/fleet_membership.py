"""A simulated engine joins a fleet by the plugin's own publishers, hence by the same protocol as a real vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.api import VERSION
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.pool_assignment import core_assignment, server_assignment
from warmfleet_worker.protocol import wire
from warmfleet_worker.reservations import Reservations
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet_loadtest.simulator.engine_core import EngineCore
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
    from warmfleet_worker.protocol.transfer import Transfer
    from warmfleet_worker.tracker import Tracker


@dataclass(frozen=True, slots=True)
class Membership:
    """How an engine joins a fleet. model: the fleet's model tag in Redis. models: the names that it serves.

    reports_ends: False for an engine whose plugin does not report the ends of requests.
    """

    redis_url: str
    model: str
    models: tuple[str, ...]
    server_id: str
    url: str
    reports_ends: bool = True


class Halves:
    """The two publishers of one simulated engine: that of the engine core and that of the API server."""

    def __init__(
        self,
        membership: Membership,
        core: EngineCore,
        tracker: Tracker,
        tokenizer: PromptTokenizer,
        artifacts: Mapping[str, bytes],
        transfer: Transfer | None = None,
    ) -> None:
        scheduler = core.scheduler
        eviction = scheduler.follower.eviction if scheduler.follower is not None else None
        config = PublisherConfig(
            redis_url=membership.redis_url,
            model=membership.model,
            worker_id=wire.worker_id_of(membership.server_id, 0),
            server_id=membership.server_id,
            rank=0,
            scheme=scheduler.scheme,
            capacity_blocks=scheduler.pool.blocks,
            max_model_len=scheduler.limits.max_model_len,
            step_tokens=scheduler.limits.step_tokens,
            version=f"sim {VERSION}",
            closed=eviction is None or eviction.tail is None,  # T-LRU may evict a block but keep its successor
            transfer=transfer,
        )
        yielded = eviction.yield_sessions if eviction is not None else None
        self._told = Reservations(core.requests) if membership.reports_ends else None
        self.worker = WorkerPublisher(
            config, tracker, core.load, core_assignment(config), core.moved, yielded, reservations=self._told
        )
        server = ServerConfig(
            redis_url=membership.redis_url,
            model=membership.model,
            server_id=membership.server_id,
            url=membership.url,
            models=membership.models,
            version=f"sim {VERSION}",
            artifacts=artifacts,
            facts=tokenizer.facts(scheduler.limits.max_model_len),
        )
        assignment = server_assignment(membership.redis_url, membership.model, membership.server_id)
        self.server = ServerPublisher(server, assignment)

    def start(self) -> None:
        self.worker.start()
        self.server.start()

    def stop(self) -> None:
        """Say goodbye to the fleet; takes two seconds at most."""
        self.server.stop()
        self.worker.stop()

    def progress(self, request: Request) -> None:
        """Report a finished prefill, if the request's id holds a reservation id; of several choices only the first."""
        reservation = wire.first_child(request.request_id)
        if reservation:
            self.worker.progress(reservation, request.cached_tokens, request.prompt_tokens)

    def arrived(self, request: Request) -> None:
        """Note a request that has come to the engine."""
        if self._told is not None:
            self._told.arrive(request.request_id)

    def ended(self, request: Request, reason: str) -> None:
        """Report a request that the engine has finished or aborted."""
        if self._told is not None:
            self._told.end([(request.request_id, request.output_tokens, reason)])
