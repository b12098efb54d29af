"""Connection pools of redis-py whose connections go to the present master, as Sentinels or Cluster nodes name it.

They extend redis-py's Sentinel pool, in which a connection asks for the master when it connects, and ends when its
server is no master any more. In a Cluster all keys of a pool of workers are in one slot, so one server has them, too:
there the same classes ask a node ``CLUSTER SLOTS``, and pipelines, TIME and INFO work as with a single server. With a
single server this module is not used; calls of scripts in a Cluster go by ``masters``. The plugin's counterpart,
without asyncio, is ``warmfleet_worker/master_client.py``.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection
from redis.exceptions import AskError, ClusterDownError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from warmfleet.fleet.connection.cancellable import Cancellable, connection_options
from warmfleet.protocol.redis_address import ASK_AGAIN_SECONDS, LOOK_SECONDS, HostPort, RedisAddress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio.connection import AbstractConnection


class Locator:
    """Asks the Sentinels or Cluster nodes in turn where the master is, beginning with the node that answered last.

    All connection pools of a replica share one locator, which asks one node at a time; a Cluster node's answer names
    the masters of all hash tags. redis-py's pool calls ``discover_master``.
    """

    def __init__(self, address: RedisAddress, nodes: Sequence[tuple[HostPort, aioredis.Redis]]) -> None:
        self._address = address
        self._nodes = list(nodes)
        self._answered: tuple[float, Any, str] | None = None  # when, a node's raw answer, the host of that node
        self._masters: dict[str, HostPort] = {}  # by hash tag, as last named
        self._silent_until: dict[str, float] = {}  # by hash tag, after no node named a master: time of the next try
        self._asking = asyncio.Lock()

    async def discover_master(self, tag: str, max_age_s: float = ASK_AGAIN_SECONDS) -> HostPort:
        """Find the master's address for keys with this hash tag, by an answer not older than ``max_age_s``.

        Each silent node delays the result by twice ``node_timeout_s``. While no node names a master, the master that
        was named last stays valid. Raises ConnectionError if none was ever named.
        """
        async with self._asking:
            now, known = time.monotonic(), self._masters.get(tag)
            if known is not None and now < self._silent_until.get(tag, 0.0):
                return known
            found = self._in_last_answer(tag, now - max_age_s)
            try:
                self._masters[tag] = found or await self._ask(tag)
            except RedisConnectionError:
                if known is None:
                    raise
                self._silent_until[tag] = time.monotonic() + LOOK_SECONDS
            return self._masters[tag]

    def _in_last_answer(self, tag: str, since: float) -> HostPort | None:
        if self._answered is None or self._answered[0] < since:
            return None
        _, answer, asked = self._answered
        return self._address.master_in(answer, tag, asked)

    async def _ask(self, tag: str) -> HostPort:
        why = "no node knows it"
        for node in list(self._nodes):
            (host, port), client = node
            self._nodes.remove(node)  # to the end of the list, also if this call is cancelled while the node is silent
            self._nodes.append(node)
            try:
                answer = await client.execute_command(*self._address.question)  # type: ignore[no-untyped-call]  # redis-py
                found = self._address.master_in(answer, tag, host)
            except (RedisError, OSError, ValueError, TypeError) as error:
                why = f"{host}:{port}: {error}"
                continue
            if found:
                self._answered = time.monotonic(), answer, host
                self._nodes.remove(node)
                self._nodes.insert(0, node)
                return found
        raise RedisConnectionError(f"no node says where the Redis master is; {why}")

    async def survey(self) -> list[tuple[HostPort, Any]]:
        """Ask every node for the master; return each node with its raw answer, or the error by which it failed."""
        found: list[tuple[HostPort, Any]] = []
        for node, client in list(self._nodes):
            try:
                answer = await client.execute_command(*self._address.question)  # type: ignore[no-untyped-call]  # redis-py
            except (RedisError, OSError) as error:
                answer = error
            found.append((node, answer))
        return found

    async def close(self) -> None:
        for _, client in self._nodes:
            await client.aclose()


class MasterPool(SentinelConnectionPool):
    """A connection pool that drops idle connections after a failed call, because a frozen master never closes them.

    While calls go on, the pool asks a node for the master once a second, and ends connections to a former master.
    """

    doubted = False
    _look_at = 0.0
    _looking: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Ask a node in the background which server is the master, at most once a second."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        self.look()
        if self.doubted:
            self.doubted = False
            await self.disconnect(inuse_connections=False)
        return await super().get_connection(*args, **kwargs)  # type: ignore[no-untyped-call]  # redis-py

    async def _look(self) -> None:
        with suppress(RedisError, OSError):  # the master that was last named stays valid
            await self.get_master_address(LOOK_SECONDS / 2)  # an answer to another pool may be that young

    async def get_master_address(self, max_age_s: float = ASK_AGAIN_SECONDS) -> HostPort:
        """Find the address of the master, as ``Locator`` says; idle connections to a former master end."""
        address: HostPort = await self.sentinel_manager.discover_master(self.service_name, max_age_s)
        if address != self.master_address:
            self.master_address = address
            await self.disconnect(inuse_connections=False)
        return address

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await super().aclose()


class MasterConnection(Cancellable, SentinelManagedConnection):
    """A connection that ends when its server is not the master any more, or has lost the slot."""

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except (AskError, ClusterDownError) as error:  # redis-py's MovedError is an AskError
            self.connection_pool.doubted = True
            await self.disconnect()
            raise RedisConnectionError(f"not the master of this slot: {error}") from error
        except (RedisConnectionError, RedisTimeoutError, asyncio.CancelledError):
            self.connection_pool.doubted = True
            raise


class MasterTLSConnection(MasterConnection, SSLConnection):
    pass


@dataclass(frozen=True, slots=True)
class Nodes:
    """The options for connections to the masters of one URL. options: redis-py's, without host and port.

    connection_class: the class for a connection to a given host and port, with or without TLS.
    """

    address: RedisAddress
    locator: Locator
    connection_class: type[AbstractConnection]
    options: dict[str, Any]

    @classmethod
    def of(cls, address: RedisAddress, **options: Any) -> Nodes:
        """Make the nodes of an address. Options in its URL win over ``options``."""
        options |= connection_options(address.url)
        connection_class = options.pop("connection_class")
        for name in ("host", "port"):
            options.pop(name, None)
        asking = options | dict.fromkeys(("socket_timeout", "socket_connect_timeout"), address.node_timeout_s)
        if address.kind == "sentinel":
            asking.pop("db", None)
            asking |= {"username": address.sentinel_username, "password": address.sentinel_password}
        asking["connection_class"] = connection_class
        nodes = [
            (node, aioredis.Redis.from_pool(ConnectionPool(host=node[0], port=node[1], **asking)))
            for node in address.nodes
        ]
        return cls(address, Locator(address, nodes), connection_class, options)

    def master_pool(self, tag: str) -> MasterPool:
        """Connections to the present master for keys with this hash tag; with Sentinels there is one for all tags."""
        kind = MasterTLSConnection if issubclass(self.connection_class, SSLConnection) else MasterConnection
        return MasterPool(tag, self.locator, connection_class=kind, **self.options)  # type: ignore[no-untyped-call]  # redis-py

    def node_pool(self, place: HostPort) -> ConnectionPool:
        """Connections to this server, whichever slots it owns."""
        host, port = place
        return ConnectionPool(host=host, port=port, connection_class=self.connection_class, **self.options)
