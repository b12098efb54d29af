"""``warmfleet acl``: prints Redis users with no more rights than routers and workers need."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from warmfleet.cli.command_error import CommandError
from warmfleet.fleet.inspection.acl import (
    REPLICA_RULES,
    SENTINEL_RULES,
    router_rules,
    shared_worker_rules,
    user,
    worker_rules,
)
from warmfleet.protocol.wire import WireError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

OLD = ".old"  # suffix of a user's name for the previous password, which stays valid while passwords are changed
PASSWORD_BYTES = 24  # random bytes of a password: many, because Redis stores only an unsalted SHA-256 of it
MAX_PASSWORD_FILE_BYTES = 1_048_576
ADMIN_RULES = ("~*", "&*", "+@all")


def run(options: argparse.Namespace) -> int:
    """Print rules on standard output and generated passwords on standard error, so ``> users.acl`` gets no password."""
    rules = rules_of(options)
    own = read_passwords(options.password_file, list(rules)) if options.password_file else {}
    passwords = own or {name: secrets.token_urlsafe(PASSWORD_BYTES) for name in rules}
    for line in lines(rules, passwords, commands=options.commands):
        print(line)
    sys.stdout.flush()
    if not own:
        print("passwords (they are stored nowhere, Redis gets their digests):", file=sys.stderr)
        for name in rules:
            print(f"  {name} {passwords[name]}", file=sys.stderr)
    if options.commands:
        text = "user `default` is unchanged: once you have an admin of your own, run ACL SETUSER default off"
        print(text, file=sys.stderr)
    return 0


def rules_of(options: argparse.Namespace) -> dict[str, Sequence[str]]:
    """Return rules by user name. Raises CommandError for a name that Redis keys cannot contain."""
    if not options.models:
        raise CommandError("name a MODEL, or set WARMFLEET_MODELS")
    if options.worker and len(options.models) > 1:
        raise CommandError("a worker belongs to one model: name one MODEL with --worker")
    if options.no_router and not (options.worker or options.shared_worker):
        raise CommandError("--no-router without --worker or --shared-worker leaves no user to print")
    users: dict[str, Sequence[str]] = {}
    try:
        if not options.no_router:
            users |= {} if options.commands else {"admin": ADMIN_RULES}
            users |= {"replica": REPLICA_RULES, "sentinel": SENTINEL_RULES} if options.sentinel else {}
            users["router"] = router_rules(options.models, cluster=options.cluster)
        if options.shared_worker:
            users["worker"] = shared_worker_rules(options.models, cluster=options.cluster)
        for worker in options.worker:
            rules = worker_rules(options.models[0], worker, ranks=options.ranks, cluster=options.cluster)
            users[f"worker-{worker}"] = rules
    except WireError as error:
        raise CommandError(str(error)) from error
    return users


def lines(rules: dict[str, Sequence[str]], passwords: dict[str, str], *, commands: bool) -> list[str]:
    """Write lines of an aclfile, or commands for redis-cli. If there is an admin, turn off Redis' user `default`."""
    verb = "ACL SETUSER" if commands else "user"
    closed = ["user default reset off"] if "admin" in rules else []
    valid = {name: [passwords[key] for key in (name, name + OLD) if key in passwords] for name in rules}
    return closed + [f"{verb} {user(name, valid[name], allowed)}" for name, allowed in rules.items()]


def read_passwords(place: str, names: Sequence[str]) -> dict[str, str]:
    """Read the users' passwords, and their previous ones as ``NAME.old``. Raises CommandError if a user has none.

    place: a file with ``NAME PASSWORD`` on each line, or a folder with a file for each user (a mounted Secret).
    ``NAME.old`` may be missing or empty.
    """
    path = Path(place)
    keys = [key for name in names for key in (name, name + OLD)]
    try:
        if path.is_dir():
            found = {name: _read(path / name).strip() for name in keys if (path / name).is_file()}
        else:
            lines = (line.split(maxsplit=1) for line in _read(path).splitlines())
            found = {line[0]: line[1].strip() for line in lines if len(line) == 2}
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--password-file {place}: {error}") from error
    if missing := [name for name in names if not found.get(name)]:
        wanted = "file with a password" if path.is_dir() else "line 'NAME PASSWORD'"
        raise CommandError(f"--password-file {place}: no {wanted} for {', '.join(missing)}")
    return {name: found[name] for name in keys if found.get(name)}


def _read(path: Path) -> str:
    with path.open(encoding="utf-8") as source:
        return source.read(MAX_PASSWORD_FILE_BYTES)
