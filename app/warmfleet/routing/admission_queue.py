"""Admits a request to a worker at once, lets it wait in the queue for the worker that suits it, or refuses it.

All replicas share the queue: the order of the tickets is in Redis (lua/parts/shared/tickets.lua). The bodies wait in
this replica, which has room for BODIES bodies of the largest size.

A request may be held before that, until the caches have room for the context of its session. No failure holds a request
for ever: if Redis has lost the session, the request is decided like a new one; while Redis is away, it is decided
without Redis; and each hold has a bound.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

from warmfleet.errors import Overloaded, QueueTimeout, RateLimited, WarmfleetError
from warmfleet.fleet import Decision, Queued, Standing
from warmfleet.routing.tickets import POLL_S

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from warmfleet.fleet import Hold
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Job
    from warmfleet.routing.tickets import Tickets
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.routing.admission_queue")

BODIES = 2  # memory for waiting bodies, as a multiple of the largest: a tenant gets half, so any body may wait
HELD_SHARE = 4  # held requests get a quarter of that memory; without room for its body a request is not held
MAX_RETRY_AFTER_S = 60
#: Redis ends a hold after 1.5 times the wait that was told (a paused one's bound). If it did not, the replica ends it.
HELD_TIMES, LATE_S = 1.5, 5.0
LIMITED_S = 1.0  # between two questions whether a client's limits admit a request that was held
BUSY = "The engines that suit this request are busy"
LATER = ": ask again after the seconds that Retry-After tells."
OF_BYTES = (
    " For the operator: the room is twice WARMFLEET_BODY_MAX_BYTES, of which the requests of one tenant together get "
    "about half."
)


class Chooser(Protocol):
    """Chooses a worker, or takes a ticket (a place in the queue). may_wait: this replica has room to keep the body."""

    async def choose(self, job: Job, attempt: Attempt, *, may_wait: bool) -> Decision | Queued: ...


class AdmissionQueue:
    """The requests of all models that wait in this replica, and how many bytes their bodies take."""

    def __init__(self, chooser: Chooser, tickets: Tickets, settings: Settings, metrics: Metrics) -> None:
        self._chooser = chooser
        self._tickets = tickets
        self._settings = settings
        self._metrics = metrics
        self._bytes = self._held_bytes = 0
        self._max_bytes = BODIES * settings.body_max_bytes
        self._tenant_bytes: dict[bytes, int] = {}

    async def admit(self, job: Job, attempt: Attempt) -> Decision:
        """Decide where the job goes; if the worker that suits it has no room, wait for its turn.

        Raises Overloaded, QueueTimeout, and what the chooser raises.
        """
        flow, size = job.call.flow, len(job.body)
        # Take the room before the decision: a ticket without room for its body could displace another request in vain.
        may_wait = self._take_room(flow, size)
        try:
            answer = await self._chooser.choose(job, attempt, may_wait=may_wait)
            if isinstance(answer, Decision):
                return answer
            return await self._wait(job, attempt, answer, may_wait=may_wait)
        finally:
            if may_wait:
                self._give_room_back(flow, size)

    async def _wait(self, job: Job, attempt: Attempt, answer: Queued, *, may_wait: bool) -> Decision:
        now = asyncio.get_running_loop().time()
        patient_until = now + job.call.patience_s - (time.perf_counter() - job.call.received_at)
        if answer.hold is not None:
            self._check_line(job, attempt, answer.hold)
        held_until = 0.0  # set by the first hold
        waiting: Decision | Queued = answer
        while isinstance(waiting, Queued):
            if waiting.hold is not None and self._held_bytes + len(job.body) > self._max_bytes // HELD_SHARE:
                attempt.chosen.leave_line()
                waiting = await self._chooser.choose(job, attempt, may_wait=may_wait)
            elif waiting.hold is not None:
                held_until = held_until or asyncio.get_running_loop().time() + self._longest_s(waiting.hold)
                try:
                    waiting = await self._hold(job, attempt, waiting.hold, held_until, patient_until)
                except RateLimited:
                    waiting = await self._when_admitted(job, attempt, min(held_until, patient_until))
            else:
                waiting = await self._queue(job, attempt, waiting, patient_until, may_wait=may_wait)
        return waiting

    def _check_line(self, job: Job, attempt: Attempt, hold: Hold) -> None:
        """Raise Overloaded if a new session would be held for too long. Only its first request is refused."""
        most_s = self._settings.session_wait_max_s
        first = not (hold.paused or job.request.goes_on or len(job.call.record.tries) > 1)
        if hold.predicted_s > most_s and first:
            raise self._refusal(attempt.chosen.pool, "sessions", hold.predicted_s - most_s, hold)

    def _longest_s(self, hold: Hold) -> float:
        return LATE_S + HELD_TIMES * (self._settings.paused_max_s if hold.paused else hold.predicted_s)

    async def _hold(
        self, job: Job, attempt: Attempt, hold: Hold, held_until: float, patient_until: float
    ) -> Decision | Queued:
        """Wait until the session has a place in a cache, then decide again. The times are of the event loop's clock.

        held_until: then the request goes on without the ledger. patient_until: the client's limit, when it gets any
        worker with room, or is refused.
        """
        booking = attempt.chosen
        pool, began = booking.pool, time.perf_counter()
        attempt.record.held(hold)
        self._held_bytes += len(job.body)
        try:
            with self._metrics.held.labels(pool.tag).track_inprogress():
                waits = self._tickets.wait_in_line(pool, attempt.reservation, hold.session)
                standing = await _until(min(held_until, patient_until), waits)
        finally:
            self._held_bytes -= len(job.body)
            attempt.record.let_go()
            self._metrics.held_seconds.labels(pool.tag).observe(time.perf_counter() - began)
        if standing is None:
            booking.leave_line()
            if patient_until <= held_until:
                return await self._last_look(pool, job, attempt)
        return await self._chooser.choose(job, attempt, may_wait=True)

    async def _when_admitted(self, job: Job, attempt: Attempt, deadline: float) -> Decision | Queued:
        """Wait until the client's limits admit a request that was held, which counted for none of them meanwhile.

        Without polls its session loses the place to others, and is then held again. Raises RateLimited at the deadline.
        """
        while True:
            await asyncio.sleep(LIMITED_S)
            try:
                return await self._chooser.choose(job, attempt, may_wait=True)
            except RateLimited:
                if asyncio.get_running_loop().time() >= deadline:
                    raise

    async def _queue(
        self, job: Job, attempt: Attempt, answer: Decision | Queued, patient_until: float, *, may_wait: bool
    ) -> Decision | Queued:
        """Wait for the turn of the ticket; returns a decision, or that the session is held.

        patient_until: the client's limit, by the event loop's clock.
        """
        deadline = min(patient_until, asyncio.get_running_loop().time() + self._settings.queue_timeout_s)
        self._check_ticket(attempt, answer, may_wait=may_wait)
        pool, began = attempt.chosen.pool, time.perf_counter()
        try:
            while isinstance(answer, Queued) and answer.hold is None:
                pool = attempt.chosen.pool  # the last decision may have chosen the queue of another pool
                with self._metrics.queued.labels(pool.tag).track_inprogress():
                    elsewhere = attempt.comparison is not None
                    waits = self._tickets.wait(pool, attempt.reservation, elsewhere=elsewhere)
                    standing = await _until(deadline, waits)
                    if standing is None:
                        return await self._last_look(pool, job, attempt)
                    answer = await self._chooser.choose(job, attempt, may_wait=may_wait)
                    displaced = standing is Standing.DISPLACED
                    self._check_ticket(attempt, answer, may_wait=may_wait, displaced=displaced)
                    if isinstance(answer, Queued) and attempt.chosen.avoided:
                        await asyncio.sleep(POLL_S)  # has its turn, but all workers with room failed a moment ago
        finally:
            self._metrics.queue_seconds.labels(pool.tag).observe(time.perf_counter() - began)
        return answer

    def _check_ticket(
        self, attempt: Attempt, answer: Decision | Queued, *, may_wait: bool, displaced: bool = False
    ) -> None:
        """Raise Overloaded if the request must wait but got no ticket. displaced: it had a ticket before."""
        if isinstance(answer, Queued) and answer.outcome in ("full", "displaced"):
            reason = "displaced" if displaced else answer.outcome
            raise self._refusal(attempt.chosen.pool, reason if may_wait else "bytes", answer.work_s)

    def _take_room(self, flow: bytes, size: int) -> bool:
        """Take room for a body of ``size`` bytes; False if there is not enough.

        A tenant that holds as many bytes as are free gets no more, so that room is left for other tenants. One tenant
        therefore gets about half of the room, even while no other tenant asks for any.
        """
        held = self._tenant_bytes.get(flow, 0)
        if held + size > self._max_bytes - self._bytes:
            return False
        self._bytes += size
        self._tenant_bytes[flow] = held + size
        return True

    def _give_room_back(self, flow: bytes, size: int) -> None:
        self._bytes -= size
        held = self._tenant_bytes.get(flow, 0) - size
        if held:
            self._tenant_bytes[flow] = held
        else:
            self._tenant_bytes.pop(flow, None)

    async def _last_look(self, pool: Pool, job: Job, attempt: Attempt) -> Decision:
        """Decide once more at the deadline, for any worker with room. Raises QueueTimeout if no worker has room."""
        answer = await self._chooser.choose(job, attempt, may_wait=False)
        if isinstance(answer, Queued):
            raise self._refusal(pool, "deadline", self._tickets.work_s(pool) or answer.work_s)
        return answer

    def _refusal(self, pool: Pool, reason: str, work_s: float, hold: Hold | None = None) -> WarmfleetError:
        """Return the error for a reason: full, displaced, bytes, deadline or sessions.

        work_s: prefill seconds in the queue, or seconds until the line is short enough. hold: for the reason sessions.
        """
        self._metrics.queue_rejections.labels(reason, pool.tag).inc()
        logger.warning("%s is overloaded: a request was refused (%s)", pool.tag, reason)
        error: WarmfleetError
        if reason == "deadline":
            error = QueueTimeout(f"{BUSY}, and the time that it may wait is over{LATER}")
        elif hold is not None:
            ahead = f"{hold.ahead} sessions wait before it for room in the engines' caches"
            error = Overloaded(f"{ahead}, for about {hold.predicted_s:.0f} s{LATER}")
        elif reason == "bytes":
            error = Overloaded(f"{BUSY}, and this replica has no room left for its body to wait{LATER}{OF_BYTES}")
        else:
            error = Overloaded(f"{BUSY}, and the queue is full{LATER}")
        error.retry_after_s = min(max(1, math.ceil(work_s)), MAX_RETRY_AFTER_S)
        return error


async def _until(deadline: float, waits: Awaitable[Standing]) -> Standing | None:
    """Wait until the request should be decided again; return its state, or None at the deadline (by the loop's
    clock)."""
    try:
        async with asyncio.timeout_at(deadline):
            return await waits
    except TimeoutError:
        return None
