"""Fleets without a router on the virtual clock, whose choosers look into the engines: what a router is held against."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.choosers.perfect_knowledge import CHOOSERS, chooser
from warmfleet_loadtest.simulator.virtual_clock import VirtualEngine, VirtualFleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.engine import EngineConfig
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.virtual_clock import Answered
    from warmfleet_loadtest.traces.trace import Arrival, Trace

RIVALS = CHOOSERS


@dataclass(slots=True)
class Rivalled:
    """The result of a run: requests in the order of their first tokens, the engines, and CPU seconds."""

    served: list[Answered]
    engines: Sequence[VirtualEngine]
    cpu_s: float

    @property
    def busy(self) -> float:
        """The share of the arrivals' time that engines spent in steps."""
        spent = sum(engine.busy_s for engine in self.engines) / len(self.engines)
        return spent / max(request.at_s for request in self.served)


class Rival:
    """A chooser of RIVALS as the router of a ``VirtualFleet``."""

    def __init__(self, name: str, engines: Sequence[EngineConfig], speed: float, seed: int) -> None:
        self.engines = [VirtualEngine(config.scheduler(), config.costs) for config in engines]
        self.fleet = VirtualFleet(self.engines, self, speed)
        self._chooser = chooser(name, self.engines, self._send, seed)

    def _send(self, request: Request, number: int) -> None:
        self.fleet.send(request, number, self.fleet.clock.now)

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int | None:
        return self._chooser.choose(request, arrival.session, now)

    async def started(self, request: Request, engine: int, now: float) -> None:
        self._chooser.room_made(now)

    async def finished(self, request: Request, engine: int, now: float) -> None:
        """An answer's end makes no room for prompts."""


async def play_rival(
    name: str, trace: Trace, engines: Sequence[EngineConfig], speed: float = 1.0, seed: int = 0
) -> Rivalled:
    """Play a trace through engines among which a chooser of RIVALS chooses, without Redis."""
    began = time.process_time()
    rival = Rival(name, engines, speed, seed)
    served = await rival.fleet.run(trace)
    return Rivalled(served, rival.engines, time.process_time() - began)


def rotated(trace: Trace, share: float) -> Trace:
    """Return the trace begun at ``share`` of its time; what came before comes at its end.

    Sessions of a closed loop stay whole.
    """
    begins: dict[int, float] = {}
    if trace.closed:
        for arrival in trace.arrivals:
            begins.setdefault(arrival.session, arrival.at_s)
    firsts = [begins.get(arrival.session, arrival.at_s) for arrival in trace.arrivals]
    span = max(firsts) * len(firsts) / max(1, len(firsts) - 1)  # with the gap from the last arrival to the first
    cut = share * span
    moved = [
        replace(arrival, at_s=arrival.at_s - cut + (span if first < cut else 0.0))
        for arrival, first in zip(trace.arrivals, firsts, strict=True)
    ]
    order = sorted(range(len(moved)), key=lambda index: (moved[index].at_s, index))
    return replace(trace, arrivals=tuple(moved[index] for index in order))


def opened(trace: Trace) -> Trace:
    """Return a closed loop's trace as an open loop: every step arrives at its own time, whatever became of the last."""
    return replace(trace, arrivals=tuple(replace(arrival, think_s=None) for arrival in trace.arrivals), closed=False)
