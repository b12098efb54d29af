"""The picker's side of one ext_proc call: an HTTP request, from its headers until the end of its answer is known.

A gateway tells in its first message how it sends the bodies (``Modes``). The answers to its messages depend on that:

- FULL_DUPLEX: nothing is answered one to one. The headers are answered once the body has come, and then the body is
  given back in pieces; the pieces of the engine's answer are given back as they come.
- BUFFERED: the headers are answered at once, else the body never comes; the endpoint goes with the answer to the body.
- STREAMED, NONE: the gateway wants the endpoint with the headers, so the prompt is not known: any engine is taken.

If the chosen engine reports the ends of requests, or nothing was booked, the call ends behind the request (``_left``):
no piece of the answer passes here, and an answer outlives its picker. Not so where a body passes in pieces (STREAMED).
Else the call stays open. The end of an answer is then known where its last piece passes (FULL_DUPLEX, STREAMED), or
where the gateway keeps the call open until the end (BUFFERED with NONE). Where it can, the gateway's own answers are
told from the engine's. An end that is not known never counts as the engine's fault.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from warmfleet.api.error_answers import OUR_BUG, error_body, error_headers
from warmfleet.engines.request_headers import safe_request_id
from warmfleet.errors import BadRequest, Stopping, WarmfleetError
from warmfleet.picker import messages
from warmfleet.picker.frames import Status, message
from warmfleet.picker.messages import FULL_DUPLEX, NONE, STREAMED, Change, MessageError, Modes
from warmfleet.routing.recovery.retries import NO_ANSWER

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from warmfleet.errors import EngineTimeout
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.picker.calls import Calls
    from warmfleet.picker.client_request import Asked, Field
    from warmfleet.picker.messages import Headers, Message
    from warmfleet.picker.stream import Stream
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.routing.picking import Picked, Place
    from warmfleet.tracing.request_record import RequestRecord

logger = logging.getLogger("warmfleet.picker.session")

SERVED_NAMESPACE, SERVED_KEY = "envoy.lb", "x-gateway-destination-endpoint-served"
FILTER = "envoy.filters.http.ext_proc"  # whose attributes tell the upstream
EVENTS = b"text/event-stream"
#: A gateway has waited so long for the answer to its message, of the 200 ms of its default, when it is asked for more.
ASKS_MORE_TIME_AFTER_S = 0.05
#: A stream of events whose call is reset so soon after its head has not ended: the gateway only gave the call up, as
#: it does with response_body_mode NONE and response_trailer_mode SKIP, in 5 ms. With SEND it keeps the call open until
#: the end, and closes its side then.
NOT_YET_S = 0.05
UNREACHABLE = 1 << 5  # bit of response.flags (UF): the connection to the engine failed
MAX_FLAGS = 2.0**53  # above it a number of metadata is not exact
ENVOYS_OWN = frozenset({413, 500, 502, 503, 504})  # statuses with which a gateway answers itself, too
ENGINE_FAILURES = NO_ANSWER - {429}  # counted against an engine, if the gateway tells that the engine gave the answer


class Session:
    """One call; a ``Handler``. ``held``: bytes of a body in memory. ``began_at``, ``heard_at``: times of the call's
    begin and of the gateway's last message.
    """

    __slots__ = (
        *("_asked", "_bodiless", "_body", "_client", "_modes", "_over", "_picked", "_calls", "_plain", "_record"),
        *("_released", "_responded_at", "_status", "_stream", "_subset", "_task", "_timer", "_trailers"),
        *("began_at", "heard_at", "held"),
    )

    def __init__(self, calls: Calls, stream: Stream) -> None:
        self._calls = calls
        self._stream = stream
        self._modes: Modes | None = None
        self._client: list[Field] = []
        self._asked: Asked | None = None
        self._record: RequestRecord | None = None
        self._subset: frozenset[str] | None = None
        self._body: list[bytes] = []
        self.held = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._picked: Picked | None = None
        self._trailers = self._over = self._bodiless = self._plain = self._released = False
        self._status = 0
        self._responded_at = 0.0
        self.began_at = self.heard_at = time.perf_counter()
        calls.open[self] = None

    # ------------------------------------------------ what the gateway sends

    def message(self, data: bytes) -> None:
        """Take the gateway's next message."""
        self.heard_at = time.perf_counter()
        try:
            piece = messages.read_piece(data)
            if piece is not None and self._modes is not None:
                self._answer_piece(*piece)
            else:
                self._take(messages.read(data))
        except MessageError as error:
            self._give_up(Status.INVALID_ARGUMENT, str(error))
        except WarmfleetError as error:
            self._refuse(error)

    def _take(self, told: Message) -> None:
        kind = told.kind
        if self._modes is None:
            self._modes = told.modes or Modes()
        if told.metadata and self._task is None and self._picked is None:
            places = self._calls.subset(told.metadata)
            self._subset = self._subset if places is None else places
        if kind == messages.RESPONSE_BODY:
            self._answer_piece(*messages.read_body(told.content))
        elif kind == messages.REQUEST_BODY:
            self._request_piece(*messages.read_body(told.content))
        elif kind == messages.REQUEST_HEADERS:
            self._request_headers(messages.read_headers(told.content))
        elif kind == messages.RESPONSE_HEADERS:
            self._answer_headers(messages.read_headers(told.content), told)
        elif kind == messages.REQUEST_TRAILERS:
            self._request_trailers()
        elif kind == messages.RESPONSE_TRAILERS:
            self._stream.send(message(messages.RESPONSE_TRAILERS_CONTINUE))
            self._finish()

    def too_long(self) -> None:
        """Refuse a body that would not fit into one message."""
        if self._picked is None and self._task is None:
            self._refuse(self._calls.too_large())
        else:
            self._give_up(Status.RESOURCE_EXHAUSTED, "a message is too long")

    def ended(self) -> None:
        """Settle by what is known: the gateway closed its side, because the answer ended or broke off."""
        if not self._over:
            self._settle_unseen_end(reset=False)
        self._close()
        self._stream.finish()

    def lost(self) -> None:
        """Settle: the gateway gave the call up, perhaps while the answer passes by, or its connection was lost."""
        if not self._over:
            self._settle_unseen_end(reset=True)
        self._close()

    # ------------------------------------------------ the request

    @property
    def _duplex(self) -> bool:
        return self._modes is None or self._modes.request == FULL_DUPLEX

    @property
    def _sees_no_body(self) -> bool:
        return self._modes is not None and self._modes.request in (NONE, STREAMED)

    def _request_headers(self, told: Headers) -> None:
        if self._asked is not None:
            raise MessageError("a request has its headers twice")
        self._client, self._bodiless = told.fields, told.ends
        self._asked = asked = self._calls.requests.asked(told.fields)
        if asked.path is None or self._sees_no_body:
            self._start(self._pass_to_any(asked))
            return
        self._record = self._calls.begun(asked, asked.path)
        if told.ends:
            self._place(asked, asked.path)
        elif not self._duplex:
            self._released = True
            self._stream.send(message(messages.request_headers()), answers=False)

    def _request_piece(self, piece: bytes, ends: bool) -> None:
        if self._asked is None:
            raise MessageError("a body without headers")
        if self._sees_no_body:
            self._stream.send(message(messages.request_body()), answers=False)
            return
        if self._picked is not None or self._task is not None:
            raise MessageError("a body goes on behind its end")
        if self.held + len(piece) > self._calls.body_max_bytes:
            raise self._calls.too_large()
        if piece:
            self._body.append(piece)
            self._calls.hold(self, len(piece))
        if ends or not self._duplex:
            path = self._asked.path
            if path is None:
                raise BadRequest("This endpoint takes no body.")
            self._place(self._asked, path)

    def _request_trailers(self) -> None:
        """Answer trailers never before the headers: a gateway would send the request on by the client's own headers."""
        asked = self._asked
        if asked is None:
            raise MessageError("trailers without headers")
        unplaced = self._picked is None and self._task is None
        if not self._released:
            self._trailers = True
            if unplaced and asked.path is not None:
                self._place(asked, asked.path)
        elif unplaced and asked.path is not None and not self._sees_no_body:  # BUFFERED: no body came, nor will come
            raise BadRequest("A request with trailers needs a body.")
        else:
            self._stream.send(message(messages.REQUEST_TRAILERS_CONTINUE), answers=False)

    def _place(self, asked: Asked, path: EnginePath) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        self._start(self._pick(asked, path, body))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(work)
        if not self._duplex:  # such a gateway waits only for a while, and a request may wait in the queue
            self._timer = loop.call_later(ASKS_MORE_TIME_AFTER_S, self._ask_for_time)

    def _ask_for_time(self) -> None:
        self._timer = None
        if not self._over:
            self._stream.send(message(messages.more_time(self._calls.longest_wait_s)), answers=False)

    async def _pick(self, asked: Asked, path: EnginePath, body: bytes) -> None:
        """Choose a worker for a request whose body has come, and answer the gateway."""
        record = self._record
        if record is None:
            return
        try:
            call = self._calls.requests.call(asked, path, self._client, body, record)
            sees_answer = self._modes is None or self._modes.response in (FULL_DUPLEX, STREAMED)
            picked = await self._calls.picking.place(call, self._subset, sees_answer=sees_answer)
            if self._over:
                picked.end("cancelled")
                return
            self._picked = picked
            changed = picked.take_body()
            self._send_to(picked.place, None if changed is body else changed, body)
        except WarmfleetError as error:
            self._refuse(error)
        except Exception:
            logger.exception("request %s failed", asked.request_id)
            self._refuse(WarmfleetError(OUR_BUG))
        finally:
            self._calls.free(self)
            self._task = None

    async def _pass_to_any(self, asked: Asked) -> None:
        """Choose a worker without a prompt, and answer the gateway."""
        try:
            models, request_id = asked.client.models, asked.request_id
            place = await self._calls.picking.any(self._subset, models, request_id, lists=asked.path is None)
            if not self._over:
                self._send_to(place, None, b"")
        except WarmfleetError as error:
            self._refuse(error)
        except Exception:
            logger.exception("request %s failed", asked.request_id)
            self._refuse(WarmfleetError(OUR_BUG))
        finally:
            self._task = None

    def _send_to(self, place: Place, changed: bytes | None, body: bytes) -> None:
        """Tell the gateway where the request goes. changed: its new body; None: the body stays."""
        self._stop_timer()
        headers, removed = self._calls.requests.for_engine(self._client)
        headers = (*place.headers, *headers)
        if changed is not None:
            headers = (*headers, (b"content-length", b"%d" % len(changed)))
        change = Change(place.address.encode(), headers, removed)
        self._client = []
        self._released = True
        picked = self._picked
        if not (self._duplex or self._sees_no_body or self._bodiless or picked is None):
            made = [messages.request_body(change._replace(body=changed))]
        else:
            made = [messages.request_headers(change)]
            if self._duplex and not self._bodiless and picked is not None:
                made += messages.request_pieces(body if changed is None else changed, ends=not self._trailers)
            if self._trailers:
                made.append(messages.REQUEST_TRAILERS_CONTINUE)
        # A call that ends while a body passes here in pieces (STREAMED) would lose those that are under way.
        unbooked = self._bodiless or (self._modes is not None and self._modes.request == NONE)
        if self._calls.leaves and (unbooked if picked is None else picked.ends_without_us):
            self._stream.send_last(b"".join(map(message, made)), self._left)
        else:
            self._stream.send(b"".join(map(message, made)))

    def _left(self) -> None:
        """Note that the call has ended behind the request, so that the answer passes by."""
        picked, record = self._picked, self._record
        if picked is not None:
            picked.leave()
        if record is not None:
            record.placed = True
        self._note_end(complete=True)
        self._close()

    # ------------------------------------------------ the answer

    def _answer_headers(self, told: Headers, whole: Message) -> None:
        picked = self._picked
        self._responded_at = self.heard_at
        if picked is None:  # an answer of the gateway itself, or of an engine whose request nobody booked
            self._stream.send(message(messages.response_headers()))
            self._status = _status(told)
            if self._task is not None:
                self._task.cancel()
            return
        self._status = status = _status(told)
        engines = self._is_engines(status, whole, picked)
        if not engines:
            self._stream.send(message(messages.response_headers()))
            self._settle("unsent")
            return
        self._stream.send(message(messages.response_headers(Change(headers=picked.client_headers()))))
        events = _value(told.fields, b"content-type").startswith(EVENTS)
        passes = self._modes is not None and self._modes.response == NONE
        picked.answered(status, events=events, more=not (passes or told.ends))
        self._plain = not events
        if told.ends:
            self._finish()

    def _is_engines(self, status: int, whole: Message, picked: Picked) -> bool:
        """Return whether the chosen engine gave this answer, as far as the gateway tells."""
        told = messages.read_attributes(whole.attributes).get(FILTER, {}) if whole.attributes else {}
        served = told.get("upstream.address")
        if whole.metadata:
            lb = messages.read_metadata(whole.metadata).get(SERVED_NAMESPACE, {})
            served = lb.get(SERVED_KEY, served)
        flags = told.get("response.flags")
        if isinstance(flags, float) and 0 <= flags < MAX_FLAGS and int(flags) & UNREACHABLE:
            picked.unreachable()
            return False
        if not served:
            return status not in ENVOYS_OWN
        engines = served == picked.place.address
        if engines and status in ENGINE_FAILURES:
            picked.failed()
        return engines

    def _answer_piece(self, piece: bytes, ends: bool) -> None:
        if self._modes is not None and self._modes.response != FULL_DUPLEX:
            self._stream.send(message(messages.RESPONSE_CONTINUES))
        else:
            made = messages.response_pieces(piece, ends=ends)
            self._stream.send(message(made[0]) if len(made) == 1 else b"".join(map(message, made)))
        picked = self._picked
        if picked is not None and not self._over and (piece or ends):
            picked.piece(piece, ends=ends)
        if ends:
            self._finish()

    # ------------------------------------------------ the end

    def _finish(self) -> None:
        """Settle a request whose answer came whole."""
        if self._picked is not None and not self._over:
            self._settled(self._picked.finished())
        self._over = True

    def _settle(self, outcome: Outcome) -> None:
        if self._picked is not None and not self._over:
            self._settled(self._picked.end(outcome))
        self._over = True

    def _settled(self, outcome: Outcome) -> None:
        self._over = True
        self._note_end(complete=outcome in ("finished", "failed"))

    def _note_end(self, *, complete: bool) -> None:
        record = self._record
        if record is not None:
            self._record = None
            self._calls.ended(record, self._status, complete=complete)

    def _settle_unseen_end(self, *, reset: bool) -> None:
        """Settle a request whose call the gateway closed before the end of the answer was seen."""
        picked, modes = self._picked, self._modes or Modes()
        if picked is None or not self._responded_at:
            if self._record is not None and not self._status:
                self._record.hung_up()
            self._settle("cancelled")
            self._note_end(complete=False)
        elif modes.response != NONE:  # the client left, or the engine died: the gateway does not tell which
            self._settle("cancelled")
        elif reset and modes.request == FULL_DUPLEX and not self._plain and self._passes_by():
            picked.leave()
            self._settled("finished")
        else:
            self._finish()

    def _passes_by(self) -> bool:
        """Return whether the gateway only gave the call up, while the answer goes on."""
        return time.perf_counter() - self._responded_at < NOT_YET_S

    def _refuse(self, error: WarmfleetError) -> None:
        """Answer the client with an error in place of an engine."""
        if self._over or self._stream.over:
            return
        record, target = self._record, self._asked.target if self._asked else _value(self._client, b":path")
        request_id = safe_request_id(_value(self._client, b"x-request-id")) if record is None else record.request_id
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
        told = error_headers(error)
        told.pop("connection", None)  # about the connection to the gateway, which stays
        headers += [(name.encode(), value.encode()) for name, value in told.items()]
        body, details = error_body(error, target, request_id), f"warmfleet_{error.code}".encode()
        self._status = error.status
        if record is not None:
            self._calls.refused(record, error)
        self._settle("failed")
        self._note_end(complete=True)
        self._stream.send(message(messages.immediate(error.status, headers, body, details)))
        self._close()
        self._stream.finish()

    def _give_up(self, status: Status, why: str) -> None:
        """End the call because the gateway broke its protocol."""
        logger.warning("a gateway's call ends: %s", why)
        self._settle("cancelled")
        self._note_end(complete=False)
        self._close()
        self._stream.fail(status, why)

    def _close(self) -> None:
        """Give back what the call holds; a second call does nothing."""
        self._over = True
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()
        self._body = []
        self._calls.free(self)
        self._calls.open.pop(self, None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ------------------------------------------------ the replica

    def give_up_body(self, error: WarmfleetError) -> None:
        """Refuse the request, whose body takes more memory than any other."""
        self._refuse(error)
        if self.held:  # it was over already, and kept its body
            self._give_up(Status.RESOURCE_EXHAUSTED, error.message)

    def forget(self) -> None:
        """Give the reservation back, because the gateway has been silent for too long."""
        self._settle("cancelled")
        self._note_end(complete=False)

    @property
    def over(self) -> bool:
        """Whether the request is settled, or never was booked."""
        return self._over

    def expire(self, error: EngineTimeout) -> None:
        """End the call: it is over a time limit. Before the answer begins, the client is told."""
        if self._over:
            self._close()
            self._stream.finish()
        elif self._responded_at:
            self._give_up(Status.UNAVAILABLE, error.message)
        else:
            self._refuse(error)

    def stop(self) -> None:
        """End the call: the replica stops, and the answer took too long."""
        if self._responded_at or self._picked is not None:
            self._settle("cancelled")
            self._note_end(complete=False)
            self._close()
        else:
            self._refuse(Stopping())


def _value(fields: list[Field], wanted: bytes) -> bytes:
    return next((value for name, value in fields if name == wanted), b"")


def _status(told: Headers) -> int:
    text = _value(told.fields, b":status")
    return int(text) if text.isdigit() and len(text) == 3 else 0
