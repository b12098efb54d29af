"""The listening side of a replica: the doors for clients and for operators, and how they close."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from warmfleet.api.http_connection import HttpConnection
from warmfleet.api.listening.tls import HANDSHAKE_TIMEOUT_S

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Sequence
    from types import FrameType

    from warmfleet.api.application import Application
    from warmfleet.api.connections import Connections
    from warmfleet.api.service_routes import Health

BACKLOG = 2_048  # connections that the kernel keeps until they are accepted


@dataclass(frozen=True, slots=True)
class Door:
    """What serves the connections of some listening sockets; ``tls`` is None for plain HTTP."""

    connections: Connections
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True)
class Doors:
    """Both doors of a replica. ``application``: its lifespan is that of the replica."""

    application: Application
    health: Health
    clients: Door
    operators: Door


class Server(uvicorn.Server):
    """A server that goes on serving for ``drain_s`` before it stops, so that balancers and clients turn away from it.

    A second signal stops it at once. uvicorn looks ten times a second whether it shall stop; this server waits for it.
    """

    def __init__(self, config: uvicorn.Config, doors: Doors, drain_s: float, admin: Sequence[socket.socket]) -> None:
        """admin: bound sockets of the operators' door."""
        self._exits = asyncio.Event()
        super().__init__(config)
        self._health = doors.health
        self._drain_s = drain_s
        self._doors = doors
        self._admin = admin

    @property
    def should_exit(self) -> bool:
        return self._exits.is_set()

    @should_exit.setter
    def should_exit(self, exits: bool) -> None:
        if exits:
            self._exits.set()
            with suppress(RuntimeError):  # no loop runs yet
                asyncio.get_running_loop().call_soon_threadsafe(int)  # a signal alone does not wake the loop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the replica, then listen on ``sockets`` for clients and on its other sockets for operators."""
        await super().startup([])
        self.started = False
        for sock in sockets or ():
            await self._listen(sock, self._doors.clients)
        for sock in self._admin:
            await self._listen(sock, self._doors.operators)
        self.started = True

    async def _listen(self, sock: socket.socket, door: Door) -> None:
        protocol = partial(
            HttpConnection,
            door.connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        limit_s = None if door.tls is None else HANDSHAKE_TIMEOUT_S
        loop = asyncio.get_running_loop()
        self.servers.append(
            await loop.create_server(protocol, sock=sock, ssl=door.tls, ssl_handshake_timeout=limit_s, backlog=BACKLOG)
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown([*(sockets or ()), *self._admin])

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._exits.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._health.draining or self._drain_s <= 0 or sig == signal.SIGINT:
            self._health.draining = True
            super().handle_exit(sig, frame)
            return
        self._health.draining = True
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(loop.call_later, self._drain_s, partial(super().handle_exit, sig, frame))
