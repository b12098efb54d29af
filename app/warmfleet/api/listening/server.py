"""The listening side of a replica: its sockets (doors) for clients and for operators, and how they close."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from warmfleet.api.http_connection import HttpConnection
from warmfleet.api.listening.parent import Listening
from warmfleet.protocol.redis_address import outgoing_address

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable, Sequence
    from types import FrameType

    from warmfleet.api.application import Application
    from warmfleet.api.connections import Connections
    from warmfleet.api.listening.parent import Parent
    from warmfleet.api.service_routes import Health

logger = logging.getLogger("warmfleet.api.listening")

AT_ONCE_S = 2.0  # longest wait, after a second SIGINT, for the background tasks, which end in milliseconds
BACKLOG = 2_048  # most connections that the kernel keeps until the replica accepts them


@dataclass(frozen=True, slots=True)
class Door:
    """The settings of a group of listening sockets. ``connections``: their shared state. ``tls``: None = plain HTTP."""

    connections: Connections
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class GatewayDoor:
    """The settings of sockets for gateways. ``make``: makes a connection, which is in the given set while it is open,
    and whose ``shutdown`` ends it as soon as its calls have ended. ``tls``: None = none.
    """

    make: Callable[[set[Any]], asyncio.Protocol]
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class Doors:
    """The groups of sockets of a replica. ``application``: the ASGI application whose lifespan runs the replica.

    ``gateways``: for a picker's calls; ``probes``: for its health checks; None without a picker.
    ``unready``: why the replica should get no requests yet; "" once it is ready.
    """

    application: Application
    health: Health
    unready: Callable[[], str]
    clients: Door
    operators: Door
    gateways: GatewayDoor | None = None
    probes: GatewayDoor | None = None


@dataclass(frozen=True, slots=True)
class Sockets:
    """Bound sockets, and the link to the parent, which orders when to listen on each; without a parent all are used."""

    clients: Sequence[socket.socket]
    operators: Sequence[socket.socket] = ()
    gateways: Sequence[socket.socket] = ()
    probes: Sequence[socket.socket] = ()
    parent: Parent | None = None

    @property
    def all(self) -> list[socket.socket]:
        return [*self.clients, *self.operators, *self.gateways, *self.probes]


def operators_address(sockets: Sockets, redis_url: str) -> tuple[str, int]:
    """Return host and port at which this replica answers operators.

    If it listens on every address of its machine, the host is the address from which the machine reaches Redis.
    """
    host, port = (sockets.operators or sockets.clients)[0].getsockname()[:2]
    if host not in ("0.0.0.0", "::"):  # noqa: S104  compared, not bound
        return host, port
    with suppress(OSError):
        host = outgoing_address(redis_url)
    return host, port


class Server(uvicorn.Server):
    """A server that goes on serving for ``drain_s`` before it stops, so that balancers and clients turn away from it.

    A second signal stops it at once. uvicorn polls for the stop ten times a second; this server waits for an event.
    """

    def __init__(self, config: uvicorn.Config, doors: Doors, drain_s: float, sockets: Sockets) -> None:
        self._exits = asyncio.Event()
        super().__init__(config)
        self._health = doors.health
        self._drain_s = drain_s
        self._doors = doors
        self._sockets = sockets
        self._listeners: dict[socket.socket, asyncio.base_events.Server] = {}
        self._obeying: asyncio.Task[None] | None = None

    @property
    def should_exit(self) -> bool:
        return self._exits.is_set()

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        if exits:
            self._exits.set()
            with suppress(RuntimeError):  # no loop runs yet
                asyncio.get_running_loop().call_soon_threadsafe(int)  # wakes the loop, which a signal alone does not

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  see self._sockets
        """Start the replica, then listen on all sockets, or on those that the parent orders."""
        await super().startup([])
        known, self.started = self._sockets, False
        if known.parent is None:
            await self.listen(Listening(tuple(range(len(known.clients))), operators=True))
        else:
            stop = partial(self.handle_exit, signal.SIGTERM, None)
            self._obeying = asyncio.create_task(known.parent.obey(self.listen, stop, self._doors.unready))
        self.started = True

    async def listen(self, to: Listening) -> None:
        """Listen on these sockets only. The caller keeps all sockets open, so that no waiting connection is lost."""
        known, served = self._sockets, self._doors
        doors: dict[socket.socket, Door | GatewayDoor] = {known.clients[place]: served.clients for place in to.clients}
        if to.operators:
            doors |= dict.fromkeys(known.operators, served.operators)
            if served.gateways is not None and served.probes is not None:
                doors |= dict.fromkeys(known.gateways, served.gateways) | dict.fromkeys(known.probes, served.probes)
        for sock in self._listeners.keys() - doors.keys():
            self._listeners.pop(sock).close()
        for sock in doors.keys() - self._listeners.keys():
            self._listeners[sock] = await self._open(sock, doors[sock])
        self.servers = list(self._listeners.values())

    async def _open(self, sock: socket.socket, door: Door | GatewayDoor) -> asyncio.base_events.Server:
        protocol: Callable[[], asyncio.Protocol]
        if isinstance(door, GatewayDoor):
            protocol = partial(door.make, self.server_state.connections)
        else:
            protocol = partial(
                HttpConnection,
                door.connections,
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
        limit_s = None if door.tls is None else self._doors.clients.connections.handshake_timeout_s
        return await asyncio.get_running_loop().create_server(
            protocol, sock=sock.dup(), ssl=door.tls, ssl_handshake_timeout=limit_s, backlog=BACKLOG
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002  see self._sockets
        """Close the sockets, let running requests end, and end the background tasks."""
        if self._obeying is not None:
            self._obeying.cancel()
        under_way, grace_s = len(self.server_state.tasks), self.config.timeout_graceful_shutdown
        logger.info("stops: no new connection; %d requests under way may go on for %s s", under_way, grace_s)
        await super().shutdown(self._sockets.all)
        if self.force_exit:
            await self._end_at_once()
        logger.info("stopped")
        for handler in logging.getLogger().handlers:
            handler.flush()  # uvicorn raises the signal again, which may end the process at once

    async def _end_at_once(self) -> None:
        """End requests and the lifespan after a second SIGINT; uvicorn leaves them, which would print tracebacks."""
        for task in self.server_state.tasks:
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_ONCE_S):
                await self.lifespan.shutdown()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._exits.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._health.draining or self._drain_s <= 0 or sig == signal.SIGINT:
            self._health.draining = True
            self._exit(sig, frame)
            return
        self._health.draining = True
        logger.info("drains for %g s: /readyz is 503, and every answer ends its connection", self._drain_s)
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain_s, partial(self._exit, sig, frame))

    def _exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        del self._captured_signals[1:]  # uvicorn raises these signals again; a second SIGINT would print a traceback
