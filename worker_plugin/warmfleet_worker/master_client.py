"""A plain Redis client whose connections always lead to the present master, which Sentinels or Cluster nodes name.

redis-py's own Sentinel pool does the work: a connection asks for the master when it connects, and ends when its server
is no master any more. All keys of a model are in one slot, so in a Cluster, too, one server has them all; with a
Cluster the pool asks ``CLUSTER SLOTS``. The routers' asyncio counterpart: ``warmfleet/fleet/connection/failover.py``.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import redis
from redis.connection import ConnectionPool, SSLConnection, parse_url
from redis.exceptions import AskError, ClusterDownError, RedisError
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection

from warmfleet_worker.protocol.redis_address import ASK_AGAIN_SECONDS, LOOK_SECONDS, HostPort, RedisAddress

if TYPE_CHECKING:
    from collections.abc import Sequence


class Locator:
    """Asks the nodes in turn for the master, beginning with the node that answered last.

    redis-py's pool calls ``discover_master``.
    """

    def __init__(self, address: RedisAddress, tag: str, nodes: Sequence[tuple[HostPort, redis.Redis]]) -> None:
        self._address = address
        self._tag = tag
        self._nodes = list(nodes)
        self._answer: tuple[float, HostPort] | None = None  # (reused until this time, the master)

    def discover_master(self, _service: str) -> HostPort:
        """Return the present master, or the last known one if no node answers.

        Takes twice ``node_timeout_s`` for every silent node. Raises ConnectionError if no node has ever answered.
        """
        if self._answer and time.monotonic() < self._answer[0]:
            return self._answer[1]
        try:
            self._answer = (time.monotonic() + ASK_AGAIN_SECONDS, self._ask())
        except redis.ConnectionError:
            if self._answer is None:
                raise
            self._answer = (time.monotonic() + LOOK_SECONDS, self._answer[1])
        return self._answer[1]

    def _ask(self) -> HostPort:
        why = "no node knows it"
        for node in list(self._nodes):
            (host, port), client = node
            try:
                answer = client.execute_command(*self._address.question)  # type: ignore[no-untyped-call]  # redis-py
                found = self._address.master_in(answer, self._tag, host)
            except (RedisError, OSError, ValueError, TypeError) as error:
                why = f"{host}:{port}: {error}"
                continue
            if found:
                self._nodes.remove(node)
                self._nodes.insert(0, node)
                return found
        raise redis.ConnectionError(f"no node says where the Redis master is; {why}")

    def close(self) -> None:
        for _, client in self._nodes:
            client.close()


class MasterPool(SentinelConnectionPool):
    """A pool that asks for the master every LOOK_SECONDS of use, so that connections to a former master end."""

    _next_look = 0.0

    def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            with suppress(redis.RedisError, OSError):  # the old answer stays valid
                self.get_master_address()  # type: ignore[no-untyped-call]  # redis-py
        return super().get_connection(*args, **kwargs)


class MasterConnection(SentinelManagedConnection):
    """A connection that ends when its server says that the slot is elsewhere; the next one asks for the master."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except (AskError, ClusterDownError) as error:  # redis-py's MovedError is an AskError
            self.disconnect()  # type: ignore[no-untyped-call]  # redis-py
            raise redis.ConnectionError(f"not the master of this slot: {error}") from error


class MasterTLSConnection(MasterConnection, SSLConnection):
    pass


class MasterRedis(redis.Redis):
    """Closes the clients of the Sentinels or Cluster nodes together with itself."""

    def close(self) -> None:
        super().close()
        self.connection_pool.sentinel_manager.close()  # type: ignore[attr-defined]  # a MasterPool


def master_client(address: RedisAddress, tag: str, **options: Any) -> redis.Redis:
    """Make a client of the master that has the keys with this hash tag.

    options: arguments of its connections; options in the URL override them.
    """
    options |= dict(parse_url(address.url))  # type: ignore[no-untyped-call]  # redis-py
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
        (node, redis.Redis.from_pool(ConnectionPool(host=node[0], port=node[1], **asking))) for node in address.nodes
    ]
    kind = MasterTLSConnection if base else MasterConnection
    locator = Locator(address, tag, nodes)
    pool = MasterPool(address.service, locator, connection_class=kind, **options)  # type: ignore[no-untyped-call]  # redis-py
    return MasterRedis.from_pool(pool)
