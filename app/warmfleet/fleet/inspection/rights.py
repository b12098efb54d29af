"""Sample calls to check the rights of a Redis user, one for each command that routers and workers need. Pure.

The calls are never executed: ``Inspection`` asks Redis whether a user may make them. Redis judges a call by its command
and its keys, so the other words may be anything, in the number that the command takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet.fleet.inspection.acl import CLUSTER_COMMANDS, ROUTER_COMMANDS, SCRIPT_COMMANDS, WORKER_COMMANDS
from warmfleet.protocol.pools import served_model
from warmfleet.protocol.wire import Keys, worker_id_of

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Command -> sample arguments behind its key. A command that is missing here takes its key alone.
BEHIND_KEY = {
    "getrange": "0 0",
    "set": "v",
    "hget": "f",
    "hset": "f v",
    "hdel": "f",
    "hincrby": "f 1",
    "hmget": "f",
    "hsetnx": "f v",
    "hstrlen": "f",
    "sadd": "m",
    "srem": "m",
    "sscan": "0",
    "sismember": "m",
    "smismember": "m",
    "zadd": "1 m",
    "zrem": "m",
    "zcount": "0 1",
    "zincrby": "1 m",
    "zrange": "0 1",
    "zrangebyscore": "0 1",
    "zrevrangebyscore": "1 0",
    "zscore": "m",
    "zrangebylex": "- +",
    "zrevrange": "0 1",
    "zrevrangebylex": "+ -",
    "zremrangebyscore": "0 1",
    "xrange": "- +",
    "xtrim": "MAXLEN 0",
    "expire": "1",
}
#: The whole call of commands that take no key, or not as their first word.
WHOLE = {
    "ping": "ping",
    "time": "time",
    "multi": "multi",
    "exec": "exec",
    "unwatch": "unwatch",
    "info": "info",
    "select": "select 0",
    "script|load": "script load x",
    "cluster|slots": "cluster slots",
}


@dataclass(frozen=True, slots=True)
class Right:
    """A call that a user must be allowed to make. name: the call as operators are shown it."""

    name: str
    words: tuple[str, ...]


def router_rights(model: str, *, cluster: bool = False) -> list[Right]:
    """Return the rights that a router needs for one model."""
    keys = Keys(model)
    commands = sorted({*SCRIPT_COMMANDS, *ROUTER_COMMANDS, *(CLUSTER_COMMANDS if cluster else ())})
    rights = [Right(command.replace("|", " ").upper(), _call(command, keys.alive)) for command in commands]
    rights += [Right(f"GET of {name}", ("get", name)) for name in (f"{keys.prefix}b:x", f"{keys.prefix}s:1")]
    rights += [Right(f"SMEMBERS of {keys.operator_approved}", ("smembers", keys.operator_approved))]
    return [*rights, Right(f"GET of {keys.operator_policy}", ("get", keys.operator_policy))]


def worker_rights(model: str, server_id: str, *, ranks: int = 1, cluster: bool = False) -> list[Right]:
    """Return the rights that the plugin needs in an API server and in its ``ranks`` engine cores."""
    keys = Keys(model)
    workers = [worker_id_of(server_id, rank) for rank in range(ranks)]
    streams = [*map(keys.events, workers), keys.server(server_id), keys.hello]
    plain = ("ping", "select", *(CLUSTER_COMMANDS if cluster else ()))
    rights = [Right(command.replace("|", " ").upper(), _call(command, "")) for command in plain]
    rights += [Right(f"XADD to {stream}", ("xadd", stream, "*", "f", "v")) for stream in streams]
    rights += [Right(f"GET of {keys.command(worker)}", ("get", keys.command(worker))) for worker in workers]
    artifact = keys.artifact(server_id, "x")
    return [*rights, Right(f"SETNX of {keys.artifact(server_id, '*')}", ("setnx", artifact, "v"))]


def newer_worker_rights(model: str, server_id: str) -> list[Right]:
    """Return the rights that only users created since 2026-11-23 have; the plugin also works without these rights."""
    artifact, of_model = Keys(model).artifact(server_id, "*"), Keys(served_model(model))
    places = of_model.placement
    rights = [Right(f"EXPIRE of {artifact}", ("expire", artifact, "1"))]
    rights += [Right(word.upper(), _call(word, "")) for word in WORKER_COMMANDS if word not in ("ping", "select")]
    rights += [Right(f"HGETALL of {key}", ("hgetall", key)) for key in (of_model.pools, places)]
    return [*rights, *(Right(f"{word.upper()} of {places}", _call(word, places)) for word in ("watch", "hset", "hdel"))]


def in_words(missing: Sequence[Right], most: int = 8) -> str:
    """Return the names of the rights, the first few of many."""
    more = f" and {len(missing) - most} more" if len(missing) > most else ""
    return ", ".join(right.name for right in missing[:most]) + more


def _call(command: str, key: str) -> tuple[str, ...]:
    if command in WHOLE:
        return tuple(WHOLE[command].split())
    if command == "xread":
        return ("xread", "STREAMS", key, "0")
    if command == "evalsha":
        return ("evalsha", "0" * 40, "1", key)
    return (*command.split("|"), key, *BEHIND_KEY.get(command, "").split())
