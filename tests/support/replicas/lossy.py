"""One router replica without HTTP, whose commands get lost, come twice or late: its bookkeeping is the real one."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.redis.servers import PATIENT

from warmfleet.background import upkeep
from warmfleet.errors import FleetUnavailable, NoWorker, WarmfleetError
from warmfleet.fleet import Fleet, Spans
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
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.fleet.reservations import Told
    from warmfleet.pools.fleet_view import View
    from warmfleet.prompt.request import Request

HOUR_MS = 3_600_000
SPANS = Spans(lease_ms=HOUR_MS, tombstone_ms=HOUR_MS, linger_ms=HOUR_MS)  # time passes when a step says so
FATES = ("well", "well", "well", "twice", "lost", "late", "unanswered", "left", "left late")

Late = list[Callable[[], Awaitable[Any]]]


class LossyFleet(Fleet):
    """A client of Redis whose next commands get lost, come twice or late. ``late``: commands whose caller has given up.

    asked: what decisions were asked for. foretold: what each would be at that moment, if ``foretells``.
    """

    fates: deque[str]
    late: Late
    tasks: set[asyncio.Task[None]]
    asked: dict[str, Question]
    foretold: dict[str, str]
    foretells = True

    async def decide_in_turn(self, question: Question, *, tell: bool = False) -> Decision | Queued:
        self.asked[question.reservation] = question
        if self.foretells:
            fates, self.fates = self.fates, deque()
            with suppress(NoWorker):
                self.foretold[question.reservation], _ = await self.explain(question)
            self.fates = fates
        return await super().decide_in_turn(question, tell=tell)

    async def run(self, name: str, *args: bytes | str | int | float, timeout_s: float | None = None) -> Any:
        return await self._fated(name, partial(super().run, name, *args))

    async def call(self, name: str, command: bytes, limit_s: float) -> Any:
        return await self._fated(name, partial(super().call, name, command, limit_s))

    def tell(self, reservation: str, outcome: Told, on_answer: OnAnswer, *more: Any, **named: Any) -> None:
        async def told() -> None:
            try:
                answer = await self.settle(reservation, outcome, *more, **named)
            except WarmfleetError as error:
                on_answer(None, error)
            else:
                on_answer(answer, None)

        task = asyncio.ensure_future(told())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _fated(self, name: str, execute: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(0)  # whoever else is there goes first
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


class GivenOrder(PolicyChoice):
    """A policy whose hash ring gives the order that the next decision asks for."""

    given: tuple[str, ...] = ()

    def order(self, view: View, request: Request, session: bytes) -> tuple[str, ...]:
        return self.given


class LossyReplica:
    """One router without HTTP: it books, settles and renews by its own code."""

    def __init__(self, client: aioredis.Redis, model: str, policy: str, late: Late, spans: Spans = SPANS) -> None:
        self.fleet = LossyFleet(client, model, timeouts=PATIENT, spans=spans)
        self.fleet.fates, self.fleet.late, self.fleet.asked, self.fleet.foretold = deque(), late, {}, {}
        self.fleet.tasks = set()
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
                attempt.release("cancelled")  # it went where the degraded mode chose: nothing of it is booked
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
        """Its task is cancelled twice, the second time while it gives back; returns the reservation."""
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
    """The reservations of so many decisions, in the order in which Redis executed them."""
    order: list[str] = []  # of calls: a script that is not there is loaded before the first of them
    while len(order) < count:
        command = (await monitor.next_command())["command"]
        found = re.match(r"EVALSHA \S+ \d+ .*?(wf-0\d+) ", command)
        order += [found[1]] if found else []
    return order
