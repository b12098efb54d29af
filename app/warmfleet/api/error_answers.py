"""Errors as answers, in the shape that the clients of each path understand: OpenAI's, or Anthropic's."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import orjson
from starlette.responses import Response

from warmfleet.errors import (
    MethodNotAllowed,
    NotFound,
    RateLimited,
    TooLarge,
    Unauthorized,
    UnsupportedCoding,
    WarmfleetError,
)
from warmfleet.prompt.engine_paths import NEVER, NEVER_BELOW, OPERATORS, is_anthropic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.requests import Request as HTTPRequest

    from warmfleet.routing.client_answer import ClientAnswer


MAX_PATH = 100  # most characters of a path that an answer repeats; a longer path gets no suggestion
LIKE = 0.7  # least similarity (``_likeness``, 0 to 1) at which a known path is suggested for a mistyped one
OUR_BUG = "Something went wrong in the router; its log says what."


def error_headers(error: WarmfleetError) -> dict[str, str]:
    """Return the headers of an error's answer."""
    headers: dict[str, str] = {}
    if error.retry_after_s:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, TooLarge):
        headers["connection"] = "close"  # the unread rest of the body is in the way of a next request
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    if isinstance(error, UnsupportedCoding):
        headers["accept-encoding"] = error.accepted
    if isinstance(error, RateLimited):
        headers |= error.headers
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_body(error: WarmfleetError, target: bytes, request_id: str = "") -> bytes:
    """Return the body of an error's answer. target: path and query as they stand in the request line."""
    return orjson.dumps(error.as_anthropic(request_id) if is_anthropic(target) else error.as_dict())


async def send_error(answer: ClientAnswer, error: WarmfleetError, target: bytes, request_id: str) -> None:
    """Answer with the error. target: path and query as they stand in the request line."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())]
    headers += [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
    await answer.whole(error.status, headers, error_body(error, target, request_id))


async def error_response(request: HTTPRequest, error: Exception) -> Response:
    """Answer a request whose route raised a WarmfleetError; a handler of Starlette."""
    return _response(request, cast("WarmfleetError", error))


async def internal_error(request: HTTPRequest, _error: Exception) -> Response:
    """Answer a request that met a bug; a handler of Starlette, which raises the error again, so that it is logged."""
    return _response(request, WarmfleetError(OUR_BUG))


def _response(request: HTTPRequest, error: WarmfleetError) -> Response:
    body = error_body(error, request.scope["path"].encode())
    return Response(body, error.status, error_headers(error), "application/json")


class UnknownPath:
    """Answers requests that no route of a port takes: 404 with the most similar path, or 405 with the methods."""

    def __init__(self, paths: Iterable[str]) -> None:
        """paths: all paths that the port serves; of a pattern only the part before ``{`` is compared."""
        self._paths = tuple(dict.fromkeys(path.partition("{")[0] for path in paths))

    async def handle(self, request: HTTPRequest, error: Exception) -> Response:
        """Answer in place of Starlette's own 404 and 405."""
        path = request.scope["path"]
        told = f"{request.method} {path[:MAX_PATH]} is not served here."
        ours: WarmfleetError
        if getattr(error, "status_code", 404) == 405:
            allow = (getattr(error, "headers", None) or {}).get("Allow", "")
            ours = MethodNotAllowed(f"{told} It takes {allow or 'another method'}.", allow)
        else:
            said = (told, self._hint(path), "GET /openapi.json lists every path.")
            ours = NotFound(" ".join(filter(None, said)))
        return _response(request, ours)

    def _hint(self, path: str) -> str:
        if path in OPERATORS or path == "/status":
            return "It is for operators, who find it on WARMFLEET_ADMIN_PORT."
        if path in NEVER or path.startswith(NEVER_BELOW):
            return "It is about one engine: ask that engine itself."
        nearest = max(self._paths, key=lambda known: _likeness(path, known), default="")
        if _likeness(path, nearest) >= LIKE:
            return f"Did you mean {nearest}?"
        if path.startswith("/v1/") and "/v1/models" not in self._paths:
            return "This port is for operators; clients ask WARMFLEET_PORT."
        return "The status page is /status." if "/status" in self._paths else ""


def _likeness(text: str, other: str) -> float:
    """Return how alike the texts are: length of common beginning and end, as a share of the longer text (0 to 1)."""
    longest, shortest = max(len(text), len(other)), min(len(text), len(other))
    if longest > MAX_PATH or not shortest:
        return 0.0
    begin = _alike(text, other)
    return (begin + _alike(text[begin:][::-1], other[begin:][::-1])) / longest


def _alike(text: str, other: str) -> int:
    """Return the length of the common beginning of both texts."""
    pairs = zip(text, other, strict=False)
    return next((at for at, (mine, yours) in enumerate(pairs) if mine != yours), min(len(text), len(other)))
