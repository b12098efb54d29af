"""An engine core in real time: it runs the scheduler's steps, each for the seconds that the cost model gives.

The event loop's timers are late by up to a millisecond. A step therefore starts when the step before should have ended,
not when its timer fired, so the mean speed is that of the model. Delays beyond MAX_CATCH_UP are not caught up.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from warmfleet_loadtest.simulator.scheduler import Output
from warmfleet_worker.load import Load
from warmfleet_worker.protocol.wire import reservation_of
from warmfleet_worker.speed_meter import SpeedMeter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from warmfleet_loadtest.simulator.scheduler import Request, Scheduler
    from warmfleet_loadtest.simulator.step_costs import StepCosts

MAX_CATCH_UP = 0.25  # after a late event loop, most seconds by which the next steps end earlier to make up for it


class EngineCore:
    """Runs the steps of one scheduler until it is cancelled.

    arrived: called with every new request. progress: called with every request whose prefill is done. ended: called
    with every request that has finished or was aborted, and the reason. stepped: called whenever the cache may have
    changed.
    busy_s: seconds spent in steps. step_ends: when the step under way will end, or else the last step ended (by the
    event loop's clock). runs: while it is not set, no step begins.
    """

    def __init__(
        self, scheduler: Scheduler, costs: StepCosts, progress: Callable[[Request], None] = lambda _request: None
    ) -> None:
        self.scheduler = scheduler
        self.costs = costs
        self.progress = progress
        self.stepped: Callable[[], None] = lambda: None
        self.arrived: Callable[[Request], None] = lambda _request: None
        self.ended: Callable[[Request, str], None] = lambda _request, _reason: None
        self.runs = asyncio.Event()
        self.runs.set()
        self.steps = 0
        self.busy_s = 0.0
        self.step_ends = 0.0
        self._meter = SpeedMeter()
        self._left: frozenset[str] = frozenset()  # ids of requests from before the engine moved to another pool
        self._sinks: dict[Request, asyncio.Queue[Output]] = {}
        self._arrived = asyncio.Event()
        self._api_free = 0.0  # when the API server's one thread has handled all earlier requests

    async def submit(self, request: Request, sink: asyncio.Queue[Output]) -> None:
        """Queue a request, whose outputs go into ``sink``. Raises ValueError if it can never run."""
        loop = asyncio.get_running_loop()
        self._api_free = max(self._api_free, loop.time()) + self.costs.arrival_seconds(request.prompt_tokens)
        delay = self._api_free - loop.time()
        if delay > 0:
            await asyncio.sleep(delay)
        self.put(request, sink)

    def put(self, request: Request, sink: asyncio.Queue[Output]) -> None:
        """Queue a request that is already past the API server. Raises ValueError if it can never run."""
        self.scheduler.add(request)
        self._sinks[request] = sink
        self.arrived(request)
        self._arrived.set()

    def abort(self, request: Request) -> None:
        """Drop a request whose client has gone. Finished and unknown requests are ignored."""
        if self._sinks.pop(request, None) is not None:
            self.scheduler.abort(request)
            self.ended(request, "abort")
            self._arrived.set()

    def fail(self, request: Request) -> None:
        """Give a request up: its answer ends with an error of the engine."""
        sink = self._sinks.pop(request, None)
        if sink is not None:
            self.scheduler.abort(request)
            sink.put_nowait(Output(request, (), first=False, finished=True, failed=True))
            self.ended(request, "error")

    def wake(self) -> None:
        """Look for work again, because some has become possible."""
        self._arrived.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        clock = loop.time()
        while True:
            await self.runs.wait()
            self._arrived.clear()
            step = self.scheduler.schedule()
            if step is None:
                await self._idle()
                clock = loop.time()
                continue
            self.steps += 1
            self._meter.scheduled(self.steps, clock)
            seconds = self.costs.seconds(step.work)
            clock = self.step_ends = max(clock, loop.time() - MAX_CATCH_UP) + seconds
            self.busy_s += seconds
            await asyncio.sleep(max(0.0, clock - loop.time()))
            self._deliver(self.scheduler.complete(step, clock))
            self._meter.done(self.steps, clock, step.work.prefill_tokens, step.work.decode_requests)
            self._deliver(self.scheduler.collect(clock))

    async def _idle(self) -> None:
        """Wait until a request arrives, or until the scheduler has outputs that need no step."""
        due = self.scheduler.next_due()
        now = asyncio.get_running_loop().time()
        timeout = None if due is None else max(0.0, due - now)
        try:
            async with asyncio.timeout(timeout):  # not wait_for, which may swallow a cancellation before Python 3.12
                await self._arrived.wait()
        except TimeoutError:
            self._deliver(self.scheduler.collect(due or now))

    def _deliver(self, outputs: list[Output]) -> None:
        self.stepped()
        for output in outputs:
            if output.first:
                self.progress(output.request)
            sink = self._sinks.get(output.request)
            if sink is not None:
                sink.put_nowait(output)
                if output.finished:
                    del self._sinks[output.request]
                    self.ended(output.request, "length")

    def requests(self) -> list[str]:
        """List the ids of this engine's requests. The publisher's thread calls this."""
        queues = self.scheduler.running.copy(), self.scheduler.waiting.copy()
        present = [request for queue in queues for request in queue if request.request_id not in self._left]
        return [request.request_id for request in present if not request.finished]

    def moved(self) -> None:
        """Note that the engine has moved to another pool of the fleet. The publisher's thread calls this."""
        queues = self.scheduler.running.copy(), self.scheduler.waiting.copy()
        self._left = frozenset(request.request_id for queue in queues for request in queue)

    def load(self) -> Load:
        """Return the present load of this engine. The publisher's thread calls this."""
        load = load_of(self.scheduler, self._meter.speed_tps, self._left)
        steps = self.steps if load.running + load.waiting else None
        return replace(load, steps=steps, step_us=self._meter.step_us)


def load_of(scheduler: Scheduler, speed_tps: int, left: Collection[str] = ()) -> Load:
    """Return the load of an engine. Any thread may call this, because each list is copied by one C call.

    left: ids of requests that count as sent by no router, because the engine has left the pool whose routers sent them.
    """
    running, waiting = scheduler.running.copy(), scheduler.waiting.copy()
    prefill = decode = 0
    for request in (*running, *waiting):
        if request.request_id in left or reservation_of(request.request_id) is None:
            if request.computed < request.prompt_tokens:
                prefill += request.prompt_tokens - request.computed
            else:
                decode += request.tokens
    return Load(len(running), len(waiting), prefill, decode, speed_tps)
