"""A request's way through this replica: parse → identify → decide → forward → settle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from warmfleet.engines.followed_stream import StreamCut
from warmfleet.engines.request_headers import safe_request_id
from warmfleet.errors import NoWorker, UpstreamGone, WarmfleetError
from warmfleet.logs.lines import log_request_id
from warmfleet.prompt import request as requests
from warmfleet.prompt.dialects import bodies
from warmfleet.routing.admission_queue import AdmissionQueue
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.call import Job
from warmfleet.routing.client_limits import Counting
from warmfleet.routing.decider import Decider
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.routing.pool_choice import PoolChoice
from warmfleet.routing.recovery.continuation import Continuation
from warmfleet.routing.recovery.hedging import Hedging
from warmfleet.routing.recovery.retries import Retries, RetryBudget
from warmfleet.routing.relay import Relay
from warmfleet.routing.sessions import session_of
from warmfleet.routing.settlements import Settlements
from warmfleet.routing.tenants import Tenancy
from warmfleet.routing.tickets import Tickets
from warmfleet.routing.transfer_params import PrefillFailed

if TYPE_CHECKING:
    from warmfleet.engines.upstream import Upstream
    from warmfleet.fleet import Decision
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools, ServedModel
    from warmfleet.prompt.request import Request
    from warmfleet.routing.call import Call
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.routing.identifier import Identifier
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.routing.router")

Forward = Callable[["Job", "Attempt", "Decision", "ClientAnswer", frozenset[int]], Coroutine[Any, Any, "Outcome"]]


class Router:
    """Serves the calls of one replica, and holds nothing that another replica needs."""

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
        self._has_ledger = settings.session_wait_max_s > 0
        self._metrics = metrics
        self._log = log or DecisionLog("", metrics)
        self._identifier = identifier
        tickets = Tickets()
        self.settlements = Settlements(tickets, metrics)
        self.counting = Counting(pools, metrics)
        choice = PoolChoice(Decider(self._log, metrics), identifier, self.counting, metrics)
        self.queue = AdmissionQueue(choice, tickets, settings, metrics)
        self._retry_budget = budget = RetryBudget()
        relay = Relay(upstream, settings, metrics)
        self._unread = relay.prefills.unread
        self._forward: Forward = relay.forward
        if settings.hedge_after_s:
            hedging = Hedging(settings.hedge_after_s, relay, self.settlements, choice, budget, metrics)
            self._forward = hedging.forward
        self._continuation = Continuation(settings, metrics, self.settlements, self.queue, relay, budget)

    async def serve(self, call: Call, answer: ClientAnswer) -> None:
        """Answer ``call``. Raises WarmfleetError; unless ``answer.started``, nothing was sent to the client then."""
        job = self._continuation.prepared(await self.prepare(call))
        retries = Retries(job, self._retry_budget)
        while True:
            if retries.pause_s:
                await retries.moment()
            failed, avoids = retries.failed_workers, retries.avoids_failing
            attempt = Attempt(self.settlements, job, failed, avoids_failing=avoids)
            outcome: Outcome = "cancelled"  # unless the attempt ends in another way
            try:
                decision = await self.queue.admit(job, attempt)  # 3 decide
                outcome = await self._forward(job, attempt, decision, answer, retries.tried_elsewhere)  # 4 forward
                if outcome == "finished":
                    attempt.chosen.pool.outliers.served(decision)
                    retries.blame()
                return  # noqa: TRY300  an else would part the five steps
            except StreamCut as cut:
                outcome = "failed"
                attempt.release(outcome)  # before another worker is chosen
                await self._continuation.go_on(job.admitted_in(attempt.chosen), cut, answer)
                return
            except PrefillFailed as error:
                outcome = "failed"
                job = self._by_one_engine(job, attempt, retries, error)
            except UpstreamGone as error:
                outcome = "failed"
                if answer.started:
                    raise
                if error.warns_others:
                    attempt.chosen.worker_failed()
                retries.worker_failed(attempt.chosen.pool, decision, error)  # raises if no other worker may be tried
                self._metrics.retries.labels("another").inc()
                call.record.event("retry", **{"warmfleet.worker": decision.worker_id, "error.type": error.code})
                job = job.admitted_in(attempt.chosen).as_of_now()
            except NoWorker as error:
                before, job = job, job.as_of_now()
                if job is before:  # raises unless an avoided worker may serve
                    retries.no_worker(error, avoided_some=attempt.avoided_some)
            except WarmfleetError:
                outcome = "failed"
                raise
            finally:
                answer.model = attempt.chosen.pool.tag
                attempt.release(outcome)  # 5 settle

    def _by_one_engine(self, job: Job, attempt: Attempt, retries: Retries, error: PrefillFailed) -> Job:
        """Return the job for an attempt at one engine, because the engine that should compute its prompt failed."""
        pool, prefill = attempt.chosen.pool, attempt.chosen.prefill
        worker_id = "" if prefill is None else prefill.engine.worker_id
        logger.info("%s does not compute a prompt for another engine (%s): %s", worker_id, error.result, error)
        job.call.record.event("retry", **{"warmfleet.worker": worker_id, "error.type": f"prefill_{error.result}"})
        retries.prefill_failed(pool, error)
        return job.admitted_in(attempt.chosen).as_of_now()._replace(alone=True)

    async def prepare(self, call: Call) -> Job:
        """Read the call and its prompt. Raises BadRequest, TooLarge, ModelNotFound, FleetUnavailable."""
        if call.body[:1] != b"{" or call.body[1:2] == b"\0":
            call = call._replace(body=requests.in_utf8(call.body))
        request = bodies.parse(call.path, call.body, self._allowed_fields, call.content_type)  # 1 parse
        request.labels = call.hints.labels
        if request.request_id and not call.named:
            call.record.request_id = safe_request_id(request.request_id.encode("ascii", "ignore"))
            log_request_id(call.record.request_id, call.record.trace_id)
        priority = requests.priority(request) if self._reads_priority else 0
        body = self.tenancy.isolate(request, call.body, call.tenant)
        keeper = self.pools.keeping(request.follows) if request.follows else None
        pool = await self.pools.find(request.model or (keeper.name if keeper is not None else ""), call.models)
        served = self.pools.served[pool.name]
        if call.models is not None:
            self._check_model(call.models, request, served)
        prompt = await self._identifier.identify(pool, request, body, call.headers)  # 2 identify
        named, tokens = request.model or pool.name, prompt.prompt_tokens
        call.record.identified(named, prompt.kind, prompt.reason, tokens, streams=request.stream)
        pools, limits = served.pools, call.limits  # an only pool checks the limits, else ``client_limits``
        if served.several:
            pools, limits = served.order_for(prompt, request.model), None
            if keeper in pools:
                pools = (keeper,)
        session = b""
        if self._has_ledger:
            session = session_of(call.path.form, call.flow, call.hints, request, prompt)
        logged = self._log.wants()
        return Job(call, request, body, pool, prompt, pools, served.several, limits, priority, logged, session=session)

    def _check_model(self, allowed: frozenset[str], request: Request, served: ServedModel) -> None:
        """Raise ModelNotFound, as for a model that does not exist, if the client's key is not for the request's model.

        Engines may read the model of a form, or of a query, otherwise than routers do. So the client needs the right to
        every name that the model's pools serve, unless its body is a JSON object. allowed: the names of its key.
        """
        named = request.model or served.name
        reachable = {named} if request.from_json else {named, *served.names}
        if not reachable <= allowed:
            raise self.pools.not_found(named, allowed)

    def waits_in(self, pool: Pool) -> bool:
        """Return whether a request waits in the queue of this pool."""
        return self.settlements.tickets.any(pool)

    async def drained(self) -> None:
        """Return when every outcome and every end of a ticket was sent to Redis, whether Redis took them or not, and
        blocks that nobody will read are freed, as far as that takes no longer than ``unread_blocks.DRAIN_S``.
        """
        await self.settlements.drained()
        await self.counting.drained()
        await self._unread.drained()
