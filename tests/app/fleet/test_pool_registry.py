"""Replicas read the registry of pools, survive bad fields, and restore a registry that Redis has lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
from warmfleet.protocol.pools import Placement, read_placement, read_registry
from warmfleet.protocol.wire import Keys

if TYPE_CHECKING:
    import redis.asyncio as aioredis


@pytest.fixture
def registry(store: aioredis.Redis, model: str) -> PoolRegistry:
    return PoolRegistry(store, model)


async def test_a_model_without_a_registry_has_none(registry: PoolRegistry) -> None:
    assert await registry.read() == ()
    assert await registry.placements() == {}


async def test_pools_are_read_in_a_fixed_order_with_their_state(registry: PoolRegistry, model: str) -> None:
    await registry.write([PoolEntry(f"{model}#{name}") for name in ("10", "2", "b")] + [PoolEntry(model)])
    await registry.write([PoolEntry(f"{model}#2", draining=True, moving=True)])
    found = await registry.read()
    assert [entry.tag for entry in found] == [model, f"{model}#2", f"{model}#b", f"{model}#10"]
    assert [entry.tag for entry in found if entry.draining and entry.moving] == [f"{model}#2"]
    assert all(entry.since_ms for entry in found)
    await registry.remove(f"{model}#2")
    assert f"{model}#2" not in [entry.tag for entry in await registry.read()]


def test_fields_that_are_no_pools_of_the_model_are_left_out() -> None:
    good = PoolEntry("org/m#1").encode().encode()
    fields = {
        b"org/m#1": good,
        b"other#1": good,
        b"org/m#a b": good,
        b"org/m#": good,
        b"\xff": good,
        b"org/m#2": b"[]",
        b"org/m#3": b"{",
    }
    assert [entry.tag for entry in read_registry("org/m", fields)] == ["org/m#1"]
    assert read_registry("org/m", {b"org/m#4": b'{"state":"gone"}'}) == ()
    assert read_registry("org/m", {b"org/m": b'{"state":"serving","move":1,"since_ms":"x"}'}) == (PoolEntry("org/m"),)


@pytest.mark.parametrize(
    "bad", [b"", b"x", b"[1]", b'{"pool":"a b","host":"h","seen_ms":1}', b'{"pool":"m","host":"h"}']
)
def test_a_place_that_is_none_is_none(bad: bytes) -> None:
    assert read_placement(bad) is None


def test_a_place_comes_back_as_it_was_written() -> None:
    place = Placement("m#1", "node-3", 17, {"0": 100, "1": 50})
    assert read_placement(place.encode()) == place
    assert place.capacity_blocks == 150
    odd = json.loads(place.encode()) | {"blocks": {"0": -4, "1": "many", "2": 7}}
    assert read_placement(json.dumps(odd)) == Placement("m#1", "node-3", 17, {"2": 7})


async def test_a_registry_that_redis_lost_is_written_back(
    store: aioredis.Redis, registry: PoolRegistry, model: str
) -> None:
    """After Redis comes back empty, a replica that knows the pools writes them for replicas that do not."""
    await registry.write([PoolEntry(f"{model}#1"), PoolEntry(f"{model}#2", draining=True)])
    before = await registry.read()
    await store.unlink(Keys(model).pools)
    assert await PoolRegistry(store, model).read() == (), "a replica that has just started knows none"
    assert await registry.read() == before
    assert await PoolRegistry(store, model).read() == before
