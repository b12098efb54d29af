"""Error replies of Redis and failures of connections, as the errors of ``warmfleet.errors``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.exceptions import AuthenticationError, ResponseError

from warmfleet.errors import BadArgument, CancelledReservation, FleetUnavailable, NoWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.errors import WarmfleetError

#: The first word of a script's error reply -> the class that Python raises.
ERROR_CODES: Mapping[str, type[WarmfleetError]] = {
    "NO_WORKER": NoWorker,
    "CANCELLED": CancelledReservation,
    "BAD_ARGUMENT": BadArgument,
}


class RefusedCall(FleetUnavailable):
    """Redis itself answered a call with an error. word: the first word of that error, such as NOPERM."""

    def __init__(self, reply: str) -> None:
        super().__init__(f"Redis refused the call: {reply}")
        self.word = reply.partition(" ")[0]


def refusal(reply: str) -> WarmfleetError:
    """Return the error for an error reply of Redis: the class of the script's own code, else FleetUnavailable."""
    code, _, text = reply.partition(" ")
    if code in ERROR_CODES:
        return ERROR_CODES[code](text)
    return RefusedCall(reply)


def failure(error: Exception) -> WarmfleetError:
    """Return the error for what redis-py, the operating system or a time limit raises during a call."""
    if isinstance(error, ResponseError):
        return refusal(str(error))
    if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
        return FleetUnavailable(f"Redis refuses the user or the password, see WARMFLEET_REDIS_URL: {error}")
    if "CERTIFICATE" in str(error).upper():
        return FleetUnavailable(f"TLS with Redis fails, see WARMFLEET_REDIS_CA: {error}")
    return FleetUnavailable(f"Redis is away or slow: {type(error).__name__}: {error}")
