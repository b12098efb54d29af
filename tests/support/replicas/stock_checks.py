"""The checks that a replica makes of engines without the plugin, run by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from warmfleet.background.stock.checks import StockEngines
from warmfleet.background.stock.engine_list import EngineList
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.fleet import Fleet, Question, connect, new_reservation
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.prompt.block_hashes import TEXT_SCHEME, text_chain
from warmfleet.settings import Settings
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from tests.support.engines.scripted import Engine

    from warmfleet.fleet import WorkerView


class Checks:
    """A replica's checks, run by hand."""

    def __init__(self, redis_url: str, model: str, entries: list[str], **times: Any) -> None:
        self.fleet = Fleet(connect(redis_url, timeout_s=5), model)
        chosen = Settings(redis_url=redis_url, models=(model,))
        self.addresses = Addresses(("10.0.0.0/8",))  # the engines of these tests are allowed only if they are listed
        self.client = EngineClient(self.addresses, 1.0)
        pools = Pools([Pool(model, self.fleet, DegradedMode(1.0))])
        self.engines = StockEngines(pools, self.client, EngineList(entries), self.addresses, chosen, Timing(**times))
        self.round = self.engines.round

    async def workers(self) -> dict[str, WorkerView]:
        return {view.url: view for view in await self.fleet.workers.read()}

    async def slot(self, url: str) -> int:
        return (await self.workers())[url].load.slot


def metrics(engine: Engine, page: bytes | None) -> None:
    """Let an engine answer /metrics with this page; None: with an error."""
    before = engine._page

    def pages(path: str) -> bytes:
        if path != "/metrics":
            return before(path)
        if page is None:
            raise ConnectionError
        return page

    cast("Any", engine)._page = pages


async def sent(checks: Checks, url: str, text: bytes = b"word " * 400) -> int:
    """Send a prompt to its end; returns the blocks that the decision saw."""
    ask = asked(text)
    decision = await checks.fleet.bookings.decide(ask)
    assert decision.url == url
    await checks.fleet.bookings.settle(ask.reservation, "finished")
    return decision.matched_tokens // TEXT_SCHEME.block_tokens


def asked(text: bytes) -> Question:
    chain = text_chain(text)
    return Question(new_reservation(1), (chain,), 16 * len(chain.hashes) // 8 + 1, 600)
