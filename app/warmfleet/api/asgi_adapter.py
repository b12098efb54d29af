"""Serves one HTTP request by an ASGI application: the paths that Starlette answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.routing.client_answer import ClientAnswer

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


async def serve_by_asgi(app: AsgiApp, request: HttpRequest, answer: ClientAnswer) -> None:
    """Let ``app`` answer. If the client hangs up, this task is cancelled, and ``app`` gets no http.disconnect."""
    path, raw_path, query = request.url()
    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.version,
        "method": request.method.decode("ascii"),
        "scheme": "http",
        "path": path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": request.headers,
        "client": (answer.peer(), 0),  # no handler reads the port
        "server": None,
    }
    unread = True

    async def receive() -> Message:
        nonlocal unread
        if unread:
            unread = False
            await request.decode(request)
            return {"type": "http.request", "body": request.body, "more_body": False}
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # waits for ever

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await answer.start(message["status"], message["headers"])
        elif message["type"] == "http.response.body":
            await answer.body(message.get("body", b""), more=message.get("more_body", False))

    await app(scope, receive, send)
