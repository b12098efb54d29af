"""The registry of a served model's pools, with the state of each, as ``warmfleet pools`` wrote it.

``clear`` deletes the keys of a pool that was removed, and ``master_of`` tells which server has a pool's keys.
``warmfleet.protocol.pools`` describes the registry's two keys. Their hash tag is the model's name without ``#``,
so they need a client of their own: ``connect(url, model_tag(name))``.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from warmfleet.fleet.bookings import new_reservation
from warmfleet.fleet.client import asked, pairs, redis_errors
from warmfleet.fleet.connection.masters import SlotLine
from warmfleet.fleet.connection.packing import pack_command
from warmfleet.fleet.connection.redis_connections import RouterRedis
from warmfleet.fleet.connection.reply_errors import RefusedCall
from warmfleet.protocol.pools import PoolEntry, read_placement, read_registry, served_model
from warmfleet.protocol.wire import SINGLE_KEYS, Keys

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Iterable, Mapping

    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet
    from warmfleet.protocol.pools import Placement

logger = logging.getLogger(__name__)

__all__ = ["PoolEntry", "PoolRegistry", "clear", "master_of", "served_model"]

#: Keys under the served model's name that belong to the whole model, not to the pool of the same name; and keys that
#: only the operator may write.
OF_THE_MODEL = frozenset({"pools", "placement"})
OF_THE_OPERATOR = frozenset({"operator_approved", "operator_policy"})
QUEUE_KEYS = ("tickets", "leases", "flows", "lengths", "served", "clock")
REAPED_AT_ONCE = 8
COLLECTED_AT_ONCE = 512  # most blocks in one call, which blocks Redis for other pools for half a millisecond


class PoolRegistry:
    """The pools of one served model. Routers ``read`` it once a second; the other calls are the operator's."""

    def __init__(self, redis: aioredis.Redis, name: str) -> None:
        """redis: a client made by ``connect``. name: the served model's name, without ``#``. Raises WireError for a
        malformed name, TypeError for another client.
        """
        if not isinstance(redis, RouterRedis):
            raise TypeError("a registry needs a client of warmfleet.fleet.connect")
        self.name = name
        self._redis = redis
        keys = Keys(served_model(name))
        self._pools, self._placement = keys.pools, keys.placement
        self._reading = pack_command("HGETALL", self._pools)
        self._known: Mapping[bytes, bytes] = {}

    async def read(self) -> tuple[PoolEntry, ...]:
        """Read all pools of the model; () without a registry: then this replica's settings name the pools.

        If the registry has vanished, Redis has lost its data, because the operator cannot remove a model's last pool
        while a router serves it; the registry is then written back as last read. Raises FleetUnavailable.
        """
        return await self.told(await self.ask())

    def ask(self) -> asyncio.Future[dict[bytes, bytes]]:
        """Read the registry's raw fields from Redis, for ``told``."""
        return asked(self._redis, self._reading, pairs)

    async def told(self, found: Mapping[bytes, bytes]) -> tuple[PoolEntry, ...]:
        """Return all pools, as ``read`` does, from the raw fields that ``ask`` has read."""
        if not found and self._known:
            logger.warning("the registry of pools of %s was lost in Redis: written back", self.name)
            with redis_errors():
                for tag, state in self._known.items():  # HSETNX: the operator may be writing, too
                    await cast("Awaitable[bool]", self._redis.hsetnx(self._pools, tag.decode(), state.decode()))
            found = await self.ask()
        self._known = found
        return read_registry(self.name, found)

    async def write(self, entries: Iterable[PoolEntry]) -> None:
        """Enter pools, or change their state, all at once and from now on. Raises FleetUnavailable."""
        now_ms = int(time.time() * 1000)
        fields: dict[Any, Any] = {entry.tag: replace(entry, since_ms=now_ms).encode() for entry in entries}
        if fields:
            with redis_errors():
                await self._redis.hset(self._pools, mapping=fields)

    async def remove(self, tag: str) -> None:
        """Remove a pool from the registry. Raises FleetUnavailable."""
        with redis_errors():
            await self._redis.hdel(self._pools, tag)

    async def close(self) -> None:
        await self._redis.aclose()

    async def placements(self) -> dict[str, Placement]:
        """Read the pool in which each server is, by the server's name. Raises FleetUnavailable."""
        with redis_errors():
            found = await cast("Awaitable[dict[bytes, bytes]]", self._redis.hgetall(self._placement))
        read = {name.decode("utf-8", "replace"): read_placement(packed) for name, packed in found.items()}
        return {name: place for name, place in sorted(read.items()) if place is not None}


async def clear(fleet: Fleet, *, shared: bool) -> bool:
    """Delete all keys of the pool; False if there were none. shared: the pool has the name of its served model, so
    the model's own keys (registry, operator's keys) stay.

    The counts of clients with limits (requests in flight, used tokens) stay until they expire. May be called again.
    Raises FleetUnavailable.
    """
    keys, redis = fleet.keys, fleet.redis
    with redis_errors():
        workers = {name.decode() for key in (keys.load, keys.workers) for name in await _names(redis, key)}
        servers = {name.decode() for name in await _names(redis, keys.servers)}
    for worker_id in [*workers, *(f"{server}.0" for server in servers)]:
        await fleet.upkeep.forget(worker_id)
    had = bool(workers or servers)
    while (await fleet.upkeep.collect(COLLECTED_AT_ONCE))[1]:  # before the first ZADD, which a full Redis refuses
        pass
    while ids := await _first_leases(fleet):  # only now, because no decision books where no worker is left
        had = True
        with redis_errors():
            await redis.zadd(keys.leases, dict.fromkeys(ids, 0))
        await fleet.bookings.settle(new_reservation(1), "finished")  # reaps what has expired, with its blocks' keys
    names = [keys.prefix + name for name in sorted(SINGLE_KEYS - OF_THE_MODEL - OF_THE_OPERATOR)]
    with redis_errors():
        count = await redis.unlink(*names, *(f"{keys.queue2}:{name}" for name in QUEUE_KEYS))
    had = bool(count) or had
    if shared:
        return had
    try:
        with redis_errors():
            return bool(await redis.unlink(*(keys.prefix + name for name in sorted(OF_THE_OPERATOR)))) or had
    except RefusedCall:  # the Redis user of routers may not delete these: they may stay until `admin` removes the pool
        return True


def master_of(redis: aioredis.Redis) -> str:
    """Return the last known master (``host:port``) of a client of a Cluster or of Sentinels; "" for a single server.

    In a Cluster it is that of the scripts' line or, before the first script, of redis-py's own connection pool.
    """
    line = getattr(redis, "multiplexed", None)
    seen = line.master if isinstance(line, SlotLine) else None
    address = seen if isinstance(seen, tuple) else getattr(redis.connection_pool, "master_address", None)
    return f"{address[0]}:{address[1]}" if address else ""


async def _names(redis: aioredis.Redis, key: str) -> list[bytes]:
    return await cast("Awaitable[list[bytes]]", redis.hkeys(key))


async def _first_leases(fleet: Fleet) -> list[bytes]:
    with redis_errors():
        return cast("list[bytes]", await fleet.redis.zrange(fleet.keys.leases, 0, REAPED_AT_ONCE - 1))
