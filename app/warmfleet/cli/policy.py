"""``warmfleet policy``: shows a model's placement policy, or switches it for all replicas at once."""

from __future__ import annotations

import asyncio
import logging
import sys
from functools import partial
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.pools.served import answers_of, fleets_of, tag_of, tags_of
from warmfleet.cli.terminal.output import print_answer
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from warmfleet.fleet import Fleet

DEFAULT = "default"


def run(options: argparse.Namespace) -> int:
    """Show or switch the policy of each pool; returns 0. Raises CommandError, FleetUnavailable."""
    logging.basicConfig(level=logging.CRITICAL)  # an outage is told by the command's error, not by log lines
    if options.name not in (None, DEFAULT, *POLICIES):
        raise CommandError(f"{options.name!r} is no policy; known are {', '.join(POLICIES)}, and {DEFAULT}")
    asyncio.run(_run(options.name, options.redis, tags_of(options), as_json=options.json))
    return 0


async def _run(name: str | None, url: str, tags: Sequence[str], *, as_json: bool) -> None:
    async with fleets_of(url, tags) as fleets:
        answers, lost = await answers_of(fleets, partial(_switched, name))
    switched = {tag_of(fleet): switched_to for fleet, switched_to in answers}
    unset = "as each replica is set (`warmfleet workers` shows how)"
    print_answer(switched, lambda: [f"{tag}: {name or unset}" for tag, name in switched.items()], as_json=as_json)
    if lost and name is not None:
        raise CommandError(f"{', '.join(lost)} may go by another policy: call this again when all answer")


async def _switched(name: str | None, fleet: Fleet) -> str | None:
    """Switch the pool's policy if ``name`` is given; return the policy set in Redis, or None if none is set there."""
    if name is not None:
        await fleet.operator.switch("" if name == DEFAULT else name)
    switched_to = await fleet.operator.switched()
    if not await fleet.workers.read():
        tag = tag_of(fleet)
        text = f"warmfleet policy: warning: no worker of {tag} is known; the policy is for workers to come"
        print(text, file=sys.stderr)
    return switched_to or None
