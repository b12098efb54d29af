"""Sends clients' requests to engines over HTTP. Bodies are passed on without looking into them.

Each request uses an open connection of the pool if there is one. Redirects are not followed, and only allowed addresses
are connected to (``allowed_addresses``). The router's own calls to engines are in ``engine_client``.
"""

from __future__ import annotations

import socket
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from warmfleet.errors import UpstreamError, UpstreamGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aiohttp import AddrInfoType

    from warmfleet.engines.allowed_addresses import Addresses

#: Errors that are raised before a byte of the request has left.
NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
CONNECT_TIMEOUT_S = 2.0  # a live engine accepts within milliseconds; after this time another worker is tried
KEEPALIVE_S = 4.0  # engines close idle connections after 5 s: the router must close them first
DNS_CACHE_S = 10
MAX_ADDRESSES = 4_096
READ_BUFFER_BYTES = 65_536
#: A machine that vanished is noticed after 25 s. A frozen process is not noticed by TCP, because its kernel still
#: answers: pools/stalled_requests.py ends the requests that wait for it.
TCP_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}  # s, s, -, ms


class CheckedResolver(AbstractResolver):
    """Resolves names, and drops every address that is not allowed."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        allowed = self._addresses.allowed_of(host, [entry["host"] for entry in found])
        return [entry for entry in found if entry["host"] in allowed]

    async def close(self) -> None:
        await self._resolver.close()


class Upstream:
    """A pool of connections to all engines: ``open`` it in the event loop, ``close`` it."""

    def __init__(
        self, addresses: Addresses, connect_timeout_s: float, on_stale: Callable[[], None] = lambda: None
    ) -> None:
        """on_stale: called when a connection from the pool was dead and is replaced."""
        self._addresses = addresses
        self._on_stale = on_stale
        self._urls: dict[tuple[str, str], URL] = {}
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession = None  # type: ignore[assignment]  # until open()

    async def open(self) -> None:
        """Make the pool of connections; it belongs to the running event loop."""
        reuse = aiohttp.TraceConfig()
        reuse.on_connection_reuseconn.append(_mark_reused)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=KEEPALIVE_S,
                ttl_dns_cache=DNS_CACHE_S,
                resolver=CheckedResolver(self._addresses),
                socket_factory=_socket,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            read_bufsize=READ_BUFFER_BYTES,
            trace_configs=[reuse],
        )

    async def send(
        self, method: str, base: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send ``body`` unchanged; returns when the answer's headers have come. The caller closes the answer.

        A connection of the pool that turns out dead is replaced once. Raises UpstreamGone if no byte came back. The
        error is not ``refused`` if the first connection was dead, because the engine may have died of the request.
        """
        for attempt in (1, 2):
            used = SimpleNamespace(reused=False)
            with upstream_errors(sent_before=attempt == 2):
                try:
                    return await self._session.request(
                        method,
                        self._url(base, path),
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                        trace_request_ctx=used,
                    )
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    fresh = not used.reused or isinstance(error, aiohttp.ClientConnectorError)
                    if fresh or attempt == 2:
                        raise
                    self._on_stale()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await self._session.close()

    def _url(self, base: str, path: str) -> URL:
        url = self._urls.get((base, path))
        if url is None:
            self._addresses.check(base)
            if len(self._urls) >= MAX_ADDRESSES:
                self._urls.clear()
            url = self._urls[base, path] = URL(base.rstrip("/") + path, encoded=True)
        return url


@contextmanager
def upstream_errors(*, sent_before: bool = False) -> Iterator[None]:
    """Translate errors of the HTTP library: UpstreamGone for a lost connection or a time-out, else UpstreamError.

    sent_before: this worker was sent the same request already, so it is never ``refused``.
    """
    try:
        yield
    except (aiohttp.ClientConnectionError, OSError, TimeoutError) as error:
        refused = isinstance(error, NOT_CONNECTED) and not sent_before
        raise UpstreamGone(f"The worker does not answer: {type(error).__name__}", refused=refused) from error
    except (aiohttp.ClientError, ValueError) as error:
        raise UpstreamError(f"The worker's answer cannot be read: {type(error).__name__}") from error


def _socket(address: AddrInfoType) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):  # not every system has every option
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def _mark_reused(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.reused = True
