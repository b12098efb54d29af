"""A plain Redis client whose connections go to wherever the master is now, as Sentinels or Cluster nodes tell.

redis-py's own Sentinel pool does the work: a connection asks when it connects, and when it meets a server that is no
master any more it ends. All keys of a model are in one slot, so in a Cluster, too, there is one server to talk to:
the same pool, asked ``CLUSTER SLOTS``. The routers have this in asyncio: ``warmfleet/fleet/failover.py``.
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
    """Asks the nodes in turn, first the one that knew last. ``discover_master`` is what redis-py's pool calls."""

    def __init__(self, address: RedisAddress, tag: str, nodes: Sequence[tuple[HostPort, redis.Redis]]) -> None:
        self._address = address
        self._tag = tag
        self._nodes = list(nodes)
        self._known: tuple[float, HostPort] | None = None  # good until then

    def discover_master(self, _service: str) -> HostPort:
        """Raises ConnectionError if no node ever knew. Takes twice ``node_timeout_s`` for each that is silent."""
        if self._known and time.monotonic() < self._known[0]:
            return self._known[1]
        try:
            self._known = (time.monotonic() + ASK_AGAIN_SECONDS, self._ask())
        except redis.ConnectionError:
            if self._known is None:
                raise
            self._known = (time.monotonic() + LOOK_SECONDS, self._known[1])  # nobody says that it is another
        return self._known[1]

    def _ask(self) -> HostPort:
        why = "none of them knows"
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
        raise redis.ConnectionError(f"nobody says where the Redis master is; {why}")

    def close(self) -> None:
        for _, client in self._nodes:
            client.close()


class MasterPool(SentinelConnectionPool):
    """Asks once a second, too: connections to a master that was ours end then."""

    _look_at = 0.0

    def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            with suppress(redis.RedisError, OSError):  # the old answer stands
                self.get_master_address()  # type: ignore[no-untyped-call]  # redis-py
        return super().get_connection(*args, **kwargs)


class MasterConnection(SentinelManagedConnection):
    """Ends when its server says that the slot is elsewhere; the next one asks anew."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)
        except (AskError, ClusterDownError) as error:  # AskError: MOVED is one, too
            self.disconnect()  # type: ignore[no-untyped-call]  # redis-py
            raise redis.ConnectionError(f"not the master of this slot: {error}") from error


class MasterTLSConnection(MasterConnection, SSLConnection):
    pass


class MasterRedis(redis.Redis):
    """Closes those that were asked with it."""

    def close(self) -> None:
        super().close()
        self.connection_pool.sentinel_manager.close()  # type: ignore[attr-defined]  # a MasterPool


def master_client(address: RedisAddress, tag: str, **options: Any) -> redis.Redis:
    """A client of the master for keys with this hash tag. ``options``: of its connections; those in the URL win."""
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
