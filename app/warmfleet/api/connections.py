"""The state that all client connections of a replica share: limits, the memory for bodies, and eviction."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from warmfleet.errors import UploadsFull

if TYPE_CHECKING:
    from warmfleet.api.application import ServiceApplication
    from warmfleet.api.service_routes import Health
    from warmfleet.errors import WarmfleetError
    from warmfleet.metrics import Metrics
    from warmfleet.settings import Settings
    from warmfleet.timing import Timing

logger = logging.getLogger("warmfleet.api.connections")

BODIES = 32  # number of bodies of the largest size that fit into a replica's memory for bodies, 1 GiB by default
RESERVED_CONNECTIONS = 64  # connections accepted beyond the limit, for requests for health and metrics only


class Connection(Protocol):
    """A client's connection. ``body_bytes``: number of bytes in memory of a body that is not complete."""

    body_bytes: int

    def refuse(self, error: WarmfleetError, reason: str) -> None:
        """Answer the request that is being read with the error, and read no more."""

    def drop(self, reason: str, why: str) -> None:
        """Close without an answer."""

    def peer(self) -> str:
        """Return the client's address."""


class Connections:
    """All connections. While ``health.draining``, each answer tells its client to connect anew.

    ``open``: number of open connections. ``body_bytes``: bytes of bodies in memory.

    ``waiting`` and ``uploading``: connections without a whole request yet, the longest waiting first; a connection in
    ``uploading`` has sent a part of a body.
    """

    def __init__(
        self,
        application: ServiceApplication,
        health: Health,
        settings: Settings,
        timing: Timing,
        metrics: Metrics,
    ) -> None:
        self.application = application
        self.health = health
        self.max_body_bytes = settings.body_max_bytes
        self.keepalive_s = settings.keepalive_s
        self.handshake_timeout_s = timing.handshake_timeout_s
        self.header_timeout_s = timing.header_timeout_s
        self.body_timeout_s = timing.body_timeout_s
        self.body_look_s = timing.body_look_s
        self.write_timeout_s = timing.write_timeout_s
        self.body_bytes = 0
        self.waiting: dict[Connection, None] = {}
        self.uploading: dict[Connection, None] = {}
        self._max_connections = settings.max_connections
        self.max_uploads_bytes = BODIES * settings.body_max_bytes
        self._metrics = metrics
        self.open = 0

    def opened(self, connection: Connection) -> bool:
        """Count a new connection; return whether it may send requests to engines.

        At the limit, a connection without a whole request is closed to make room: the longest waiting, or else the
        longest uploading. Without such a connection, the new one may ask for health and metrics only.
        """
        self.open += 1
        if self.open <= self._max_connections:
            return True
        for found in (self.waiting, self.uploading):
            for victim in found:
                if victim is not connection:
                    victim.drop("crowded", "it gave way to a new connection")
                    return True
        if self.open > self._max_connections + RESERVED_CONNECTIONS:
            connection.drop("connections", "there are too many")
        return False

    def closed(self, connection: Connection) -> None:
        """Count a connection that was lost."""
        self.open -= 1
        self.waiting.pop(connection, None)
        self.uploading.pop(connection, None)

    def hold(self, size: int, held: int) -> None:
        """Count ``size`` more bytes of a body, which then has ``held`` bytes. Raises UploadsFull if that is too much.

        While all bodies exceed ``max_uploads_bytes``, the largest unfinished body is refused, so that small ones pass.
        """
        self.body_bytes += size
        while self.body_bytes > self.max_uploads_bytes:
            largest = max(self.uploading, key=lambda other: other.body_bytes, default=None)
            if largest is None or largest.body_bytes <= held:
                raise UploadsFull("Too many large requests are being sent: ask again.")
            largest.refuse(UploadsFull("Too many large requests are being sent: ask again."), "uploads")

    def fault(self, reason: str, what: str, connection: Connection) -> None:
        """Count and log a connection that is closed because of a client's fault or a limit."""
        self._metrics.connections_closed.labels(reason).inc()
        logger.warning("closed the connection of a client at %s: %s", connection.peer(), what)
