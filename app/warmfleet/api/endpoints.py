"""HTTP in and out: the two hot endpoints as plain ASGI callables, the small ones by Starlette, errors in one place."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import orjson
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warmfleet.api import fleet_status as status
from warmfleet.api.body import HungUp, Receive, read_body
from warmfleet.errors import BadRequest, MethodNotAllowed, NotFound, Stopping, TooLarge, Unauthorized, WarmfleetError
from warmfleet.prompt import request as prompt
from warmfleet.prompt.request import PATHS, Endpoint
from warmfleet.routing import client_hints as hints
from warmfleet.routing.admission_queue import patience_s
from warmfleet.routing.call import Call

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request as HTTPRequest

    from warmfleet.metrics import Metrics
    from warmfleet.routing.router import Router
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.api.endpoints")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_REQUEST_ID = 64
CANCEL_AGAIN_S = 0.2
_UNSAFE_ID = re.compile(r"[^A-Za-z0-9._-]")
#: Headers of a client that reach the engine. Authorization only if the settings hold no key for workers.
PASSED_ON = {
    b"accept": "Accept",
    b"authorization": "Authorization",
    b"content-type": "Content-Type",
    b"traceparent": "traceparent",
    b"tracestate": "tracestate",
    b"user-agent": "User-Agent",
    b"x-session-id": "X-Session-ID",
}


class Proxy:
    """One hot endpoint. A client that hangs up cancels its call, in whatever step that is."""

    def __init__(self, endpoint: Endpoint, router: Router, settings: Settings, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._router = router
        self._settings = settings
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, request_id, length, told = self._read_headers(scope["headers"])
        call = Call(self._endpoint, b"", request_id, headers, send, self._router.tenancy.name(scope["headers"]))
        self._metrics.in_flight.inc()
        try:
            if scope["method"] != "POST":
                await self._refuse(call, MethodNotAllowed("This endpoint takes POST."))
                return
            call.flow, call.patience_s = self._router.tenancy.flow(scope["headers"]), patience_s(scope["headers"])
            call.hints = hints.read(told, headers.get("X-Session-ID", ""), self._settings.explain_key)
            call.body = await read_body(receive, length, self._settings)
            call.began = time.perf_counter()
            await self._serve(call, receive)
        except HungUp:
            pass
        except asyncio.CancelledError:  # by uvicorn, when the time after a stop signal is over
            if call.started and not call.complete:
                raise  # part of a plain answer is out
            if not call.complete:
                await self._refuse(call, Stopping())
        except WarmfleetError as error:
            await self._refuse(call, error)
        except Exception:  # a bug of ours: uvicorn would answer it with plain text, and log no request id
            logger.exception("request %s failed", request_id)
            await self._refuse(call, WarmfleetError("Something went wrong in the router; its log says what."))
        finally:
            self._metrics.in_flight.dec()

    async def _serve(self, call: Call, receive: Receive) -> None:
        me = cast("asyncio.Task[None]", asyncio.current_task())
        loop = asyncio.get_running_loop()
        again: list[asyncio.TimerHandle] = []

        def cancel() -> None:
            # Until it works: a library's wait_for may swallow a cancellation that meets its result.
            me.cancel()
            again[:] = [loop.call_later(CANCEL_AGAIN_S, cancel)]

        def hung_up(watch: asyncio.Future[Any]) -> None:
            if not watch.cancelled() and not call.complete:
                cancel()

        watch = asyncio.ensure_future(receive())  # returns only when the client is gone, or was answered
        watch.add_done_callback(hung_up)
        try:
            await self._router.serve(call)
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

    def _read_headers(self, raw: list[tuple[bytes, bytes]]) -> tuple[dict[str, str], str, int, dict[bytes, bytes]]:
        """What is passed on, the request id, the announced length, what is for the router."""
        headers, told = dict[str, str](), dict[bytes, bytes]()
        request_id, length = "", 0
        for name, value in raw:
            if name in PASSED_ON:
                headers[PASSED_ON[name]] = value.decode("latin-1")
            elif name == b"x-request-id":
                request_id = _UNSAFE_ID.sub("", value.decode("latin-1"))[:MAX_REQUEST_ID]
            elif name == b"content-length":
                length = int(value) if value.isdigit() else 0
            elif name.startswith(b"x-warmfleet-"):
                told[name] = value
        if self._settings.worker_api_key:
            headers["Authorization"] = f"Bearer {self._settings.worker_api_key}"
        headers.setdefault("Content-Type", "application/json")
        return headers, request_id or secrets.token_hex(12), length, told

    async def _refuse(self, call: Call, error: WarmfleetError) -> None:
        self._metrics.requests.labels(self._endpoint, str(error.status), "none").inc()
        if call.started:  # part of the answer is out: only closing the connection can tell that it is not whole
            raise error
        call.complete = True
        await _send_error(call, error)


async def _send_error(call: Call, error: WarmfleetError) -> None:
    body = orjson.dumps(error.as_dict())
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers.append((b"x-request-id", call.request_id.encode()))
    headers += [(name.encode(), value.encode()) for name, value in _error_headers(error).items()]
    await call.send({"type": "http.response.start", "status": error.status, "headers": headers})
    await call.send({"type": "http.response.body", "body": body})


def _error_headers(error: WarmfleetError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, TooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = "POST"
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


class Health:
    """``draining`` is set by a stop signal."""

    draining = False


class SmallEndpoints:
    """Everything that is not a completion. What tells of others' requests is the operator's: ``admin_key``."""

    def __init__(self, router: Router, settings: Settings, metrics: Metrics, health: Health) -> None:
        self._tenancy = router.tenancy
        self._pools = router.pools
        self._settings = settings
        self._metrics = metrics
        self._health = health

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/metrics", self.metrics),
            Route("/workers", self.workers),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/favicon.ico", self.favicon),
        ]

    async def models(self, _request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": status.models(self._pools)})

    async def livez(self, _request: HTTPRequest) -> Response:
        return JSONResponse({"status": "alive"})

    async def readyz(self, _request: HTTPRequest) -> Response:
        """Ready once there is what requests need; stays so whatever goes away; not while draining."""
        reason = "draining" if self._health.draining else self._pools.unready()
        return JSONResponse({"status": reason or "ready"}, status_code=503 if reason else 200)

    async def metrics(self, request: HTTPRequest) -> Response:
        self._operators_only(request)
        status.gauges(self._pools, self._metrics)
        return Response(self._metrics.render(), headers={"content-type": self._metrics.content_type})

    async def workers(self, request: HTTPRequest) -> Response:
        self._operators_only(request)
        return JSONResponse({"models": [await status.workers(pool) for pool in self._pools.all]})

    async def explain(self, request: HTTPRequest) -> Response:
        """Body: a request, and ``endpoint``, the path it would go to (default: by its ``messages`` or ``prompt``), and
        ``tenant``, as whose (the value of the tenant header)."""
        self._operators_only(request)
        try:
            body = await read_body(request.receive, 0, self._settings)
        except HungUp:
            return Response()  # to nobody
        data = prompt.decoded(body)
        tenant = data.pop("tenant", None)
        if not isinstance(tenant, str | None):
            raise BadRequest("tenant must be a string: a value of the tenant header.", "tenant")
        path = data.pop("endpoint", PATHS["chat" if "messages" in data else "completions"])
        endpoint = next((name for name, known in PATHS.items() if known == path), None)
        if endpoint is None:
            raise BadRequest(f"endpoint must be one of {', '.join(PATHS.values())}.", "endpoint")
        asked = prompt.from_dict(endpoint, data, self._settings.allowed_fields)
        asked.size_bytes = len(body)
        raw, tenancy = request.headers.raw, self._tenancy
        whose = tenancy.name(raw) if tenant is None else tenant.encode("utf-8", "replace")
        asked.salt = tenancy.salt(whose, asked.salt)
        pool = await self._pools.find(asked.model)
        return JSONResponse(await status.explain(pool, asked, hints.of(raw), self._settings))

    def _operators_only(self, request: HTTPRequest) -> None:
        """Raises Unauthorized."""
        wanted, given = f"Bearer {self._settings.admin_key}", request.headers.get("authorization", "")
        if self._settings.admin_key and not hmac.compare_digest(given.encode("latin-1"), wanted.encode()):
            raise Unauthorized("This is the operator's: it takes WARMFLEET_ADMIN_KEY as bearer token.")

    async def favicon(self, _request: HTTPRequest) -> Response:
        return Response(status_code=204)


async def error_response(_request: HTTPRequest, error: Exception) -> Response:
    """The one place where errors of the small endpoints become answers."""
    shaped = cast("WarmfleetError", error)
    return JSONResponse(shaped.as_dict(), status_code=shaped.status, headers=_error_headers(shaped))


async def not_found(request: HTTPRequest, error: Exception) -> Response:
    """Starlette's own 404 and 405, shaped as OpenAI's."""
    kind = MethodNotAllowed if getattr(error, "status_code", 404) == 405 else NotFound
    shaped = kind(f"{request.method} {request.url.path} is not served here.")
    return JSONResponse(shaped.as_dict(), status_code=shaped.status, headers=getattr(error, "headers", None))


class Application:
    """The ASGI application: hot paths straight to their callable, the rest through Starlette."""

    def __init__(self, starlette: Starlette, hot: dict[str, Proxy]) -> None:
        self._starlette = starlette
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            proxy = self._hot.get(scope["path"])
            if proxy is not None:
                await proxy(scope, receive, send)
                return
        await self._starlette(scope, receive, send)
