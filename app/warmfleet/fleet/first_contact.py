"""Waits for the first answer of Redis to a new replica, and logs in one sentence why it does not come."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from warmfleet.fleet.pool_registry import master_of
from warmfleet.protocol.redis_address import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

    from warmfleet.protocol.redis_address import RedisAddress

logger = logging.getLogger("warmfleet.fleet")

OLDEST = (7, 0)  # oldest version of Redis with selectors for users and EVAL_RO
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0
LOG_EVERY_S = 60.0  # time between two equal log lines; logs/folding drops a line repeated within 60 s
_CONNECTING = re.compile(r"Error (-?\d+) connecting to \S+\. ")  # redis-py names the address once more
THEN = "No request can be served before it does; trying again at least every 2 s."


async def first_contact(clients: Sequence[aioredis.Redis], url: str) -> None:
    """Return when Redis has answered, and is new enough. Until then log what is wrong, once in LOG_EVERY_S.

    A changed reason is logged at once. clients: of all pools. One master of a Cluster that answers is
    enough, because its pools can be served while another master is away.
    """
    where, pause_s, told, told_at = parse(url), FIRST_PAUSE_S, "", 0.0
    asked = clients if where.kind == "cluster" else clients[:1]  # without a Cluster all clients have the same server
    while all(troubles := await asyncio.gather(*[trouble_with(redis, where) for redis in asked])):
        name, text = server_in_words(clients[0], where, url), troubles[0].text if troubles[0] else ""
        why = f"{name} {text}.{pools_help(clients[0], where)}"
        if why != told or time.monotonic() - told_at >= LOG_EVERY_S:
            told, told_at = why, time.monotonic()
            logger.error("%s %s", why, THEN)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    logger.info("%s answers now", in_words(where, url))


def server_in_words(redis: aioredis.Redis, where: RedisAddress, url: str) -> str:
    """Return the server of a client, as a sentence begins; in a Cluster the master, if its nodes have named it."""
    name, master = in_words(where, url), master_of(redis)
    if where.kind != "cluster" or not master:
        return name
    return f"The master {master} of the Redis Cluster, which has the keys of {_tag(redis)},"


def pools_help(redis: aioredis.Redis, where: RedisAddress) -> str:
    """Return a sentence of help if only the master with the registry of a model's pools is away, else ""."""
    if where.kind != "cluster" or not master_of(redis) or "#" in (tag := _tag(redis)):
        return ""
    return (
        f" If {tag} has several pools, others may answer: name them, as the registry cannot be read"
        f" (WARMFLEET_MODELS={tag}#1,{tag}#2)."
    )


def _tag(redis: aioredis.Redis) -> str:
    """Return the pool whose keys a client of a Cluster is for."""
    return str(redis.connection_pool.service_name).replace("~", "/")  # type: ignore[attr-defined]  # the pool is a MasterPool


def in_words(where: RedisAddress, url: str) -> str:
    """Return the address as an operator knows it, without user and password."""
    nodes = ", ".join(f"{host}:{port}" for host, port in where.nodes) or urlsplit(url).path
    return {
        "single": f"Redis at {nodes}",
        "sentinel": f"The Redis master {where.service!r} of the Sentinels at {nodes}",
        "cluster": f"The Redis Cluster at {nodes}",
    }[where.kind]


@dataclass(frozen=True, slots=True)
class Trouble:
    """The reason why Redis cannot be used. text: the end of a sentence that begins with ``in_words``."""

    kind: Literal["login", "protocol", "version", "slow", "tls", "connection", "loading"]
    text: str


async def trouble_with(redis: aioredis.Redis, where: RedisAddress) -> Trouble | None:
    """Ask Redis; return the reason why it cannot be used, None if it can."""
    try:
        info: dict[str, Any] = await redis.info("server")
    except AuthenticationError as error:
        return Trouble("login", f"refuses the user or the password of WARMFLEET_REDIS_URL ({error})")
    except InvalidResponse:
        return Trouble("protocol", f"is no Redis: what answers there speaks another protocol{_perhaps(where)}")
    except ResponseError as error:
        if "HELLO" in str(error).upper() and "UNKNOWN COMMAND" in str(error).upper():
            return Trouble("version", "is older than version 6, or no Redis: 7.0 or newer is needed")
        return None  # Redis answers; a refusal is reported by the call that it concerns
    except (TimeoutError, RedisTimeoutError):
        return Trouble("slow", f"does not answer in time{_perhaps(where)}")
    except (RedisError, OSError) as error:
        return _of_connection(error, where)
    version = str(info.get("redis_version", ""))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < OLDEST:
        return Trouble("version", f"is version {version}, but routers need 7.0 or newer (or Valkey)")
    return None


def _of_connection(error: Exception, where: RedisAddress) -> Trouble:
    text = str(error).rstrip(".")
    if isinstance(error.__cause__, AuthenticationError):
        return Trouble("login", f"refuses the user or the password of WARMFLEET_REDIS_URL ({error.__cause__})")
    if "CERTIFICATE" in text.upper():
        return Trouble("tls", f"shows a certificate that is not trusted, see WARMFLEET_REDIS_CA ({text})")
    if "SSL" in text.upper():
        return Trouble("tls", f"does not speak TLS, though WARMFLEET_REDIS_URL begins with rediss ({text})")
    if "loading" in text.lower():
        return Trouble("loading", "is loading its data")
    if "closed" in text.lower() or "reset" in text.lower():
        return Trouble("connection", f"ends the connection{_perhaps(where)} ({text})")
    if connecting := _CONNECTING.match(text):
        number = int(connecting[1])
        text = os.strerror(number) if number > 0 else text[connecting.end() :]  # each event loop has texts of its own
    return Trouble("connection", f"cannot be reached ({text})")


def _perhaps(where: RedisAddress) -> str:
    """Return a guess about TLS, the most frequent reason for such failures."""
    if where.tls:
        return "; perhaps it has no TLS there, then WARMFLEET_REDIS_URL begins with redis://"
    return "; if it wants TLS there, WARMFLEET_REDIS_URL begins with rediss://"
