"""Whether a host and port can be reached from here: name, connection and TLS are told apart."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Sequence

CONNECT_S = 3.0
AT_MOST = 4  # addresses of one name that are tried

Stage = Literal["name", "connection", "tls", ""]


@dataclass(frozen=True, slots=True)
class Reached:
    """failed: the step that failed, empty if none did. addresses: of the name. seconds: of connection and TLS."""

    failed: Stage
    why: str = ""
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0


async def resolve(host: str, port: int, limit_s: float = CONNECT_S) -> Reached:
    """The addresses of a host; nothing is connected to."""
    try:
        async with asyncio.timeout(limit_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return Reached("name", f"no answer of the resolver within {limit_s:g} s")
    except (OSError, UnicodeError) as error:
        return Reached("name", in_words(error))
    return Reached("", addresses=tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))


async def reach(
    host: str, port: int, tls: ssl.SSLContext | None = None, addresses: Sequence[str] = (), limit_s: float = CONNECT_S
) -> Reached:
    """Connect and, with ``tls``, shake hands; then hang up. addresses: of the host; empty = they are resolved first."""
    named = Reached("", addresses=tuple(addresses)) if addresses else await resolve(host, port, limit_s)
    last = named if named.failed else Reached("name", "it has no address")
    for address in named.addresses[:AT_MOST]:
        last = await _connect(address, port, host, tls, limit_s)
        if not last.failed:
            break
    return Reached(last.failed, last.why, named.addresses, last.seconds)


async def _connect(address: str, port: int, host: str, tls: ssl.SSLContext | None, limit_s: float) -> Reached:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(limit_s):
            if tls is None:
                _, writer = await asyncio.open_connection(address, port)
            else:
                _, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=host)
    except TimeoutError:
        return Reached("connection", f"no answer within {limit_s:g} s: a firewall, or a host that is down")
    except ssl.SSLError as error:
        return Reached("tls", error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else str(error))
    except OSError as error:
        return Reached("connection" if tls is None or not _handshake(error) else "tls", in_words(error))
    seconds = time.perf_counter() - began
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return Reached("", seconds=seconds)


def place_of(url: str) -> tuple[str, int]:
    """Host and port of an http URL; ("", 0) if it cannot be read: workers announce whatever they like."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0


def is_loopback(host: str) -> bool:
    """The host means the machine itself, whoever uses it."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"


def in_words(error: Exception) -> str:
    """The reason alone, without the address that the caller tells anyway."""
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        return str(error.strerror or error).lower()
    return os.strerror(number).lower() if isinstance(number, int) and number > 0 else str(error) or type(error).__name__


def _handshake(error: OSError) -> bool:
    """The connection was made, and ended while TLS was spoken."""
    return isinstance(error, ConnectionResetError | BrokenPipeError) or "SSL" in str(error).upper()
