"""Chooses workers for requests that gateways send themselves, and takes the gateways' reports of the outcomes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.engines.engine_priority import PRIORITY_HEADER
from warmfleet.errors import CancelledReservation, FleetUnavailable, KeyInUse, NoWorker
from warmfleet.fleet import Flag, Renewal
from warmfleet.pools.outliers import Judged
from warmfleet.protocol.wire import RESERVATION_LENGTH
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.booking import UNSERVED

if TYPE_CHECKING:
    from warmfleet.fleet import Decision
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.booking import Booking
    from warmfleet.routing.call import Call, Job
    from warmfleet.routing.router import Router
    from warmfleet.settings import Settings

FIND_S = 0.25  # time for pools to tell whether they have a reservation; later answers are ignored


class Handover(NamedTuple):
    """A gateway's options for a call that it sends itself.

    key: equal keys get the same reservation; empty: a new reservation. exclude: ids of workers not to choose.
    """

    key: bytes = b""
    exclude: tuple[str, ...] = ()


class Ending(NamedTuple):
    """A gateway's report of how its call ended. status: of the engine's answer; None if none came, or not reported.

    failed_workers: workers that failed this call before another worker served it. output_tokens: tokens of the answer.
    """

    outcome: Outcome
    status: int | None = None
    failed_workers: tuple[str, ...] = ()
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The tokens that the client's limit counts besides the prompt; none after a failure."""
        return 0 if self.outcome == "failed" else self.output_tokens

    @property
    def served(self) -> bool:
        return self.outcome == "finished" and (self.status or 200) < 400

    @property
    def broke_off(self) -> bool:
        """Whether an answer with a status 2xx broke off: the worker's fault, whatever the request was."""
        return self.outcome == "failed" and self.status is not None and 200 <= self.status < 300


class Placement(NamedTuple):
    """The worker to which a gateway is to send its call.

    reservation: None if Redis booked nothing. model: the name with which to settle it. url: the worker's, without a
    path. headers: to send with the call. cache_salt: to be set in the body; None: the body stays as it is.
    expires_in_s: time from now until the reservation expires, unless it is renewed.
    """

    reservation: str | None
    model: str
    worker: str
    url: str
    matched_tokens: int
    prompt_tokens: int
    expires_in_s: float
    headers: dict[str, str]
    cache_salt: str | None


class Gateway:
    """Places requests for gateways, which send them to engines themselves. Shares the router's queue and pools."""

    def __init__(self, router: Router, settings: Settings) -> None:
        self._router = router
        self._pools = router.pools
        self._sends_priority = settings.engine_priority
        self._placing: set[bytes] = set()  # keys of requests that are being placed

    async def place(self, call: Call, handover: Handover) -> Placement:
        """Book ``call`` at a worker for a gateway that sends it there. Waits in the queue as ``Router.serve`` does.

        Only the gateway renews and settles the reservation; if it does neither, it expires. Raises WarmfleetError.
        """
        router = self._router
        # No gateway tells how an answer ended, or sends a request twice.
        job = (await router.prepare(call))._replace(session=b"", alone=True)
        router.tenancy.may_stay(job.call.body)
        if handover.key in self._placing:
            raise KeyInUse("A request with this Idempotency-Key is being placed: ask again.", "Idempotency-Key")
        self._placing |= {handover.key} - {b""}
        avoids, key = True, handover.key
        try:
            while True:
                attempt = Attempt(router.settlements, job, handover.exclude, avoids_failing=avoids, key=key)
                try:
                    if key:
                        job = await self._where_booked(job, attempt.reservation)
                    decision = await router.queue.admit(job, attempt)
                    if decision.outcome == "known":
                        await self.renew(attempt.chosen.pool.tag, attempt.reservation)
                    return self._hand_over(job, attempt, decision)
                except NoWorker:
                    if not (avoids and attempt.avoided_some):
                        raise
                    avoids = False
                finally:
                    attempt.release("cancelled")
        finally:
            self._placing.discard(key)

    async def _where_booked(self, job: Job, reservation: str) -> Job:
        """Return the job with the pool first in which this reservation was booked before, if such a pool answers.

        This may be another pool than the prompt's first choice now: the model's pools may have changed, or a pool may
        have been full or away.
        """
        pool = None
        with suppress(FleetUnavailable, TimeoutError):
            async with asyncio.timeout(FIND_S):
                pool = await self._holder(job.pool.name, reservation, asks_all=False)
        if pool is None:
            return job
        others = (other for other in job.pools if other is not pool)
        return job._replace(pools=(pool, *others), several=True, limits=None)

    def _hand_over(self, job: Job, attempt: Attempt, decision: Decision) -> Placement:
        pool = attempt.chosen.pool
        headers = headers_for_engine(job, attempt.chosen, decision, sends_priority=self._sends_priority)
        return Placement(
            attempt.hand_over(),
            pool.tag,
            decision.worker_id,
            decision.url,
            decision.matched_tokens,
            decision.prompt_tokens,
            pool.fleet.constants.spans.lease_ms / 1_000,
            headers,
            job.request.salt if job.body is not job.call.body else None,
        )

    async def settle(self, model: str, reservation: str, ending: Ending) -> str:
        """Settle a reservation; return ``started``, ``settled``, ``unknown`` or ``same``.

        The first report of an end also judges the worker, as an answer through this replica does. Raises ModelNotFound,
        BadRequest, FleetUnavailable.
        """
        pool, booked = await self._booked(model, reservation)
        lease = await pool.fleet.bookings.lease(booked)
        word = await pool.fleet.bookings.settle(booked, ending.outcome, ending.tokens)
        if booked != reservation and ending.outcome != "started":
            prompt_tokens = lease.prompt_tokens if lease is not None and ending.outcome in UNSERVED else 0
            self._router.counting.end_one(pool.name, reservation, ending.tokens - prompt_tokens)
        if word in ("STARTED", "SETTLED"):
            self._router.settlements.gateway_settled(pool, ending.outcome)
        if word == "SETTLED" and lease is not None:
            _judge(pool, lease.worker_id, ending)
        return word.lower()

    async def renew(self, model: str, reservation: str) -> float:
        """Renew a reservation; returns its new lifetime in seconds.

        Raises CancelledReservation if it has ended, ModelNotFound, BadRequest, FleetUnavailable.
        """
        pool, booked = await self._booked(model, reservation)
        # With an empty worker id, ``renew`` does not book an expired or settled reservation anew.
        renewed, _, _ = await pool.fleet.bookings.renew([Renewal(booked, "", 0, 0)])
        if not renewed:
            raise CancelledReservation("This reservation was settled or has expired.", "reservation")
        if booked != reservation:
            await self._router.counting.keep_one(pool.name, reservation)
        return pool.fleet.constants.spans.lease_ms / 1_000

    async def _booked(self, model: str, reservation: str) -> tuple[Pool, str]:
        """Find the pool that has a reservation, and the reservation's id in that pool.

        With several pools, ``client_limits`` counts clients, so the id in the pool has no client's tag, unless it was
        booked while the model had one pool. Raises as ``_pool_of``.
        """
        untagged = reservation[:RESERVATION_LENGTH]
        pool = await self._pool_of(model, untagged)
        if untagged == reservation or await pool.fleet.bookings.lease(untagged) is not None:
            return pool, untagged
        return await self._pool_of(model, reservation), reservation

    async def _pool_of(self, model: str, reservation: str) -> Pool:
        """Find the pool with this tag, or, for a model's name (which may be a tag, too), the pool of the reservation.

        Raises ModelNotFound, BadRequest, FleetUnavailable.
        """
        pool = self._pools.tagged(model)
        if pool is not None and pool.tag != pool.name:
            return pool
        pool = pool or await self._pools.find(model)
        return await self._holder(pool.name, reservation) or pool

    async def _holder(self, model: str, reservation: str, *, asks_all: bool = True) -> Pool | None:
        """Find the pool, of several, in which this reservation is booked, else a pool that remembers its end.

        None if no pool has it, or if the model has one pool. asks_all: pools that are away are asked, too. Raises
        FleetUnavailable if no pool that answers has it, and some pool does not answer.
        """
        pools = self._pools.named(model)
        if len(pools) == 1:
            return None
        pools = [pool for pool in pools if asks_all or pool.degraded.asks_redis]
        leases = await asyncio.gather(
            *[pool.fleet.bookings.lease(reservation) for pool in pools], return_exceptions=True
        )
        knows: Pool | None = None
        failure: BaseException | None = None
        for pool, lease in zip(pools, leases, strict=True):
            if isinstance(lease, BaseException):
                failure = lease
            elif lease is not None and lease.worker_id:
                return pool
            else:
                knows = pool if lease is not None else knows
        if failure is not None:
            raise failure
        return knows


def headers_for_engine(job: Job, booking: Booking, decision: Decision, *, sends_priority: bool) -> dict[str, str]:
    """Return the headers that a gateway is to send with a call, besides the client's. sends_priority: as set."""
    headers = {"X-Request-Id": booking.id_at_engine(job.call.record.request_id, ended=job.call.hints.ended)}
    rank = booking.pool.view.ranks.get(decision.worker_id)
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    if sends_priority and (number := job.engine_priority(booking.pool, decision)) is not None:
        headers[PRIORITY_HEADER] = str(number)
    return headers


def _judge(pool: Pool, worker_id: str, ending: Ending) -> None:
    """Judge the worker of a gateway's call, and the workers that failed the call before, by the call's outcome."""
    on_trial = {worker.worker_id: bool(worker.load.flags & Flag.TRIAL) for worker in pool.view.workers}
    worker = Judged(worker_id, on_trial.get(worker_id, False))
    if ending.served:
        pool.outliers.served(worker)
        for name in on_trial.keys() & {*ending.failed_workers} - {worker_id}:
            pool.outliers.failed(Judged(name, on_trial[name]))
    elif ending.broke_off:
        pool.outliers.failed(worker)
