"""Runs the background tasks of a replica one round at a time, without HTTP and without waiting between rounds."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from warmfleet.api import fleet_status as status
from warmfleet.api.model_listing import entries
from warmfleet.background.index_health import IndexHealthWatch
from warmfleet.background.prober import Prober
from warmfleet.background.view_reader import ViewReader
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.fleet.upkeep import Pace
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.identified_prompt import identify_here
from warmfleet.pools.identities import Identities
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.prompt import request as prompt
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.settings import Settings
from warmfleet.timing import Timing
from warmfleet.untrusted.template_approval import Templates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet.fleet import Fleet, WorkerView

CHAT = {"role": "user", "content": "Hello there. " * 9}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]}


class SteppedReplica:
    """The background tasks of a replica with one model, one round at a time, without waiting between rounds."""

    def __init__(self, fleet: Fleet, executor: ThreadPoolExecutor) -> None:
        self.fleet, self.metrics = fleet, Metrics()
        fleet.upkeep.pace = Pace(min_gap_ms=0, share_permille=1000, max_streams=256)
        self.pool = Pool(fleet.keys.tag, fleet, DegradedMode(1.0))
        self.pools = Pools([self.pool])
        self.identities = Identities(executor, Trie(2**20), Templates(self.metrics, approved="*"))
        self.reader = ViewReader(self.pools, self.identities, Settings(), Timing(), self.metrics)
        self.client = EngineClient(Addresses((), ()), 1.0)
        self.prober = Prober(self.pools, self.client, Settings(), Timing(), self.metrics)

    async def applied(self) -> None:
        empty = 0
        while empty < 3:  # the first round may come too soon after the last one, and only finds new names
            tick = await self.fleet.upkeep.tick()
            empty = 0 if tick.backlog + tick.snapshots else empty + tick.ran
            for stream in tick.backlog + tick.snapshots:
                kind, _, name = stream.partition(":")
                await (self.fleet.upkeep.apply(name) if kind == "events" else self.fleet.upkeep.apply_server(name))

    async def look(self) -> dict[str, Any]:
        """Read the whole fleet, and return the JSON that ``/workers`` would answer."""
        self.pool.fleet.workers._servers_until = 0.0  # so that servers' records are due and read again
        await self.reader.refresh()
        await IndexHealthWatch(self.pools, self.metrics).look()
        view = self.pool.view
        for worker in view.workers:  # finds due workers as a round of probes does, but sends no probe
            self.prober._first_seen["x"] = 0.0
            self.prober._due("x", view, worker)
        entries(self.pools, 0)
        shown = json.dumps(await status.workers(self.pool, self.pools), ensure_ascii=False, allow_nan=False).encode()
        return cast("dict[str, Any]", json.loads(shown))

    async def probed(self, worker: WorkerView) -> None:
        """Run a probe up to its requests to the engine, which fail because no engine listens there."""
        self.prober._running["x"] = asyncio.ensure_future(asyncio.sleep(0))
        await self.prober._probe("x", self.pool, worker)

    async def loaded(self) -> None:
        """Wait until every identity is loaded or refused; raises the error of a task, which would be lost otherwise."""
        while self.reader._loads:
            await asyncio.gather(*self.reader._loads.values())

    @property
    def refused(self) -> float:
        """Identities that could not be built."""
        return self.metrics.registry.get_sample_value("warmfleet_task_failures_total", {"task": "identity"}) or 0.0

    async def asked(self) -> set[str]:
        """The kinds of identity of a text, a chat and a chat with an image. Fails for the reason ``error``."""
        kinds = set()
        for endpoint, more in (
            ("completions", {"prompt": "Hello there"}),
            ("chat", {"messages": [CHAT]}),
            ("chat", {"messages": [CHAT, IMAGE]}),
        ):
            request = prompt.from_dict(cast("Any", endpoint), {"model": "m", **more})
            known = await identify_here(request, self.pool)
            assert known.reason != "error", "a mistake of ours"
            kinds.add(known.kind)
        return kinds


@asynccontextmanager
async def stepped_replica(fleet: Fleet) -> AsyncIterator[SteppedReplica]:
    with ThreadPoolExecutor(2) as executor:
        made = SteppedReplica(fleet, executor)
        try:
            yield made
        finally:
            await made.client.close()
            await made.reader.close()
            await made.identities.templates.close()
