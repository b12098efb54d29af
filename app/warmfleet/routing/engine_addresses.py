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

    from warmfleet.fleet import WorkerView
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
        self._listed: dict[tuple[frozenset[str], str], tuple[View, tuple[str, ...]]] = {}

    async def of(self, url: str) -> str:
        """Return the address of the engine with this URL. Raises NoWorker if its name is not known."""
        known = self._known.get(url)
        if known is None or known.until < time.monotonic():
            known = self._literal(url) or await self._look_up(url, known)
        return known.text

    async def listed(self, pool: Pool, places: frozenset[str]) -> tuple[str, ...]:
        """Return the workers of the pool whose address, or IP address, is among ``places``."""
        key = places, pool.tag
        found = self._listed.get(key)
        if found is not None and found[0] is pool.view:
            return found[1]
        view = pool.view
        workers = [worker.worker_id for worker in view.workers if await self._is_among(worker, places)]
        if len(self._listed) >= MAX_SUBSETS:
            self._listed.clear()
        self._listed[key] = view, tuple(workers)
        return self._listed[key][1]

    async def _is_among(self, worker: WorkerView, places: Collection[str]) -> bool:
        if not worker.routable:
            return False
        try:
            text = await self.of(worker.url)
        except NoWorker:
            return False
        return text in places or self._known[worker.url].host in places

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

    async def _look_up(self, url: str, before: Address | None) -> Address:
        """Look the name up; if that fails, an address of before is kept. Raises NoWorker."""
        parts = urlsplit(url)
        port = parts.port or PORTS.get(parts.scheme, 80)
        try:
            async with asyncio.timeout(LOOKUP_S):
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname or "", port, type=socket.SOCK_STREAM
                )
            return self._keep(url, str(found[0][4][0]), port, time.monotonic() + KEPT_S)
        except (OSError, TimeoutError, UnicodeError) as error:
            logger.warning("the address of the engine at %s cannot be looked up: %s", parts.hostname, error)
            if before is not None:
                return before
            raise NoWorker("The name of the chosen engine cannot be looked up: ask again.") from error
