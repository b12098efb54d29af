"""Sends a job to its worker, and passes the worker's answer on to the client as its bytes come."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import orjson

from warmfleet.engines import engine_death, first_event
from warmfleet.engines.followed_stream import StreamCut
from warmfleet.engines.output_tokens import OutputTokens, WatchedClient
from warmfleet.errors import EngineTimeout, NameRefused, Stopping, UpstreamError, UpstreamGone
from warmfleet.fleet import Shortfall
from warmfleet.pools.cache_reports import CacheReports
from warmfleet.prompt.json_splice import with_key
from warmfleet.routing.error_events import ErrorEvents
from warmfleet.routing.explain_header import answer_headers
from warmfleet.routing.first_bytes import FirstBytes
from warmfleet.routing.prefills import UNKNOWN_TOKEN_S, Prefills
from warmfleet.routing.sender import Sender
from warmfleet.routing.token_handoff import REFUSALS, Handoff

if TYPE_CHECKING:
    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.engines.followed_stream import ContinuedStream, Sink
    from warmfleet.engines.reported_usage import AnswerTail
    from warmfleet.engines.upstream import Upstream
    from warmfleet.fleet import Decision
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.attempt import Attempt
    from warmfleet.routing.booking import Booking
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.settings import Settings

#: Headers of an engine's answer that reach the client. All others belong to the connection or the router, or reveal
#: facts about the engine. ``metadata`` describes embeddings that vLLM sends as bytes.
PASSED_BACK = frozenset(
    {
        *(b"content-type", b"content-encoding", b"content-language", b"content-disposition", b"metadata"),
        *(b"cache-control", b"vary", b"expires", b"etag", b"last-modified", b"x-accel-buffering"),
        *(b"retry-after", b"www-authenticate", b"allow"),
    }
)
#: The header by which nginx and similar balancers pass each piece on as it comes.
UNBUFFERED = (b"x-accel-buffering", b"no")
#: Most bytes of an answer in JSON that are read before its headers go to the client. If the engine dies before that,
#: the client gets a 502 in place of a broken answer.
BUFFER_MAX_BYTES = 1_048_576
#: Most seconds and pieces for which a stream that begins with a comment, a ping or half an event waits for its first
#: event, which may be an error. A comment tells the client to go on waiting, so it must come in time.
FIRST_EVENT_S, FIRST_EVENT_PIECES = 0.5, 32
ID_BYTES = 8  # of a token id in JSON, with its comma
NOT_FOUND = 404  # the status for an unknown model, path or object
EVENTS, JSON = b"text/event-stream", b"application/json"

Ended = Literal["finished", "failed"]


class Relay:
    """Sends requests to the workers that were chosen for them, and passes the answers on. prefills: the first steps."""

    def __init__(self, upstream: Upstream, settings: Settings, metrics: Metrics) -> None:
        self._sender = Sender(upstream, settings)
        self._metrics = metrics
        self._first_bytes = FirstBytes(metrics)
        self._answer_headers = settings.answer_headers
        self._cache_reports = CacheReports(metrics)
        self._handoff = Handoff(metrics, enabled=settings.token_handoff)
        self.prefills = Prefills(self._sender, self._handoff, metrics)

    async def forward(
        self, job: Job, attempt: Attempt, decision: Decision, answer: ClientAnswer, tried_elsewhere: frozenset[int]
    ) -> Ended:
        """Send the job to the chosen worker and relay its answer; returns how the answer ended.

        tried_elsewhere: statuses that count as a failure of the worker. Raises UpstreamGone if the worker failed (then
        another worker may be tried unless ``answer.started``), UpstreamError if its answer cannot be used,
        PrefillFailed if the request was split and its worker has got nothing of it.
        """
        booking, worker_id, held = attempt.chosen, decision.worker_id, attempt.chosen.prefill
        if held is None:
            with_ids = self._handoff.body(job.request, booking.prompt, job.body, booking.pool.view, worker_id)
        else:
            with_ids = await self.prefills.body(job, booking, decision, held, attempt.record)
        response = self._start(job, attempt, decision, with_ids or job.body)
        if held is not None:
            response.on_stale = None  # the parameters are sent once: a lost connection fails this attempt
            held.handed_over(decision, attempt.record, response, streams=job.request.stream)
        try:
            await _head(response)
            if with_ids is not None and response.status in REFUSALS:  # send the request again without token ids
                refused = response
                refused.close()
                if held is not None:
                    held.given_up()
                    held = None
                response = self._start(job, attempt, decision, job.body)
                await _head(response)
                if response.status < 400:
                    self._handoff.refused(worker_id, refused.status)
            if response.status == 500 and engine_death.is_reported_in(await _seen_piece(response)):
                raise UpstreamGone("The worker says that its engine has died.")
            if response.status in tried_elsewhere:
                begun = response.status in (500, 504)
                raise UpstreamGone(f"The worker answered {response.status}.", refused=not begun, answered=True)
            ended = await self._relay(job, attempt, decision, response, answer, tried_elsewhere)
            if attempt.tail is not None:
                self._look_at_usage(job, attempt, decision, attempt.tail)
            return ended  # noqa: TRY300  an else would part the steps
        except UpstreamError as error:
            late = held.engine.worker_id if held is not None and held.overdue else ""
            attempt.record.failed(error, late)
            if late:
                raise self.prefills.overdue(booking.pool) from error
            raise
        finally:
            attempt.record.came(response)
            if held is None:
                response.close()  # an answer that is not complete is aborted, so that the engine stops its work
            else:
                self.prefills.unread.close(response)

    def _look_at_usage(self, job: Job, attempt: Attempt, decision: Decision, tail: AnswerTail) -> None:
        """Compare the tokens that the answer reports with those that were expected."""
        booking = attempt.chosen
        pool, prompt = booking.pool, booking.prompt
        if decision.approximate:
            held = self._cache_reports.held_blocks(pool.view, prompt, decision, tail.usage())
            if held is not None:
                attempt.shortfall = Shortfall(held, time.perf_counter() - job.call.received_at)
        if prompt.image_tokens and (reported := tail.image_tokens()) is not None:
            if decision.worker_id in pool.view.other_images:
                result = "other"  # that engine's settings give an image other tokens
            else:
                result = pool.image_counts.compare(prompt.image_tokens, reported, named=prompt.named_images)
            self._metrics.image_counts.labels(result, pool.tag).inc()
            if result in ("more", "fewer") and prompt.learned_images:
                forgotten = pool.learned.forget(prompt.learned_images)
                self._metrics.image_reports.labels("wrong", pool.tag).inc(forgotten)

    def _start(self, job: Job, attempt: Attempt, decision: Decision, body: bytes) -> EngineResponse:
        """Send the request with this body."""
        call, booking, record = job.call, attempt.chosen, attempt.record
        view, request_id = booking.pool.view, booking.id_at_engine(call.record.request_id, ended=call.hints.ended)
        record.sent(request_id, with_ids=body is not job.body)
        if call.path.form == "responses":
            body = with_response_id(job, booking, decision, body)
        response = self._sender.send(job, booking.pool, decision, request_id, body, record.headers)
        booking.sent(decision.worker_id, response, call.received_at)
        if decision.worker_id in view.unreported and not job.request.stream:
            token_s = view.token_s_of(decision.worker_id) or UNKNOWN_TOKEN_S
            booking.prefill_due_in(token_s * (decision.wait_tokens + decision.prefill_tokens))
        return response

    async def _relay(
        self,
        job: Job,
        attempt: Attempt,
        decision: Decision,
        response: EngineResponse,
        client: ClientAnswer,
        tried_elsewhere: frozenset[int],
    ) -> Ended:
        """Pass the engine's answer on to the client; returns how the answer ended.

        Raises UpstreamGone if the engine died before the first byte of its body, or began its stream with an error: the
        client got nothing, so another worker may be tried. Raises UpstreamError if an answer in JSON broke off before
        the client got any of it.
        """
        if response.content_type == EVENTS:
            piece, whole = await _opening(response, tried_elsewhere), False
            if attempt.chosen.prefill is not None and response.status == 200:
                attempt.chosen.prefill.begun()
                piece = await _with_token(job, response, piece, tried_elsewhere)
        elif response.complete or _must_be_whole(job, response):
            piece, whole = await _read(response)
        else:
            piece = await _first_piece(response)
            whole = response.at_eof
        _check(job, attempt, decision, response, piece, whole=whole)
        events = response.content_type == EVENTS
        self._first_bytes.note(job, attempt, decision, response.status, piece if whole else None, events=events)
        headers = _passed_back(response, whole=whole)
        headers += answer_headers(job.call.record.request_id, attempt, decision, self._answer_headers)
        if job.call.limits is not None:
            headers += job.call.limits.headers(decision.use)
            attempt.output = OutputTokens(piece if whole else b"")
        if not whole:
            await client.start(response.status, headers)
            return await self._pass_on(job, attempt, decision, response, client, piece)
        await client.whole(response.status, headers, piece)
        return "finished" if response.status < 400 else "failed"

    async def _pass_on(
        self,
        job: Job,
        attempt: Attempt,
        decision: Decision,
        response: EngineResponse,
        client: ClientAnswer,
        piece: bytes,
    ) -> Ended:
        """Pass on an answer from its first ``piece`` as it comes; returns how it ended."""
        errors = ErrorEvents(job.call.path.form) if response.content_type == EVENTS else None
        pool, followed = attempt.chosen.pool, None
        if job.continuable is not None and errors is not None and response.status == 200:
            able = pool.view.handoff.get(decision.worker_id)
            followed = job.continuable.follow(client, able.identity_key if able else "")
        watched = _watched(attempt, followed or client)
        try:
            await _stream(response, watched if errors is None else errors.watching(watched), piece)
        except UpstreamError as error:
            attempt.record.failed(error)
            if not isinstance(error, EngineTimeout):
                pool.outliers.failed(decision)
            if followed is not None:
                raise StreamCut(followed, error, decision.worker_id) from error
            self._metrics.stream_errors.labels(pool.tag).inc()
            if errors is None:
                raise  # the closed connection shows the client that its answer is cut off
            await errors.end(client, error, job.call.record)
            return "failed"
        except asyncio.CancelledError:  # the client hung up, or the grace period of a stopping replica is over
            if errors is not None:
                await errors.end(client, Stopping(), job.call.record)
            raise
        finally:
            if followed is not None:
                followed.close()
        return "finished" if response.status < 400 else "failed"

    async def go_on(self, job: Job, attempt: Attempt, decision: Decision, continued: ContinuedStream) -> Ended:
        """Let the chosen worker continue a stream whose first part the client has. Raises UpstreamError if it fails."""
        response = self._start(job, attempt, decision, job.body)
        try:
            await _head(response)
            if response.status != 200 or response.content_type != EVENTS:
                raise UpstreamGone(f"Another worker answered {response.status}.", answered=True)
            piece = await _first_piece(response)
            attempt.record.first_byte(response.status, time.perf_counter())
            attempt.chosen.prefill_done()
            if job.call.limits is not None:
                attempt.output = OutputTokens()
            await _stream(response, _watched(attempt, continued), piece)
        except UpstreamError as error:
            attempt.record.failed(error)
            if (
                isinstance(error, UpstreamGone) and not error.answered
            ):  # a refusal of the continuation is no fault of the worker
                attempt.chosen.pool.outliers.failed(decision)
            raise
        finally:
            attempt.record.came(response)
            response.close()
        return "finished"


async def _head(response: EngineResponse) -> None:
    """Wait for the status and the headers. Raises UpstreamGone, also if they cannot be read."""
    try:
        await response.head()
    except (UpstreamGone, EngineTimeout):
        raise
    except UpstreamError as error:
        raise UpstreamGone(error.message) from error


def _must_be_whole(job: Job, response: EngineResponse) -> bool:
    """Return whether the client gets the answer only once it is complete: JSON that no client reads in pieces."""
    if response.content_type != JSON:
        return False
    length = _length(response)
    return length <= BUFFER_MAX_BYTES and (length >= 0 or job.call.path.answer != "any")


def _length(response: EngineResponse) -> int:
    """Return the length of the body by its head; -1 if the head has none."""
    for name, value in response.headers:
        if name == b"content-length":
            return int(value)
    return -1


def _passed_back(response: EngineResponse, *, whole: bool) -> list[tuple[bytes, bytes]]:
    """Return the engine's headers that the client gets. whole: the body is complete, so its length is set anew."""
    headers, hop = [], b""
    for field in response.headers:
        if field[0] in PASSED_BACK:
            headers.append(field)
        elif field[0] == b"connection":
            hop += field[1] + b","
    if hop:
        named = {name.strip().lower() for name in hop.split(b",")}
        headers = [field for field in headers if field[0] not in named]
    if whole:
        return headers
    length = _length(response)
    if length >= 0 and response.content_type != EVENTS:  # an error may be added to events
        headers.append((b"content-length", b"%d" % length))
    elif not any(name == b"x-accel-buffering" for name, _ in headers):
        headers.append(UNBUFFERED)
    return headers


def _check_name(job: Job, pool: Pool, worker_id: str, answer: bytes) -> None:
    """Raise NameRefused if the worker answers that it has no such model, though another worker serves that name.

    Later requests for the name are not sent to this worker (``Pool.refused``).
    """
    model = job.request.model
    if not model or not any(other.view.names.others(model, worker_id) for other in job.pools):
        return
    if _names_model(answer, model):
        raise NameRefused(model, counts=pool.refused(worker_id, model))


def _names_model(answer: bytes, model: str) -> bool:
    """Return whether an engine's answer of 404 is about the model, and not about a path or an object."""
    try:
        whole = orjson.loads(answer)
        error = whole.get("error") or whole
        if isinstance(error, str):
            error = {"message": error}
        message, param = str(error.get("message") or error.get("detail")), error.get("param")
    except (ValueError, AttributeError):
        return False
    return param == "model" or (model in message and "model" in message.replace(model, "").lower())


def _check(
    job: Job, attempt: Attempt, decision: Decision, response: EngineResponse, piece: bytes, *, whole: bool
) -> None:
    """Raise NameRefused, or UpstreamGone if the answer must be a JSON object and is not: another worker may be tried.

    piece: the first piece of the answer, or all of it if ``whole``.
    """
    if response.status == NOT_FOUND:
        _check_name(job, attempt.chosen.pool, decision.worker_id, piece)
    if response.status != 200 or job.call.path.answer != "object":
        return
    if whole and piece[:1] == b"{" and piece[-1:] == b"}":
        return
    if not piece:
        raise UpstreamGone("The worker's answer is empty.")
    if response.content_type != JSON or any(name == b"content-encoding" for name, _ in response.headers):
        return
    if not piece.lstrip().startswith(b"{") or (whole and not piece.rstrip().endswith(b"}")):
        raise UpstreamGone("The worker's answer is no JSON object.")


async def _opening(response: EngineResponse, tried_elsewhere: frozenset[int]) -> bytes:
    """Read the beginning of a stream of events, with its first event if that comes soon.

    Raises UpstreamGone if that event is an error of the engine, such as the death of its core, and as
    ``_first_piece``. An error that the client caused goes to the client.
    """
    piece = await _first_piece(response)
    if first_event.is_plain(piece) or response.status != 200:
        return piece
    with suppress(TimeoutError):
        async with asyncio.timeout(FIRST_EVENT_S):
            for _ in range(FIRST_EVENT_PIECES):
                if response.at_eof or not first_event.is_open(piece):
                    break
                piece += await _first_piece(response)
    _check_event(first_event.read(piece[: first_event.MAX_BYTES], ended=response.at_eof), piece, tried_elsewhere)
    return piece


async def _with_token(job: Job, response: EngineResponse, piece: bytes, tried_elsewhere: frozenset[int]) -> bytes:
    """Read on until the stream has a token: an engine that gets no blocks says so behind the event with the role.

    The event with the role repeats the prompt's text and ids if the request asks for them. Raises as ``_opening``.
    """
    most_bytes = first_event.MAX_BYTES + len(job.body) + ID_BYTES * job.prompt.prompt_tokens
    held = b""  # whole events without a token, which are read once
    while True:
        event = first_event.telling(piece, ended=response.at_eof)
        if event is not None or response.at_eof or len(held) + len(piece) > most_bytes:
            _check_event(event, piece, tried_elsewhere)
            return held + piece
        events, end, piece = piece.rpartition(b"\n\n")
        held += events + end
        piece += await _first_piece(response)


def _check_event(event: first_event.Event | None, piece: bytes, tried_elsewhere: frozenset[int]) -> None:
    """Raise UpstreamGone if this event of a stream's first piece is an error that another worker may not have."""
    error = None if event is None else first_event.error_of(event)
    if error is not None and error.status in first_event.FAILED | tried_elsewhere:
        refused, died = error.status not in (500, 504), engine_death.is_reported_in(piece)
        text = f"The worker's stream began with an error: {error.message}"
        raise UpstreamGone(text, refused=refused and not died, answered=not died)


async def _first_piece(response: EngineResponse) -> bytes:
    """Read the first piece of the body. The client gets nothing before, so another worker can take over until then."""
    try:
        return await response.read_any()
    except (UpstreamGone, EngineTimeout):
        raise
    except UpstreamError as error:  # the body broke off before it began
        raise UpstreamGone(error.message) from error


async def _seen_piece(response: EngineResponse) -> bytes:
    """Wait for the first piece of the body, and leave it for the next reader; return it."""
    piece = await _first_piece(response)
    if piece:
        response.pieces.insert(0, piece)
        response.unread += len(piece)
    return piece


async def _read(response: EngineResponse) -> tuple[bytes, bool]:
    """Read the body to its end, or about BUFFER_MAX_BYTES of it; return it, and whether it is complete."""
    try:
        piece = await response.read_any()
        if response.at_eof:
            return piece, True
        pieces, size = [piece], len(piece)
        while size < BUFFER_MAX_BYTES and not response.at_eof:
            piece = await response.read_any()
            pieces.append(piece)
            size += len(piece)
    except UpstreamGone as error:  # no retry after an answer has begun: another worker would repeat the work
        raise UpstreamError(error.message) from error
    return b"".join(pieces), response.at_eof


def _watched(attempt: Attempt, client: Sink) -> Sink:
    """Wrap ``client`` so that each reader of the answer sees its pieces first. Most answers have no reader."""
    if attempt.output is not None:
        client = WatchedClient(attempt.output.add, client)
    return client if attempt.tail is None else WatchedClient(attempt.tail.add, client)


async def _stream(response: EngineResponse, client: Sink, piece: bytes) -> None:
    """Pass on ``piece`` and all that follows it, as it comes."""
    if not response.at_eof:
        await client.body(piece, more=True)
        while not await response.pass_on(client.pass_on):
            since = time.perf_counter()
            await client.body(b"", more=True)  # waits until the client has accepted enough
            response.waited_for_client(time.perf_counter() - since)
        piece = await response.read_any()
    await client.body(piece, more=False)


def with_response_id(job: Job, booking: Booking, decision: Decision, body: bytes) -> bytes:
    """Put an id for the answer into a body of /v1/responses, unless the client has named one.

    On this path vLLM ignores the header X-Request-Id.
    """
    if job.request.request_id or not job.request.from_json:
        return body
    name = booking.response_id(decision.worker_id, ended=job.call.hints.ended)
    return with_key(body, "request_id", b'"', name.encode(), b'"')
