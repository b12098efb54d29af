"""The ASGI application of a replica: paths that go to engines bypass Starlette."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.routing.client_answer import ClientAnswer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from warmfleet.api.body import Receive
    from warmfleet.api.completions import Scope
    from warmfleet.api.cors import Cors
    from warmfleet.api.proxies import Proxies
    from warmfleet.routing.client_answer import Send


class Application:
    """Gives a request to the proxy of its path, else to Starlette, which also runs the lifespan."""

    def __init__(self, starlette: Starlette, proxies: Proxies, cors: Cors) -> None:
        self._starlette = starlette
        self._proxies = proxies
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            origin = self._cors.allowed(scope["headers"])
            if origin:
                preflight = self._cors.preflight(scope["method"], scope["headers"], origin)
                if preflight is not None:
                    await ClientAnswer(send).whole(204, preflight, b"")
                    return
                send = self._cors.shown(send, origin)
            proxy = self._proxies.of(scope["path"])
            if proxy is not None:
                await proxy(scope, receive, send)
                return
        await self._starlette(scope, receive, send)
