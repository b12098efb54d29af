"""``warmfleet artifacts``: lists the files that workers announced, and approves their chat templates."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.pools.served import answers_of, fleets_of, tag_of, tags_of
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, in_short, print_answer, printable
from warmfleet.errors import FleetUnavailable, WarmfleetError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from warmfleet.fleet import Fleet

HEADER = ("SHA256", "ARTIFACT", "BYTES", "WORKERS", "STATE")
TEMPLATE = "chat_template.jinja"  # the only artifact that is code
APPROVED_TEMPLATES = "WARMFLEET_APPROVED_TEMPLATES"
MAY_BE_APPROVED = (
    f"Settings of routers may approve templates, too: {APPROVED_TEMPLATES} with digests, or with `*`, as "
    "`warmfleet up` sets it for its own store."
)
_DIGEST = re.compile(r"[0-9a-f]{12,64}\Z")


@dataclass
class Artifact:
    """A file of a model. entry: its size and SHA-256 as announced. servers: the servers that announced the file."""

    name: str
    entry: dict[str, Any]
    servers: list[str] = field(default_factory=list)


@dataclass
class Shelf:
    """The artifacts of one model by digest, and the digests that the operator approved.

    approved: by `warmfleet artifacts approve`. by_settings: by APPROVED_TEMPLATES in this shell; routers may differ.
    """

    fleet: Fleet
    artifacts: dict[str, Artifact]
    approved: frozenset[str]
    by_settings: frozenset[str]

    def templates(self) -> set[str]:
        return {sha256 for sha256, artifact in self.artifacts.items() if artifact.name == TEMPLATE} | self.approved


def run(options: argparse.Namespace) -> int:
    """Run the chosen action; returns 0. Raises CommandError."""
    wanted = [digest.lower() for digest in options.sha256]
    if wrong := [digest for digest in wanted if not _DIGEST.match(digest)]:
        raise CommandError(f"{wrong[0]!r} is neither a sha256 nor its first 12 or more hex digits")
    if (options.action == "list") == bool(wanted):
        raise CommandError("list takes no SHA256; show, approve and revoke take at least one")
    if options.json and options.action != "list":
        raise CommandError("--json is for list")
    asyncio.run(_run(options.action, wanted, options.redis, tags_of(options), as_json=options.json))
    return 0


async def _run(action: str, wanted: Sequence[str], url: str, tags: Sequence[str], *, as_json: bool) -> None:
    async with fleets_of(url, tags) as fleets:
        answers, lost = await answers_of(fleets, _shelf)
        shelves = [shelf for _, shelf in answers]
        if action == "list":
            found = {tag_of(shelf.fleet): rows(shelf) for shelf in shelves}
            print_answer(found, lambda: listing(shelves), as_json=as_json)
            return
        known = set[str]().union(*[shelf.templates() for shelf in shelves])
        for digest in [whole(digest, known) for digest in wanted]:
            if action == "show":
                print(await _source(shelves, digest))
            else:
                await _change(action, digest, shelves)
    if lost and action in ("approve", "revoke"):
        raise CommandError(f"nothing has changed in {', '.join(lost)}: call this again when all answer")


async def _shelf(fleet: Fleet) -> Shelf:
    artifacts: dict[str, Artifact] = {}
    for worker in await fleet.workers.read():
        server_id = str(worker.record.get("server_id", ""))
        for name, entry in ((worker.server or {}).get("artifacts") or {}).items():
            if not isinstance(entry, dict) or not _DIGEST.match(str(entry.get("sha256"))):
                continue  # a malformed entry: routers ignore it, too
            found = artifacts.setdefault(entry["sha256"], Artifact(name, entry))
            if server_id not in found.servers:
                found.servers.append(server_id)
    by_settings = frozenset(digest.strip() for digest in os.environ.get(APPROVED_TEMPLATES, "").split(","))
    return Shelf(fleet, artifacts, await fleet.operator.approved(), by_settings)


def rows(shelf: Shelf) -> list[dict[str, Any]]:
    """List the files of one model, by name, and approvals of templates that no worker has announced."""
    announced = sorted(shelf.artifacts.items(), key=lambda item: (item[1].name, item[0]))
    others = [(sha256, Artifact(TEMPLATE, {})) for sha256 in sorted(shelf.approved - shelf.artifacts.keys())]
    return [
        {
            "sha256": sha256,
            "artifact": artifact.name,
            "bytes": artifact.entry.get("bytes"),
            "servers": artifact.servers,
            "approved": sha256 in shelf.approved if artifact.name == TEMPLATE else None,
        }
        for sha256, artifact in [*announced, *others]
    ]


def listing(shelves: Sequence[Shelf]) -> list[Part]:
    """Make a table for each model, with whole digests, because an approval names a digest."""
    parts, footnote = list[Part](), list[Part]()
    for shelf in shelves:
        files = [_cells(row, shelf.by_settings) for row in rows(shelf)]
        parts.append(Toned(shelf.fleet.keys.tag, Tone.HEAD))
        parts.append(Table(HEADER, files) if files else "no worker has announced a file")
        if any(row["approved"] is False and row["sha256"] not in shelf.by_settings for row in rows(shelf)):
            footnote = [MAY_BE_APPROVED]
    return parts + footnote


def _cells(row: dict[str, Any], by_settings: frozenset[str]) -> tuple[object, ...]:
    by_setting = Toned(f"approved by {APPROVED_TEMPLATES}", Tone.GOOD)
    states = {
        None: "-",  # no template, so it needs no approval
        True: Toned("approved", Tone.GOOD),
        False: by_setting if row["sha256"] in by_settings else Toned("not approved by command", Tone.MIND),
    }
    size = "-" if row["bytes"] is None else row["bytes"]
    return row["sha256"], row["artifact"], size, in_short(row["servers"]) or "-", states[row["approved"]]


def whole(digest: str, known: set[str]) -> str:
    """Return the only known digest that begins with ``digest``; a whole digest as it is. Raises CommandError."""
    if len(digest) == 64:
        return digest
    found = sorted(sha256 for sha256 in known if sha256.startswith(digest))
    if len(found) == 1:
        return found[0]
    if found:
        raise CommandError(f"{digest} is not enough, several begin so: {', '.join(found)}")
    raise CommandError(f"no chat template begins with {digest}: see `warmfleet artifacts`, or give all 64 digits")


async def _source(shelves: Sequence[Shelf], digest: str) -> str:
    for shelf in shelves:
        if digest in shelf.artifacts:
            artifact = shelf.artifacts[digest]
            source = await shelf.fleet.artifacts.read(artifact.servers[0], artifact.entry)
            return printable(source.decode("utf-8", "replace"))
    raise CommandError(f"no worker has announced {digest}")


async def _change(action: str, digest: str, shelves: Sequence[Shelf]) -> None:
    """Approve or revoke a template for each model that knows it, or for all named models if none does."""
    concerned = [shelf for shelf in shelves if digest in shelf.templates()] or shelves
    for shelf in concerned:
        try:
            await (shelf.fleet.operator.approve if action == "approve" else shelf.fleet.operator.revoke)([digest])
        except FleetUnavailable as error:
            if "permission" not in str(error).lower():
                raise
            text = "this Redis user may not do that: use an operator's, such as `admin` of `warmfleet acl`"
            raise WarmfleetError(text) from error
        print(f"{shelf.fleet.keys.tag}: {digest} {'approved' if action == 'approve' else 'revoked'}")
    print("routers follow within a second or two")
