"""All errors of the router; each knows the HTTP status and the OpenAI error type it is answered with.

    WarmfleetError
    ├── BadRequest            400
    ├── NotFound              404
    │   └── ModelNotFound     404  nobody here serves this model
    ├── TooLarge              413
    ├── NoWorker              503  no live worker serves this model
    ├── UpstreamError         502
    ├── FleetUnavailable      503  Redis is gone or slow
    ├── CancelledReservation  409  it was cancelled before it was booked
    ├── SchemaMismatch        500  a script and this router do not speak the same version
    └── BadArgument           500  a script refused an argument: a bug of ours
"""

from __future__ import annotations


class WarmfleetError(Exception):
    """``param`` names the request field at fault, if one is."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(WarmfleetError):
    status, type, code = 400, "invalid_request_error", "bad_request"


class NotFound(WarmfleetError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class TooLarge(WarmfleetError):
    status, type, code = 413, "invalid_request_error", "body_too_large"


class NoWorker(WarmfleetError):
    status, code = 503, "no_worker"


class UpstreamError(WarmfleetError):
    status, code = 502, "upstream_error"


class FleetUnavailable(WarmfleetError):
    status, code = 503, "fleet_unavailable"


class CancelledReservation(WarmfleetError):
    status, code = 409, "cancelled"


class SchemaMismatch(WarmfleetError):
    code = "schema_mismatch"


class BadArgument(WarmfleetError):
    code = "bad_argument"
