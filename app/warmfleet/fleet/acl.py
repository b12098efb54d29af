"""Least privilege in Redis: the ACL rules of routers and workers, for Redis 7 or newer and Valkey.

A router may call the commands that its code and the scripts call, on the keys of its models. A worker may use each key
for one purpose only. That takes selectors (the brackets): without them ``XADD`` and ``SETNX`` would be allowed on all
of its keys. Everything here is pure; ``warmfleet acl`` prints it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from warmfleet.protocol.wire import Keys, check_name, worker_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: The commands that scripts in lua/ call: Redis checks each call of a script, too. A test compares list and scripts.
_SCRIPTS = """
    get getrange set strlen incr type unlink time
    hget hset hdel hgetall hincrby hkeys hlen hmget hsetnx hstrlen hvals
    sadd srem scard sscan sinter sismember smembers smismember spop srandmember
    zadd zrem zcard zcount zincrby zpopmin zrange zrangebyscore zrevrangebyscore zscore
    zrangebylex zrevrange zrevrangebylex zremrangebyscore
    xlen xrange xtrim xinfo|stream
"""
SCRIPT_COMMANDS = tuple(_SCRIPTS.split())
#: The commands that a router calls itself. No EVAL: a script is loaded once and then named by its digest.
ROUTER_COMMANDS = (
    *("ping", "select", "info", "time", "evalsha", "script|load"),
    *("expire", "get", "hget", "hgetall", "hvals", "sadd", "scard", "smismember", "srem", "unlink", "xread"),
    *("zcount", "zrange"),
)
#: The commands that a worker calls without a key. AUTH and HELLO are always allowed.
WORKER_COMMANDS = ("ping", "select")
#: In a Redis Cluster routers and workers ask which server has the slot of their keys.
CLUSTER_COMMANDS = ("cluster|slots",)
#: The rights that Redis itself needs where the user ``default`` is off: a replica at its master, and a Sentinel at the
#: servers that it watches.
REPLICA_RULES = ("+psync", "+replconf", "+ping")
SENTINEL_RULES = (
    *("allchannels", "+multi", "+slaveof", "+ping", "+exec", "+subscribe", "+config|rewrite", "+role", "+publish"),
    *("+info", "+client|setname", "+client|kill", "+script|kill"),
)


def router_rules(models: Iterable[str], *, cluster: bool = False) -> list[str]:
    """Every command that routers need, on every key of these models and on no other; the operator's keys read-only.

    The operator's keys are those whose name begins with an ``o``: an ACL pattern can exclude a letter, but not a whole
    name. Raises WireError.
    """
    allowed = sorted({*SCRIPT_COMMANDS, *ROUTER_COMMANDS, *(CLUSTER_COMMANDS if cluster else ())})
    models = list(models)
    own = [f"~{Keys(model).prefix}[^o]*" for model in models]
    approved = _selector("R", [Keys(model).operator_approved for model in models], "smembers")
    policy = _selector("R", [Keys(model).operator_policy for model in models], "get")
    return ["resetkeys", *own, "resetchannels", "-@all", *(f"+{command}" for command in allowed), approved, policy]


def worker_rules(model: str, server_id: str, *, ranks: int = 1, cluster: bool = False) -> list[str]:
    """One API server and its ``ranks`` engine cores: write own streams, read own commands, add artifacts.

    Ranks are listed one by one: in a pattern, ``w1.*`` would also be the keys of a server named ``w1.0``.
    Raises WireError for a name that the keys may not have.
    """
    keys = Keys(model)
    workers = [worker_id_of(check_name(server_id), rank) for rank in range(ranks)]
    streams = [*map(keys.events, workers), keys.server(server_id), keys.hello]
    allowed = (*WORKER_COMMANDS, *(CLUSTER_COMMANDS if cluster else ()))
    return [
        *("resetkeys", "resetchannels", "-@all", *(f"+{command}" for command in allowed)),
        _selector("W", streams, "xadd"),
        _selector("R", map(keys.command, workers), "get"),
        _selector("W", [keys.artifact(server_id, "*")], "setnx", "expire"),
    ]


def shared_worker_rules(models: Iterable[str], *, cluster: bool = False) -> list[str]:
    """The rights of ``worker_rules`` for every worker of these models, whatever its name: for one user that they share.

    So one worker may write as another. It still reads and overwrites nothing else. Raises WireError.
    """
    keys = [Keys(model) for model in models]
    streams = [key for each in keys for key in (each.events("*"), each.server("*"), each.hello)]
    allowed = (*WORKER_COMMANDS, *(CLUSTER_COMMANDS if cluster else ()))
    return [
        *("resetkeys", "resetchannels", "-@all", *(f"+{command}" for command in allowed)),
        _selector("W", streams, "xadd"),
        _selector("R", [each.command("*") for each in keys], "get"),
        _selector("W", [each.artifact("*", "*") for each in keys], "setnx", "expire"),
    ]


def user(name: str, passwords: Sequence[str], rules: Sequence[str]) -> str:
    """``<name> reset on #<digest> <rules>``: after ``user`` a line of an aclfile, after ``ACL SETUSER`` a command.

    passwords: each of them opens the user, so that there may be an old and a new one while passwords are changed.
    """
    digests = ["#" + hashlib.sha256(password.encode()).hexdigest() for password in passwords]
    return " ".join([name, "reset", "on", *digests, *rules])


def _selector(access: str, keys: Iterable[str], *commands: str) -> str:
    return "(" + " ".join([*(f"%{access}~{key}" for key in keys), *(f"+{command}" for command in commands)]) + ")"
