"""The paths whose requests go to engines, as plain ASGI callables."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import orjson

from warmfleet.api.body import HungUp, read_body
from warmfleet.api.client_hints import patience_s, read_hints
from warmfleet.api.error_answers import error_headers
from warmfleet.errors import BadRequest, MethodNotAllowed, Stopping, WarmfleetError
from warmfleet.routing.call import Call
from warmfleet.routing.client_answer import ClientAnswer

if TYPE_CHECKING:
    from warmfleet.api.body import Receive
    from warmfleet.metrics import Metrics
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.routing.client_answer import Send
    from warmfleet.routing.router import Router
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.api.completions")

Scope = MutableMapping[str, Any]

MAX_REQUEST_ID = 64
CANCEL_AGAIN_S = 0.2
_QUERY = re.compile(rb"[!-~]*")
_UNSAFE_ID = re.compile(r"[^A-Za-z0-9._-]")
#: Headers of a client that reach the engine. Authorization does only if the settings hold no key for workers.
PASSED_ON = {
    b"accept": "Accept",
    b"authorization": "Authorization",
    b"content-type": "Content-Type",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
    b"user-agent": "User-Agent",
    b"x-session-id": "X-Session-ID",
}


class _Head(NamedTuple):
    """The headers of a request, parsed. passed_on: headers for the engine. length: bytes of the body, 0 if unknown."""

    passed_on: dict[str, str]
    request_id: str
    length: int
    for_router: dict[bytes, bytes]


class CompletionsProxy:
    """Serves one path. A client that hangs up cancels its call, in whatever step the call is."""

    def __init__(self, path: EnginePath, router: Router, settings: Settings, metrics: Metrics) -> None:
        self._path = path
        self._router = router
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; an error becomes an answer, too."""
        head, answer = self._read_head(scope["headers"]), ClientAnswer(send)
        self._metrics.in_flight.inc()
        try:
            if scope["method"] not in self._path.methods:
                takes = ", ".join(self._path.methods)
                await self._refuse(answer, head, MethodNotAllowed(f"This endpoint takes {takes}.", takes))
                return
            call = await self._read_call(scope, head, receive)
            await self._serve(call, answer, receive)
        except HungUp:
            pass
        except asyncio.CancelledError:  # by uvicorn, when the time after a stop signal is over
            if answer.started and not answer.complete:
                raise  # part of a plain answer was sent: closing the connection tells the client that it is cut off
            if not answer.complete:
                await self._refuse(answer, head, Stopping())
        except WarmfleetError as error:
            await self._refuse(answer, head, error)
        except Exception:  # a bug of ours: uvicorn would answer it with plain text, and log no request id
            logger.exception("request %s failed", head.request_id)
            await self._refuse(answer, head, WarmfleetError("Something went wrong in the router; its log says what."))
        finally:
            self._metrics.in_flight.dec()

    async def _read_call(self, scope: Scope, head: _Head, receive: Receive) -> Call:
        """Read the body, and parse the headers. Raises BadRequest, TooLarge, Unauthorized, HungUp."""
        raw, query = scope["headers"], scope["query_string"]
        if not _QUERY.fullmatch(query):
            raise BadRequest("The query of the URL must be ASCII, with every other byte written as %XX.")
        tenancy, session_id = self._router.tenancy, head.passed_on.get("X-Session-ID", "")
        flow, patience = tenancy.flow(raw), patience_s(raw)
        hints = read_hints(head.for_router, session_id, self._settings.explain_key)
        body = await read_body(receive, head.length, self._settings)
        return Call(
            self._path,
            body,
            head.request_id,
            head.passed_on,
            tenancy.name(raw),
            flow,
            patience,
            time.perf_counter(),
            hints,
            scope["method"],
            query.decode(),
        )

    async def _serve(self, call: Call, answer: ClientAnswer, receive: Receive) -> None:
        """Let the router answer; cancel this task if the client hangs up before the answer is complete."""
        me = cast("asyncio.Task[None]", asyncio.current_task())
        loop = asyncio.get_running_loop()
        again: list[asyncio.TimerHandle] = []

        def cancel() -> None:
            # Again and again until the task ends: a library's wait_for may swallow a cancellation that meets its
            # result.
            me.cancel()
            again[:] = [loop.call_later(CANCEL_AGAIN_S, cancel)]

        def hung_up(watch: asyncio.Future[Any]) -> None:
            if not watch.cancelled() and not answer.complete:
                cancel()

        watch = asyncio.ensure_future(receive())  # returns only when the client hung up, or has its whole answer
        watch.add_done_callback(hung_up)
        try:
            await self._router.serve(call, answer)
        except asyncio.CancelledError:
            if not again:
                raise
            while me.uncancel():
                pass
            raise HungUp from None
        finally:
            for timer in again:
                timer.cancel()
            watch.remove_done_callback(hung_up)
            watch.cancel()

    def _read_head(self, raw: list[tuple[bytes, bytes]]) -> _Head:
        passed_on, for_router = dict[str, str](), dict[bytes, bytes]()
        request_id, length = "", 0
        for name, value in raw:
            if name in PASSED_ON:
                passed_on[PASSED_ON[name]] = value.decode("latin-1")
            elif name == b"x-request-id":
                request_id = _UNSAFE_ID.sub("", value.decode("latin-1"))[:MAX_REQUEST_ID]
            elif name == b"content-length":
                length = int(value) if value.isdigit() else 0
            elif name.startswith(b"x-warmfleet-"):
                for_router[name] = value
        if self._settings.worker_api_key:
            passed_on["Authorization"] = f"Bearer {self._settings.worker_api_key}"
        passed_on.setdefault("Content-Type", "application/json")
        return _Head(passed_on, request_id or secrets.token_hex(12), length, for_router)

    async def _refuse(self, answer: ClientAnswer, head: _Head, error: WarmfleetError) -> None:
        """Answer with the error. Raises the error if part of another answer was sent."""
        self._metrics.requests.labels(self._path.name, str(error.status), "none").inc()
        if answer.started:  # only closing the connection can tell the client that its answer is not whole
            raise error
        body = orjson.dumps(error.as_dict())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers.append((b"x-request-id", head.request_id.encode()))
        headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
        await answer.whole(error.status, headers, body)
