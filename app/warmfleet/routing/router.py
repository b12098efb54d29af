"""The request's one-way path: parse → tokens → hashes → decide → forward → settle."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from warmfleet.errors import FleetUnavailable, NoWorker, UpstreamGone, WarmfleetError
from warmfleet.fleet import Decision, Place, Queued, Renewal, new_reservation
from warmfleet.pools.degraded import unbooked
from warmfleet.pools.pool import NOT_READ
from warmfleet.prompt import request as prompt
from warmfleet.prompt.prompt_identity import INLINE_CHARACTERS
from warmfleet.prompt.request import PATHS
from warmfleet.routing.admission_queue import Waiting
from warmfleet.routing.call import Trip
from warmfleet.routing.decision_log import DecisionLog
from warmfleet.routing.explain_header import answer_headers, told_of
from warmfleet.routing.relay import Answer, relay
from warmfleet.routing.tenants import Tenancy
from warmfleet.routing.token_handoff import REFUSALS, Handoff, offer

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    import aiohttp

    from warmfleet.engines.upstream import Upstream
    from warmfleet.fleet.reservations import Outcome
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools, Shape
    from warmfleet.routing.call import Call
    from warmfleet.routing.engine_tokenizer import Asker
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.routing.router")

TRIES = 4  # of different workers, before the first byte: half of a fleet may die at once
DEATHS = 2  # of workers that had the request: it may be what they die of, so no third one gets it
MAX_UNSETTLED = 10_000


class Router:
    """Serves calls. One for a replica; holds nothing that another replica needs."""

    def __init__(
        self,
        pools: Pools,
        upstream: Upstream,
        asker: Asker,
        settings: Settings,
        metrics: Metrics,
        log: DecisionLog | None = None,
    ) -> None:
        self.pools = pools
        self._log = log or DecisionLog("", 0.0, metrics)
        self.tenancy = Tenancy(settings.tenant_key, settings.tenant_header)
        self._upstream = upstream
        self._settings = settings
        self._metrics = metrics
        self._asker = asker
        self._handoff = Handoff(metrics, enabled=settings.token_handoff)
        self._settling: set[asyncio.Task[None]] = set()
        self._waiting = Waiting(settings, metrics)

    async def serve(self, call: Call) -> None:
        """Answer ``call``. Raises WarmfleetError while nothing has been sent, and nothing afterwards."""
        settings = self._settings
        request = prompt.parse(call.endpoint, call.body, settings.allowed_fields)  # 1
        call.priority = prompt.priority(request) if settings.queue_priority else 0
        call.body = self.tenancy.apply(request, call.body, call.tenant)
        pool = await self.pools.find(request.model)
        shape = await pool.shape(request, INLINE_CHARACTERS, settings.expected_output_tokens)  # 2, 3
        shape = await self._asker.better(pool, request, call, shape)
        call.offer = offer(request, shape)
        call.order = lambda: pool.policy.order(pool.view, request, call.hints.session)  # as they are when it is decided
        call.rings = pool.policy.orders(pool.view, request, call.hints.session) if self._log.wants() else None
        barred, spare = shape.barred, True  # spare: who failed somebody a moment ago
        gone: UpstreamGone | None = None
        deaths = 0
        for attempt in range(1, TRIES + 1):
            reservation = new_reservation(shape.prompts, exact=shape.kind == "exact")
            trip = Trip(reservation, pool, last=attempt == TRIES)
            decide = partial(self._decide, call, trip, shape, barred, spare)
            try:
                decision = await self._waiting.in_turn(call, trip, decide)  # 4
                await self._forward(call, trip, decision)  # 5
                return  # noqa: TRY300  the road goes straight down; an else would hide it
            except UpstreamGone as error:
                trip.outcome, gone = "failed", error
                if call.started:
                    raise
                pool.suspect(decision.worker_id)
                deaths += not error.refused
                if attempt == TRIES or deaths == DEATHS or shape.reason == "too_long":
                    raise  # what no engine takes may have been too much for this one
                barred = (*barred, decision.worker_id)
                self._metrics.retries.labels("another").inc()
            except NoWorker:
                if gone is not None:
                    raise gone from None  # every worker there is has failed: that is what to tell
                if not trip.spared:
                    raise
                spare = False  # only suspects are left: better one of them than nobody
            except WarmfleetError:
                trip.outcome = "failed"
                raise
            finally:
                await self._settled(trip)  # 6: a task of its own

    async def _decide(
        self, call: Call, trip: Trip, shape: Shape, barred: tuple[str, ...], spare: bool
    ) -> Decision | Queued:
        """barred: who cannot serve it, or has failed it. spare: pass over who failed another request, too."""
        pool = trip.pool
        trip.spared = pool.suspects() if spare else ()
        exclude = (*barred, *trip.spared)
        if not pool.fallback.asks_redis:
            return await self._without_redis(trip, shape, exclude, "open")
        started = time.perf_counter()
        waited_ms = round(1_000 * (started - call.began))
        place = Place(call.flow, call.priority, waited_ms, barred, may_wait=trip.may_wait)
        trip.booked = trip.ticket = True  # as far as anyone knows, from here on
        ask = shape.ask(trip.reservation, pool, exclude, call.hints.prefix_tokens, call.order())
        tell = call.rings is not None or call.hints.explain
        try:
            decision = await pool.fleet.decide_in_turn(ask, place, tell=tell)
        except NoWorker:
            trip.booked = False
            if len(exclude) > len(shape.barred):
                raise
            return await self._without_redis(trip, shape, exclude, "no_worker")  # Redis came back empty, perhaps
        except WarmfleetError as error:  # gone, slow, or a script that refuses: no reason to fail a request
            reason = "away" if isinstance(error, FleetUnavailable) else error.code
            pool.fallback.failed(f"{error.code}: {error}")
            self._spawn(self._tell(pool, trip.reservation, "cancelled"))  # it may be booked late, or was
            trip.booked = False
            return await self._without_redis(trip, shape, exclude, reason)
        finally:
            self._metrics.decide_seconds.observe(time.perf_counter() - started)
        pool.fallback.succeeded()
        if isinstance(decision, Queued):
            trip.booked = False
            return decision
        trip.ticket = False
        pool.open[trip.reservation] = Renewal(
            trip.reservation, decision.worker_id, decision.prefill_tokens, decision.decode_tokens
        )
        pool.fallback.take(decision.worker_id)
        trip.decision, trip.word = decision, decision.outcome
        trip.tells_start = shape.prompts == 1 or decision.approximate
        self._metrics.prompt_tokens.inc(decision.prompt_tokens)
        self._metrics.matched_tokens.inc(decision.matched_tokens)
        self._metrics.decisions.labels(ask.policy, decision.why).inc()
        if decision.seen is not None:
            told_of(self._log, call, pool, ask, decision)
        return decision

    async def _without_redis(self, trip: Trip, shape: Shape, exclude: tuple[str, ...], reason: str) -> Decision:
        pool = trip.pool
        key = shape.prefix or trip.reservation.encode()
        if reason == "no_worker":
            await pool.last_known.look()  # the operator may have drained the last one since the last reading
        worker = pool.fallback.choose(pool.last_known.workers, key, exclude)
        if worker is None and reason != "no_worker" and not trip.spared:
            await pool.last_known.look()  # who joined since the last reading: only decisions may be too slow
            worker = pool.fallback.choose(pool.last_known.workers, key, exclude)
        if worker is None:
            if not pool.contacted:
                raise FleetUnavailable(NOT_READ)
            raise NoWorker("No worker is alive, as far as is known.")
        self._metrics.fallback.labels(reason).inc()
        pool.fallback.take(worker.worker_id)
        trip.decision = unbooked(trip.reservation, worker, shape.prompt_tokens)
        return trip.decision

    async def _forward(self, call: Call, trip: Trip, decision: Decision) -> None:
        pool = trip.pool
        # What is not booked must count as foreign load, so the engine must not take it for ours.
        owner = trip.reservation if trip.booked else "unbooked"
        headers = {**call.headers, "X-Request-Id": f"{owner}.{call.request_id}"}
        rank = pool.view.ranks.get(decision.worker_id)
        if rank is not None:
            headers["X-data-parallel-rank"] = rank
        upstream = await self._send(call, trip, decision, headers)
        try:
            if upstream.status in (502, 503) and not trip.last and len(pool.view.workers) > 1:
                raise UpstreamGone(f"The worker answered {upstream.status}.", refused=True)
            told = answer_headers(call, decision, trip.word, self._settings.answer_headers)
            answer = Answer(upstream, call.send, told)

            def first_byte(*, streams: bool) -> None:
                call.started = True
                waited_s, good = time.perf_counter() - call.began, answer.status < 400
                self._metrics.first_byte_seconds.labels(pool.tag).observe(waited_s)
                if streams and good:  # of a plain answer it is the last byte
                    pool.tail.observe(waited_s)
                self._metrics.requests.labels(call.endpoint, str(answer.status), trip.word).inc()
                if streams and trip.tells_start and trip.reservation in pool.open:
                    self._spawn(self._started(trip))  # if it comes after the end, it changes nothing

            def complete() -> None:
                call.complete = True

            try:
                trip.outcome = await relay(answer, first_byte, complete)
            finally:
                if answer.cut_off:
                    self._metrics.stream_errors.inc()
        finally:
            upstream.close()  # gives the connection back if the answer was read to its end

    async def _send(
        self, call: Call, trip: Trip, decision: Decision, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """With its token ids if that may be. If the worker refuses these, its answer to the request as it came."""
        pool, path, worker_id = trip.pool, PATHS[call.endpoint], decision.worker_id
        handed = self._handoff.body(call.offer, call.endpoint, call.body, pool.view, worker_id)
        sent = self._upstream.post(decision.url, path, handed or call.body, headers)
        upstream = await pool.tries.begin(trip.reservation, worker_id).headers(sent)
        if handed is None or upstream.status not in REFUSALS:
            return upstream
        upstream.close()
        sent = self._upstream.post(decision.url, path, call.body, headers)
        again = await pool.tries.begin(trip.reservation, worker_id).headers(sent)
        if again.status < 400:
            self._handoff.refused(worker_id, upstream.status)
        return again

    async def _started(self, trip: Trip) -> None:
        """Prefill is done: what was booked of it is given back. Runs beside the stream, delays no byte of it."""
        pool = trip.pool
        pool.open[trip.reservation] = replace(pool.open[trip.reservation], prefill_tokens=0, started=True)
        await self._tell(pool, trip.reservation, "started")

    async def _settled(self, trip: Trip) -> None:
        """Before another try is decided, if Redis is not slow; it also ends when the client is gone."""
        await asyncio.wait([self._spawn(self._settle(trip))], timeout=trip.pool.fleet.timeouts.request_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._settling.add(task)
        task.add_done_callback(self._spawned)
        return task

    def _spawned(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("an outcome was not told, its lease expires by itself", exc_info=error)

    async def _settle(self, trip: Trip) -> None:
        pool = trip.pool
        pool.open.pop(trip.reservation, None)
        pool.tries.end(trip.reservation)
        if trip.decision is not None:
            pool.fallback.give(trip.decision.worker_id)
        if trip.ticket and pool.fleet.limits.max_engine_wait_s:
            self._waiting.leave(pool, trip.reservation)
        if not trip.booked:
            return
        self._metrics.settled.labels(trip.outcome).inc()
        await self._tell(pool, trip.reservation, trip.outcome)

    async def _tell(self, pool: Pool, reservation: str, outcome: Outcome) -> None:
        try:
            await pool.fleet.settle(reservation, outcome)
            self._waiting.hurry(pool)
        except WarmfleetError as error:
            self._metrics.settle_failures.inc()
            if outcome != "started" and len(pool.unsettled) < MAX_UNSETTLED:
                pool.unsettled[reservation] = outcome
            logger.info("settle %s: %s; told again soon, and the lease expires by itself", outcome, error)

    async def drained(self) -> None:
        """Return when every reservation is settled, or could not be."""
        while self._settling:
            await asyncio.wait(set(self._settling))
        await self._waiting.drained()
