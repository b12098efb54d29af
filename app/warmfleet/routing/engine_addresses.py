"""The addresses of engines as gateways need them, ``ip:port``; names of engines are looked up."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from warmfleet.errors import NoWorker

if TYPE_CHECKING:
    from collections.abc import Collection

    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.pool import Pool

logger = logging.getLogger("warmfleet.routing.engine_addresses")

KEPT_S = 30.0  # time for which the address behind a name is kept, as resolvers of clusters do
LOOKUP_S = 2.0  # longest look-up of a name
MAX_URLS = 8_192  # most engines whose addresses are kept; before one more, all are dropped
MAX_SUBSETS = 64  # most lists of a gateway for which the workers are kept
PORTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    """The address of an engine. text: as ``ip:port``. until: monotonic seconds; infinite without a name."""

    text: str
    host: str
    until: float


class EngineAddresses:
    """Finds the address of an engine by its URL, and the workers that a gateway lists by address."""

    def __init__(self) -> None:
        self._known: dict[str, Address] = {}
        self._lookups: dict[str, asyncio.Task[Address | None]] = {}  # those that run, by URL
        self._listed: dict[tuple[frozenset[str], str], tuple[View, tuple[str, ...]]] = {}

    async def of(self, url: str) -> str:
        """Return the address of the engine with this URL. Raises NoWorker if its name is not known."""
        address = self._at_hand(url) or await self._looked_up(url)
        if address is None:
            raise NoWorker("The name of the chosen engine cannot be looked up: ask again.")
        return address.text

    async def listed(self, pool: Pool, places: frozenset[str]) -> tuple[str, ...]:
        """Return the workers of the pool whose address, or IP address, is among ``places``."""
        key = places, pool.tag
        found = self._listed.get(key)
        if found is not None and found[0] is pool.view:
            return found[1]
        view = pool.view
        addresses = {worker.url: self._at_hand(worker.url) for worker in view.workers if worker.routable}
        missing = [url for url, address in addresses.items() if address is None]
        addresses.update(zip(missing, await asyncio.gather(*map(self._looked_up, missing)), strict=True))
        workers = [worker.worker_id for worker in view.workers if _is_among(addresses.get(worker.url), places)]
        if len(self._listed) >= MAX_SUBSETS:
            self._listed.clear()
        self._listed[key] = view, tuple(workers)
        return self._listed[key][1]

    def _at_hand(self, url: str) -> Address | None:
        """Return the address if no name has to be looked up."""
        known = self._known.get(url)
        return self._literal(url) if known is None or known.until < time.monotonic() else known

    def _literal(self, url: str) -> Address | None:
        """Return the address in a URL without a name; None if there is a name."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS.get(parts.scheme, 80)
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            return None
        return self._keep(url, str(ip), port, float("inf"))

    def _keep(self, url: str, host: str, port: int, until: float) -> Address:
        if len(self._known) >= MAX_URLS:
            self._known.clear()
        text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        address = self._known[url] = Address(text, host, until)
        return address

    async def _looked_up(self, url: str) -> Address | None:
        """Look the name up, once for all that wait for it; None if that fails."""
        task = self._lookups.get(url)
        if task is None:
            task = self._lookups[url] = asyncio.get_running_loop().create_task(self._look_up(url))
            task.add_done_callback(lambda _: self._lookups.pop(url, None))
        return await asyncio.shield(task)  # a client that leaves ends no other's look-up

    async def _look_up(self, url: str) -> Address | None:
        """Look the name up; if that fails, an address of before is kept for as long as a new one. None without any."""
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 80)
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname or "", port, type=socket.SOCK_STREAM
                )
            host = str(found[0][4][0])
        except (OSError, TimeoutError, UnicodeError) as error:
            logger.warning("the address of the engine at %s cannot be looked up: %s", parts.hostname, error)
            before = self._known.get(url)
            if before is None:
                return None
            host = before.host
        return self._keep(url, host, port, time.monotonic() + KEPT_S)


def _is_among(address: Address | None, places: Collection[str]) -> bool:
    return address is not None and (address.text in places or address.host in places)
