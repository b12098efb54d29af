"""The pools of workers that share a master of a Redis Cluster, and tags for new pools that spread them.

All keys of a pool have one hash tag, so one master has them all: a busy pool takes a share of one core of that master.
Everything here is computed from the ranges of slots, as ``RedisConnections.slot_ranges`` reads them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet.protocol.redis_address import owner_of, slot_of
from warmfleet.protocol.wire import model_tag

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from warmfleet.protocol.redis_address import HostPort, SlotRange

TAGS_TRIED = 1_000  # most tags tried: their slots are random, so one of them is nearly always on a wanted master


@dataclass(frozen=True, slots=True)
class Crowded:
    """A master that has several busy pools. tags: the tags of these pools, sorted."""

    master: HostPort
    tags: tuple[str, ...]


def master_of(tag: str, ranges: Iterable[SlotRange]) -> HostPort | None:
    """Return the master that has this pool's keys; None if no master owns their slot, or without a Cluster.

    tag: as in WARMFLEET_MODELS. Raises WireError for another.
    """
    return owner_of(slot_of(model_tag(tag)), ranges)


def by_master(tags: Iterable[str], ranges: Sequence[SlotRange]) -> dict[HostPort, list[str]]:
    """Return for every master that owns slots the sorted tags of the pools on it; an empty list if it has no pool."""
    found: dict[HostPort, list[str]] = {owner: [] for _, _, owner in ranges}
    for tag in sorted(tags):
        owner = master_of(tag, ranges)
        if owner is not None:
            found[owner].append(tag)
    return found


def crowded(busy: Iterable[str], ranges: Sequence[SlotRange]) -> tuple[Crowded, ...]:
    """Return the masters with several busy pools; () if every master has a busy pool.

    busy: the tags of all pools with workers, of every served model.
    """
    found = by_master(busy, ranges)
    if all(found.values()):
        return ()
    return tuple(Crowded(master, tuple(tags)) for master, tags in sorted(found.items()) if len(tags) > 1)


def next_tag(name: str, existing: Collection[str], ranges: Sequence[SlotRange], others: Iterable[str] = ()) -> str:
    """Return a tag ``name#N`` for a new pool of a served model, on a master that has the fewest pools.

    N is larger than in every existing tag, so that keys of a removed pool are not used again. existing: the tags of
    the model's pools; others: tags of other models' pools. ranges: empty without a Cluster; N is then the next number.
    """
    numbers = (re.fullmatch(r"#(\d{1,9})", tag[len(name) :]) for tag in existing if tag.startswith(name))
    first = 1 + max((int(found[1]) for found in numbers if found), default=0)
    counted = Counter({master: len(tags) for master, tags in by_master([*existing, *others], ranges).items()})
    fewest = min(counted.values(), default=0)
    for number in range(first, first + TAGS_TRIED):
        tag = f"{name}#{number}"
        master = master_of(tag, ranges)
        if not ranges or (master is not None and counted[master] == fewest):
            return tag
    return f"{name}#{first}"
