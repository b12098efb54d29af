"""``warmfleet policy``: shows a model's placement policy, or switches it for all replicas at once."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.pools.served import tags_of
from warmfleet.fleet import Fleet, connect
from warmfleet.protocol.redis_address import RedisAddressError, with_ca
from warmfleet.protocol.wire import WireError, model_tag
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    import argparse

TIMEOUT_S = 2.0
DEFAULT = "default"


def run(options: argparse.Namespace) -> int:
    """Show or switch the policy of each named model; returns 0. Raises CommandError."""
    logging.basicConfig(level=logging.CRITICAL)  # the error of an outage says it
    if options.name not in (None, DEFAULT, *POLICIES):
        raise CommandError(f"{options.name!r} is no policy; known are {', '.join(POLICIES)}, and {DEFAULT}")
    models = tags_of(options)
    switched: dict[str, str | None] = {}
    for model in models:
        switched[model] = asyncio.run(_one(options.name, options.redis, model))
        if not options.json:
            print(f"{model}: {switched[model] or 'as each replica is set (`warmfleet workers` shows how)'}", flush=True)
    if options.json:
        print(json.dumps(switched, indent=2))
    return 0


async def _one(name: str | None, url: str, model: str) -> str | None:
    """The policy that the model is switched to; None: each replica goes by its own."""
    try:
        client = connect(with_ca(url, os.environ.get("WARMFLEET_REDIS_CA", "")), model_tag(model), timeout_s=TIMEOUT_S)
    except (RedisAddressError, WireError) as error:
        raise CommandError(str(error)) from error
    fleet = Fleet(client, model)
    try:
        if name is not None:
            await fleet.switch("" if name == DEFAULT else name)
        switched_to = await fleet.switched()
        workers = await fleet.workers()
    finally:
        await fleet.close()
    if not workers:
        print(
            f"warmfleet policy: warning: no worker of {model} is known; the policy is for workers to come",
            file=sys.stderr,
        )
    return switched_to or None
