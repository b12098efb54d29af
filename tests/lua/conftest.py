"""A fleet without streams, for the scripts of the read path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.lua.stream import Core
from tests.lua.world import World

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet


@pytest.fixture
def world(store: aioredis.Redis, fleet: Fleet) -> World:
    """An empty fleet on each of the two servers."""
    return World(store, fleet)


@pytest.fixture
async def core(store: aioredis.Redis, fleet: Fleet) -> Core:
    """A worker that has joined through its stream."""
    core = Core(store, fleet)
    await core.join()
    await core.applied()
    return core
