"""The name of an API server, and the address under which routers reach it."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.redis_address import outgoing_address, parse


class UrlRefusedError(ValueError):
    """Routers could not reach this server under its address."""


def default_server_id(argv: list[str]) -> str:
    """Make a name that stays the same over a restart and differs from that of another server on the same host."""
    digest = hashlib.sha256("\0".join(argv).encode()).hexdigest()[:8]
    host = "".join(char if char.isalnum() or char in "._-" else "-" for char in socket.gethostname())
    return wire.check_name(f"{host[:48] or 'host'}-{digest}")


def worker_url(redis_url: str, host: str | None, port: int, *, tls: bool = False) -> str:
    """Return the URL under which routers reach this server, which is bound to ``host`` and ``port``.

    Taken from WARMFLEET_WORKER_URL, else POD_IP, else the bound address, else this machine's address towards Redis.
    Raises UrlRefusedError for a loopback address while Redis is on another machine: routers may be there, too.
    """
    local = redis_is_local(redis_url)
    given = os.environ.get("WARMFLEET_WORKER_URL")
    if given:
        address = urlsplit(given).hostname or ""
        url = given.rstrip("/")
    else:
        if not port:
            raise UrlRefusedError("the port is not known before it is bound: set WARMFLEET_WORKER_URL")
        address = os.environ.get("POD_IP") or (host if host and not _is_unspecified(host) else "")
        address = address or ("127.0.0.1" if local else outgoing_address(redis_url))
        url = f"http{'s' if tls else ''}://{f'[{address}]' if ':' in address else address}:{port}"
    if _is_unspecified(address) or (is_loopback(address) and not local):
        raise UrlRefusedError(f"{url} means this machine only, but Redis is elsewhere: set WARMFLEET_WORKER_URL")
    return url


def redis_is_local(redis_url: str) -> bool:
    """Return True if Redis is reached through a unix socket or loopback: then the routers are on this machine, too."""
    return all(is_loopback(host) for host, _ in parse(redis_url).nodes)


@dataclass(frozen=True, slots=True)
class Bound:
    """Where an API server listens. uds: the path of its unix socket, which it has in place of host and port."""

    host: str | None
    port: int
    uds: str | None = None
    tls: bool = False

    def connect(self) -> socket.socket:
        """Connect from this machine, within a second; raises OSError if that fails."""
        if self.uds:
            plain = socket.socket(socket.AF_UNIX)
            try:
                plain.settimeout(1)
                plain.connect(self.uds)
            except OSError:
                plain.close()
                raise
        else:
            host = "127.0.0.1" if not self.host or _is_unspecified(self.host) else self.host
            plain = socket.create_connection((host, self.port), timeout=1)
        if not self.tls:
            return plain
        unchecked = ssl.create_default_context()  # the certificate names another host than this address
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        try:
            return unchecked.wrap_socket(plain)
        except OSError:
            plain.close()
            raise


def healthy(bound: Bound) -> bool:
    """Return True if the API server at ``bound`` answers ``GET /health`` with 200: it and its engine are healthy.

    A server that demands client certificates cannot be asked; of such a server it is enough that it listens.
    """
    try:
        with bound.connect() as connection:
            connection.settimeout(5)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            with connection.makefile("rb") as answer:
                return answer.readline(64).split()[1:2] == [b"200"]
    except ssl.SSLError:
        return True
    except OSError:
        return False


def _is_unspecified(host: str) -> bool:
    address = _ip_address(host)
    return address is not None and address.is_unspecified


def is_loopback(host: str) -> bool:
    address = _ip_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Read an IP address; None for a host name, because the operator who set it knows where it leads."""
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
