"""Gives each request to the code that answers it: the proxy of its path, else Starlette."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from warmfleet.api.asgi_adapter import serve_by_asgi
from warmfleet.api.error_answers import OUR_BUG, send_error
from warmfleet.api.http_request import request_id
from warmfleet.errors import TooManyConnections, WarmfleetError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.applications import Starlette

    from warmfleet.api.access.cors import Cors
    from warmfleet.api.asgi_adapter import Message, Receive, Send
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.api.proxies import Proxies
    from warmfleet.routing.client_answer import ClientAnswer

logger = logging.getLogger("warmfleet.api")


class ServiceApplication:
    """The paths that a replica answers itself."""

    def __init__(self, starlette: Starlette) -> None:
        self.starlette = starlette

    def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> Coroutine[Any, Any, None]:  # noqa: ARG002
        """The coroutine that answers the request. engines: whether it may be sent to an engine."""
        return self._serve_itself(request, answer)

    async def _serve_itself(self, request: HttpRequest, answer: ClientAnswer) -> None:
        try:
            await serve_by_asgi(self.starlette, request, answer)
        except Exception as error:
            ours = error if isinstance(error, WarmfleetError) else WarmfleetError(OUR_BUG)
            if ours is not error:
                logger.exception("%s %s failed", request.method.decode(), request.target[:200])
            if not answer.started:
                await send_error(answer, ours, request.target, request_id(request.headers))


class Application(ServiceApplication):
    """All paths of a replica's clients. As an ASGI application it runs only the lifespan, which is Starlette's."""

    def __init__(self, starlette: Starlette, proxies: Proxies, cors: Cors) -> None:
        super().__init__(starlette)
        self._proxies = proxies
        self._cors = cors

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run the lifespan."""
        await self.starlette(scope, receive, send)

    def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> Coroutine[Any, Any, None]:
        """The coroutine that answers the request. engines: whether it may be sent to an engine."""
        origin = self._cors.allowed(request.headers)
        if origin:
            preflight = self._cors.preflight(request.method, request.headers, origin)
            if preflight is not None:
                return answer.whole(204, preflight, b"")
            answer.added = self._cors.shown(origin)
        try:
            proxy = self._proxies.by_target.get(request.target) or self._proxies.of(request.url()[0])
            if proxy is None:
                return self._serve_itself(request, answer)
            if engines:
                return proxy.serve(request, answer)
            raise TooManyConnections("This replica has as many connections as it takes: ask again.")
        except WarmfleetError as error:
            return send_error(answer, error, request.target, request_id(request.headers))
