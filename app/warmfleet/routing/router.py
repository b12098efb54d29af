"""One request's way through this replica: parse → identify → decide → forward → settle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from warmfleet.engines.engine_priority import PRIORITY_HEADER
from warmfleet.engines.followed_stream import StreamCut
from warmfleet.engines.request_headers import safe_request_id
from warmfleet.errors import (
    CancelledReservation,
    FleetUnavailable,
    KeyInUse,
    NameRefused,
    NoWorker,
    UpstreamGone,
    WarmfleetError,
)
from warmfleet.fleet import Flag, Renewal
from warmfleet.logs.lines import tell_request
from warmfleet.pools.outliers import Judged
from warmfleet.prompt import request as requests
from warmfleet.prompt.dialects import bodies
from warmfleet.protocol.wire import RESERVATION_LENGTH
from warmfleet.routing.admission_queue import AdmissionQueue
from warmfleet.routing.attempt import Attempts
from warmfleet.routing.call import Job, Placement
from warmfleet.routing.client_limits import Counting
from warmfleet.routing.decider import Decider
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.routing.pool_choice import PoolChoice
from warmfleet.routing.recovery.continuation import Continuation
from warmfleet.routing.recovery.hedging import Hedging
from warmfleet.routing.recovery.retry_budget import RetryBudget
from warmfleet.routing.relay import Relay
from warmfleet.routing.tenants import Tenancy
from warmfleet.routing.tickets import Tickets
from warmfleet.routing.token_handoff import offer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.engines.upstream import Upstream
    from warmfleet.fleet import Decision
    from warmfleet.fleet.reservations import Outcome
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.prompt.request import Request
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Call, Ending, Handover
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.routing.identifier import Identifier
    from warmfleet.settings import Settings

MAX_ATTEMPTS = 4  # at different workers that take the request, before the first byte of an answer
MAX_GONE = 16  # workers that are found dead on the way: half of a large fleet may die at once
MAX_DEATHS = 2  # of workers that had read the request: the request may have killed them
#: Where other workers are left then, a third one gets the request, but only after a moment: engines that die of a
#: common cause have died by then, and hardly any request meets three of them. One that kills engines gets no fourth.
LARGE_FLEET, MOMENT_S = 4, 1.0
BUSY = frozenset({429, 502, 503})  # the worker did not begin to work on the request
FAILED = frozenset({500, 504})  # it did; the request may be the reason
NO_ANSWER = BUSY | FAILED
NO_STATUS = frozenset[int]()
FIND_S = 0.25  # for all pools to tell whether they have a reservation; then the request is decided without knowing it


Forward = Callable[["Job", "Attempt", "Decision", "ClientAnswer", frozenset[int]], Coroutine[Any, Any, "Outcome"]]


class Router:
    """Serves the calls of one replica. It holds nothing that another replica needs."""

    def __init__(
        self,
        pools: Pools,
        upstream: Upstream,
        identifier: Identifier,
        settings: Settings,
        metrics: Metrics,
        log: DecisionLog | None = None,
    ) -> None:
        self.pools = pools
        self.tenancy = Tenancy(settings.tenant_key, settings.tenant_header)
        self._allowed_fields = settings.allowed_fields
        self._reads_priority = settings.queue_priority
        self._sends_priority = settings.engine_priority
        self._metrics = metrics
        self._log = log or DecisionLog("", metrics)
        self._identifier = identifier
        tickets = Tickets()
        self._queue = AdmissionQueue(tickets, settings, metrics)
        self._attempts = Attempts(tickets, metrics)
        self._retry_budget = RetryBudget()
        self._placing: set[bytes] = set()  # keys of gateways' requests that are being placed
        self._decider = Decider(self._log, metrics)
        self.counting = Counting(pools, metrics)
        self._choice = PoolChoice(self._queue, self._decider, identifier, self.counting, metrics)
        self._relay = Relay(upstream, settings, metrics)
        self._forward: Forward = self._relay.forward
        if settings.hedge_after_s:
            self._forward = Hedging(
                settings.hedge_after_s, self._relay, self._attempts, self._choice, self._retry_budget, metrics
            ).forward
        self._continuation = Continuation(
            settings, metrics, self._attempts, self._choice, self._relay, self._retry_budget
        )

    async def serve(self, call: Call, answer: ClientAnswer) -> None:
        """Answer ``call``. Raises WarmfleetError; unless ``answer.started``, nothing was sent to the client then."""
        job = self._continuation.prepared(await self._prepare(call))
        retries = _Retries(job, self._retry_budget)
        while True:
            if retries.pause_s:
                await retries.moment()
            attempt = self._attempts.begin(job, retries.failed_workers, avoids_failing=retries.avoids_failing)
            outcome: Outcome = "cancelled"  # until it is known how the attempt ended
            try:
                if job.homes:
                    job, decision = await self._choice.admit(job, attempt)
                else:
                    decision = await self._queue.admit(job, attempt, self._decider.decide)  # 3 decide
                outcome = await self._forward(job, attempt, decision, answer, retries.tried_elsewhere)  # 4 forward
                if outcome == "finished":
                    job.pool.outliers.served(decision)
                    retries.blame()
                return  # noqa: TRY300  an else would part the five steps
            except StreamCut as cut:
                outcome = "failed"
                attempt.release(outcome)  # before another worker is chosen
                await self._continuation.go_on(job.admitted(), cut, answer)
                return
            except UpstreamGone as error:
                outcome = "failed"
                if answer.started:
                    raise
                if error.warns_others:
                    attempt.worker_failed()
                retries.worker_failed(job.pool, decision, error)  # raises the error if no other worker may be tried
                self._metrics.retries.labels("another").inc()
                _retried(job, decision.worker_id, error)
                job = job.admitted().as_of_now()
            except NoWorker as error:
                before, job = job, job.as_of_now()
                if job is before:  # raises unless an avoided worker may serve
                    retries.no_worker(error, avoided_some=bool(attempt.avoided))
            except WarmfleetError:
                outcome = "failed"
                raise
            finally:
                answer.model = attempt.pool.tag
                attempt.release(outcome)  # 5 settle

    async def _prepare(self, call: Call) -> Job:
        """Raises BadRequest, TooLarge, ModelNotFound, FleetUnavailable."""
        if call.body[:1] != b"{" or call.body[1:2] == b"\0":
            call = call._replace(body=requests.in_utf8(call.body))
        request = bodies.parse(call.path, call.body, self._allowed_fields, call.content_type)  # 1 parse
        if request.request_id and not call.named:
            call.record.request_id = safe_request_id(request.request_id.encode("ascii", "ignore"))
            tell_request(call.request_id, call.record.trace_id)
        priority = requests.priority(request) if self._reads_priority else 0
        body = self.tenancy.isolate(request, call.body, call.tenant)
        pool = await self.pools.find(request.model, call.models)
        self._check_model(call, request, pool)
        served = self.pools.served[pool.name]
        prompt = await self._identifier.identify(pool, request, body, call.headers)  # 2 identify
        named, tokens = request.model or pool.name, prompt.prompt_tokens
        call.record.identified(named, prompt.kind, prompt.reason, tokens, streams=request.stream)
        homes = () if served.only else served.order_for(prompt, request.model)
        return Job(call, request, body, pool, prompt, offer(request, prompt), priority, self._log.wants(), homes=homes)

    def _check_model(self, call: Call, request: Request, pool: Pool) -> None:
        """Raises ModelNotFound, as for a model that does not exist, if the client's key is not for the request's model.

        Engines may read the model of a form, or of a query, otherwise than routers do. So the client needs the right to
        every name that the model's pools serve, unless its body is a JSON object.
        """
        if call.models is None:
            return
        named = request.model or pool.name
        reachable = {named} if request.from_json else {named, *self.pools.served[pool.name].names}
        if not reachable <= call.models:
            raise self.pools.not_found(named, call.models)

    async def place(self, call: Call, handover: Handover) -> Placement:
        """Book ``call`` at a worker for a gateway that sends it there by itself. Waits in the queue as ``serve`` does.

        Nobody but the gateway renews and settles the reservation, so it expires by itself. Raises WarmfleetError.
        """
        job = await self._prepare(call)
        self.tenancy.may_stay(job.call.body)
        if handover.key in self._placing:
            raise KeyInUse("A request with this Idempotency-Key is being placed: ask again.", "Idempotency-Key")
        self._placing |= {handover.key} - {b""}
        avoids_failing = True
        try:
            while True:
                attempt = self._attempts.begin(job, handover.exclude, avoids_failing=avoids_failing, key=handover.key)
                try:
                    if handover.key:
                        job = await self._where_booked(job, attempt.reservation)
                    job, decision = await self._choice.admit(job, attempt)
                    if decision.outcome == "known":
                        await self.renew(job.pool.tag, attempt.reservation)
                    return self._hand_over(job, attempt, decision)
                except NoWorker:
                    if not (avoids_failing and attempt.avoided):
                        raise
                    avoids_failing = False
                finally:
                    attempt.release("cancelled")
        finally:
            self._placing.discard(handover.key)

    async def _where_booked(self, job: Job, reservation: str) -> Job:
        """The job with that pool first in which this reservation was booked before, if one was and answers.

        The home pools of a prompt change with the pools of its model, and a pool may have been full or away before.
        """
        pools = self.pools.named(job.pool.name)
        if len(pools) == 1:
            return job
        with suppress(FleetUnavailable, TimeoutError):
            async with asyncio.timeout(FIND_S):
                pool = await _holder([one for one in pools if one.degraded.asks_redis], reservation)
            if pool is not None:
                return job._replace(homes=(pool, *(one for one in job.homes or (job.pool,) if one is not pool)))
        return job

    def _hand_over(self, job: Job, attempt: Attempt, decision: Decision) -> Placement:
        headers = {"X-Request-Id": job.call.id_at_engine(attempt.owner)}
        rank = job.pool.view.ranks.get(decision.worker_id)
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        if self._sends_priority and (number := job.engine_priority(decision)) is not None:
            headers[PRIORITY_HEADER] = str(number)
        return Placement(
            attempt.hand_over(),
            job.pool.tag,
            decision.worker_id,
            decision.url,
            decision.matched_tokens,
            decision.prompt_tokens,
            job.pool.fleet.spans.lease_ms / 1_000,
            headers,
            job.request.salt if job.body is not job.call.body else None,
        )

    async def settle(self, model: str, reservation: str, ending: Ending) -> str:
        """Tell Redis what became of a gateway's reservation; returns ``started``, ``settled``, ``unknown`` or ``same``.

        The worker is judged by it as by an answer that this replica got, once. Raises ModelNotFound, BadRequest,
        FleetUnavailable.
        """
        pool, booked = await self._booked(model, reservation)
        lease = await pool.fleet.lease(booked)
        word = await pool.fleet.settle(booked, ending.outcome, ending.tokens)
        if booked != reservation and ending.outcome != "started":
            prompt_tokens = lease.prompt_tokens if lease is not None and ending.outcome in ("failed", "unsent") else 0
            self.counting.end_one(pool.name, reservation, ending.tokens - prompt_tokens)
        if word in ("STARTED", "SETTLED"):
            self._attempts.gateway_settled(pool, ending.outcome)
        if word == "SETTLED" and lease is not None:
            _judge(pool, lease.worker_id, ending)
        return word.lower()

    async def renew(self, model: str, reservation: str) -> float:
        """Let a gateway's reservation live on; returns for how many seconds.

        Raises CancelledReservation if it has ended, ModelNotFound, BadRequest, FleetUnavailable.
        """
        pool, booked = await self._booked(model, reservation)
        # Without a worker nothing is booked anew: what has expired or was settled stays so.
        renewed, _, _ = await pool.fleet.renew([Renewal(booked, "", 0, 0)])
        if not renewed:
            raise CancelledReservation("This reservation was settled or has expired.", "reservation")
        if booked != reservation:
            await self.counting.keep_one(pool.name, reservation)
        return pool.fleet.spans.lease_ms / 1_000

    async def _booked(self, model: str, reservation: str) -> tuple[Pool, str]:
        """The pool that has a gateway's reservation, and the id under which it has it.

        Several pools have it without the tag of its client (``counting``), unless it was booked when there was one.
        Raises as ``_pool_of``.
        """
        untagged = reservation[:RESERVATION_LENGTH]
        pool = await self._pool_of(model, untagged)
        if untagged == reservation or len(self.pools.named(pool.name)) == 1:
            return pool, reservation
        if await pool.fleet.lease(untagged) is not None:
            return pool, untagged
        return await self._pool_of(model, reservation), reservation

    async def _pool_of(self, model: str, reservation: str) -> Pool:
        """The pool with this tag; of a model's name, which may be a pool's tag, too, the pool that has the reservation.

        Raises ModelNotFound, BadRequest, FleetUnavailable.
        """
        pool = self.pools.tagged(model)
        if pool is not None and pool.tag != pool.name:
            return pool
        pool = pool or await self.pools.find(model)
        pools = self.pools.named(pool.name)
        return (await _holder(pools, reservation) if len(pools) > 1 else None) or pool

    def waits_in(self, pool: Pool) -> bool:
        """Whether a request waits in the queue of this pool."""
        return self._attempts.tickets.any(pool)

    async def drained(self) -> None:
        """Return when no reservation is left to settle and no ticket to give up, whether Redis took them or not."""
        await self._attempts.drained()
        await self.counting.drained()


def _retried(job: Job, worker_id: str, error: UpstreamGone) -> None:
    job.call.record.event("retry", **{"warmfleet.worker": worker_id, "error.type": error.code})


def _judge(pool: Pool, worker_id: str, ending: Ending) -> None:
    """Count how a gateway's call went for its worker, and for the workers that had failed it before."""
    on_trial = {worker.worker_id: bool(worker.load.flags & Flag.TRIAL) for worker in pool.view.workers}
    worker = Judged(worker_id, on_trial.get(worker_id, False))
    if ending.served:
        pool.outliers.served(worker)
        for name in on_trial.keys() & {*ending.failed_workers} - {worker_id}:
            pool.outliers.failed(Judged(name, on_trial[name]))
    elif ending.broke_off:
        pool.outliers.failed(worker)


async def _holder(pools: Sequence[Pool], reservation: str) -> Pool | None:
    """The pool in which this reservation is booked, else one that knows of its end.

    Raises FleetUnavailable if none of those that answer has it, and one does not answer.
    """
    leases = await asyncio.gather(*[pool.fleet.lease(reservation) for pool in pools], return_exceptions=True)
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


class _Retries:
    """Decides after a failed attempt whether the job may have another one, and at which workers.

    ``to_blame``: the workers that are to blame if another one serves the job, as they were decided, by their pools.
    """

    def __init__(self, job: Job, budget: RetryBudget) -> None:
        self.failed_workers: tuple[str, ...] = ()
        self.to_blame: tuple[tuple[Pool, Decision], ...] = ()
        self.avoids_failing = True
        self._last = False
        self._job = job
        self._budget = budget
        self._attempts_left = MAX_ATTEMPTS
        self._gone_left = MAX_GONE
        self._deaths = 0
        self.pause_s = 0.0
        self._failure: UpstreamGone | None = None
        budget.earn()

    @property
    def tried_elsewhere(self) -> frozenset[int]:
        """The statuses of an answer that the client does not get: another worker is tried instead."""
        if self._last or self._budget.empty or not self._job.has_another_worker:
            return NO_STATUS
        return BUSY if self._deaths + 1 >= MAX_DEATHS else NO_ANSWER

    def blame(self) -> None:
        """Another worker has served the job, so those that failed it are to blame."""
        for pool, decision in self.to_blame:
            pool.outliers.failed(decision)

    def worker_failed(self, pool: Pool, decision: Decision, error: UpstreamGone) -> None:
        """Exclude this worker from the next attempt. Raises ``error`` if no other attempt may follow."""
        self._failure = error
        gone = error.refused and not error.answered
        self._deaths += not error.refused
        by_name = isinstance(error, NameRefused)
        # What was under way at a worker that died is asked again once, however much that is. To refuse a name costs a
        # worker nothing.
        costs = not by_name and (error.answered or (not gone and self._deaths > 1))
        free = gone or by_name
        if (self._last and not free) or self._too_much or (costs and self._budget.empty):
            raise error
        if costs:
            self._budget.spend()
        if not gone and (not isinstance(error, NameRefused) or error.counts):
            self.to_blame = (*self.to_blame, (pool, decision))
        if free:
            self._gone_left -= 1
        else:
            self._next()
            self.pause_s = MOMENT_S if self._deaths >= MAX_DEATHS else 0.0
        self.failed_workers = (*self.failed_workers, decision.worker_id)

    @property
    def _too_much(self) -> bool:
        """Whether the request may have been too much for the workers that had it, as one is that no engine survives."""
        most = MAX_DEATHS + (self._job.worker_count >= LARGE_FLEET)
        # A request that is too long for every engine may have been too much for the first one.
        return (
            self._deaths >= most
            or not self._gone_left
            or (bool(self._deaths) and self._job.prompt.reason == "too_long")
        )

    async def moment(self) -> None:
        """Wait before another worker is risked, if two have died under the request."""
        pause_s, self.pause_s = self.pause_s, 0.0
        await asyncio.sleep(pause_s)

    def no_worker(self, error: NoWorker, *, avoided_some: bool) -> None:
        """Let the next attempt choose the avoided workers, too, but none that failed this job.

        Raises if this attempt avoided none.
        """
        if not avoided_some:
            raise self._failure or error  # no worker is left: the client gets the last worker's failure
        self.avoids_failing = False

    def _next(self) -> None:
        self._attempts_left -= 1
        self._last = self._attempts_left == 1
