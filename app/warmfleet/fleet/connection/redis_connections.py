"""The connections of a replica to Redis, shared by all of its pools of workers.

Scripts and small commands of all pools share one connection to each master. Calls that block have one connection for
each pool. A single server or Sentinels have one master; a Cluster as many as own slots of the pools.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from warmfleet.errors import BadArgument
from warmfleet.fleet.connection.cancellable import connection_options
from warmfleet.fleet.connection.failover import Nodes
from warmfleet.fleet.connection.masters import Masters, SlotLine
from warmfleet.fleet.connection.multiplexed import BLOCKED_STEP_S, Multiplexed
from warmfleet.fleet.connection.reply_errors import failure
from warmfleet.protocol.redis_address import RedisAddressError, all_nodes, parse, slot_ranges

if TYPE_CHECKING:
    from warmfleet.protocol.redis_address import HostPort, SlotRange

CONNECT_S = 1.0  # longest time to open a connection; a request waits less: its call fails at the limit in Timeouts
UPKEEP_S = 2.0  # longest time of a call that no request waits for


class RouterRedis(aioredis.Redis):
    """A redis-py client for one hash tag, with the connection for its scripts and another one for calls that block."""

    #: The connections that end with this client, because no other client uses them.
    owned: RedisConnections | None = None

    def __init__(self, *args: Any, line: Multiplexed | SlotLine | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.multiplexed = line or Multiplexed(self.connection_pool)
        self._own_line = line is None
        silent_s = self.connection_pool.connection_kwargs.get("socket_timeout") or UPKEEP_S
        self.blocking = Multiplexed(self.connection_pool, BLOCKED_STEP_S, silent_s)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.blocking.aclose()
        if isinstance(self.multiplexed, SlotLine):
            self.multiplexed.leave()
        elif self._own_line:
            await self.multiplexed.aclose()
        await super().aclose(close_connection_pool)
        if self.owned is not None:
            await self.owned.aclose()


class RedisConnections:
    """The clients of one URL (see ``warmfleet.protocol.redis_address``); they connect on first use.

    redis-py does not retry by itself: after a time-out the caller of a script decides whether to ask again. timeout_s:
    the limit for opening a connection; each script call has a limit of its own (``Timeouts``). max_connections: of
    redis-py, to one master. Raises BadArgument.
    """

    def __init__(self, url: str, *, timeout_s: float = CONNECT_S, max_connections: int = 256) -> None:
        try:
            where = parse(url)
        except RedisAddressError as error:
            raise BadArgument(str(error)) from error
        options: dict[str, Any] = {
            "socket_connect_timeout": timeout_s,
            "socket_timeout": max(timeout_s, UPKEEP_S),
            "retry": Retry(NoBackoff(), 0),
            "max_connections": max_connections,
            "decode_responses": False,
        }
        self._nodes = None if where.kind == "single" else Nodes.of(where, **options)
        self._masters: Masters | None = None
        self._pool: ConnectionPool | None = None
        self._line: Multiplexed | None = None
        if self._nodes is not None and where.kind == "cluster":
            self._masters = Masters(self._nodes)
            return
        if self._nodes is None:
            self._pool = ConnectionPool(**options | connection_options(url))
        else:
            self._pool = self._nodes.master_pool(where.service)
        self._line = Multiplexed(self._pool)

    def of(self, tag: str) -> RouterRedis:
        """Return a client for keys with this hash tag. Closing the client leaves shared connections open."""
        if self._masters is None:
            return RouterRedis(connection_pool=self._pool, line=self._line)
        client = RouterRedis(connection_pool=self._masters.nodes.master_pool(tag), line=SlotLine(self._masters, tag))
        client.auto_close_connection_pool = True
        return client

    async def slot_ranges(self) -> tuple[SlotRange, ...]:
        """Ask a node which slots each master of the Cluster owns; return () without a Cluster."""
        return slot_ranges(*await self._cluster_slots())

    async def of_every_node(self, *command: str) -> dict[HostPort, Any]:
        """Send a command to each master and replica of the Cluster; return each raw answer or error by node.

        The nodes are those that the first node to answer names; {} without a Cluster.
        """
        if self._masters is None:
            return {}
        nodes = self._masters.nodes
        places = all_nodes(*await self._cluster_slots())
        answers = await asyncio.gather(*[_answer(nodes.node_pool(place), command) for place in places])
        return dict(zip(places, answers, strict=True))

    async def _cluster_slots(self) -> tuple[Any, str]:
        """Read the raw answer to ``CLUSTER SLOTS`` of the first node that answers, and its host; else nothing."""
        if self._masters is not None:
            for (host, _), answer in await self._masters.nodes.locator.survey():
                if not isinstance(answer, Exception):
                    return answer, host
        return (), ""

    async def aclose(self) -> None:
        """Close the connections that the clients share. Close the clients first."""
        if self._masters is not None:
            await self._masters.aclose()
        if self._line is not None:
            await self._line.aclose()
        if self._pool is not None:
            await self._pool.aclose()
        if self._nodes is not None:
            await self._nodes.locator.close()


async def _answer(pool: ConnectionPool, command: tuple[str, ...]) -> Any:
    """Send this command; return the raw answer, or the error by which it failed."""
    client = aioredis.Redis.from_pool(pool)
    try:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]  # redis-py
    except (RedisError, OSError) as error:
        return failure(error)
    finally:
        await client.aclose()
