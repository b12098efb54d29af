"""Connects from this machine to a host and port, in steps that can fail: look-up of the name, connection, TLS."""

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
AT_MOST = 4  # most addresses of one name that are tried

Stage = Literal["name", "connection", "tls", ""]


@dataclass(frozen=True, slots=True)
class Reached:
    """The result of ``reach``. failed: the failed step, or "". addresses: of the host. seconds: to connect."""

    failed: Stage
    why: str = ""
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0


async def resolve(host: str, port: int) -> Reached:
    """Look up the addresses of a host, without a connection to them."""
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        return Reached("name", f"no answer of the resolver within {CONNECT_S:g} s")
    except (OSError, UnicodeError) as error:
        return Reached("name", in_words(error))
    return Reached("", addresses=tuple(dict.fromkeys(str(entry[4][0]) for entry in found)))


async def reach(host: str, port: int, tls: ssl.SSLContext | None = None, addresses: Sequence[str] = ()) -> Reached:
    """Connect and, with ``tls``, shake hands; then hang up. addresses: of the host; empty = they are resolved first."""
    named = Reached("", addresses=tuple(addresses)) if addresses else await resolve(host, port)
    last = named if named.failed else Reached("name", "it has no address")
    for address in named.addresses[:AT_MOST]:
        last = await _connect(address, port, host, tls)
        if not last.failed:
            break
    return Reached(last.failed, last.why, named.addresses, last.seconds)


async def _connect(address: str, port: int, host: str, tls: ssl.SSLContext | None) -> Reached:
    began = time.perf_counter()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(
                address, port, ssl=tls, server_hostname=None if tls is None else host
            )
    except TimeoutError:
        return Reached("connection", f"no answer within {CONNECT_S:g} s: a firewall, or a host that is down")
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
    """Read host and port of an http URL; ("", 0) if that fails, because workers announce whatever they like."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return "", 0


def is_loopback(host: str) -> bool:
    """Tell whether the host is a loopback address or ``localhost``, which means a different machine to each machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"


def in_words(error: Exception) -> str:
    """Return the reason of an error alone, without the address, which the caller adds."""
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        return str(error.strerror or error).lower()
    return os.strerror(number).lower() if isinstance(number, int) and number > 0 else str(error) or type(error).__name__


def _handshake(error: OSError) -> bool:
    """Tell whether the connection was made, and ended during the TLS handshake."""
    return isinstance(error, ConnectionResetError | BrokenPipeError) or "SSL" in str(error).upper()
