"""Least privilege in Redis: the ACL rules of routers and workers, for Redis 7 or newer and Valkey.

A router may call the commands that its code and the scripts call, on the keys of its models. A worker may use each key
for one purpose only. That takes selectors (in brackets): without them ``XADD`` and ``SETNX`` would be allowed on all
keys of a worker. This module only makes texts, which ``warmfleet acl`` prints.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from warmfleet.protocol.pools import served_model
from warmfleet.protocol.wire import Keys, check_name, worker_id_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: The commands that scripts in lua/ call: Redis checks each call of a script, too. A test compares list and scripts.
_SCRIPTS = """
    get getrange mget set strlen exists incr type expire unlink time
    hget hset hdel hexists hgetall hincrby hkeys hlen hmget hsetnx hstrlen hvals
    sadd srem scard sscan sinter sismember smembers smismember spop srandmember
    zadd zrem zcard zcount zincrby zpopmin zrange zrangebyscore zrevrangebyscore zscore
    zrangebylex zrevrange zrevrangebylex zremrangebyscore zrank zlexcount
    rpush ltrim
    xlen xrange xtrim xinfo|stream
"""
SCRIPT_COMMANDS = tuple(_SCRIPTS.split())
#: The commands that a router calls itself. No EVAL: a script is loaded once and then named by its digest.
ROUTER_COMMANDS = (
    *("ping", "select", "info", "time", "evalsha", "script|load"),
    *("expire", "get", "hget", "hgetall", "hvals", "sadd", "scard", "set", "smismember", "srem", "strlen", "unlink"),
    *("xread", "zcount", "zrange"),
)
#: The commands that a worker calls without a key. AUTH and HELLO are always allowed. With MULTI, EXEC and UNWATCH a
#: worker takes a place in a pool only if no other worker has taken one meanwhile.
WORKER_COMMANDS = ("ping", "select", "time", "multi", "exec", "unwatch")
#: In a Redis Cluster routers and workers ask which server has the slot of their keys.
CLUSTER_COMMANDS = ("cluster|slots",)
#: The rights that Redis itself needs where the user ``default`` is off: those of a replica at its master, and of a
#: Sentinel at the servers that it watches.
REPLICA_RULES = ("+psync", "+replconf", "+ping")
SENTINEL_RULES = (
    *("allchannels", "+multi", "+slaveof", "+ping", "+exec", "+subscribe", "+config|rewrite", "+role", "+publish"),
    *("+info", "+client|setname", "+client|kill", "+script|kill"),
)


def router_rules(models: Iterable[str], *, cluster: bool = False) -> list[str]:
    """Allow every command that routers need on the keys of these models alone; the operator's keys are read-only.

    models: a name without ``#`` means all pools of the model, also future ones; with ``#`` that pool and the registry
    of pools. The operator's keys are those whose name begins with an ``o``: an ACL pattern can exclude a letter, but
    not a whole name. Raises WireError.
    """
    allowed = sorted({*SCRIPT_COMMANDS, *ROUTER_COMMANDS, *(CLUSTER_COMMANDS if cluster else ())})
    models = list(models)
    registries = dict.fromkeys(f"~{Keys(served_model(model)).pools}" for model in models if "#" in model)
    own = [f"~{prefix}" for prefix in _in_pools(models, lambda keys: [f"{keys.prefix}[^o]*"])] + list(registries)
    approved = _selector("R", _in_pools(models, lambda keys: [keys.operator_approved]), "smembers")
    policy = _selector("R", _in_pools(models, lambda keys: [keys.operator_policy]), "get")
    return ["resetkeys", *own, "resetchannels", "-@all", *(f"+{command}" for command in allowed), approved, policy]


def worker_rules(model: str, server_id: str, *, ranks: int = 1, cluster: bool = False) -> list[str]:
    """Let a server and its ``ranks`` cores write streams, read commands, take yields, store files, and enter a pool.

    model: without ``#`` the server may be in any pool of the model. Ranks are listed one by one: a pattern ``w1.*``
    would also match the keys of a server named ``w1.0``. Raises WireError for a name that the keys may not have.
    """
    workers = [worker_id_of(check_name(server_id), rank) for rank in range(ranks)]
    return _worker_rules([model], workers, server_id, cluster=cluster)


def shared_worker_rules(models: Iterable[str], *, cluster: bool = False) -> list[str]:
    """Return the rights of ``worker_rules`` for one user that all workers of these models share, whatever their names.

    A worker may then write as another worker, but may neither read nor overwrite any other key. Raises WireError.
    """
    return _worker_rules(list(models), ["*"], "*", cluster=cluster)


def _worker_rules(models: Sequence[str], workers: Sequence[str], server: str, *, cluster: bool) -> list[str]:
    """Return the rules of these workers of one server.

    All servers share the hash ``placement``, so a worker can also overwrite another server's pool there; the other
    server then joins the wrong pool when it is started next.
    """
    allowed = (*WORKER_COMMANDS, *(CLUSTER_COMMANDS if cluster else ()))
    places = list(dict.fromkeys(Keys(served_model(model)).placement for model in models))
    registries = list(dict.fromkeys(Keys(served_model(model)).pools for model in models))
    streams = _in_pools(models, lambda keys: [*map(keys.events, workers), keys.server(server), keys.hello])
    return [
        *("resetkeys", "resetchannels", "-@all", *(f"+{command}" for command in allowed)),
        _selector("W", streams, "xadd"),
        _selector("R", _in_pools(models, lambda keys: map(keys.command, workers)), "get"),
        _selector("RW", _in_pools(models, lambda keys: map(keys.yields, workers)), "lpop"),
        _selector("W", _in_pools(models, lambda keys: [keys.artifact(server, "*")]), "setnx", "expire"),
        _selector("R", [*registries, *places], "hgetall", "hget", "watch"),
        _selector("W", places, "hset", "hdel"),
    ]


def _in_pools(models: Iterable[str], names: Callable[[Keys], Iterable[str]]) -> list[str]:
    """Return these keys of each model; for a model without ``#`` also patterns for the keys of all its other pools."""
    found: list[str] = []
    for model in models:
        keys = Keys(model)
        own = list(names(keys))
        found += own
        if "#" not in model:
            found += [name.replace(keys.prefix, f"wf:{{{keys.tag}#*}}:", 1) for name in own]
    return found


def user(name: str, passwords: Sequence[str], rules: Sequence[str]) -> str:
    """Return ``<name> reset on #<digest> <rules>``: after ``user`` a line of an aclfile, after ``ACL SETUSER`` a
    command.

    passwords: each of them is accepted, so that an old and a new one work while passwords are changed.
    """
    digests = ["#" + hashlib.sha256(password.encode()).hexdigest() for password in passwords]
    return " ".join([name, "reset", "on", *digests, *rules])


def _selector(access: str, keys: Iterable[str], *commands: str) -> str:
    return "(" + " ".join([*(f"%{access}~{key}" for key in keys), *(f"+{command}" for command in commands)]) + ")"
