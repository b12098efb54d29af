"""The connection to Redis, and its scripts: one script is one round trip, and errors of redis-py become ours here."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from warmfleet.errors import (
    BadArgument,
    CancelledReservation,
    FleetUnavailable,
    NoWorker,
    WarmfleetError,
)
from warmfleet.fleet.connection.cancellable import connection_options
from warmfleet.fleet.connection.failover import master_client
from warmfleet.fleet.connection.loop_aware_timeout import Patience
from warmfleet.protocol.redis_address import RedisAddressError, parse
from warmfleet.protocol.wire import Keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from redis.commands.core import AsyncScript

#: KEYS of every script, in order, by their names in lua/README.md. tests/lua/test_headers.py checks that this list, the
#: header and the body of each script, and lua/README.md name the same keys.
SCRIPT_KEYS: Mapping[str, tuple[str, ...]] = {
    name: tuple(keys.split())
    for name, keys in {
        "decide": "alive load workers servers leases lease tick counts queue",
        "queue": "alive load tick queue",
        "settle": "load leases lease",
        "renew": "load leases lease",
        "tick": "tick hello cursor alive alive_servers servers load resync retired counts workers",
        "apply": "workers load alive cursor batch digest resync retired lease counts tick",
        "apply_control": "workers load alive alive_servers cursor batch digest next_slot resync retired counts",
        "apply_server": "servers workers load alive_servers cursor counts",
        "prove": "workers load counts",
        "register": "workers load alive next_slot retired",
        "drain": "load",
        "vouch": "workers load alive alive_servers",
        "forget": "workers servers load alive alive_servers cursor batch digest resync retired",
        "collect": "retired",
        "lag": "cursor",
        "replay": "",
        "audit": "workers load digest resync counts audit audit_walk",
    }.items()
}

#: ARGV of every script, in order and by name, up to a list of varying length at the end. The same test checks it.
SCRIPT_ARGS: Mapping[str, tuple[str, ...]] = {
    name: tuple(args.split())
    for name, args in {
        "decide": "prefix id constants policy prompt_tokens decode_tokens mode exclude seed prefix_tokens order "
        "objective_s tenant priority waited_ms may_wait barred",
        "queue": "constants leaving",
        "settle": "prefix id outcome tombstone_ms linger_ms",
        "renew": "lease_ms",
        "tick": "prefix min_gap_ms ttl_ms forget_ms max_streams used_permille short_ms share_permille",
        "apply": "prefix worker_id max_blocks",
        "apply_control": "prefix worker_id max_entries ttl_ms",
        "apply_server": "prefix server_id max_entries ttl_ms",
        "prove": "worker_id nonce proof cause reason probed owner lease_ms",
        "register": "worker_id record_json capacity_checkpoints healthy",
        "drain": "worker_id draining",
        "vouch": "worker_id nonce",
        "forget": "prefix worker_id silent_ms",
        "collect": "prefix max_blocks",
        "lag": "prefix start max_streams",
        "replay": "constants policy prompt_tokens seed prefix_tokens order objective_s median_tps block_tokens turn "
        "now_ms",
        "audit": "prefix max_blocks period_ms min_gap_ms",
    }.items()
}

#: The first word of a script's error reply -> the class that Python raises.
ERROR_CODES: Mapping[str, type[WarmfleetError]] = {
    "NO_WORKER": NoWorker,
    "CANCELLED": CancelledReservation,
    "BAD_ARGUMENT": BadArgument,
}


CONNECT_S = 1.0  # seconds; a request never waits that long: its script calls have shorter limits (Timeouts)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds until a call is given up. A request then falls back to a degraded choice; upkeep is tried again."""

    request_s: float = 0.25
    upkeep_s: float = 2.0


def connect(url: str, tag: str = "", *, timeout_s: float = CONNECT_S, max_connections: int = 256) -> aioredis.Redis:
    """A client for ``url`` (see ``warmfleet.protocol.redis_address``); connects on first use. Raises BadArgument.

    redis-py does not retry by itself: after a time-out the caller of a script decides whether to ask again. timeout_s:
    the limit for opening a connection; each script call has a limit of its own (``Timeouts``). tag: the hash tag of all
    keys, for a Cluster.
    """
    try:
        where = parse(url)
    except RedisAddressError as error:
        raise BadArgument(str(error)) from error
    options: dict[str, Any] = {
        "socket_connect_timeout": timeout_s,
        "socket_timeout": max(timeout_s, Timeouts().upkeep_s),
        "retry": Retry(NoBackoff(), 0),
        "max_connections": max_connections,
        "decode_responses": False,
    }
    if where.kind != "single":
        return master_client(where, tag, **options)
    return aioredis.Redis.from_pool(ConnectionPool(**options | connection_options(url)))


#: A part is named by its folder and its file, in words of a-z and _: an include cannot leave ``lua/parts``.
INCLUDE = re.compile(r'\binclude "([a-z_]+/[a-z_]+)"')


@cache
def script_source(name: str) -> str:
    """The text of the command ``lua/<name>.lua``, with the text of its included parts, as Redis gets it.

    Each ``include "<folder>/<part>"`` is replaced by a call of a function whose body is the text of
    ``lua/parts/<folder>/<part>.lua``. A script in Redis cannot use ``require``. As bodies of functions the parts keep
    their locals (Lua allows 200 in each function) to themselves.
    """
    return _with_parts(f"{name}.lua")


@cache
def _with_parts(path: str) -> str:
    text = (files("warmfleet") / "lua" / path).read_text(encoding="utf-8")
    return INCLUDE.sub(lambda include: f"(function()\n{_with_parts(f'parts/{include[1]}.lua')}\nend)()", text)


Argument = bytes | str | int | float


def argv(script: str, rest: Iterable[Argument] = (), /, **values: Argument) -> list[Argument]:
    """The ARGV of a script, from its arguments by name and then ``rest``, the list of varying length.

    Raises TypeError if a name is missing or unknown.
    """
    names = SCRIPT_ARGS[script]
    if len(values) != len(names) or any(name not in values for name in names):
        raise TypeError(f"{script} takes {', '.join(names)}, not {', '.join(values)}")
    return [*[values[name] for name in names], *rest]


@contextmanager
def redis_errors() -> Iterator[None]:
    """Translate what redis-py raises into the error tree of ``warmfleet.errors``."""
    try:
        yield
    except ResponseError as error:
        code, _, text = str(error).partition(" ")
        if code in ERROR_CODES:
            raise ERROR_CODES[code](text) from error
        raise FleetUnavailable(f"Redis refused the call: {error}") from error
    except (RedisError, OSError, TimeoutError) as error:
        if "CERTIFICATE" in str(error).upper():
            raise FleetUnavailable(f"TLS with Redis fails, see WARMFLEET_REDIS_CA: {error}") from error
        raise FleetUnavailable(f"Redis is away or slow: {type(error).__name__}: {error}") from error


class ScriptClient:
    """Runs the scripts of one model: fills in KEYS by name and raises the errors of ``warmfleet.errors``."""

    def __init__(self, redis: aioredis.Redis, model: str, timeouts: Timeouts | None = None) -> None:
        self.redis = redis
        self.keys = Keys(model)
        self.timeouts = timeouts or Timeouts()
        self.suspected = asyncio.Event()  # set when an apply of this replica has made a worker suspected
        self._prefix = self.keys.prefix.encode()
        self._scripts: dict[str, tuple[AsyncScript, list[str]]] = {
            name: (redis.register_script(script_source(name)), [getattr(self.keys, key) for key in keys])
            for name, keys in SCRIPT_KEYS.items()
        }

    async def run(self, name: str, *args: Argument, timeout_s: float | None = None) -> Any:
        """EVALSHA of ``lua/<name>.lua`` with ``args`` as ARGV (see ``argv``); the script is loaded on NOSCRIPT.

        Default time limit: ``timeouts.request_s``. Raises FleetUnavailable or the class of the script's error code.
        """
        script, keys = self._scripts[name]
        with redis_errors():
            async with Patience(timeout_s or self.timeouts.request_s):
                return await script(keys=keys, args=args)

    async def keep(self, name: str, rest: Iterable[Argument] = (), /, **values: Argument) -> Any:
        """``run`` with arguments by name and the longer time limit of upkeep: no request waits for such a call."""
        return await self.run(name, *argv(name, rest, **values), timeout_s=self.timeouts.upkeep_s)
