"""The pool that a server belongs to: chosen when it joins, kept while it serves, left when the operator says so.

A worker is told only the name of its model. One hash in Redis, the registry, holds the model's pools; another says
which server is in which pool (``protocol/pools``). A restarted server takes its old pool. A new one takes the pool with
the least capacity; of equal pools, the pool with the fewest servers of its host, then the first by rendezvous hash.
Servers that start together are spread as if they had started one after another: each writes its choice only if no other
has written since it read (WATCH), else it chooses again. So no server needs the right to run scripts.

Engine core and API server are two processes with a ``PoolAssignment`` each. Their server's record in Redis binds both:
the process that looks later follows the other within ASK_SECONDS.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from redis.exceptions import NoPermissionError, RedisError, WatchError

from warmfleet_worker.protocol import pools, wire
from warmfleet_worker.protocol.pools import KEPT_MS, Placement
from warmfleet_worker.stream import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import redis

    from warmfleet_worker.config import PublisherConfig
    from warmfleet_worker.protocol.pools import PoolEntry

logger = logging.getLogger("vllm.warmfleet")

ASK_SECONDS = 15.0  # time between two looks at the list of pools, after which a server's processes are in one pool
TIMEOUT_SECONDS = 0.5  # longest wait for an answer about pools, during which the publisher's thread reports nothing
SEEN_MS = 30_000  # age at which a server renews ``seen_ms`` in its record, which says that it runs
AWAY_MS = 90_000  # time without a renewal after which a server counts as restarted
RECENT_MS = 600_000  # largest age of ``seen_ms`` at which a server still counts when a new server chooses a pool
SETTLE_MS = 45_000  # longest time from a move until both processes have followed and passed a probe in the new pool
MOVING_SHARE = 1 / 8  # largest share of a model's servers that move between pools at a time; one server always may
STRUCK_AT_ONCE = 64  # most records of servers unseen for a day that one call removes
TRIES = 8  # tries to write a choice; the last ignores what other servers wrote meanwhile, which does little harm


def host_name() -> str:
    """Return the name of this machine: NODE_NAME, which Kubernetes can set for a pod, else the host name."""
    name = os.environ.get("NODE_NAME") or socket.gethostname()
    return "".join(char if char.isalnum() or char in "._-" else "-" for char in name)[:64]


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a server that asks for a pool. rank, blocks: an engine core's number and capacity."""

    server_id: str
    host: str = ""
    rank: int | None = None
    blocks: int = 0


class PoolAssignment:
    """Finds the pool of one process of a server, which is its API server or an engine core. One thread uses it.

    model: the name as it was given; with ``#`` it names a pool, which the operator has chosen and the server keeps.
    """

    def __init__(self, redis_url: str, model: str, member: Member) -> None:
        self.tag = model if "#" in model else ""
        self._name = pools.served_model(model)
        self._pinned = bool(self.tag)
        self._member = member
        self._client = connect(redis_url, wire.model_tag(self._name), timeout_seconds=TIMEOUT_SECONDS)
        self._due = 0.0
        self._unanswered = False
        self._told = False

    def look(self, now: float) -> str:
        """Return the tag of the pool to be in at ``now`` (monotonic seconds).

        Raises RedisError if Redis has never named a pool yet. After later errors the server stays in its pool: in a
        Cluster the registry's Redis server may be down while that of the pool works.
        """
        if now < self._due:
            return self.tag
        self._due = now + ASK_SECONDS * random.uniform(0.8, 1.0)
        try:
            self.tag = take(self._client, self._name, self._member, self.tag, self._lacks if self._pinned else None)
            self._unanswered = False
        except NoPermissionError:  # the user's rights are from an older `warmfleet acl`
            self._say("this Redis user may not choose a pool (`warmfleet acl` prints its rights)")
            self.tag = self.tag or self._name
        except RedisError as error:
            if not self.tag:
                self._due = 0.0
                raise
            self._say(f"the registry of pools cannot be read: {error}")
        return self.tag

    def doubt(self) -> None:
        """Let the next call of ``look`` ask Redis, because the keys of the present pool are gone."""
        self._due = 0.0

    def close(self) -> None:
        self._client.close()

    def _say(self, reason: str) -> None:
        """Log the first failure of several."""
        if not self._unanswered:
            does = f"stays in {self.tag}" if self.tag else f"joins the pool {self._name}"
            logger.warning("warmfleet: %s: %s; it %s", self._member.server_id, reason, does)
        self._unanswered = True

    def _lacks(self, registry: Sequence[PoolEntry]) -> None:
        """Log once that the registry lacks the pool that the operator has chosen for this server."""
        if not self._told:
            logger.warning(
                "warmfleet: %s: WARMFLEET_MODEL names the pool %s, which the registry of %s lacks: only routers whose"
                " WARMFLEET_MODELS names it send requests here. Enter it (warmfleet pools add %s), or name the model"
                " alone, or one of its pools: %s",
                *(self._member.server_id, self.tag, self._name, self.tag),
                ", ".join(entry.tag for entry in registry),
            )
        self._told = True


def take(
    client: redis.Redis,
    name: str,
    member: Member,
    present: str,
    lacks: Callable[[Sequence[PoolEntry]], None] | None = None,
) -> str:
    """Choose or keep the pool of ``member``, and write it into the server's ``placement``; return the pool's tag.

    present: the server's pool now; "" if it has just started. lacks: given only for a server whose operator has chosen
    the pool, which it keeps; called if the registry lacks that pool. Raises RedisError.
    """
    pinned = lacks is not None
    keys = wire.Keys(name)
    pipe = client.pipeline(transaction=False)
    pipe.time()
    pipe.hgetall(keys.pools)
    pipe.hget(keys.placement, member.server_id)
    (seconds, micros), fields, packed = pipe.execute()
    now_ms, own = seconds * 1000 + micros // 1000, pools.read_placement(packed)
    registry = pools.read_registry(name, fields)
    if not registry:  # the model has one pool, or Redis lost the registry, which a router writes back
        return present or (own.pool if own else name)
    if lacks is not None and all(entry.tag != present for entry in registry):
        lacks(registry)
    pool = present if pinned else stays(registry, own, present, now_ms)
    if not pool:
        return _choose(client, keys.placement, registry, member, present, now_ms)
    place = replace(placed(own, pool, member, present, now_ms), pinned=pinned)
    told = own and (own.pool, own.blocks, own.pinned)
    if own is None or now_ms - own.seen_ms > SEEN_MS or told != (place.pool, place.blocks, pinned):
        client.hset(keys.placement, member.server_id, place.encode())
    return pool


def _choose(
    client: redis.Redis, key: str, registry: Sequence[PoolEntry], member: Member, present: str, now_ms: int
) -> str:
    """Choose a pool by the records of all servers, and write it; choose again if another server wrote meanwhile."""
    for tries_left in reversed(range(TRIES)):
        with client.pipeline() as pipe:
            pipe.watch(key)  # type: ignore[no-untyped-call]  # redis-py
            found = {member.decode(): pools.read_placement(packed) for member, packed in pipe.hgetall(key).items()}  # type: ignore[union-attr]  # watching: it has answered
            places = {member: place for member, place in found.items() if place and now_ms - place.seen_ms < KEPT_MS}
            pool = choose(registry, places, member, present, now_ms)
            if not tries_left:
                pipe.unwatch()
            pipe.multi()
            pipe.hset(
                key, member.server_id, placed(places.get(member.server_id), pool, member, present, now_ms).encode()
            )
            gone = sorted(found.keys() - places.keys() - {member.server_id})[:STRUCK_AT_ONCE]
            if gone:
                pipe.hdel(key, *gone)
            try:
                pipe.execute()
            except WatchError:
                time.sleep(random.uniform(0.001, 0.02))  # only the publisher's thread sleeps
                continue
            return pool
    raise AssertionError("the last try watches nothing")


def placed(own: Placement | None, pool: str, member: Member, present: str, now_ms: int) -> Placement:
    """Make a server's record; it keeps the capacity of the other ranks, unless the server has been restarted."""
    moves = bool(present) and (own.pool if own else present) != pool
    moved_ms = now_ms if moves else own.moved_ms if own else 0
    blocks = dict(own.blocks) if own and now_ms - own.seen_ms <= AWAY_MS else {}
    if member.rank is not None and member.blocks:
        blocks[str(member.rank)] = member.blocks
    return Placement(pool, member.host, now_ms, blocks, moved_ms)


def stays(registry: Sequence[PoolEntry], own: Placement | None, present: str, now_ms: int) -> str:
    """Return the pool that the server keeps, whatever other servers do; "" if it must choose among pools."""
    old = own.pool if own else present
    entry = next((entry for entry in registry if entry.tag == old), None)
    if entry is None or entry.moving:
        return ""
    if entry.draining:
        return old if present else ""
    restarted = not present and own is not None and now_ms - own.seen_ms > AWAY_MS
    return "" if restarted else old


def choose(
    registry: Sequence[PoolEntry], places: Mapping[str, Placement], member: Member, present: str, now_ms: int
) -> str:
    """Choose the pool of a server, by the records of all servers of its model."""
    own = places.get(member.server_id)
    kept = stays(registry, own, present, now_ms)
    if kept:
        return kept
    serving = [entry.tag for entry in registry if not entry.draining]
    others = {server: place for server, place in places.items() if server != member.server_id}
    here = [place for place in others.values() if now_ms - place.seen_ms < RECENT_MS]
    if present and any(entry.tag == present for entry in registry):  # its pool is being emptied, and serves meanwhile
        on_the_way = sum(1 for place in here if now_ms - place.moved_ms < SETTLE_MS)
        if on_the_way >= max(1, int(MOVING_SHARE * len(here))):
            return present
    told = [place.capacity_blocks for place in others.values() if place.capacity_blocks]
    unknown = sum(told) / len(told) if told else 1.0  # capacity assumed of a server that has told none
    size = placed(own, "", member, present, now_ms).capacity_blocks or unknown
    old = own.pool if own else ""
    if old in serving:  # restarted: stay, unless another pool is smaller even with this server added to it
        full = _capacity(serving, others.values(), unknown)
        if full[old] < min(full.values()) + size:
            return old
    if not serving:  # all pools are drained: stay, or go where some requests may still come
        serving = [old] if any(entry.tag == old for entry in registry) else [entry.tag for entry in registry]
    filled = _capacity(serving, here, unknown)
    least = min(filled.values())
    equal = [tag for tag in serving if filled[tag] < least + size / 2]  # equal engines differ by a few blocks
    beside = {tag: sum(1 for place in here if place.pool == tag and place.host == member.host) for tag in equal}
    return min(equal, key=lambda tag: (beside[tag], -pools.weight(tag, member.server_id)))


def _capacity(tags: Sequence[str], places: Iterable[Placement], unknown: float) -> dict[str, float]:
    filled = dict.fromkeys(tags, 0.0)
    for place in places:
        if place.pool in filled:
            filled[place.pool] += place.capacity_blocks or unknown
    return filled


def core_assignment(config: PublisherConfig, host: str = "") -> PoolAssignment:
    """Make the assignment of an engine core. host: its machine; by default this one."""
    member = Member(config.server_id, host or host_name(), config.rank, config.capacity_blocks)
    return PoolAssignment(config.redis_url, config.model, member)


def server_assignment(redis_url: str, model: str, server_id: str, host: str = "") -> PoolAssignment:
    """Make the assignment of an API server. host: its machine; by default this one."""
    return PoolAssignment(redis_url, model, Member(server_id, host or host_name()))
