"""Sends a job to its worker, and passes the worker's answer on to the client as its bytes come."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from warmfleet.engines.upstream import upstream_errors
from warmfleet.errors import Stopping, UpstreamError, UpstreamGone
from warmfleet.routing.explain_header import answer_headers
from warmfleet.routing.token_handoff import REFUSALS, Handoff

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from warmfleet.engines.upstream import Upstream
    from warmfleet.fleet import Decision
    from warmfleet.metrics import Metrics
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.settings import Settings

#: Headers of an engine's answer that reach the client. All others are about the connection, or are the router's own.
PASSED_BACK = ("Content-Type", "Retry-After", "Cache-Control")
#: So much of a plain answer is read before its headers go to the client. If the engine dies while that is read, the
#: client gets a 502 in place of a broken answer.
BUFFER_MAX_BYTES = 1_048_576

Ended = Literal["finished", "failed"]


class FirstByte(Protocol):
    """Called when the first byte of an engine's answer came. streams: the answer is a stream of events."""

    def __call__(self, *, streams: bool) -> None: ...


class Relay:
    """Serves the attempts of one replica, once they have a worker."""

    def __init__(self, upstream: Upstream, settings: Settings, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._answer_headers = settings.answer_headers
        self._handoff = Handoff(metrics, enabled=settings.token_handoff)

    async def forward(self, job: Job, attempt: Attempt, decision: Decision, answer: ClientAnswer) -> Ended:
        """Send the job to the chosen worker and relay its answer; returns how the answer ended.

        Raises UpstreamGone if the worker failed, and UpstreamError if its answer cannot be used. Another worker may be
        tried unless ``answer.started``.
        """
        call, view = job.call, job.pool.view
        headers = {**call.headers, "X-Request-Id": f"{attempt.owner}.{call.request_id}"}
        rank = view.ranks.get(decision.worker_id)
        if rank is not None:
            headers["X-data-parallel-rank"] = rank
        response = await self._send(job, attempt, decision, headers)
        try:
            if response.status in (502, 503) and not attempt.last and len(job.pool.view.workers) > 1:
                raise UpstreamGone(f"The worker answered {response.status}.", refused=True)
            ours = answer_headers(call.request_id, attempt, decision, self._answer_headers)
            engine_answer = EngineAnswer(response, ours)
            first_byte = partial(self._first_byte, job, attempt, decision, response.status)
            try:
                return await relay(engine_answer, answer, first_byte)
            finally:
                if engine_answer.cut_off:
                    self._metrics.stream_errors.inc()
        finally:
            response.close()  # gives the connection back if the answer was read to its end

    async def _send(
        self, job: Job, attempt: Attempt, decision: Decision, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send the request with its token ids if the worker takes ids; if it refuses the ids, as the client sent it."""
        call, worker_id = job.call, decision.worker_id
        with_ids = self._handoff.body(job.offer, job.request.endpoint, job.body, job.pool.view, worker_id)
        sent = self._upstream.send(call.method, decision.url, call.target, with_ids or job.body, headers)
        response = await attempt.sent(worker_id).headers(sent)
        if with_ids is None or response.status not in REFUSALS:
            return response
        response.close()
        sent = self._upstream.send(call.method, decision.url, call.target, job.body, headers)
        again = await attempt.sent(worker_id).headers(sent)
        if again.status < 400:
            self._handoff.refused(worker_id, response.status)
        return again

    def _first_byte(self, job: Job, attempt: Attempt, decision: Decision, status: int, *, streams: bool) -> None:
        pool, waited_s = job.pool, time.perf_counter() - job.call.received_at
        self._metrics.first_byte_seconds.labels(pool.tag).observe(waited_s)
        if streams and status < 400:  # the first byte of a plain answer comes with its last token
            pool.ttft.observe(waited_s)
        self._metrics.requests.labels(job.call.path.name, str(status), attempt.reservation_word).inc()
        # With several prompts in a request, only the engine knows when the prefill of each is done.
        if streams and (job.prompt.prompt_count == 1 or decision.approximate):
            attempt.prefill_done()


class EngineAnswer:
    """An engine's answer. ``cut_off``: the engine died after the first byte had gone out to the client."""

    __slots__ = ("cut_off", "headers", "response")

    def __init__(self, response: aiohttp.ClientResponse, ours: Mapping[bytes, bytes]) -> None:
        """ours: headers that the router adds for the client."""
        self.response = response
        self.cut_off = False
        given = response.headers
        self.headers = [(name.lower().encode(), given[name].encode()) for name in PASSED_BACK if name in given]
        self.headers += ours.items()

    @property
    def streams(self) -> bool:
        """Whether the engine answers with a stream of events."""
        return self.response.content_type == "text/event-stream"

    @property
    def ended(self) -> Ended:
        """The outcome of this answer after all of it was relayed."""
        return "finished" if self.response.status < 400 else "failed"


async def relay(engine: EngineAnswer, client: ClientAnswer, first_byte: FirstByte) -> Ended:
    """Pass the engine's answer on to the client; returns how the answer ended.

    Raises UpstreamGone if the engine died before the first byte of its body: nothing was sent, another worker may be
    tried. Raises UpstreamError if a plain answer broke off before any of it was sent.
    """
    if engine.streams:
        return await _stream(engine, client, await _first_piece(engine), first_byte)
    response = engine.response
    try:
        with upstream_errors():
            body, whole = await _read(response.content, BUFFER_MAX_BYTES)
    except UpstreamGone as error:  # the engine's answer had begun: another worker would do the same work again
        raise UpstreamError(error.message) from error
    if not whole:
        return await _stream(engine, client, body, first_byte)
    first_byte(streams=False)
    await client.start(response.status, [*engine.headers, (b"content-length", b"%d" % len(body))])
    await client.body(body, more=False)
    return engine.ended


async def _first_piece(engine: EngineAnswer) -> bytes:
    """The first piece of the body. The headers wait for it, so until then another worker can serve the request."""
    try:
        with upstream_errors():
            return await engine.response.content.readany()
    except UpstreamGone:
        raise
    except UpstreamError as error:  # the body broke off before it began
        raise UpstreamGone(error.message) from error


async def _read(content: aiohttp.StreamReader, limit: int) -> tuple[bytes, bool]:
    """The body, and whether it is complete: reading stops with the piece by which it reaches ``limit`` bytes."""
    piece = await content.readany()
    if content.at_eof():
        return piece, True
    pieces, size = [piece], len(piece)
    while size < limit:
        piece = await content.readany()
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False


async def _stream(engine: EngineAnswer, client: ClientAnswer, piece: bytes, first_byte: FirstByte) -> Ended:
    read, body = engine.response.content.readany, client.body
    first_byte(streams=True)
    await client.start(engine.response.status, engine.headers)
    try:
        while piece:
            await body(piece, more=True)
            with upstream_errors():
                piece = await read()
    except UpstreamError as error:
        engine.cut_off = True
        if not engine.streams:
            raise  # part of a plain answer was sent: closing the connection tells the client that it is cut off
        await client.end_stream(error)
        return "failed"
    except asyncio.CancelledError:  # the client hung up, or the grace period of a stopping replica is over
        if engine.streams:
            await client.end_stream(Stopping())
        raise
    await body(b"", more=False)
    return engine.ended
