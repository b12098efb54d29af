"""A plain Redis client whose connections go to the server that is master now, as Sentinels or Cluster nodes say.

redis-py's own Sentinel pool does the work: a connection asks for the master when it connects, and ends when its server
is no master any more. All keys of a model are in one slot, so a Cluster has one server for them, too: the same pool is
used, and it asks a node ``CLUSTER SLOTS``. So scripts, pipelines, TIME and INFO work as with a single server.
With a single server this module is not used. The plugin has the same without asyncio:
``warmfleet_worker/master_client.py``.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
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


class Locator:
    """Asks the Sentinels or Cluster nodes in turn where the master is, beginning with the node that answered last.

    It asks one question at a time, however many connections wait. redis-py's pool calls ``discover_master``.
    """

    def __init__(self, address: RedisAddress, tag: str, nodes: Sequence[tuple[HostPort, aioredis.Redis]]) -> None:
        self._address = address
        self._tag = tag
        self._nodes = list(nodes)
        self._known: tuple[float, HostPort] | None = None  # (good until, the master)
        self._asking = asyncio.Lock()

    async def discover_master(self, _service: str) -> HostPort:
        """The address of the master. Each silent node delays it by twice ``node_timeout_s``.

        Raises ConnectionError if no node has ever known one.
        """
        async with self._asking:
            if self._known and time.monotonic() < self._known[0]:
                return self._known[1]
            try:
                self._known = (time.monotonic() + ASK_AGAIN_SECONDS, await self._ask())
            except RedisConnectionError:
                if self._known is None:
                    raise
                self._known = (time.monotonic() + LOOK_SECONDS, self._known[1])  # no node names another master
            return self._known[1]

    async def _ask(self) -> HostPort:
        why = "no node knows it"
        for node in list(self._nodes):
            (host, port), client = node
            self._nodes.remove(node)  # to the end of the list, also if this call is cancelled while the node is silent
            self._nodes.append(node)
            try:
                answer = await client.execute_command(*self._address.question)  # type: ignore[no-untyped-call]  # redis-py
                found = self._address.master_in(answer, self._tag, host)
            except (RedisError, OSError, ValueError, TypeError) as error:
                why = f"{host}:{port}: {error}"
                continue
            if found:
                self._nodes.remove(node)
                self._nodes.insert(0, node)
                return found
        raise RedisConnectionError(f"no node says where the Redis master is; {why}")

    async def survey(self) -> list[tuple[HostPort, Any]]:
        """Every node with its raw answer to the question for the master, or with the error by which it failed."""
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
    """A pool that drops its idle connections after a call has failed: a frozen master keeps its connections open.

    It also asks a node for the master once a second, while calls go on; connections to a former master then end.
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
            await self.get_master_address()  # type: ignore[no-untyped-call]  # redis-py

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await super().aclose()
        await self.sentinel_manager.close()  # the clients of the Sentinels or Cluster nodes


class MasterConnection(Cancellable, SentinelManagedConnection):
    """Ends when its server is no master any more or has no longer the slot; the next connection asks a node anew."""

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


def master_pool(address: RedisAddress, tag: str, **options: Any) -> MasterPool:
    """Connections to the master for keys with this hash tag. options: of its connections; those in the URL win."""
    options |= connection_options(address.url)
    asking_class = options.pop("connection_class")
    for name in ("host", "port"):
        options.pop(name, None)
    asking = options | dict.fromkeys(("socket_timeout", "socket_connect_timeout"), address.node_timeout_s)
    if address.kind == "sentinel":
        asking.pop("db", None)
        asking |= {"username": address.sentinel_username, "password": address.sentinel_password}
    asking["connection_class"] = asking_class
    nodes = [
        (node, aioredis.Redis.from_pool(ConnectionPool(host=node[0], port=node[1], **asking))) for node in address.nodes
    ]
    kind = MasterTLSConnection if issubclass(asking_class, SSLConnection) else MasterConnection
    locator = Locator(address, tag, nodes)
    return MasterPool(address.service, locator, connection_class=kind, **options)  # type: ignore[no-untyped-call]  # redis-py
