"""Finds the pools that a command is about: options name models, and the registry in Redis lists each model's pools."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.running_stack import models_of, models_of_settings
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, connect
from warmfleet.fleet.connection.redis_connections import RedisConnections
from warmfleet.fleet.pool_registry import PoolRegistry
from warmfleet.protocol.pools import PoolEntry, served_model
from warmfleet.protocol.redis_address import RedisAddressError, parse, with_ca
from warmfleet.protocol.wire import WireError, model_tag

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

    import redis.asyncio as aioredis

    from warmfleet.protocol.pools import Placement
    from warmfleet.protocol.redis_address import SlotRange

Answer = TypeVar("Answer")
TIMEOUT_S = 2.0
SEEN_S = 90.0  # a server has ended if its record is older: it renews the record every 30 s, by its own clock


def tags_of(options: argparse.Namespace) -> list[str]:
    """Return the tags of all pools of the models that a command with ``--model`` and ``--redis`` is about.

    ``--model NAME#POOL`` means one pool, ``--model NAME`` all pools of a model. Raises CommandError, FleetUnavailable.
    """
    models, settings = models_of(options), models_of_settings(options)
    return asyncio.run(all_tags(options.redis, models if options.model else map(served_model, models), settings))


async def all_tags(url: str, models: Iterable[str], settings: Sequence[str]) -> list[str]:
    """Return the tags of all pools of these models. settings: the tags of WARMFLEET_MODELS."""
    found: list[str] = []
    for model in dict.fromkeys(models):
        named = [tag for tag in settings if served_model(tag) == model]
        found += [model] if "#" in model else [entry.tag for entry in await entries_of(url, model, named)]
    return list(dict.fromkeys(found))


async def entries_of(url: str, name: str, named: Sequence[str]) -> Sequence[PoolEntry]:
    """Read the pools of a served model from its registry; without a registry, use those of the settings (``named``).

    In a Cluster, if the registry's master does not answer (others may), ``named`` is used, with a warning.
    """
    async with registry_of(url, name) as registry:
        try:
            return await registry.read() or [PoolEntry(tag) for tag in named or [name]]
        except FleetUnavailable as error:
            if parse(url).kind != "cluster":
                raise
            lost = f"the registry of {name}'s pools cannot be read ({error})"
            if not any("#" in tag for tag in named):
                text = f"{lost}: name pools that may be on other masters, by --model '{name}#1' or in WARMFLEET_MODELS"
                raise FleetUnavailable(text) from error
    text = f"{lost}: of its pools only those that WARMFLEET_MODELS names are known, {', '.join(named)}"
    print(f"warmfleet: warning: {text}", file=sys.stderr)
    return [PoolEntry(tag) for tag in named]


async def answers_of(
    fleets: Sequence[Fleet], ask: Callable[[Fleet], Awaitable[Answer]]
) -> tuple[list[tuple[Fleet, Answer]], list[str]]:
    """Ask all pools at once; return the answers, and the tags of pools whose Redis does not answer.

    Pools without an answer are left out, with a warning on standard error. Raises FleetUnavailable if none answers.
    """
    answers: list[tuple[Fleet, Answer]] = []
    errors: dict[str, FleetUnavailable] = {}
    for fleet, answer in zip(fleets, await asyncio.gather(*map(ask, fleets), return_exceptions=True), strict=True):
        if isinstance(answer, FleetUnavailable):
            errors[tag_of(fleet)] = answer
        elif isinstance(answer, BaseException):
            raise answer
        else:
            answers.append((fleet, answer))
    if not answers:
        raise next(iter(errors.values()))
    for tag, error in errors.items():
        print(f"warmfleet: warning: {tag} is left out: {error}", file=sys.stderr)
    return answers, list(errors)


def tag_of(fleet: Fleet) -> str:
    """Return the tag of a pool, as WARMFLEET_MODELS would name it."""
    return fleet.keys.tag.replace("~", "/")


@asynccontextmanager
async def fleets_of(url: str, tags: Sequence[str]) -> AsyncIterator[list[Fleet]]:
    """Connect to these pools until the ``with`` block ends. Raises CommandError."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(pool_of(url, tag)) for tag in tags]


@asynccontextmanager
async def registry_of(url: str, model: str) -> AsyncIterator[PoolRegistry]:
    """Connect to the registry of the served model of ``model``, a name or a pool's tag. Raises CommandError."""
    name = served_model(model)
    redis = _client(url, name)
    try:
        yield PoolRegistry(redis, name)
    finally:
        await redis.aclose()


@asynccontextmanager
async def pool_of(url: str, tag: str) -> AsyncIterator[Fleet]:
    """Connect to one pool until the ``with`` block ends. Raises CommandError."""
    fleet = Fleet(_client(url, tag), tag)
    try:
        yield fleet
    finally:
        await fleet.close()


async def slot_ranges(url: str) -> tuple[SlotRange, ...]:
    """Ask for the slots of each master of a Cluster."""
    connections = RedisConnections(_complete(url), timeout_s=TIMEOUT_S)
    try:
        return await connections.slot_ranges()
    finally:
        await connections.aclose()


def runs(place: Placement, now: float) -> bool:
    """Tell whether a server has written its record lately. now: this machine's clock, in seconds."""
    return abs(now - place.seen_ms / 1_000) < SEEN_S


def _client(url: str, tag: str) -> aioredis.Redis:
    """Make a client of the Redis that has the keys of this model or pool. Raises CommandError."""
    try:
        return connect(_complete(url), model_tag(tag), timeout_s=TIMEOUT_S)
    except (RedisAddressError, WireError) as error:
        raise CommandError(str(error)) from error


def _complete(url: str) -> str:
    """Return the URL of Redis with the CA file of WARMFLEET_REDIS_CA. Raises RedisAddressError."""
    return with_ca(url, os.environ.get("WARMFLEET_REDIS_CA", ""))
