"""The ASGI application of a replica: paths that go to engines bypass Starlette."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.applications import Starlette

    from warmfleet.api.body import Receive
    from warmfleet.api.completions import CompletionsProxy, Scope
    from warmfleet.routing.client_answer import Send


class Application:
    """Gives a request to the proxy of its path, else to Starlette, which also runs the lifespan."""

    def __init__(self, starlette: Starlette, proxies: Mapping[str, CompletionsProxy]) -> None:
        self._starlette = starlette
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI scope."""
        if scope["type"] == "http":
            proxy = self._proxies.get(scope["path"])
            if proxy is not None:
                await proxy(scope, receive, send)
                return
        await self._starlette(scope, receive, send)
