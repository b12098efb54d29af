"""Errors as answers: the shape that OpenAI's clients understand."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import orjson
from starlette.responses import JSONResponse

from warmfleet.errors import MethodNotAllowed, NotFound, RateLimited, TooLarge, Unauthorized, WarmfleetError

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from warmfleet.routing.client_answer import ClientAnswer


OUR_BUG = "Something went wrong in the router; its log says what."


def error_headers(error: WarmfleetError) -> dict[str, str]:
    """The headers that belong to an error's answer."""
    headers: dict[str, str] = {}
    if error.retry_after_s:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, TooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    if isinstance(error, RateLimited):
        headers |= error.headers
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


async def send_error(answer: ClientAnswer, error: WarmfleetError, request_id: str = "") -> None:
    """Answer with the error."""
    headers = [(b"content-type", b"application/json")]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await answer.whole(error.status, headers, orjson.dumps(error.as_dict()))


async def error_response(_request: HTTPRequest, error: Exception) -> Response:
    """Starlette's handler for a WarmfleetError that a route raised."""
    ours = cast("WarmfleetError", error)
    return JSONResponse(ours.as_dict(), status_code=ours.status, headers=error_headers(ours))


async def not_found(request: HTTPRequest, error: Exception) -> Response:
    """Starlette's handler for its own 404 and 405."""
    kind = MethodNotAllowed if getattr(error, "status_code", 404) == 405 else NotFound
    ours = kind(f"{request.method} {request.scope['path']} is not served here.")
    return JSONResponse(ours.as_dict(), status_code=ours.status, headers=getattr(error, "headers", None))


async def internal_error(_request: HTTPRequest, _error: Exception) -> Response:
    """Starlette's handler for a bug of ours; Starlette raises the error again, and the log tells it."""
    return JSONResponse(WarmfleetError(OUR_BUG).as_dict(), 500)
