"""``warmfleet artifacts``: what workers brought, and which chat templates may run in the routers' own process."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import table
from warmfleet.cli.command_error import CommandError
from warmfleet.errors import FleetUnavailable, WarmfleetError
from warmfleet.fleet import Fleet, connect
from warmfleet.protocol.redis_address import RedisAddressError, with_ca
from warmfleet.protocol.wire import WireError, model_tag

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence

HEADER = ("SHA256", "ARTIFACT", "BYTES", "WORKERS", "STATE")
TEMPLATE = "chat_template.jinja"  # the only artifact that is code
TIMEOUT_S = 2.0
NAMED_WORKERS = 8
_DIGEST = re.compile(r"[0-9a-f]{12,64}\Z")


@dataclass
class Brought:
    """One artifact of one model. entry: of a manifest; servers: who brought it."""

    name: str
    entry: dict[str, Any]
    servers: list[str] = field(default_factory=list)


@dataclass
class Shelf:
    """Everything of one model: artifacts by digest, and the digests that are approved."""

    fleet: Fleet
    brought: dict[str, Brought]
    approved: frozenset[str]

    def templates(self) -> set[str]:
        return {sha256 for sha256, one in self.brought.items() if one.name == TEMPLATE} | self.approved


def run(options: argparse.Namespace) -> int:
    """0, or CommandError in words for whoever typed the command."""
    wanted = [digest.lower() for digest in options.sha256]
    if wrong := [digest for digest in wanted if not _DIGEST.match(digest)]:
        raise CommandError(f"{wrong[0]!r} is no sha256, nor its first 12 or more hex digits")
    if (options.action == "list") == bool(wanted):
        raise CommandError("list takes no SHA256; show, approve and revoke take at least one")
    models = options.model or [tag.strip() for tag in os.environ.get("WARMFLEET_MODELS", "").split(",") if tag.strip()]
    if not models:
        raise CommandError("name the model with --model, or all of a router in WARMFLEET_MODELS")
    asyncio.run(_run(options.action, wanted, options.redis, models))
    return 0


async def _run(action: str, wanted: Sequence[str], url: str, models: Sequence[str]) -> None:
    async with _shelves(url, models) as shelves:
        if action == "list":
            print(printable("\n\n".join([listing(shelf) for shelf in shelves])))
            return
        known = set[str]().union(*[shelf.templates() for shelf in shelves])
        for digest in [whole(digest, known) for digest in wanted]:
            if action == "show":
                print(await _source(shelves, digest))
            else:
                await _change(action, digest, shelves)


@asynccontextmanager
async def _shelves(url: str, models: Sequence[str]) -> AsyncIterator[list[Shelf]]:
    fleets: list[Fleet] = []
    try:
        complete = with_ca(url, os.environ.get("WARMFLEET_REDIS_CA", ""))
        fleets += [Fleet(connect(complete, model_tag(model), timeout_s=TIMEOUT_S), model) for model in models]
        yield [await _shelf(fleet) for fleet in fleets]
    except (RedisAddressError, WireError) as error:
        raise CommandError(str(error)) from error
    finally:
        for fleet in fleets:
            await fleet.close()


async def _shelf(fleet: Fleet) -> Shelf:
    brought: dict[str, Brought] = {}
    for worker in await fleet.workers():
        server_id = str(worker.record.get("server_id", ""))
        for name, entry in ((worker.server or {}).get("artifacts") or {}).items():
            if not isinstance(entry, dict) or not _DIGEST.match(str(entry.get("sha256"))):
                continue  # a worker may write what it likes; routers do not take it either
            found = brought.setdefault(entry["sha256"], Brought(name, entry))
            if server_id not in found.servers:
                found.servers.append(server_id)
    return Shelf(fleet, brought, await fleet.approved())


def listing(shelf: Shelf) -> str:
    """One model's table. Whole digests: they are what approving is about."""
    rows: list[tuple[object, ...]] = []
    for sha256, one in sorted(shelf.brought.items(), key=lambda item: (item[1].name, item[0])):
        state = "-" if one.name != TEMPLATE else "approved" if sha256 in shelf.approved else "not approved"
        more = f" and {len(one.servers) - NAMED_WORKERS} more" if len(one.servers) > NAMED_WORKERS else ""
        rows.append((sha256, one.name, one.entry.get("bytes"), ", ".join(one.servers[:NAMED_WORKERS]) + more, state))
    rows += [(sha256, TEMPLATE, "-", "-", "approved") for sha256 in sorted(shelf.approved - shelf.brought.keys())]
    return f"{shelf.fleet.keys.tag}\n" + (table(HEADER, rows) if rows else "no worker has brought anything")


def whole(digest: str, known: set[str]) -> str:
    """The digest that begins so. Raises CommandError unless it is exactly one of ``known``, or has all 64 digits."""
    if len(digest) == 64:
        return digest
    found = sorted(one for one in known if one.startswith(digest))
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{digest} is not enough, several begin so: {', '.join(found)}")
    raise CommandError(f"no chat template begins with {digest}: see `warmfleet artifacts`, or give all 64 digits")


async def _source(shelves: Sequence[Shelf], digest: str) -> str:
    for shelf in shelves:
        if digest in shelf.brought:
            one = shelf.brought[digest]
            return printable((await shelf.fleet.artifact(one.servers[0], one.entry)).decode("utf-8", "replace"))
    raise CommandError(f"no worker has brought {digest}")


def printable(text: str) -> str:
    """Control characters written out: what is read before it is approved must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


async def _change(action: str, digest: str, shelves: Sequence[Shelf]) -> None:
    """For every model that knows the template; one that nobody brought yet, for every model that was named."""
    concerned = [shelf for shelf in shelves if digest in shelf.templates()] or shelves
    for shelf in concerned:
        try:
            await (shelf.fleet.approve if action == "approve" else shelf.fleet.revoke)([digest])
        except FleetUnavailable as error:
            if "permission" not in str(error).lower():
                raise
            text = "this Redis user may not: it takes an operator, such as `admin` of `warmfleet acl`"
            raise WarmfleetError(text) from error
        print(f"{shelf.fleet.keys.tag}: {digest} {'approved' if action == 'approve' else 'revoked'}")
    print("routers follow within WARMFLEET_VIEW_INTERVAL_S")
