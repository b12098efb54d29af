"""Checks of the rights of routers' and workers' Redis users: too few break the fleet, too many are a risk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.cli.doctor.finding import Finding, fault, note, ok, skipped
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet.connection.reply_errors import RefusedCall
from warmfleet.fleet.inspection.rights import in_words, newer_worker_rights, router_rights, worker_rights
from warmfleet.protocol.wire import WireError

if TYPE_CHECKING:
    from warmfleet.fleet.inspection.server import Inspection

WORKER_USER = "worker-"  # prefix, before the worker's id, of the name that `warmfleet acl` gives a worker's user
MAX_USERS = 64


async def of_router(inspection: Inspection, model: str, *, cluster: bool) -> list[Finding]:
    """Check that the user of WARMFLEET_REDIS_URL may do all that a router does."""
    rights = router_rights(model, cluster=cluster)
    remedy = f"print the user again (`warmfleet acl {model}`), and load it (ACL LOAD, or --commands)"
    try:
        missing = await inspection.refused(rights)
    except RefusedCall as error:
        if error.word != "NOPERM":
            raise
        return [fault("router rights", f"this user may not run scripts at all ({error})", remedy)]
    if missing:
        return [fault("router rights", f"this user may not: {in_words(missing)}", remedy)]
    return [ok("router rights", f"this user may do all {len(rights)} things that a router does")]


async def of_workers(inspection: Inspection, model: str, servers: frozenset[str], *, cluster: bool) -> list[Finding]:
    """Check the rights of workers' Redis users; skipped if this user may not call ACL LIST and ACL DRYRUN."""
    users = await inspection.users()
    if users is None:
        why = "this user may not look at others (ACL LIST, ACL DRYRUN): name an admin's in WARMFLEET_ADMIN_REDIS_URL"
        return [skipped("worker rights", why)]
    findings = [_open_door(users)]
    named = f"{{{inspection.keys.tag}}}"
    own = [
        name
        for name, rules in users.items()
        if name.startswith(WORKER_USER) and ("wf:{" not in rules or named in rules)
    ]
    findings += [await _of_worker(inspection, model, name, cluster=cluster) for name in own[:MAX_USERS]]
    strangers = sorted(server for server in servers if WORKER_USER + server not in users)
    if strangers and not own and "nopass" not in users.get("default", ""):
        listed = ", ".join(strangers[:8])
        text = f"no user {WORKER_USER}ID is known for {listed}: their rights were not checked"
        remedy = f"make one user for each worker: warmfleet acl {model} --worker {strangers[0]} --no-router"
        findings.append(note("worker rights", text, remedy))
    return findings


def _open_door(users: dict[str, str]) -> Finding:
    rules = users.get("default", "").split()
    if "on" in rules and "nopass" in rules:
        text = "whoever reaches this Redis may do everything: the user `default` is on and has no password"
        remedy = "let `warmfleet acl MODEL --worker ID ... > users.acl` print users with the least rights"
        return note("default user", text, f"{remedy} (app/docs/redis.md)")
    return ok("default user", "nobody gets in without a password")


async def _of_worker(inspection: Inspection, model: str, user: str, *, cluster: bool) -> Finding:
    server = user.removeprefix(WORKER_USER)
    try:
        missing = await inspection.refused_to(user, worker_rights(model, server, cluster=cluster))
        newer = await inspection.refused_to(user, newer_worker_rights(model, server))
    except (FleetUnavailable, WireError) as error:
        return skipped("worker rights", f"{user}: {error}")
    remedy = f"print the user again and load it: warmfleet acl {model} --worker {server} --no-router"
    if missing:
        return fault("worker rights", f"the plugin's user {user} may not: {in_words(missing)}", remedy)
    if newer:
        text = (
            f"{user} has rules of an older version, with which a worker's files do not expire, or it cannot choose a"
            f" pool: it may not {in_words(newer)}"
        )
        return note("worker rights", text, remedy)
    return ok("worker rights", f"{user} may do what the plugin does")
