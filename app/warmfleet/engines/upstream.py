"""Sends clients' requests to engines over HTTP. Bodies are passed on without looking into them.

Each request uses a connection that an earlier one left open, if there is one. Redirects are not followed, and only
allowed addresses are connected to (``allowed_addresses``). The router's own calls to engines are in ``engine_client``.
"""

from __future__ import annotations

import asyncio
import base64
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes, urlsplit

from warmfleet.engines.engine_connection import Connection, EngineResponse, KeptConnections
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.engines.resolver import Resolver
from warmfleet.errors import UpstreamError, UpstreamGone

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from warmfleet.engines.allowed_addresses import Addresses

SWEEP_INTERVAL_S = 1.0  # time between two calls of ``sweep``
MAX_ADDRESSES = 4_096  # most engines whose connections are kept; one more closes all idle connections
WITHOUT_LENGTH = frozenset({"GET", "HEAD", "OPTIONS", "DELETE", "TRACE"})  # need no Content-Length if bodiless
_HOST = re.compile(r"[A-Za-z0-9._:%~-]+")


class Upstream:
    """The connections to all engines. Await ``open`` in the event loop first, and ``close`` at the end."""

    def __init__(
        self,
        addresses: Addresses,
        connect_timeout_s: float,
        on_stale: Callable[[], None] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """on_stale: called when a dead kept connection is replaced. tls: for https; None = the system's authorities."""
        self._addresses = addresses
        self._resolver = Resolver(addresses)
        self._on_stale = on_stale
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls or engine_tls("")
        self._engines: dict[str, Engine] = {}
        self._loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # until open()

    async def open(self) -> None:
        """Note the running event loop, to which all connections will belong."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Close the kept connections. Connections in use belong to their requests."""
        self._forget_engines()

    async def sweep(self) -> None:
        """Close the connections that are idle for too long, because ``start`` closes only those that it would use."""
        for engine in self._engines.values():
            engine.kept.sweep()

    def start(self, method: str, base: str, path: str, body: bytes, headers: bytes) -> EngineResponse:
        """Send a request to the engine at ``base``; the caller awaits ``head`` and calls ``close``.

        path: with its query, as it stands in a request line. headers: lines made by ``request_headers``. A kept
        connection that turns out dead is replaced once. Raises UpstreamError if the request cannot be sent as it is.
        """
        engine = self._engines.get(base) or self._engine(base)
        head = engine.head(method, path, headers, len(body))
        answer = EngineResponse(self._loop, (head, body) if body else (head,), without_body=method == "HEAD")
        connection = engine.kept.take()
        if connection is None:
            self._connect(engine, answer)
        else:
            answer.on_stale = engine.replace
            connection.send(answer)
        return answer

    async def send(self, method: str, base: str, path: str, body: bytes, headers: bytes) -> EngineResponse:
        """Send a request as ``start``; return when the headers came. Raises UpstreamGone if no byte came back.

        The error is not ``refused`` if the engine had read the request, because the engine may have died of it.
        """
        answer = self.start(method, base, path, body, headers)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def _engine(self, base: str) -> Engine:
        self._addresses.check(base)
        if len(self._engines) >= MAX_ADDRESSES:
            self._forget_engines()
        engine = self._engines[base] = Engine(base, KeptConnections(self._loop), self._replace)
        return engine

    def _forget_engines(self) -> None:
        for engine in self._engines.values():
            engine.kept.close()
        self._engines.clear()

    def _replace(self, engine: Engine, answer: EngineResponse) -> None:
        """Send the request of ``answer`` once more, on a new connection, because its kept connection was dead."""
        self._on_stale()
        self._connect(engine, answer)

    def _connect(self, engine: Engine, answer: EngineResponse) -> None:
        answer.connecting = self._loop.create_task(self._send_anew(engine, answer))

    async def _send_anew(self, engine: Engine, answer: EngineResponse) -> None:
        """Make a connection and send the request on it. Every error goes to the reader of ``answer``."""
        try:
            connection = await self._connection(engine)
        except (OSError, TimeoutError, ValueError) as error:  # ValueError means a name that cannot be looked up
            answer.connecting = None  # because this task ends, so nobody need cancel it
            why = f"The worker does not answer: {type(error).__name__}"
            answer.fail(UpstreamGone(why, refused=not answer.may_have_been_read))
        else:
            connection.send(answer)

    async def _connection(self, engine: Engine) -> Connection:
        """Connect to the first address of the engine that accepts. Raises OSError, TimeoutError."""
        *others, last = await self._resolver.resolve(engine.host, engine.port)
        for address in others:
            try:
                return await self._connected(engine, address)
            except (OSError, TimeoutError):
                continue
        return await self._connected(engine, last)

    async def _connected(self, engine: Engine, address: str) -> Connection:
        """Connect to this address; TLS asks for a certificate of the name in the URL."""
        tls, name = (self._tls, engine.host) if engine.tls else (None, None)
        async with asyncio.timeout(self._connect_timeout_s):
            _, made = await self._loop.create_connection(
                lambda: Connection(engine.kept), address, engine.port, ssl=tls, server_hostname=name
            )
        return made


class Engine:
    """The address of requests for one base URL, and the headers that all these requests share."""

    __slots__ = ("_authorization", "_lines", "_path", "_replace", "host", "kept", "port", "tls")

    def __init__(self, base: str, kept: KeptConnections, replace: Callable[[Engine, EngineResponse], None]) -> None:
        """Raises UpstreamError if the URL cannot be used."""
        try:
            parts = urlsplit(base)
            host, port = parts.hostname or "", parts.port
            name = host if host.isascii() else host.encode("idna").decode()  # the form in DNS and certificates
        except ValueError as error:
            raise UpstreamError(f"{base!r} is not an http address") from error
        if not _HOST.fullmatch(name) or not _sendable(parts.path) or parts.query or parts.fragment:
            raise UpstreamError(f"{base!r} is not the base of an http address")
        self.kept = kept
        self.tls = parts.scheme == "https"
        self.host = name
        self.port = port or (443 if self.tls else 80)
        self._replace = replace
        self._path = parts.path.rstrip("/")
        shown = f"[{name}]" if ":" in name else name
        self._lines = f"Host: {shown}:{port}\r\n".encode() if port else f"Host: {shown}\r\n".encode()
        user = parts.netloc.rpartition("@")[0]
        self._authorization = _basic(user) if user else b""

    def head(self, method: str, path: str, headers: bytes, length: int) -> bytes:
        """Return the request line and all headers. Raises UpstreamError."""
        if not _sendable(path) or not method.isalpha():
            raise UpstreamError("The method or the path cannot be sent to a worker.")
        if self._authorization:
            if b"\nauthorization:" in b"\n" + headers.lower():
                raise UpstreamError("The worker's URL names a user, and an Authorization header is given: choose one.")
            headers += self._authorization
        line = f"{method} {self._path}{path} HTTP/1.1\r\n".encode("ascii")
        if not length and method in WITHOUT_LENGTH:
            return b"%b%b%b\r\n" % (line, self._lines, headers)
        return b"%b%b%bContent-Length: %d\r\n\r\n" % (line, self._lines, headers, length)

    def replace(self, answer: EngineResponse) -> None:
        """Send the request of ``answer`` again, because its kept connection was dead."""
        self._replace(self, answer)


def _sendable(path: str) -> bool:
    """Return whether ``path`` may stand in a request line: neither a space nor a line break can end it early."""
    return path.isascii() and path.isprintable() and " " not in path


def _basic(user: str) -> bytes:
    name, _, password = user.partition(":")
    pair = unquote_to_bytes(name) + b":" + unquote_to_bytes(password)
    return b"Authorization: Basic %b\r\n" % base64.b64encode(pair)
