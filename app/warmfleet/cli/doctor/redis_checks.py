"""Checks of the Redis server: connection, version, settings and speed, and its replicas, Sentinels or Cluster nodes."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from warmfleet.cli.doctor.finding import Finding, fault, note, ok, skipped
from warmfleet.cli.doctor.reach import reach
from warmfleet.cli.local.store import SOCKET_NAME
from warmfleet.fleet.first_contact import in_words, pools_help, server_in_words, trouble_with
from warmfleet.protocol.redis_address import CLUSTER_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis.asyncio as aioredis

    from warmfleet.fleet.first_contact import Trouble
    from warmfleet.fleet.inspection.server import Inspection, Node, ServerFacts
    from warmfleet.protocol.redis_address import HostPort, RedisAddress

SHORT_SHARE = 0.85  # used share of maxmemory above which routers index no new blocks (lua/README.md)
BYTES_PER_BLOCK = 130  # memory of Redis for each pair of block and worker
MAX_SKEW_S = 2.0
CALLS, CALLS_S = 100, 1.0  # most script calls that measure the latency, and their longest total time
LATE_SHARE = 0.05  # least share of calls over the decision timeout that is a fault; fewer may be a busy moment here
SLOW_S = 0.005  # longest usual median of a script call; every request waits for at least one call
MIB = 2**20
VARIABLE = "WARMFLEET_REDIS_URL"
OF_UP = "the URL of `warmfleet up`"
NO_SOCKET = "start Redis with `unixsocket`, or correct the path in the URL"

REMEDIES = {
    "name": "correct the host in WARMFLEET_REDIS_URL, or the DNS of this machine",
    "connection": "start Redis there, or correct host and port in WARMFLEET_REDIS_URL; if Redis runs, look at its"
    " `bind` and `protected-mode`, and at firewalls and network policies between here and there",
    "login": "put user and password of `warmfleet acl` into the URL (redis://router:PASSWORD@HOST:PORT/0); in it, %"
    " : / @ ? # of a password are written as %XX",
    "tls": "set WARMFLEET_REDIS_CA to the PEM file of the authority that signed Redis' certificate, use the host"
    " that the certificate names, and begin the URL with rediss:// only if Redis speaks TLS on that port",
    "protocol": "correct host and port in WARMFLEET_REDIS_URL; a TLS port needs rediss://",
    "version": "run Redis 7.0 or newer, or Valkey",
    "slow": "find out what keeps Redis busy (SLOWLOG GET), or which firewall swallows the packets",
    "loading": "wait: Redis reads its dump",
}
#: Remedies, by kind of URL, if some nodes take connections, but the master that they name cannot be reached.
NO_MASTER = {
    "sentinel": "compare the SERVICE at the end of the URL with `sentinel monitor` of the Sentinels, and see whether"
    " the address that they name can be reached from here",
    "cluster": "see `redis-cli --cluster check`, and whether the addresses that the nodes name can be reached from"
    " here",
}


async def reachable(redis: aioredis.Redis, where: RedisAddress, url: str, url_from: str = VARIABLE) -> list[Finding]:
    """Check look-up of the name, connection, TLS, login and version, in this order until one fails.

    url_from: the variable or option that gave the URL; the findings name it.
    """
    found = await _reachable(redis, where, url)
    if url_from == OF_UP and Path(urlsplit(url).path).name == SOCKET_NAME:
        dead = (NO_SOCKET, REMEDIES["connection"])
        restart = "its store died; start `warmfleet up` again"
        return [replace(finding, remedy=restart) if finding.remedy in dead else finding for finding in found]
    texts = [
        (finding.detail.replace(VARIABLE, url_from), finding.remedy.replace(VARIABLE, url_from)) for finding in found
    ]
    return [replace(finding, detail=text[0], remedy=text[1]) for finding, text in zip(found, texts, strict=True)]


def lost(tag: str, trouble: Trouble, where: RedisAddress) -> Finding:
    """Make the fault for a pool whose Redis does not answer, while another pool's Redis does."""
    remedy = NO_MASTER.get(where.kind) if trouble.kind == "connection" else None
    return fault("reachable", f"the Redis that has the keys of {tag} {trouble.text}", remedy or REMEDIES[trouble.kind])


async def _reachable(redis: aioredis.Redis, where: RedisAddress, url: str) -> list[Finding]:
    steps = [await _node(host, port) for host, port in where.nodes] or [_socket_file(urlsplit(url).path)]
    if all(step.state == "FAULT" for step in steps):
        return steps
    began = time.perf_counter()
    trouble = await trouble_with(redis, where)
    name = in_words(where, url)
    if trouble is None:
        seconds = time.perf_counter() - began
        tls = "TLS and login" if where.tls else "login"
        return [*steps, ok("login", f"{name} answers; {tls} took {1000 * seconds:.1f} ms")]
    check = trouble.kind if trouble.kind in ("login", "tls", "version") else "login"
    detail = f"{server_in_words(redis, where, url)} {trouble.text}"
    remedy = (NO_MASTER.get(where.kind) if trouble.kind == "connection" else None) or REMEDIES[trouble.kind]
    more = pools_help(redis, where)
    return [*steps, fault(check, detail, f"{remedy}.{more}" if more else remedy)]


async def _node(host: str, port: int) -> Finding:
    got = await reach(host, port)
    if got.failed:
        step = "the name cannot be resolved" if got.failed == "name" else "no connection"
        return fault("reachable", f"{host}:{port}: {step} ({got.why})", REMEDIES[got.failed])
    return ok("reachable", f"{host}:{port} takes connections ({1000 * got.seconds:.1f} ms)")


def _socket_file(path: str) -> Finding:
    if Path(path).exists():
        return ok("reachable", f"the socket {path} exists")
    return fault("reachable", f"there is no socket {path}", NO_SOCKET)


def settings_of(facts: ServerFacts, capacity_blocks: int) -> list[Finding]:
    """Check version, eviction policy, memory and role. capacity_blocks: of all engines together."""
    return [ok("version", facts.version), _eviction(facts), _memory(facts, capacity_blocks), _role(facts)]


def _eviction(facts: ServerFacts) -> Finding:
    if facts.eviction == "noeviction":
        return ok("eviction", "maxmemory-policy is noeviction")
    return fault(
        "eviction",
        f"maxmemory-policy is {facts.eviction}: at its limit Redis would drop the index and reservations at will",
        "CONFIG SET maxmemory-policy noeviction, and the same line in redis.conf",
    )


def _memory(facts: ServerFacts, capacity_blocks: int) -> Finding:
    used, limit = facts.used_bytes / MIB, facts.limit_bytes / MIB
    needed = math.ceil(capacity_blocks * BYTES_PER_BLOCK / MIB)
    more = f"raise maxmemory; full caches of the known engines take about {needed} MiB of index"
    if not facts.limit_bytes:
        return note(
            "memory",
            f"{used:.0f} MiB used, maxmemory is not set: Redis grows until its machine has no memory left",
            f"set maxmemory; full caches of the known engines take about {needed} MiB of index",
        )
    if facts.used_share >= 1:
        text = (
            f"Redis is full: {used:.1f} of {limit:.1f} MiB; it refuses joins and block events, nothing new is indexed"
        )
        return fault("memory", text, more)
    if facts.used_share >= SHORT_SHARE:
        text = f"{facts.used_share:.0%} of {limit:.1f} MiB are used: from {SHORT_SHARE:.0%} on no new block is indexed"
        return fault("memory", text, more)
    text = f"{used:.0f} of {limit:.0f} MiB used"
    if needed > limit * SHORT_SHARE:
        return note("memory", f"{text}, but full caches of all engines take about {needed} MiB of index", more)
    return ok("memory", text)


def _role(facts: ServerFacts) -> Finding:
    if facts.role != "slave":
        return ok("role", f"it is a master; replicas: {facts.replicas}")
    link = "" if facts.link_up else ", and its link to the master is down"
    return fault(
        "role",
        f"this server is a read-only replica{link}: nothing can be written here",
        "name the master in WARMFLEET_REDIS_URL, or the Sentinels: redis+sentinel://host:26379/SERVICE",
    )


async def clock(inspection: Inspection, wall: Callable[[], float]) -> Finding:
    """Compare the clock of this machine with that of Redis."""
    ahead, error = await inspection.clock_ahead_s(wall)
    if abs(ahead) - error <= MAX_SKEW_S:
        return ok("clock", f"this machine and Redis differ by {abs(ahead):.3f} s (measured to {error:.3f} s)")
    direction = "ahead of" if ahead > 0 else "behind"
    return fault(
        "clock",
        f"this machine's clock is {abs(ahead):.1f} s {direction} Redis': leases go by Redis' clock alone, but client"
        " keys expire by the replicas', certificates fail by it, and logs cannot be compared",
        "let chrony or systemd-timesyncd set the clocks of both machines",
    )


async def latency(inspection: Inspection, decide_timeout_s: float) -> Finding:
    """Check the median and P99 latency of script calls, sent one after the other."""
    taken = sorted(await inspection.script_seconds(CALLS, CALLS_S))
    if not taken:
        return skipped("latency", "no call of a script was answered in time")
    median, p99 = statistics.median(taken), taken[min(len(taken) - 1, int(0.99 * len(taken)))]
    text = f"a script call takes {1000 * median:.2f} ms, P99 {1000 * p99:.2f} ms ({len(taken)} calls)"
    late = sum(seconds >= decide_timeout_s for seconds in taken)
    fallback = f"{text}; after {1000 * decide_timeout_s:.0f} ms a request goes by the last known fleet instead"
    nearer = "put Redis near the routers and see what keeps it busy (SLOWLOG GET)"
    if late >= LATE_SHARE * len(taken):
        return fault("latency", fallback, f"{nearer}; only if it cannot be quicker, raise WARMFLEET_DECIDE_TIMEOUT_S")
    if late:
        return note("latency", fallback, f"{nearer}, or what keeps this machine busy")
    if median >= SLOW_S:
        return note("latency", f"{text}; every request waits for one", nearer)
    return ok("latency", text)


async def topology(inspection: Inspection, where: RedisAddress, facts: ServerFacts) -> list[Finding]:
    """Check that Sentinels or Cluster nodes answer and agree, all slots have a master, and each master a replica."""
    if where.kind == "single":
        if not facts.cluster:
            return []
        text = "this server is a node of a Cluster, but the URL names a single server"
        remedy = "begin WARMFLEET_REDIS_URL with redis+cluster:// (rediss+cluster:// with TLS)"
        return [fault("cluster", text, remedy)]
    nodes = await inspection.nodes(where)
    findings = [_silent(node, where.kind) for node in nodes if node.why]
    findings += _owners(nodes, where.kind)
    if facts.replicas == 0:
        text = f"no replica follows the master of {inspection.keys.tag}: when it is lost, nothing takes its place"
        findings.append(fault("replication", text, "start a replica (replicaof), and look at its log if there is one"))
    else:
        findings.append(ok("replication", f"replicas that follow the master: {facts.replicas}"))
    return findings


def _silent(node: Node, kind: str) -> Finding:
    host, port = node.address
    role = "Sentinel" if kind == "sentinel" else "Cluster node"
    remedy = f"start it, or take it out of the URL; a {role} needs its own user and password"
    return fault("nodes", f"the {role} {host}:{port} does not answer ({node.why})", remedy)


def _owners(nodes: list[Node], kind: str) -> list[Finding]:
    named: dict[HostPort | None, list[HostPort]] = {}
    for node in nodes:
        if not node.why:
            named.setdefault(node.master, []).append(node.address)
    text = "; ".join(f"{_at(master)} by {', '.join(map(_at, by))}" for master, by in named.items())
    remedy = "look at SENTINEL CKQUORUM and the Sentinels' logs" if kind == "sentinel" else "redis-cli --cluster check"
    agree = len(named) == 1 and None not in named
    first = ok("master", f"named: {text}") if agree else fault("master", f"they do not agree: {text}", remedy)
    if kind != "cluster" or not agree:
        return [first]
    covered = max((node.slots for node in nodes), default=0)
    if covered < CLUSTER_SLOTS:
        lacking = f"{CLUSTER_SLOTS - covered} of {CLUSTER_SLOTS} slots have no owner"
        return [first, fault("slots", lacking, "redis-cli --cluster fix")]
    return [first, ok("slots", f"all {CLUSTER_SLOTS} slots have an owner")]


def _at(place: HostPort | None) -> str:
    return f"{place[0]}:{place[1]}" if place else "nobody"
