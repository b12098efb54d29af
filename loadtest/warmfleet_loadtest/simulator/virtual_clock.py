"""Engines on a virtual clock: the same scheduler and block pool as over HTTP, but minutes of load take seconds.

Events are ordered by time. The router under test is told the same as a router of a real fleet. The router may add
events of its own (``at`` with ``duty``), which do not keep a run from ending.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Protocol

from warmfleet_loadtest.simulator.scheduler import Request, hash_blocks
from warmfleet_worker.speed_meter import SpeedMeter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from warmfleet_loadtest.simulator.scheduler import Output, Scheduler, Step
    from warmfleet_loadtest.simulator.step_costs import StepCosts
    from warmfleet_loadtest.traces.trace import Arrival, Trace

    Event = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class Clock:
    """The time of a simulation, which other simulated parts may share. now: virtual seconds."""

    now: float = 0.0


@dataclass(slots=True)
class Answered:
    """An answered arrival, in virtual seconds. at_s: when it arrived; ended_s: its answer's end; engine: its number."""

    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    engine: int
    session: int
    output_tokens: int
    ended_s: float = math.inf


class Router(Protocol):
    """The router under test. Its methods are called in order of time, with virtual seconds.

    choose: returns the engine's number, or None if the router keeps the request back and will call
    ``VirtualFleet.send`` or ``refuse`` later.
    """

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int | None: ...
    async def started(self, request: Request, engine: int, now: float) -> None: ...
    async def finished(self, request: Request, engine: int, now: float) -> None: ...


class VirtualEngine:
    """A scheduler with the step under way.

    step_ends: when the step under way will end, or else the last step ended. busy_s: seconds in steps. work_tokens:
    computed prefill tokens.
    """

    def __init__(self, scheduler: Scheduler, costs: StepCosts) -> None:
        self.scheduler = scheduler
        self.costs = costs
        self.step: Step | None = None
        self.step_ends = 0.0
        self.collect_at = math.inf  # when outputs that need no step are collected next
        self.api_free = 0.0
        self.busy_s = 0.0
        self.work_tokens = 0
        self.meter = SpeedMeter()
        self._steps = 0

    def begin(self, now: float) -> float | None:
        """Start the next step and return its seconds; None if a step is under way or there is nothing to do."""
        if self.step is not None:
            return None
        self.step = self.scheduler.schedule()
        if self.step is None:
            return None
        seconds = self.costs.seconds(self.step.work)
        self._steps += 1
        self.meter.scheduled(self._steps, now)
        self.step_ends = now + seconds
        self.busy_s += seconds
        self.work_tokens += self.step.work.prefill_tokens
        return seconds

    def end(self, now: float) -> Sequence[Output]:
        """End the step under way, and return its outputs."""
        if self.step is None:
            return ()
        step, self.step = self.step, None
        self.meter.done(self._steps, now, step.work.prefill_tokens, step.work.decode_requests)
        return self.scheduler.complete(step, now)


class VirtualFleet:
    """``run`` plays a trace through the engines. speed: the trace's times are divided by it."""

    def __init__(
        self, engines: Sequence[VirtualEngine], router: Router, speed: float = 1.0, clock: Clock | None = None
    ) -> None:
        self.engines = engines
        self.served: list[Answered] = []
        self.clock = clock or Clock()
        self._router = router
        self._speed = speed
        self._events: list[tuple[float, int, bool, Event]] = []
        self._left = 0  # pending events for which ``run`` waits, and requests that are kept back
        self._stopped = False
        self._order = count()
        self._open: dict[Request, tuple[float, int, int]] = {}  # (arrival time, engine, session)
        self._begun: dict[Request, Answered] = {}  # whose answer has begun
        self._kept_back: dict[Request, tuple[float, int]] = {}  # (arrival time, session)
        self._sessions: dict[int, list[Arrival]] = {}

    async def run(self, trace: Trace) -> list[Answered]:
        """Play all arrivals, until every request is answered or ``stop`` was called."""
        for arrival in reversed(trace.arrivals):
            if arrival.think_s is not None:
                self._sessions.setdefault(arrival.session, []).append(arrival)
        for arrival in trace.arrivals:
            if arrival.think_s is None:
                self.at(arrival.at_s / self._speed, partial(self.arrive, arrival))
        while self._left and not self._stopped:
            self.clock.now, _order, duty, event = heapq.heappop(self._events)
            self._left -= not duty
            await event(self.clock.now)
        return self.served

    def stop(self) -> None:
        """End the run after the present event."""
        self._stopped = True

    def at(self, when: float, event: Event, *, duty: bool = False) -> None:
        """Call ``event`` at the time ``when``. duty: upkeep of the router, for which ``run`` does not wait."""
        self._left += not duty
        heapq.heappush(self._events, (when, next(self._order), duty, event))

    async def arrive(self, arrival: Arrival, now: float) -> None:
        """Let a request come. A router may add arrivals with ``at``."""
        request = self.request_of(arrival)
        self._kept_back[request] = (now, arrival.session)
        number = await self._router.choose(request, arrival, now)
        if number is None:
            self._left += 1  # ``run`` waits for this request
        else:
            self._hand_over(request, number, now)

    def request_of(self, arrival: Arrival) -> Request:
        """Return the request of an arrival, with the hashes of its prompt."""
        answer = range(1_000_000, 1_000_000 + arrival.output_tokens)  # ids that occur in no prompt
        request = Request("", arrival.prompt, arrival.output_tokens, answer)
        hash_blocks(self.engines[0].scheduler.scheme, request)
        return request

    def send(self, request: Request, number: int, now: float) -> None:
        """Send a request that the router has kept back to the engine of this number."""
        self._left -= 1
        self._hand_over(request, number, now)

    def refuse(self, request: Request) -> None:
        """Answer a request that the router has kept back with an error. In a closed loop its session ends with it."""
        self._left -= 1
        del self._kept_back[request]

    def _hand_over(self, request: Request, number: int, now: float) -> None:
        at, session = self._kept_back.pop(request)
        self._open[request] = (at, number, session)
        engine = self.engines[number]
        engine.api_free = max(engine.api_free, now) + engine.costs.arrival_seconds(request.prompt_tokens)
        if engine.api_free <= now:  # at once, so that the router sees the request in the engine's load
            engine.scheduler.add(request)
            self.at(now, partial(self._next_step, number))
        else:
            self.at(engine.api_free, partial(self._admit, number, request))

    async def _admit(self, number: int, request: Request, now: float) -> None:
        self.engines[number].scheduler.add(request)
        await self._next_step(number, now)

    async def _next_step(self, number: int, now: float) -> None:
        seconds = self.engines[number].begin(now)
        if seconds is not None:
            self.at(now + seconds, partial(self._end_step, number))
        self._collect_when_due(number, now)

    async def _end_step(self, number: int, now: float) -> None:
        engine = self.engines[number]
        await self._outputs(engine.end(now), engine, now)
        await self._next_step(number, now)

    def _collect_when_due(self, number: int, now: float) -> None:
        engine = self.engines[number]
        due = engine.scheduler.next_due()
        if due is not None and due < engine.collect_at:
            engine.collect_at = max(due, now)
            self.at(engine.collect_at, partial(self._collect, number))

    async def _collect(self, number: int, now: float) -> None:
        engine = self.engines[number]
        if now >= engine.collect_at:
            engine.collect_at = math.inf
        await self._outputs(engine.scheduler.collect(now), engine, now)
        await self._next_step(number, now)

    async def _outputs(self, outputs: Sequence[Output], engine: VirtualEngine, now: float) -> None:
        for output in outputs:
            request = output.request
            at, number, session = self._open[request]
            if output.first:
                ttft = now + engine.costs.first_token_s - at
                sizes = request.prompt_tokens, request.cached_tokens
                begun = self._begun[request] = Answered(at, ttft, *sizes, number, session, request.max_tokens)
                self.served.append(begun)
                await self._router.started(request, number, now)
            if output.finished:
                self._begun.pop(request).ended_s = now + engine.costs.first_token_s
                await self._router.finished(request, number, now)
                del self._open[request]
                following = self._sessions.get(session)
                if following:
                    arrival = following.pop()
                    self.at(now + (arrival.think_s or 0.0) / self._speed, partial(self.arrive, arrival))
