"""The API-server half: where this server is reached, and what a router needs to see its prompts as it does."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from warmfleet_worker.protocol import artifacts, wire
from warmfleet_worker.protocol.redis_address import parse
from warmfleet_worker.stream import Outage, Refused, StreamGone, StreamWriter, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger("warmfleet")

YOUNG_SECONDS = 60.0  # a join or an artifact this young may be lost in a failover of Redis: nobody would ask for it
READY_SECONDS = 120.0  # a server that does not listen by then is announced all the same: the probe will tell


class UrlRefusedError(ValueError):
    """Routers could not reach this server under the address it has."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What an API server says of itself when it joins. artifacts: content by name; ready: the server listens.

    adapters: name and path of the LoRA adapters that it serves now; it joins anew when they change.
    """

    redis_url: str
    model: str
    server_id: str
    url: str
    models: tuple[str, ...]
    version: str
    artifacts: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    ready: Callable[[], bool] = lambda: True
    adapters: Callable[[], Mapping[str, str]] = dict


class ServerPublisher:
    """Writes ``server:<server_id>`` from a daemon thread: artifacts, join, a heartbeat every 5 s, leave."""

    def __init__(self, config: ServerConfig) -> None:
        keys = wire.Keys(config.model)
        self.config = config
        self._keys = keys
        self._stream = StreamWriter(
            connect(config.redis_url, keys.tag),
            keys.server(wire.check_name(config.server_id)),
            (keys.hello, f"server:{config.server_id}"),
            wire.SERVER_MAXLEN,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="warmfleet-server", daemon=True)
        self.joined = False
        self._joined_at = 0.0
        self._adapters: dict[str, str] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """Say goodbye and end the thread; gives up after ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self.config.ready() and time.monotonic() < deadline and not self._stopping.is_set():
            self._stopping.wait(wire.FLUSH_SECONDS)
        outage = Outage(self._stopping)
        while not self._stopping.is_set():
            try:
                self._round()
            except StreamGone:
                self.joined = False
                self._stopping.wait(wire.FLUSH_SECONDS)
            except (RedisError, Refused, OSError) as error:
                outage.wait(error)
            else:
                outage.over()
                self._stopping.wait(wire.HEARTBEAT_SECONDS)
        self._leave()

    def _round(self) -> None:
        moved = self._stream.moved and time.monotonic() - self._joined_at < YOUNG_SECONDS
        if not self.joined or moved or dict(self.config.adapters()) != self._adapters:
            self._join()
        self._stream.flush()  # what a failed round has left
        self._stream.put("heartbeat")
        self._stream.flush()

    def _join(self) -> None:
        config, manifest = self.config, {}
        self._adapters = dict(config.adapters())
        for name, content in config.artifacts.items():
            manifest[name], chunks = artifacts.split(content)
            for sha256, piece in chunks.items():  # one call each: none is long
                # SETNX: the one way to add without a right to overwrite
                self._stream.client.setnx(self._keys.artifact(config.server_id, sha256), piece)
        self._stream.join(
            wire.dumps(
                {
                    "schema": wire.SCHEMA,
                    "server_id": config.server_id,
                    "url": config.url,
                    "models": list(config.models),
                    "artifacts": manifest,
                    "facts": {**config.facts, "loras": self._adapters},
                    "version": config.version,
                }
            )
        )
        self.joined, self._joined_at = True, time.monotonic()
        logger.info("warmfleet: server %s joined %s as %s", config.server_id, config.model, config.url)

    def _leave(self) -> None:
        if self.joined:
            try:
                self._stream.put("leave")
                self._stream.flush()
            except (RedisError, Refused, StreamGone, OSError) as error:
                logger.info("warmfleet: no goodbye: %s", error)
        self._stream.close()


# ---------------------------------------------------------------- the address


def default_server_id(argv: list[str]) -> str:
    """A name that a restart keeps and that another server on the same host does not share."""
    digest = hashlib.sha256("\0".join(argv).encode()).hexdigest()[:8]
    host = "".join(char if char.isalnum() or char in "._-" else "-" for char in socket.gethostname())
    return wire.check_name(f"{host[:48] or 'host'}-{digest}")


def worker_url(redis_url: str, host: str | None, port: int, *, tls: bool = False) -> str:
    """The URL under which routers reach this server; ``host`` and ``port`` are what it is bound to.

    WARMFLEET_WORKER_URL wins, then POD_IP, then the bound address, then the address that reaches Redis.
    Raises UrlRefusedError for a loopback address while Redis is elsewhere, hence routers may be, too.
    """
    local = redis_is_local(redis_url)
    given = os.environ.get("WARMFLEET_WORKER_URL")
    if given:
        address = urlsplit(given).hostname or ""
        url = given.rstrip("/")
    else:
        if not port:
            raise UrlRefusedError("the port is not known before it is bound: set WARMFLEET_WORKER_URL")
        address = os.environ.get("POD_IP") or (host if host and not _is(host, "is_unspecified") else "")
        address = address or ("127.0.0.1" if local else outgoing_address(redis_url))
        url = f"http{'s' if tls else ''}://{f'[{address}]' if ':' in address else address}:{port}"
    if _is(address, "is_unspecified") or (_is(address, "is_loopback") and not local):
        raise UrlRefusedError(f"{url} means this machine only, but Redis is elsewhere: set WARMFLEET_WORKER_URL")
    return url


def redis_is_local(redis_url: str) -> bool:
    """Redis is reached through a unix socket or loopback, so the routers are on this machine."""
    return all(_is(host, "is_loopback") for host, _ in parse(redis_url).nodes)


def outgoing_address(redis_url: str) -> str:
    """This machine's address on the way to Redis. Sends nothing: it only asks the routing table."""
    host, port = parse(redis_url).nodes[0]
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listens(host: str | None, port: int) -> bool:
    """Something accepts connections there."""
    address = "127.0.0.1" if not host or _is(host, "is_unspecified") else host
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _is(host: str, what: str) -> bool:
    if host == "localhost":
        return what == "is_loopback"
    try:
        return bool(getattr(ipaddress.ip_address(host.strip("[]")), what))
    except ValueError:
        return False  # a name: whoever configured it knows where it leads
