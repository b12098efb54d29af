"""A plain Redis client whose connections go to wherever the master is now, as Sentinels or Cluster nodes tell.

redis-py's own Sentinel pool does the work: a connection asks when it connects, and when it meets a server that is no
master any more it ends. All keys of a model are in one slot, so in a Cluster, too, there is one server to talk to:
the same pool, asked ``CLUSTER SLOTS``. Hence scripts, pipelines, TIME and INFO work as with a single server, whose
path does not come by here. The plugin has this without asyncio: ``warmfleet_worker/master_client.py``.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool, SSLConnection, parse_url
from redis.asyncio.sentinel import SentinelConnectionPool, SentinelManagedConnection
from redis.exceptions import AskError, ClusterDownError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from warmfleet.protocol.redis_address import ASK_AGAIN_SECONDS, LOOK_SECONDS, HostPort, RedisAddress

if TYPE_CHECKING:
    from collections.abc import Sequence


class Locator:
    """Asks the nodes in turn, first the one that knew last; one question at a time, however many connections wait.

    ``discover_master`` is what redis-py's pool calls.
    """

    def __init__(self, address: RedisAddress, tag: str, nodes: Sequence[tuple[HostPort, aioredis.Redis]]) -> None:
        self._address = address
        self._tag = tag
        self._nodes = list(nodes)
        self._known: tuple[float, HostPort] | None = None  # good until then
        self._asking = asyncio.Lock()

    async def discover_master(self, _service: str) -> HostPort:
        """Raises ConnectionError if no node ever knew. Takes twice ``node_timeout_s`` for each that is silent."""
        async with self._asking:
            if self._known and time.monotonic() < self._known[0]:
                return self._known[1]
            try:
                self._known = (time.monotonic() + ASK_AGAIN_SECONDS, await self._ask())
            except RedisConnectionError:
                if self._known is None:
                    raise
                self._known = (time.monotonic() + LOOK_SECONDS, self._known[1])  # nobody says that it is another
            return self._known[1]

    async def _ask(self) -> HostPort:
        why = "none of them knows"
        for node in list(self._nodes):
            (host, port), client = node
            self._nodes.remove(node)  # to the end, also if we are cancelled while it keeps us waiting
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
        raise RedisConnectionError(f"nobody says where the Redis master is; {why}")

    async def close(self) -> None:
        for _, client in self._nodes:
            await client.aclose()


class MasterPool(SentinelConnectionPool):
    """After a call that failed, idle connections are not trusted either: a frozen master keeps them all open.

    Besides, somebody is asked once a second, beside the calls: connections to a master that was ours end then.
    """

    doubted = False
    _look_at = 0.0
    _looking: asyncio.Task[None] | None = None

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
        if self.doubted:
            self.doubted = False
            await self.disconnect(inuse_connections=False)
        return await super().get_connection(*args, **kwargs)  # type: ignore[no-untyped-call]  # redis-py

    async def _look(self) -> None:
        with suppress(RedisError, OSError):  # the old answer stands
            await self.get_master_address()  # type: ignore[no-untyped-call]  # redis-py

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await super().aclose()


class MasterConnection(SentinelManagedConnection):
    """Ends when its server is no master, or says that the slot is elsewhere; the next one asks anew."""

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)
        except (AskError, ClusterDownError) as error:  # AskError: MOVED is one, too
            self.connection_pool.doubted = True
            await self.disconnect()
            raise RedisConnectionError(f"not the master of this slot: {error}") from error
        except (RedisConnectionError, RedisTimeoutError, asyncio.CancelledError):
            self.connection_pool.doubted = True
            raise


class MasterTLSConnection(MasterConnection, SSLConnection):
    pass


class MasterRedis(aioredis.Redis):
    """Closes those that were asked with it."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self.connection_pool.sentinel_manager.close()  # type: ignore[attr-defined]  # a MasterPool


def master_client(address: RedisAddress, tag: str, **options: Any) -> aioredis.Redis:
    """A client of the master for keys with this hash tag. ``options``: of its connections; those in the URL win."""
    options |= dict(parse_url(address.url))
    base = options.pop("connection_class", None)
    for name in ("host", "port"):
        options.pop(name, None)
    asking = options | dict.fromkeys(("socket_timeout", "socket_connect_timeout"), address.node_timeout_s)
    if address.kind == "sentinel":
        asking.pop("db", None)
        asking |= {"username": address.sentinel_username, "password": address.sentinel_password}
    if base:
        asking["connection_class"] = base
    nodes = [
        (node, aioredis.Redis.from_pool(ConnectionPool(host=node[0], port=node[1], **asking))) for node in address.nodes
    ]
    kind = MasterTLSConnection if base else MasterConnection
    locator = Locator(address, tag, nodes)
    pool = MasterPool(address.service, locator, connection_class=kind, **options)  # type: ignore[no-untyped-call]  # redis-py
    return MasterRedis.from_pool(pool)
