"""Places requests for a picker, and takes what the picker sees of their answers, which a gateway passes on.

If the engine reports the request's end, the picker leaves the reservation to it. Else this replica stays with the
request: it renews and settles the reservation as it does for its own requests. A gateway never asks twice for a
request, so no other worker is tried here.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.engines.output_tokens import OutputTokens
from warmfleet.engines.request_headers import header_value
from warmfleet.errors import ModelNotFound, NoWorker, WarmfleetError
from warmfleet.fleet import Shortfall
from warmfleet.pools.cache_reports import CacheReports
from warmfleet.routing.attempt import Attempt
from warmfleet.routing.engine_addresses import EngineAddresses
from warmfleet.routing.explain_header import answer_headers
from warmfleet.routing.first_bytes import FirstBytes
from warmfleet.routing.gateway import headers_for_engine
from warmfleet.routing.prefills import UNKNOWN_TOKEN_S
from warmfleet.routing.relay import with_response_id
from warmfleet.routing.token_handoff import REFUSALS, Handoff

if TYPE_CHECKING:
    from warmfleet.fleet import Decision, WorkerView
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Call, Job
    from warmfleet.routing.router import Router
    from warmfleet.settings import Settings

OUTSIDE = (
    "No engine that the gateway allows for this request takes requests at this moment: ask again. For the operator: "
    "compare the gateway's endpoints with `warmfleet workers`."
)
#: Refusals of token ids in a row by a worker after which it gets none for a while. A gateway does not send a request
#: again as text, so a refusal may also be the client's fault; a served request between two clears the worker.
REFUSED_IN_A_ROW = 3
MAX_WORKERS = 4_096
Fields = tuple[tuple[bytes, bytes], ...]


class Place(NamedTuple):
    """Where a request goes that no one booked. headers: for the engine."""

    address: str
    headers: Fields


class Picking:
    """Chooses workers for a picker. Shares the router's queue and pools."""

    def __init__(self, router: Router, settings: Settings, metrics: Metrics) -> None:
        self._router = router
        self._pools = router.pools
        self.addresses = EngineAddresses()
        self.sends_priority = settings.engine_priority
        self.answer_headers = settings.answer_headers
        self.first_bytes = FirstBytes(metrics)
        self._metrics = metrics
        self.cache_reports = CacheReports(metrics)
        self._handoff = Handoff(metrics, enabled=settings.token_handoff)
        self._refused: dict[str, int] = {}  # worker_id -> refusals of token ids in a row

    async def place(self, call: Call, places: frozenset[str] | None, *, sees_answer: bool) -> Picked:
        """Book the call at a worker. Waits in the queue as ``Router.serve`` does.

        places: the addresses that the gateway allows; None: all. sees_answer: the pieces of the answer pass the picker,
        so that it sees the first token. Raises WarmfleetError. The caller must ``end`` what it gets.
        """
        router = self._router
        job = (await router.prepare(call))._replace(session=b"", alone=True)
        if places is not None:
            job = await self._within(job, places)
        avoids = True
        while True:
            attempt = Attempt(router.settlements, job, avoids_failing=avoids)
            try:
                decision = await router.queue.admit(job, attempt)
                address = await self.addresses.of(decision.url)
                return self._picked(job, attempt, decision, address, sees_answer=sees_answer)
            except NoWorker:
                attempt.release("failed")
                if not (avoids and attempt.avoided_some):
                    raise
                avoids = False
            except BaseException as error:
                attempt.release("failed" if isinstance(error, WarmfleetError) else "cancelled")
                raise

    async def _within(self, job: Job, places: frozenset[str]) -> Job:
        """Narrow the job to the workers at these addresses. Raises NoWorker if there is none."""
        only: tuple[str, ...] = ()
        pools: list[Pool] = []
        for pool in job.pools:
            workers = await self.addresses.listed(pool, places)
            if workers:
                only += workers
                pools.append(pool)
        if not only:
            raise NoWorker(OUTSIDE)
        return job._replace(only=only, pools=tuple(pools))

    def _picked(self, job: Job, attempt: Attempt, decision: Decision, address: str, *, sees_answer: bool) -> Picked:
        booking, view = attempt.chosen, attempt.chosen.pool.view
        with_ids = self._handoff.body(job.request, booking.prompt, job.body, view, decision.worker_id)
        body = with_ids or job.body
        if job.call.path.form == "responses":
            body = with_response_id(job, booking, decision, body)
        told = headers_for_engine(job, booking, decision, sends_priority=self.sends_priority)
        headers = tuple((name.lower().encode(), header_value(value)) for name, value in told.items())
        attempt.record.sent(told["X-Request-Id"], with_ids=with_ids is not None)
        silent = decision.worker_id in view.unreported or decision.approximate
        if silent and not (sees_answer and job.request.stream):  # nobody will tell when the prefill is done
            token_s = view.token_s_of(decision.worker_id) or UNKNOWN_TOKEN_S
            booking.prefill_due_in(token_s * (decision.wait_tokens + decision.prefill_tokens))
        return Picked(self, job, attempt, decision, Place(address, headers), body, with_ids=with_ids is not None)

    async def any(
        self, places: frozenset[str] | None, models: frozenset[str] | None, request_id: str, *, lists: bool
    ) -> Place:
        """Choose a worker for a request that computes no prompt, or whose body the gateway does not show.

        Of two workers at random the one with fewer requests is taken. Nothing is booked. models: the names that the
        client may use; None: all. lists: the request is for a list of models; any other goes to the only model. Raises
        NoWorker, ModelNotFound, and BadRequest if there are several models.
        """
        if lists:
            await self._pools.ready()
        else:
            await self._pools.find("", models)
        served = [pool for model in self._pools.served.values() for pool in model.pools]
        pools = [pool for pool in served if models is None or models & {pool.name, *pool.view.names.routable}]
        if models is not None and not pools:
            raise ModelNotFound("There is no model that this key may use.")
        found: list[tuple[Pool, WorkerView]] = []
        for pool in pools:
            only = None if places is None else frozenset(await self.addresses.listed(pool, places))
            found += [
                (pool, worker)
                for worker in pool.view.workers
                if worker.routable and (only is None or worker.worker_id in only)
            ]
        if not found:
            raise NoWorker(OUTSIDE if places is not None else "No engine takes requests at this moment: ask again.")
        _, worker = min(random.sample(found, min(2, len(found))), key=_in_flight)
        return Place(await self.addresses.of(worker.url), ((b"x-request-id", f"unbooked.{request_id}".encode()),))

    def left(self, path: str, tag: str) -> None:
        """Count a request whose answer passes by, and whose reservation was left to its engine."""
        self._metrics.requests.labels(path, "unseen", "booked", tag).inc()
        self._metrics.left.inc()

    def handed_over(self, worker_id: str, status: int) -> None:
        """Note the status of the answer to a request with token ids."""
        if status not in REFUSALS:
            self._refused.pop(worker_id, None)
            return
        if len(self._refused) >= MAX_WORKERS:
            self._refused.clear()
        self._refused[worker_id] = count = self._refused.get(worker_id, 0) + 1
        if count >= REFUSED_IN_A_ROW:
            del self._refused[worker_id]
            self._handoff.refused(worker_id, status)


class Picked:
    """A request that was placed, until its end is known. ``place``: where it goes.

    ``chunks``, ``tail``: of the answer, as ``TryRecord`` takes them.
    """

    gap_s = client_s = 0.0

    def __init__(
        self,
        picking: Picking,
        job: Job,
        attempt: Attempt,
        decision: Decision,
        place: Place,
        body: bytes,
        *,
        with_ids: bool,
    ) -> None:
        self._picking = picking
        self._job = job._replace(body=b"", call=job.call._replace(body=b""))  # the answer may take minutes
        self._attempt = attempt
        self._decision = decision
        self.place = place
        self._body = body
        self._with_ids = with_ids
        self._began = self._events = False
        self.chunks = self.status = 0
        self._last = deque[bytes](maxlen=2)

    def take_body(self) -> bytes:
        """Return the body for the engine, and keep it no longer."""
        body, self._body = self._body, b""
        return body

    @property
    def tail(self) -> bytes:
        return b"".join(self._last)

    def client_headers(self) -> Fields:
        """Return the headers that the answer gets."""
        call, attempt = self._job.call, self._attempt
        told = answer_headers(call.record.request_id, attempt, self._decision, self._picking.answer_headers)
        if call.limits is not None:
            told += call.limits.headers(self._decision.use)
        return tuple(told)

    def answered(self, status: int, *, events: bool, more: bool) -> None:
        """Note the head of the engine's answer. events: a stream of events. more: the picker sees its pieces."""
        # Without its pieces nobody sees the first token: engines send the head of a stream before that.
        self.status, self._events = status, events and more
        if self._with_ids:
            self._picking.handed_over(self._decision.worker_id, status)
        if not more:
            self._first(b"")

    def _first(self, whole: bytes | None) -> None:
        self._began = True
        job, attempt = self._job, self._attempt
        self._picking.first_bytes.note(job, attempt, self._decision, self.status, whole, events=self._events)
        if job.call.limits is not None:
            attempt.output = OutputTokens()

    def piece(self, data: bytes, *, ends: bool) -> None:
        """Note a piece of the answer. ends: it is the last one."""
        attempt, whole = self._attempt, ends and not self._began
        if not self._began:
            self._first(data if ends else None)
        self.chunks += 1
        self._last.append(data)
        if attempt.output is not None:
            attempt.output.add(data)
        if attempt.tail is not None and not whole:  # the tail of a whole answer has it already
            attempt.tail.add(data)

    def finished(self) -> Outcome:
        """Settle the request, whose answer is complete; return the outcome."""
        attempt, decision = self._attempt, self._decision
        if not self._began:
            self._first(b"")
        if self.status >= 400:
            return self.end("failed")
        booking = attempt.chosen
        booking.pool.outliers.served(decision)
        if attempt.tail is not None and decision.approximate:
            usage = attempt.tail.usage()
            held = self._picking.cache_reports.held_blocks(booking.pool.view, booking.prompt, decision, usage)
            if held is not None:
                attempt.shortfall = Shortfall(held, time.perf_counter() - self._job.call.received_at)
        return self.end("finished")

    def failed(self) -> None:
        """Count the answer against the engine, which is known to have given it.

        No other engine is tried, so nothing tells whether the request is at fault; the bound of ``eject.lua`` on the
        ejected workers holds for requests that every engine fails.
        """
        self._attempt.chosen.pool.outliers.failed(self._decision)

    def unreachable(self) -> None:
        """Note that the gateway could not reach the engine: other requests avoid it for a moment, nobody is blamed."""
        self._attempt.chosen.worker_failed()

    def end(self, outcome: Outcome) -> Outcome:
        """Settle the request; a second call does nothing."""
        self._attempt.record.came(self)
        self._attempt.release(outcome)
        return outcome

    @property
    def ends_without_us(self) -> bool:
        """Whether the engine's report gives back all that was booked, so that nobody has to settle. It does not end the
        count of a client with limits that stands in another pool's keys.
        """
        return self._decision.reports_ends and self._attempt.counted is None

    def leave(self) -> None:
        """Renew the reservation no longer: its engine reports the end. Else the end is not known, and the lease lapses.

        The load is given back by that, also if the engine never gets the request.
        """
        if not self._began:
            self._picking.left(self._job.call.path.name, self._attempt.chosen.pool.tag)
        self._attempt.record.came(self)
        self._attempt.hand_over()


def _in_flight(choice: tuple[Pool, WorkerView]) -> int:
    pool, worker = choice
    return worker.load.in_flight + pool.degraded.in_flight[worker.worker_id]
