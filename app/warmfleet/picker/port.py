"""The state that all connections of a port for gateways share: methods, limits, counts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from warmfleet.picker.memory import BODIES, Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from warmfleet.metrics import Metrics
    from warmfleet.picker.limits import Limits
    from warmfleet.picker.stream import Handler, Stream

logger = logging.getLogger("warmfleet.picker.port")

MAX_HEADS = 256  # header blocks that are remembered; gateways send a few


class Head(NamedTuple):
    """The parts of a call's headers that matter."""

    method: bytes
    path: bytes
    content_type: bytes


class Connection(Protocol):
    """An open connection. ``streams``: its calls, by number."""

    streams: dict[int, Stream]

    def give_way(self) -> None:
        """Close, because another connection needs the place."""

    def peer(self) -> str:
        """Return the address of the other end."""


class Port:
    """A port. ``routes``: path of a method -> begins a call. ``streams``: number of open calls. ``memory``: for what
    they hold. ``heads``: see ``Http2Connection._head``.
    """

    def __init__(
        self,
        routes: Mapping[bytes, Callable[[Stream], Handler]],
        limits: Limits,
        metrics: Metrics,
        memory: Memory | None = None,
    ) -> None:
        self.routes = routes
        self.limits = limits
        self.memory = memory or Memory(BODIES * limits.message_bytes)
        self.streams = 0
        self.heads: dict[bytes, Head] = {}
        self.connections: dict[Connection, None] = {}
        self._metrics = metrics

    @property
    def full(self) -> bool:
        """Whether no further call may be opened."""
        return self.streams >= self.limits.all_streams

    def opened(self, connection: Connection) -> bool:
        """Count a new connection. At the limit one without a call makes room, the oldest first; else the new one is
        refused: False.
        """
        if len(self.connections) >= self.limits.connections:
            victim = next((other for other in self.connections if not other.streams), None)
            if victim is None:
                self._metrics.connections_closed.labels("connections").inc()
                return False
            del self.connections[victim]
            victim.give_way()
            self._metrics.connections_closed.labels("crowded").inc()
        self.connections[connection] = None
        return True

    def closed(self, connection: Connection) -> None:
        """Count a connection that was lost."""
        self.connections.pop(connection, None)

    def look(self) -> None:
        """Reset the calls that should have ended by now."""
        now = time.monotonic()
        for connection in self.connections:
            for stream in [stream for stream in connection.streams.values() if stream.until <= now]:
                stream.reset()

    def remember(self, block: bytes, head: Head) -> None:
        """Keep the meaning of a header block."""
        if len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        self.heads[block] = head

    def fault(self, reason: str, what: str, connection: Connection) -> None:
        """Count and log a connection that is closed because of a peer's fault or a limit."""
        self._metrics.connections_closed.labels(reason).inc()
        logger.warning("closed the connection of a gateway at %s: %s", connection.peer(), what)
