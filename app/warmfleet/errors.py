"""All errors of the router. Each class has the HTTP status and the OpenAI error type of its answer.

Clients of Anthropic's API get the type that this API has for the status. A table of app/docs/api.md is generated from
the first lines of the classes.
"""
# ruff: noqa: N818  the names are conditions that a client is told of, without "Error", as in starlette and kubernetes

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


#: The error types of Anthropic's API by status; of any other status see ``as_anthropic``.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Statuses of causes that pass by themselves: the client may try again after a second.
PASSING = frozenset({429, 502, 503, 504})


class WarmfleetError(Exception):
    """The router has a bug: see its log.

    The class is also the base of all other errors. ``param``: the request field at fault, or None. ``retry_after_s``:
    seconds until the client may try again; 0: trying again cannot help.
    """

    status = 500
    type = "server_error"
    code = "internal_error"
    retry_after_s = 0

    def __init_subclass__(cls) -> None:
        cls.retry_after_s = int(cls.status in PASSING)

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def as_dict(self) -> dict[str, dict[str, str | None]]:
        """The body of the answer, in the form of OpenAI's API."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def as_anthropic(self, request_id: str = "") -> dict[str, Any]:
        """The body of the answer, in the form of Anthropic's API. request_id: empty if the body shall name none."""
        usual = "invalid_request_error" if self.status < 500 else "api_error"
        body = {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(self.status, usual), "message": self.message}}
        return body | {"request_id": request_id} if request_id else body


class BadRequest(WarmfleetError):
    """The request is wrong."""

    status, type, code = 400, "invalid_request_error", "bad_request"


class Unauthorized(WarmfleetError):
    """A key is missing or unknown."""

    status, type, code = 401, "invalid_request_error", "unauthorized"


class Forbidden(WarmfleetError):
    """Only the replica's own host may ask."""

    status, type, code = 403, "permission_error", "forbidden"


class NotFound(WarmfleetError):
    """The path does not exist."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """No worker serves this model."""

    code = "model_not_found"


class MethodNotAllowed(WarmfleetError):
    """The path lacks this method.

    ``allow``: the methods that the path takes, as the header Allow lists them.
    """

    status, type, code = 405, "invalid_request_error", "method_not_allowed"

    def __init__(self, message: str, allow: str = "POST") -> None:
        super().__init__(message)
        self.allow = allow


class TooLarge(WarmfleetError):
    """The body is too long."""

    status, type, code = 413, "invalid_request_error", "body_too_large"


class UnsupportedCoding(WarmfleetError):
    """The body's compression is unknown.

    ``accepted``: the codings that are read, as the header Accept-Encoding lists them.
    """

    status, type, code = 415, "invalid_request_error", "unsupported_coding"

    def __init__(self, message: str, accepted: str) -> None:
        super().__init__(message, "Content-Encoding")
        self.accepted = accepted


class HeadersTooLarge(WarmfleetError):
    """The headers are too many."""

    status, type, code = 431, "invalid_request_error", "headers_too_large"


class Overloaded(WarmfleetError):
    """The queue is full, or too many sessions wait for room in the caches."""

    status, type, code = 429, "rate_limit_error", "overloaded"


class RateLimited(WarmfleetError):
    """The client's key is at its limit of requests.

    ``type``: the limit, as in OpenAI's API. ``headers``: the answer's headers that tell all limits of the key.
    """

    status, type, code = 429, "requests", "rate_limit_exceeded"

    def __init__(self, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.headers = headers


class TokensLimited(RateLimited):
    """The client's key is at its limit of tokens."""

    type = "tokens"


class QueueTimeout(WarmfleetError):
    """The wait in the queue was too long."""

    status, code = 503, "queue_timeout"


class NoWorker(WarmfleetError):
    """No worker of this model takes requests."""

    status, code = 503, "no_worker"


class UpstreamError(WarmfleetError):
    """The engine's answer broke off."""

    status, code = 502, "upstream_error"


class UpstreamGone(UpstreamError):
    """No byte of an answer came.

    ``refused``: the worker never began to work on the request. Otherwise the request may have killed the worker.
    ``answered``: the worker lives, and its answer says that it did not serve the request. ``late``: the worker takes
    connections, but no answer came in time.
    """

    code = "upstream_gone"

    def __init__(self, message: str, *, refused: bool = False, answered: bool = False, late: bool = False) -> None:
        super().__init__(message)
        self.late = late
        self.refused = refused
        self.answered = answered

    @property
    def warns_others(self) -> bool:
        """Whether other requests should avoid the worker; not after a 500, which the request may have caused."""
        return self.refused or not self.answered


class NameRefused(UpstreamGone):
    """The worker does not serve this model any more.

    Another worker serves the model, so the request is tried there. counts: whether this is a failure of the
    worker: only its first refusal since it last announced its names is (``Pool.refused``).
    """

    status, type, code = ModelNotFound.status, ModelNotFound.type, ModelNotFound.code

    def __init__(self, model: str, *, counts: bool) -> None:
        super().__init__(f"The model `{model[:200]}` is not served any more.", refused=True, answered=True)
        self.counts = counts

    @property
    def warns_others(self) -> bool:
        """False, because the worker serves other models as before."""
        return False


class EngineTimeout(UpstreamError):
    """The engine passed a time limit."""

    status, code = 504, "engine_timeout"


class FleetUnavailable(WarmfleetError):
    """Redis gave no answer in time."""

    status, code = 503, "fleet_unavailable"


class UploadsFull(WarmfleetError):
    """The memory for request bodies is full."""

    status, code = 503, "uploads_full"


class TooManyConnections(WarmfleetError):
    """Every connection is busy with a request."""

    status, code = 503, "too_many_connections"


class Stopping(WarmfleetError):
    """The replica stops."""

    status, code = 503, "stopping"

    def __init__(self) -> None:
        super().__init__("This replica is stopping, and the answer took too long: ask again.")


class CancelledReservation(WarmfleetError):
    """The reservation has ended."""

    status, code = 409, "cancelled"


class KeyInUse(WarmfleetError):
    """A request with this Idempotency-Key is being placed."""

    status, type, code = 409, "invalid_request_error", "key_in_use"


class BadArgument(WarmfleetError):
    """A Redis script refused an argument."""

    code = "bad_argument"
