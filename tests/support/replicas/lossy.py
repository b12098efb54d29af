"""A router replica without HTTP, with the real bookkeeping, whose commands get lost, come twice or late."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import patch

from tests.support.redis.servers import PATIENT

from warmfleet import fleet
from warmfleet.background import upkeep
from warmfleet.errors import FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.fleet import Constants, Fleet, Spans
from warmfleet.fleet.bookings import Bookings
from warmfleet.fleet.client import Scripts
from warmfleet.fleet.queueing import Queue
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.pools.identified_prompt import IdentifiedPrompt
from warmfleet.pools.policy import PolicyChoice
from warmfleet.pools.pool import Pool
from warmfleet.pools.served_models import Pools
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.prompt.request import from_dict
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.booking import BookingState
from warmfleet.routing.call import Call, Job
from warmfleet.routing.decider import Decider
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.routing.settlements import Settlements
from warmfleet.routing.tickets import Tickets
from warmfleet.tracing.request_record import RequestRecord

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Decision, Question, Queued
    from warmfleet.fleet.bookings import Told
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.pools.fleet_view import View
    from warmfleet.prompt.request import Request

HOUR_MS = 3_600_000
SPANS = Spans(lease_ms=HOUR_MS, tombstone_ms=HOUR_MS, linger_ms=HOUR_MS)  # time passes when a step says so
FATES = ("well", "well", "well", "twice", "lost", "late", "unanswered", "left", "left late")

Late = list[Callable[[], Awaitable[Any]]]


class LossyScripts(Scripts):
    """Scripts whose next calls get lost, come twice or late. ``late``: calls whose caller has given up."""

    fates: deque[str]
    late: Late

    async def run(self, name: str, *args: bytes | str | int | float, timeout_s: float | None = None) -> Any:
        return await self._fated(name, partial(super().run, name, *args))

    async def call(self, name: str, command: bytes, limit_s: float) -> Any:
        return await self._fated(name, partial(super().call, name, command, limit_s))

    async def _fated(self, name: str, execute: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(0)  # other waiting tasks run first
        fate = self.fates.popleft() if self.fates else "well"
        if fate == "lost":
            raise FleetUnavailable(fate)
        if fate in ("late", "left late"):
            self.late.append(execute)
        else:
            answer = await execute()
        if fate == "twice":
            answer = await execute()
        if fate in ("left", "left late") and name == "decide":
            raise asyncio.CancelledError  # of the request: its client hung up
        if fate not in ("well", "twice"):
            raise FleetUnavailable(fate)
        return answer

    async def arrive(self, which: int) -> None:
        """Let one delayed command arrive at Redis."""
        if self.late:
            with suppress(WarmfleetError):  # nobody reads the answer
                await self.late.pop(which % len(self.late))()


class LossyBookings(Bookings):
    """Settles by calls that may be lost."""

    def __init__(self, scripts: LossyScripts) -> None:
        super().__init__(scripts)
        self._tasks: set[asyncio.Task[None]] = set()

    def settle_later(self, reservation: str, outcome: Told, on_answer: OnAnswer, *more: Any, **named: Any) -> None:
        async def settled() -> None:
            try:
                answer = await self.settle(reservation, outcome, *more, **named)
            except WarmfleetError as error:
                on_answer(None, error)
            else:
                on_answer(answer, None)

        task = asyncio.ensure_future(settled())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ForetellingQueue(Queue):
    """asked: requests for decisions. foretold: the decision that each would get at that moment, if ``foretells``."""

    def __init__(self, scripts: LossyScripts, bookings: Bookings) -> None:
        super().__init__(scripts, bookings)
        self._lossy, self.foretells = scripts, True
        self.asked: dict[str, Question] = {}
        self.foretold: dict[str, str] = {}

    async def decide_in_turn(self, question: Question, *, explain: bool = False) -> Decision | Queued:
        self.asked[question.reservation] = question
        if self.foretells:
            fates, self._lossy.fates = self._lossy.fates, deque()
            with suppress(NoWorker):
                self.foretold[question.reservation], _ = await self.explain(question)
            self._lossy.fates = fates
        return await super().decide_in_turn(question, explain=explain)


class GivenOrder(PolicyChoice):
    """A policy whose hash ring gives the order that the next decision asks for."""

    given: tuple[str, ...] = ()

    def order(self, view: View, request: Request, session: bytes) -> tuple[str, ...]:
        return self.given


class LossyReplica:
    """A router without HTTP: it books, settles and renews by its own code."""

    def __init__(self, client: aioredis.Redis, model: str, policy: str, late: Late, spans: Spans = SPANS) -> None:
        with patch.object(fleet, "Scripts", LossyScripts):
            self.fleet = Fleet(client, model, timeouts=PATIENT, constants=Constants(spans=spans))
        self.scripts = cast("LossyScripts", self.fleet.scripts)
        self.scripts.fates, self.scripts.late = deque(), late
        self.fleet.bookings = LossyBookings(self.scripts)
        self.fleet.queue = self.queue = ForetellingQueue(self.scripts, self.fleet.bookings)
        self.metrics, self.pool = Metrics(), Pool(model, self.fleet, DegradedMode(0.0), policy)
        self.pools = Pools([self.pool])
        self.policy = self.pool.policy = GivenOrder(policy)
        self.settlements = Settlements(Tickets(), self.metrics)
        self.decider = Decider(DecisionLog("", self.metrics), self.metrics)
        self.attempts: list[Attempt] = []

    async def decide(self, ask: Question) -> Attempt:
        job = self._job(ask)
        attempt = Attempt(self.settlements, job, avoids_failing=False)
        attempt.reservation = attempt.chosen.reservation = ask.reservation
        self.policy.given = ask.order
        try:
            await self.decider.decide(job, attempt, may_wait=True)
        except (WarmfleetError, asyncio.CancelledError):
            attempt.release("cancelled")
        else:
            if attempt.chosen.state is BookingState.BOOKED:
                self.attempts.append(attempt)
            else:
                attempt.release("cancelled")  # the degraded mode chose its worker: nothing of it is booked
        await self.settlements.drained()
        return attempt

    def _job(self, ask: Question) -> Job:
        """A request whose decision asks for ``ask``, under a policy that gives its order."""
        request = from_dict("completions", {"prompt": "x"})
        prompt = IdentifiedPrompt(ask.chains, ask.prompt_tokens, ask.decode_tokens, "exact", unable_workers=ask.exclude)
        return Job(
            Call(KNOWN["/v1/completions"], b"", RequestRecord("id", KNOWN["/v1/completions"], "POST", 0.0), b""),
            request,
            b"",
            self.pool,
            prompt,
            (self.pool,),
        )

    async def end(self, which: int, outcome: Any) -> None:
        if self.attempts:
            self.attempts.pop(which % len(self.attempts)).release(outcome)
            await self.settlements.drained()

    async def end_cancelled(self, which: int) -> str:
        """A request's task is cancelled twice, the second time while it gives back; returns the reservation."""
        attempt = self.attempts.pop(which % len(self.attempts))

        async def request() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                attempt.release("cancelled")

        task = asyncio.ensure_future(request())
        await asyncio.sleep(0)
        task.cancel()
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.wait({task})
        await self.settlements.drained()
        return attempt.reservation

    async def start(self, which: int) -> None:
        if self.attempts:
            self.attempts[which % len(self.attempts)].chosen.prefill_done()
            await self.settlements.drained()

    async def renew(self) -> None:
        with suppress(FleetUnavailable, asyncio.CancelledError):
            await upkeep.renew(self.pools, self.metrics)

    async def clear(self) -> None:
        with suppress(FleetUnavailable, asyncio.CancelledError):
            await upkeep.tell_again(self.pools)
            await upkeep.clear(self.pools)


async def order_of(monitor: Any, count: int) -> list[str]:
    """The reservations of ``count`` decisions, in the order in which Redis executed them."""
    order: list[str] = []  # calls of the script only: a missing script is loaded first
    while len(order) < count:
        command = (await monitor.next_command())["command"]
        found = re.match(r"EVALSHA \S+ \d+ .*?(wf-0\d+) ", command)
        order += [found[1]] if found else []
    return order
