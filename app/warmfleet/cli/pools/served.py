"""The pools that a command is about: its models are given by name, and the registry in Redis tells their pools."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.running_stack import models_of
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.pool_registry import PoolRegistry
from warmfleet.protocol.pools import served_model
from warmfleet.protocol.redis_address import RedisAddressError, parse, with_ca
from warmfleet.protocol.wire import WireError, model_tag

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence

    from warmfleet.protocol.pools import PoolEntry

TIMEOUT_S = 2.0


def tags_of(options: argparse.Namespace) -> list[str]:
    """The tags of all pools of the models that a command with ``--model`` and ``--redis`` is about.

    A model without ``#`` stands for all its pools. Raises CommandError and FleetUnavailable.
    """
    return asyncio.run(all_tags(options.redis, models_of(options)))


async def all_tags(url: str, models: Sequence[str]) -> list[str]:
    """As ``tags_of``, for these models. Raises CommandError and FleetUnavailable."""
    found: list[str] = []
    for model in models:
        registered: Sequence[str] = ()
        if "#" not in model:
            async with registry_of(url, model) as registry:
                registered = [entry.tag for entry in await _read(registry, url)]
        found += registered or [model]
    return list(dict.fromkeys(found))


async def _read(registry: PoolRegistry, url: str) -> Sequence[PoolEntry]:
    try:
        return await registry.read()
    except FleetUnavailable as error:
        if parse(url).kind != "cluster":
            raise
        name = registry.name
        text = (
            f"{error}; it has the registry of {name}'s pools: name pools of other masters yourself (--model '{name}#1')"
        )
        raise FleetUnavailable(text) from error


@asynccontextmanager
async def registry_of(url: str, model: str) -> AsyncIterator[PoolRegistry]:
    """The registry of the served model that ``model``, a name or the tag of a pool, belongs to. Raises CommandError."""
    name = served_model(model)
    try:
        redis = connect(complete(url), model_tag(name), timeout_s=TIMEOUT_S)
    except (RedisAddressError, WireError) as error:
        raise CommandError(str(error)) from error
    try:
        yield PoolRegistry(redis, name)
    finally:
        await redis.aclose()


@asynccontextmanager
async def pool_of(url: str, tag: str) -> AsyncIterator[Fleet]:
    """All calls on one pool. Raises CommandError."""
    try:
        fleet = Fleet(connect(complete(url), model_tag(tag), timeout_s=TIMEOUT_S), tag)
    except (RedisAddressError, WireError) as error:
        raise CommandError(str(error)) from error
    try:
        yield fleet
    finally:
        await fleet.close()


def complete(url: str) -> str:
    """The address of Redis with the authority that the environment names. Raises RedisAddressError."""
    return with_ca(url, os.environ.get("WARMFLEET_REDIS_CA", ""))
