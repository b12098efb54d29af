"""One router replica without HTTP, whose commands get lost, come twice or late: its bookkeeping is the real one."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.conftest import PATIENT

from warmfleet.background import upkeep
from warmfleet.engines.allowed_addresses import Addresses
from warmfleet.engines.engine_client import EngineClient
from warmfleet.engines.upstream import Upstream
from warmfleet.errors import FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.fleet import Fleet
from warmfleet.fleet.reservations import Spans
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import Fallback
from warmfleet.pools.pool import Pool, Pools, Shape
from warmfleet.routing.call import Call, Trip
from warmfleet.routing.engine_tokenizer import Asker
from warmfleet.routing.router import Router
from warmfleet.settings import Settings

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Ask, Decision, Place, Queued

HOUR_MS = 3_600_000
SPANS = Spans(lease_ms=HOUR_MS, tombstone_ms=HOUR_MS, linger_ms=HOUR_MS)  # time passes when a step says so
FATES = ("well", "well", "well", "twice", "lost", "late", "unanswered", "left", "left late")

Late = list[tuple[str, tuple[Any, ...]]]


class Wire(Fleet):
    """A fleet whose next commands have a fate. ``late``: those that arrive after their caller has given up.

    asked: what decisions were asked for. foretold: what each would be at that moment, if ``foretells``.
    """

    fates: deque[str]
    late: Late
    asked: dict[str, Ask]
    foretold: dict[str, str]
    foretells = True

    async def decide_in_turn(self, ask: Ask, place: Place, *, tell: bool = False) -> Decision | Queued:
        self.asked[ask.reservation] = ask
        if self.foretells:
            fates, self.fates = self.fates, deque()
            with suppress(NoWorker):
                self.foretold[ask.reservation], _ = await self.explain(ask)
            self.fates = fates
        return await super().decide_in_turn(ask, place, tell=tell)

    async def run(self, name: str, *args: bytes | str | int | float, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(0)  # whoever else is there goes first
        fate = self.fates.popleft() if self.fates else "well"
        if fate == "lost":
            raise FleetUnavailable(fate)
        if fate in ("late", "left late"):
            self.late.append((name, args))
        else:
            answer = await super().run(name, *args)
        if fate == "twice":
            answer = await super().run(name, *args)
        if fate in ("left", "left late") and name == "decide":
            raise asyncio.CancelledError  # of the request: its client hung up
        if fate not in ("well", "twice"):
            raise FleetUnavailable(fate)
        return answer

    async def arrive(self, which: int) -> None:
        """One of those that were on the way."""
        if self.late:
            name, args = self.late.pop(which % len(self.late))
            with suppress(WarmfleetError):  # nobody reads the answer
                await super().run(name, *args)


async def _nothing(_: Any) -> None:
    """To a client that is not there."""


class Replica:
    """One router without HTTP: what it books, settles and renews is its own code."""

    def __init__(self, client: aioredis.Redis, model: str, policy: str, late: Late, spans: Spans = SPANS) -> None:
        self.fleet = Wire(client, model, timeouts=PATIENT, spans=spans)
        self.fleet.fates, self.fleet.late, self.fleet.asked, self.fleet.foretold = deque(), late, {}, {}
        self.metrics, self.pool = Metrics(), Pool(model, self.fleet, Fallback(0.0), policy)
        self.pools = Pools([self.pool])
        addresses, settings = Addresses((), ()), Settings()
        asker = Asker(EngineClient(addresses, 1.0), settings, self.metrics)
        self.router = Router(self.pools, Upstream(addresses, 1.0), asker, settings, self.metrics)
        self.trips: list[Trip] = []

    async def decide(self, ask: Ask) -> Trip:
        trip = Trip(ask.reservation, self.pool, last=False)
        call = Call("completions", b"", "", {}, _nothing, order=lambda: ask.order)
        shape = Shape(ask.chains, ask.prompt_tokens, ask.decode_tokens, "exact")
        try:
            await self.router._decide(call, trip, shape, ask.exclude, spare=False)
        except (WarmfleetError, asyncio.CancelledError):
            await self.router._settled(trip)
        else:
            if trip.booked:
                self.trips.append(trip)
            else:
                await self.router._settled(trip)  # it went where the fallback chose: nothing of it is booked
        await self.router.drained()
        return trip

    async def end(self, which: int, outcome: Any) -> None:
        if self.trips:
            trip = self.trips.pop(which % len(self.trips))
            trip.outcome = outcome
            with suppress(asyncio.CancelledError):
                await self.router._settled(trip)
            await self.router.drained()

    async def end_cancelled(self, which: int) -> str:
        """Its task is cancelled again while it settles; returns the reservation."""
        trip = self.trips.pop(which % len(self.trips))
        task = asyncio.ensure_future(self.router._settled(trip))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await self.router.drained()
        return trip.reservation

    async def start(self, which: int) -> None:
        trip = self.trips[which % len(self.trips)] if self.trips else None
        if trip and trip.reservation in self.pool.open:
            with suppress(asyncio.CancelledError):
                await self.router._started(trip)

    async def renew(self) -> None:
        with suppress(FleetUnavailable, asyncio.CancelledError):
            await upkeep.renew(self.pools, self.metrics)

    async def clear(self) -> None:
        with suppress(FleetUnavailable, asyncio.CancelledError):
            await upkeep.clear(self.pools)


async def order_of(monitor: Any, count: int) -> list[str]:
    """The reservations of so many decisions, as the server came to them."""
    order: list[str] = []  # of calls: a script that is not there is loaded before the first of them
    while len(order) < count:
        command = (await monitor.next_command())["command"]
        found = re.match(r"EVALSHA \S+ \d+ .*?(wf-0\d+) ", command)
        order += [found[1]] if found else []
    return order
