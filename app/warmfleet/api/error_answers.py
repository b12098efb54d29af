"""Errors as answers: the shape that OpenAI's clients understand."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from starlette.responses import JSONResponse

from warmfleet.errors import MethodNotAllowed, NotFound, TooLarge, Unauthorized, WarmfleetError

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response


def error_headers(error: WarmfleetError) -> dict[str, str]:
    """The headers that belong to an error's answer."""
    headers = {}
    if error.retry_after_s:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, TooLarge):
        headers["connection"] = "close"  # the rest of the body is not read
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


async def error_response(_request: HTTPRequest, error: Exception) -> Response:
    """Starlette's handler for a WarmfleetError that a route raised."""
    ours = cast("WarmfleetError", error)
    return JSONResponse(ours.as_dict(), status_code=ours.status, headers=error_headers(ours))


async def not_found(request: HTTPRequest, error: Exception) -> Response:
    """Starlette's handler for its own 404 and 405."""
    kind = MethodNotAllowed if getattr(error, "status_code", 404) == 405 else NotFound
    ours = kind(f"{request.method} {request.url.path} is not served here.")
    return JSONResponse(ours.as_dict(), status_code=ours.status, headers=getattr(error, "headers", None))
