"""The picker of a replica: its ports, and the calls that they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.picker import health
from warmfleet.picker.limits import MESSAGE_MARGIN, Limits
from warmfleet.picker.port import Port
from warmfleet.picker.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.metrics import Metrics
    from warmfleet.picker.calls import Calls
    from warmfleet.settings import Settings

PROCESS = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEALTH_CONNECTIONS = 64


class Picker:
    """Serves the calls of gateways. ``port``: for calls. ``health_port``: for health checks without TLS."""

    def __init__(self, calls: Calls, settings: Settings, metrics: Metrics, is_ready: Callable[[], bool]) -> None:
        """is_ready: whether the replica takes requests."""
        self.calls = calls
        most = settings.max_connections
        limits = Limits(max(1, most // 2), most, most, settings.body_max_bytes + MESSAGE_MARGIN)
        checks = health.checks(is_ready)
        self.port = Port({PROCESS: lambda stream: Session(calls, stream), **checks}, limits, metrics, calls.memory)
        small = Limits(HEALTH_CONNECTIONS, HEALTH_CONNECTIONS, HEALTH_CONNECTIONS, MESSAGE_MARGIN)
        self.health_port = Port(checks, small, metrics)

    async def look(self) -> None:
        """End the calls that are over a time limit."""
        self.calls.look()
        self.port.look()
        self.health_port.look()
