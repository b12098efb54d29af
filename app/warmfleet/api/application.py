"""Gives each request to the code that answers it: the proxy of its path, else Starlette."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from warmfleet.api.asgi_adapter import serve_by_asgi
from warmfleet.api.error_answers import OUR_BUG, send_error
from warmfleet.api.http_request import request_id
from warmfleet.errors import TooManyConnections, WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from starlette.applications import Starlette

    from warmfleet.api.access.cors import Cors
    from warmfleet.api.access_log import AccessLog
    from warmfleet.api.asgi_adapter import Message, Receive, Send
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.api.proxies import Proxies
    from warmfleet.routing.client_answer import ClientAnswer

logger = logging.getLogger("warmfleet.api")


class ServiceApplication:
    """Serves the paths that a replica answers itself. access_log: None if no access log is written."""

    def __init__(self, starlette: Starlette, access_log: AccessLog | None = None) -> None:
        self.starlette = starlette
        self._access_log = access_log

    def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> Coroutine[Any, Any, None]:  # noqa: ARG002
        """Return the coroutine that answers the request. engines: whether the request may go to an engine."""
        return self._logged(request, answer, partial(self._serve_itself, request, answer))

    async def _logged(
        self, request: HttpRequest, answer: ClientAnswer, serve: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Answer and log the request. With an access log, a request without an id gets an id, which its answer shows.

        serve: makes the coroutine that answers. If the caller made it, and this task were cancelled before it starts,
        the coroutine would never be awaited, of which Python warns.
        """
        if self._access_log is None:
            await serve()
            return
        told = request_id(request.headers)
        request.headers.append((b"x-request-id", told.encode()))
        try:
            await serve()
        finally:
            self._access_log.own(request, answer, told)

    async def _serve_itself(self, request: HttpRequest, answer: ClientAnswer) -> None:
        try:
            await serve_by_asgi(self.starlette, request, answer)
        except Exception as error:
            ours = error if isinstance(error, WarmfleetError) else WarmfleetError(OUR_BUG)
            if ours is not error:
                logger.exception("%s %s failed", request.method.decode(), request.target[:200])
            if not answer.started:
                await self._refuse(request, answer, ours)

    async def _refuse(self, request: HttpRequest, answer: ClientAnswer, error: WarmfleetError) -> None:
        await send_error(answer, error, request.target, request_id(request.headers))


class Application(ServiceApplication):
    """All paths of a replica's clients. uvicorn calls it by ASGI only for the lifespan, which Starlette runs."""

    def __init__(self, starlette: Starlette, proxies: Proxies, cors: Cors, access_log: AccessLog | None = None) -> None:
        super().__init__(starlette, access_log)
        self._proxies = proxies
        self._cors = cors

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run the lifespan."""
        await self.starlette(scope, receive, send)

    def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> Coroutine[Any, Any, None]:
        """Return the coroutine that answers the request. engines: whether the request may go to an engine."""
        origin = self._cors.allowed(request.headers)
        if origin:
            preflight = self._cors.preflight(request.method, request.headers, origin)
            if preflight is not None:
                return self._logged(request, answer, partial(answer.whole, 204, preflight, b""))
            answer.added = self._cors.shown(origin)
        try:
            proxy = self._proxies.by_target.get(request.target) or self._proxies.of(request.url()[0])
            if proxy is None:
                return super().serve(request, answer, engines=engines)
            if engines:
                return proxy.serve(request, answer)
            raise TooManyConnections("This replica has as many connections as it takes: ask again.")
        except WarmfleetError as error:
            return self._logged(request, answer, partial(self._refuse, request, answer, error))
