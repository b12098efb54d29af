"""Reads bodies as vLLM's own server does, and tells which it takes. It runs in vLLM's environment, without an engine.

Its routes are vLLM's, with the request models and checks of each; only what would run a model is left out.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import importlib
import json
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

#: The fields that routers read.
READ = (
    *("model", "stream", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "add_special_tokens", "echo"),
    *("priority", "request_id", "cache_salt", "add_generation_prompt", "continue_final_message", "prompt"),
)


def told(endpoint: Callable[..., Any]) -> Callable[..., Any]:
    """An endpoint with the same parameters as ``endpoint``, which answers with the fields that were read."""
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel

    @functools.wraps(endpoint)
    async def tell(*_args: Any, **given: Any) -> JSONResponse:
        (body,) = [value for value in given.values() if isinstance(value, BaseModel)]
        body = getattr(body, "root", body)
        return JSONResponse({name: getattr(body, name) for name in READ if name in type(body).model_fields})

    return tell


def application() -> FastAPI:
    import vllm.entrypoints
    from fastapi import APIRouter, FastAPI
    from fastapi.routing import APIRoute

    app = FastAPI()
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if not module.name.endswith("api_router"):
            continue
        for router in vars(importlib.import_module(module.name)).values():
            for route in router.routes if isinstance(router, APIRouter) else ():
                if isinstance(route, APIRoute) and "POST" in route.methods and route.body_field is not None:
                    ends = {"methods": ["POST"], "dependencies": route.dependencies, "response_model": None}
                    app.add_api_route(route.path, told(route.endpoint), **ends)
    return app


async def read(app: FastAPI, path: str, content_type: str, body: bytes) -> dict[str, Any] | None:
    sent: list[dict[str, Any]] = []
    headers = [(b"content-type", content_type.encode("latin-1")), (b"content-length", b"%d" % len(body))]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, "asgi": {}}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except Exception:  # noqa: BLE001  vLLM's server answers these, too, with an error
        return None
    return json.loads(sent[1]["body"]) if sent[0]["status"] == 200 else None


def read_all(cases: list[tuple[str, str, str]]) -> list[dict[str, Any] | None]:
    """The fields that vLLM read in each body; None if it refuses the body.

    A case is a path, a Content-Type and a body (base64).
    """
    app, loop = application(), asyncio.get_event_loop()
    return [loop.run_until_complete(read(app, path, kind, base64.b64decode(body))) for path, kind, body in cases]
