"""Resolves the hosts of engines outside the event loop, and lets only allowed addresses through."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet.engines.allowed_addresses import Addresses

RESOLVED_FOR_S = 10.0  # time for which the addresses of a name are remembered
MAX_NAMES = 4_096  # most names that are remembered; one more empties the memory


class Resolver:
    """Remembers the addresses of names. Callers connect to the addresses returned, never to the name again."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._known: dict[tuple[str, int], tuple[float, asyncio.Task[list[str]]]] = {}

    async def resolve(self, host: str, port: int) -> list[str]:
        """Return the allowed addresses of ``host``. Raises OSError if none is allowed or the name is unknown.

        A name is resolved once in RESOLVED_FOR_S, also when many requests ask for it at the same time.
        """
        # Remembered addresses are checked as well, because the operator may have changed the named hosts.
        return self._addresses.allowed_of(host, await self.addresses(host, port))

    async def addresses(self, host: str, port: int) -> list[str]:
        """Return all addresses of ``host``, even forbidden ones, so callers must not connect. Raises OSError."""
        if _is_literal(host):
            return [host]
        until, task = self._known.get((host, port), (0.0, None))
        if task is None or time.monotonic() >= until or _has_failed(task):
            task = asyncio.create_task(_look_up(host, port))
            if len(self._known) >= MAX_NAMES:
                self._known.clear()
            self._known[host, port] = time.monotonic() + RESOLVED_FOR_S, task
        return await asyncio.shield(task)  # other requests may wait for the same look-up


async def _look_up(host: str, port: int) -> list[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in entries))


def _has_failed(task: asyncio.Task[list[str]]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
