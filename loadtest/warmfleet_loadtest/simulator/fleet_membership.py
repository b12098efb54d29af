"""What the plugin does in a real vLLM, for a simulated engine: the same publishers, hence the same protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.api import VERSION
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet_loadtest.simulator.engine_core import EngineCore
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.tokens.prompt_tokenizer import PromptTokenizer
    from warmfleet_worker.tracker import Tracker


@dataclass(frozen=True, slots=True)
class Membership:
    """How an engine joins the fleet. model: the tag in Redis; models: the names that it serves."""

    redis_url: str
    model: str
    models: tuple[str, ...]
    server_id: str
    url: str


class Halves:
    """Both halves of one worker: the engine core's and the API server's."""

    def __init__(
        self,
        membership: Membership,
        core: EngineCore,
        tracker: Tracker,
        identity: PromptTokenizer,
        artifacts: Mapping[str, bytes],
    ) -> None:
        scheduler = core.scheduler
        config = PublisherConfig(
            redis_url=membership.redis_url,
            model=membership.model,
            worker_id=wire.worker_id_of(membership.server_id, 0),
            server_id=membership.server_id,
            rank=0,
            scheme=scheduler.scheme,
            capacity_blocks=scheduler.pool.blocks,
            max_model_len=scheduler.limits.max_model_len,
            version=f"sim {VERSION}",
        )
        self.worker = WorkerPublisher(config, tracker, core.load)
        self.server = ServerPublisher(
            ServerConfig(
                redis_url=membership.redis_url,
                model=membership.model,
                server_id=membership.server_id,
                url=membership.url,
                models=membership.models,
                version=f"sim {VERSION}",
                artifacts=artifacts,
                facts=identity.facts(scheduler.limits.max_model_len),
            )
        )

    def start(self) -> None:
        self.worker.start()
        self.server.start()

    def stop(self) -> None:
        """Say goodbye; blocks for two seconds at most."""
        self.server.stop()
        self.worker.stop()

    def progress(self, request: Request) -> None:
        """A prefill is done: reported if the request carries a reservation of the fleet (of n choices, the first)."""
        ours = wire.reservation_of(request.request_id)
        if ours is not None and ours[1] == 0:
            self.worker.progress(ours[0], request.cached_tokens, request.prompt_tokens)
