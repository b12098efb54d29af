"""The router's own small calls to engines: health, metrics, probes, warming, token ids. Answers are read whole.

Clients' requests go through ``upstream``, which is quicker and passes the bytes of an answer on as they come.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from warmfleet.engines.engine_connection import KEEPALIVE_S
from warmfleet.engines.engine_tls import engine_tls
from warmfleet.engines.request_headers import header_value
from warmfleet.engines.resolver import Resolver
from warmfleet.errors import UpstreamError, UpstreamGone, WarmfleetError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from warmfleet.engines.allowed_addresses import Addresses

PLACE_S = 1.0  # longest time that ``place`` may take to resolve a name
MAX_PAGE_BYTES = 8_388_608  # most bytes read of the answer to a GET; a large engine's /metrics has about 200 kB
SMALL_ANSWER_BYTES = 1_048_576  # most bytes read of the answer to a POST, unless the caller sets another limit
CONNECT_ERRORS = (httpx.ConnectError, httpx.ConnectTimeout)


class Place(NamedTuple):
    """Where connections to a URL lead. end: address, port, path. named: the host is a name, but not ``localhost``."""

    end: tuple[str, int, str]
    host: str
    named: bool


class DeadConnection(httpx.NetworkError):
    """A connection that an earlier call left open was closed by the engine before this request reached it."""


class EngineClient:
    """Makes all small calls to engines; follows no redirects, keeps no cookies, uses no proxy of the environment."""

    def __init__(self, addresses: Addresses, connect_timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        """tls: the context for https; None = the system's authorities."""
        self._addresses = addresses
        self._timeouts = httpx.Timeout(None, connect=connect_timeout_s).as_dict()
        self._resolver = Resolver(addresses)
        self._transport = httpx.AsyncHTTPTransport(
            verify=tls or engine_tls(""),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S),
        )

    async def get(self, base: str, path: str, headers: Mapping[str, str], timeout_s: float) -> tuple[int, bytes]:
        """Send a GET and return status and body, which is cut off behind MAX_PAGE_BYTES. Raises UpstreamError."""
        with _engine_errors():
            async with asyncio.timeout(timeout_s):
                return await self._call("GET", _joined(base, path), b"", headers, MAX_PAGE_BYTES)

    async def healthy(self, base: str, timeout_s: float) -> bool:
        """Return whether the engine answers /health within the limit, and with no status of 500 or above.

        An engine other than vLLM may not know /health, but it answers.
        """
        try:
            status, _ = await self.get(base, "/health", {}, timeout_s)
        except WarmfleetError:
            return False
        return status < 500

    async def post(
        self, base: str, path: str, body: bytes, headers: Mapping[str, str], limit_bytes: int = SMALL_ANSWER_BYTES
    ) -> tuple[int, bytes]:
        """Send a POST and return status and body, which is cut off behind ``limit_bytes``. Raises UpstreamError.

        The caller sets the time limit, because one limit may cover several requests.
        """
        with _engine_errors():
            return await self._call("POST", _joined(base, path), body, headers, limit_bytes)

    async def place(self, base: str) -> Place | None:
        """Find where connections to this engine end; None if its host cannot be resolved, or is several machines."""
        try:
            url = httpx.URL(base)
            host, port = _host_and_port(url)
            async with asyncio.timeout(PLACE_S):
                addresses = await self._resolver.addresses(host, port)
        except (OSError, UnicodeError, httpx.InvalidURL, ValueError):
            return None
        first = [address for address in addresses if ":" not in address] or addresses  # IPv4 if the host has both
        if len(first) > 1:
            return None
        address = ipaddress.ip_address(first[0])
        if address.is_unspecified:  # a connection to 0.0.0.0 or :: goes to this machine
            address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
        named = url.host != first[0] and url.host != "localhost"
        return Place((str(address), port, url.path.rstrip("/")), url.host, named)

    async def close(self) -> None:
        await self._transport.aclose()

    async def _call(
        self, method: str, address: str, body: bytes, headers: Mapping[str, str], limit_bytes: int
    ) -> tuple[int, bytes]:
        """Try the addresses of the URL's host in turn until one takes the connection."""
        self._addresses.check(address)
        url = httpx.URL(address)
        # The values are bytes, because httpx refuses a text that is not ASCII, which a client's header may be.
        encoded = [(name.encode(), header_value(value)) for name, value in headers.items()]
        request = httpx.Request(method, url, content=body, headers=encoded)
        if url.userinfo:
            if "Authorization" in request.headers:  # requests to such a worker fail, too (``upstream``)
                raise UpstreamError("The worker's URL names a user, and an Authorization header is given: choose one.")
            request.headers["Authorization"] = (
                f"Basic {base64.b64encode(f'{url.username}:{url.password}'.encode()).decode()}"
            )
        *others, last = await self._resolver.resolve(*_host_and_port(url))
        for host in others:
            with suppress(*CONNECT_ERRORS):
                return await self._exchange(request, host, limit_bytes)
        return await self._exchange(request, last, limit_bytes)

    @retry(retry=retry_if_exception_type(DeadConnection), stop=stop_after_attempt(2), reraise=True)
    async def _exchange(self, request: httpx.Request, host: str, limit_bytes: int) -> tuple[int, bytes]:
        """Send the request to the address ``host``; the Host header and the TLS handshake keep the name in the URL."""
        connected = False

        async def trace(event: str, _info: Mapping[str, Any]) -> None:
            nonlocal connected
            connected = connected or event == "connection.connect_tcp.complete"

        sent = httpx.Request(
            request.method,
            request.url.copy_with(host=host),
            headers=request.headers,
            content=request.content,
            extensions={"timeout": self._timeouts, "trace": trace, "sni_hostname": request.url.raw_host.decode()},
        )
        try:
            answer = await self._transport.handle_async_request(sent)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            if connected:
                raise
            raise DeadConnection(str(error)) from error
        try:
            body = bytearray()
            async with aclosing(cast("AsyncGenerator[bytes]", answer.aiter_raw())) as pieces:
                async for piece in pieces:
                    body += piece
                    if len(body) >= limit_bytes:
                        break
            return answer.status_code, bytes(body)
        finally:
            await answer.aclose()


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Translate the HTTP library's errors: to UpstreamGone if the engine does not answer, others to UpstreamError."""
    try:
        yield
    except (httpx.TransportError, OSError, TimeoutError) as error:
        refused = isinstance(error, CONNECT_ERRORS)
        late = isinstance(error, httpx.TimeoutException | TimeoutError) and not refused
        text = f"The worker does not answer: {type(error).__name__}"
        raise UpstreamGone(text, refused=refused, late=late) from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, ValueError) as error:
        raise UpstreamError(f"The worker's answer cannot be read: {type(error).__name__}") from error


def _joined(base: str, path: str) -> str:
    return base.rstrip("/") + path


def _host_and_port(url: httpx.URL) -> tuple[str, int]:
    return url.raw_host.decode("ascii"), url.port or (443 if url.scheme == "https" else 80)
