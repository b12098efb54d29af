"""Engines on a virtual clock: the same scheduler and block pool as over HTTP, minutes of load in seconds.

Events are ordered by time. A router is a callable that picks an engine for an arrival; what it may know (what engines
hold, what was booked) is its own affair.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from warmfleet_loadtest.scheduler import Request, hash_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_loadtest.costs import StepCosts
    from warmfleet_loadtest.scheduler import Output, Scheduler, Step
    from warmfleet_loadtest.trace import Arrival, Trace


@dataclass(frozen=True, slots=True)
class Served:
    """What became of an arrival. Seconds and tokens."""

    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    engine: int


class Router(Protocol):
    """Told of everything that a fleet's router learns, in order of time."""

    def choose(self, request: Request, now: float) -> int: ...
    def started(self, request: Request, engine: int) -> None: ...
    def finished(self, request: Request, engine: int) -> None: ...


class VirtualEngine:
    """A scheduler with the step that is under way. busy_s: seconds in steps."""

    def __init__(self, scheduler: Scheduler, costs: StepCosts) -> None:
        self.scheduler = scheduler
        self.costs = costs
        self.step: Step | None = None
        self.api_free = 0.0
        self.busy_s = 0.0


class VirtualFleet:
    """``run`` plays a trace through the engines. speed: the trace's time is divided by it."""

    def __init__(self, engines: Sequence[VirtualEngine], router: Router, speed: float = 1.0) -> None:
        self.engines = engines
        self._router = router
        self._speed = speed
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._served: list[Served] = []
        self._open: dict[Request, tuple[float, int, int]] = {}  # arrived at, engine, session
        self._sessions: dict[int, list[Arrival]] = {}

    def run(self, trace: Trace) -> list[Served]:
        """Play all arrivals until everything is answered."""
        for arrival in reversed(trace.arrivals):
            if arrival.think_s is not None:
                self._sessions.setdefault(arrival.session, []).append(arrival)
        for arrival in trace.arrivals:
            if arrival.think_s is None:
                self._at(arrival.at_s / self._speed, self._arrive(arrival))
        while self._events:
            now, _order, event = heapq.heappop(self._events)
            event(now)
        return self._served

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, arrival: Arrival) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            answer = range(1_000_000, 1_000_000 + arrival.output_tokens)  # what is said is nobody's prompt
            request = Request("", arrival.prompt, arrival.output_tokens, answer)
            hash_blocks(self.engines[0].scheduler.scheme, request)
            number = self._router.choose(request, now)
            self._open[request] = (now, number, arrival.session)
            engine = self.engines[number]
            engine.api_free = max(engine.api_free, now) + engine.costs.arrival_seconds(request.prompt_tokens)
            self._at(engine.api_free, lambda then: self._admit(number, request, then))

        return arrive

    def _admit(self, number: int, request: Request, now: float) -> None:
        self.engines[number].scheduler.add(request)
        self._next_step(number, now)

    def _next_step(self, number: int, now: float) -> None:
        engine = self.engines[number]
        if engine.step is None:
            engine.step = engine.scheduler.schedule()
            if engine.step is not None:
                seconds = engine.costs.seconds(engine.step.work)
                engine.busy_s += seconds
                self._at(now + seconds, lambda then: self._end_step(number, then))

    def _end_step(self, number: int, now: float) -> None:
        engine = self.engines[number]
        if engine.step is not None:
            self._outputs(engine.scheduler.complete(engine.step, now), engine, now)
            engine.step = None
        due = engine.scheduler.next_due()
        if due is not None:
            self._at(max(due, now), lambda then: self._collect(number, then))
        self._next_step(number, now)

    def _collect(self, number: int, now: float) -> None:
        engine = self.engines[number]
        self._outputs(engine.scheduler.collect(now), engine, now)
        self._next_step(number, now)

    def _outputs(self, outputs: Sequence[Output], engine: VirtualEngine, now: float) -> None:
        for output in outputs:
            request = output.request
            at, number, session = self._open[request]
            if output.first:
                ttft = now + engine.costs.first_token_s - at
                self._served.append(Served(at, ttft, request.prompt_tokens, request.cached_tokens, number))
                self._router.started(request, number)
            if output.finished:
                self._router.finished(request, number)
                del self._open[request]
                following = self._sessions.get(session)
                if following:
                    arrival = following.pop()
                    self._at(now + (arrival.think_s or 0.0) / self._speed, self._arrive(arrival))
