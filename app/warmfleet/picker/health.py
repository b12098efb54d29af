"""gRPC's health checks (grpc.health.v1) of a picker, on its port and, without TLS, on a port of their own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from warmfleet.picker import frames
from warmfleet.picker.frames import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.errors import WarmfleetError
    from warmfleet.picker.stream import Handler, Stream

CHECK = b"/grpc.health.v1.Health/Check"
LIVENESS = b"liveness"
#: Names by which gateways and kubelets ask whether the picker takes calls.
READINESS = frozenset({b"", b"readiness", b"envoy.service.ext_proc.v3.ExternalProcessor"})
SERVING, NOT_SERVING = frames.message(b"\x08\x01"), frames.message(b"\x08\x02")
MAX_NAME_BYTES = 127
CHECK_MAX_S = 5.0  # longest time from the begin of a check until its answer is taken


class Check:
    """A health check; a ``Handler``."""

    __slots__ = ("_is_ready", "_service", "_stream")

    def __init__(self, stream: Stream, is_ready: Callable[[], bool]) -> None:
        self._stream = stream
        self._is_ready = is_ready
        self._service: bytes | None = None
        stream.until = time.monotonic() + CHECK_MAX_S

    def message(self, data: bytes) -> None:
        """Take the question: a message with the name of a service, or nothing."""
        if not data:
            self._service = b""
        elif len(data) > 1 and data[:1] == b"\n" and len(data) == 2 + data[1] <= 2 + MAX_NAME_BYTES:
            self._service = data[2:]
        else:
            self._service = b"?"

    def too_long(self) -> None:
        self._stream.fail(Status.RESOURCE_EXHAUSTED, "a message is too long")

    def ended(self) -> None:
        """Answer."""
        if self._service is None:
            self._stream.fail(Status.INVALID_ARGUMENT, "the call has no message")
        elif self._service == LIVENESS:
            self._answer(SERVING)
        elif self._service in READINESS:
            self._answer(SERVING if self._is_ready() else NOT_SERVING)
        else:
            self._stream.fail(Status.NOT_FOUND, "no service has this name")

    def _answer(self, status: bytes) -> None:
        self._stream.send(status)
        self._stream.finish()

    def give_up_body(self, error: WarmfleetError) -> None:
        self._stream.fail(Status.RESOURCE_EXHAUSTED, error.message)

    def lost(self) -> None:
        """Do nothing: nobody waits for the answer any more."""


def checks(is_ready: Callable[[], bool]) -> dict[bytes, Callable[[Stream], Handler]]:
    """Return the methods of health checks. is_ready: whether the replica takes calls."""
    return {CHECK: lambda stream: Check(stream, is_ready)}
