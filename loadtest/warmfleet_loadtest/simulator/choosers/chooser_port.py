"""A port that sends each request to one of the engines of this process, by a chooser that sees their state.

No router stands in between, so the choice costs no time, and is made by the engines' state at that moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from warmfleet_loadtest.simulator.api import MAX_BODY_BYTES, Api
from warmfleet_loadtest.simulator.choosers.perfect_knowledge import chooser
from warmfleet_loadtest.simulator.scheduler import hash_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.simulator.engine_core import EngineCore
    from warmfleet_loadtest.simulator.scheduler import Output, Request, Scheduler
    from warmfleet_loadtest.simulator.step_costs import StepCosts


class ChosenCore:
    """Stands for all engine cores: ``submit`` hands a request to the core that the chooser names, at once or later."""

    def __init__(self, cores: Sequence[EngineCore], name: str) -> None:
        self._cores = cores
        self._chooser = chooser(name, cores, self._send)
        self._sinks: dict[Request, asyncio.Queue[Output]] = {}  # of requests not yet sent to a core
        self._at: dict[Request, EngineCore] = {}
        for core in cores:
            core.progress = self._room_made

    @property
    def scheduler(self) -> Scheduler:
        return self._cores[0].scheduler

    @property
    def costs(self) -> StepCosts:
        return self._cores[0].costs

    @property
    def busy_s(self) -> float:
        return sum(core.busy_s for core in self._cores)

    async def submit(self, request: Request, sink: asyncio.Queue[Output]) -> None:
        """Hand a request to the chosen core. A request that is kept back has reached no engine when this returns."""
        self.scheduler.check(request)
        hash_blocks(self.scheduler.scheme, request)
        self._sinks[request] = sink
        number = self._chooser.choose(request, "", asyncio.get_running_loop().time())
        if number is not None:
            self._send(request, number)

    def _send(self, request: Request, number: int) -> None:
        core = self._at[request] = self._cores[number]
        core.put(request, self._sinks.pop(request))

    def abort(self, request: Request) -> None:
        """Drop a request whose client has gone, whether a core has the request or the chooser keeps it back."""
        self._sinks.pop(request, None)
        self._chooser.gone(request)
        if core := self._at.pop(request, None):
            core.abort(request)
            self._room_made(request)

    def _room_made(self, _request: Request) -> None:
        self._chooser.room_made(asyncio.get_running_loop().time())


class ChooserApi(Api):
    """The part of an engine's API that a load test needs, for all engines together."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.add_routes([web.post("/v1/completions", self.completions), web.post("/v1/chat/completions", self.chat)])
        app.add_routes([web.get("/v1/models", self.models), web.get("/health", self.health)])
        return app
