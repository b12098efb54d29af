"""The replicas that serve a pool: each announces itself in Redis, and reads the announcements of all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.fleet.client import pairs
from warmfleet.fleet.connection.packing import pack_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet.client import Scripts

ANNOUNCE_S = 3.0  # interval between two announcements of a replica
SILENT_S = 8.0  # time without an announcement after which a replica counts as killed, hung or cut off
FORGET_MS = 600_000  # time for which operators can still read that a replica was lost
MAX_BUCKETS = 256


@dataclass(frozen=True, slots=True)
class LastMinute:
    """The counts of a replica in one pool in the last minute.

    decided: number of decisions; fallbacks: how many of them were made without Redis. prompt_tokens, matched_tokens:
    sums over the other decisions. waits: number of streamed answers by bucket of TTFT (``pools/ttft_window``).
    """

    decided: int = 0
    fallbacks: int = 0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    waits: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Announcement:
    """The record of a replica in one pool, written by the replica itself.

    url: the address at which the replica answers operators; empty: unknown. started: Unix time. in_flight: number of
    its requests at engines; waiting: number of its requests in the queue.
    """

    url: str = ""
    version: str = ""
    started: int = 0
    policy: str = ""
    draining: bool = False
    in_flight: int = 0
    waiting: int = 0
    minute: LastMinute = field(default_factory=LastMinute)

    def pack(self) -> bytes:
        return orjson.dumps(asdict(self), option=orjson.OPT_NON_STR_KEYS)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as one reading of Redis found it. name: host and port. age_s: age of the last announcement."""

    name: str
    age_s: float
    told: Announcement

    @property
    def heard(self) -> bool:
        """Whether the last announcement is recent; otherwise the replica was killed, hangs, or cannot reach Redis."""
        return self.age_s <= SILENT_S

    @property
    def state(self) -> str:
        """``serving``, ``draining`` or ``silent``."""
        return ("draining" if self.told.draining else "serving") if self.heard else "silent"


class Replicas:
    """Writes the announcement of this replica, and reads those of all replicas."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def announce(self, name: str, told: Announcement | None) -> int:
        """Announce this replica, or with None delete its announcement; return their number. Raises FleetUnavailable."""
        record = b"" if told is None else told.pack()
        return int(await self._scripts.keep("announce", name=name, record=record, forget_ms=FORGET_MS))

    async def read(self) -> list[ReplicaView]:
        """Read all replicas with an announcement of the last ten minutes, by name. Raises FleetUnavailable."""
        calls = [("", pack_command("HGETALL", self._scripts.keys.replicas)), ("", pack_command("TIME"))]
        found, (seconds, micros) = await self._scripts.together(calls)
        now = int(seconds) + int(micros) / 1e6
        views = [_view(name, raw, now) for name, raw in sorted(pairs(found).items())]
        return [view for view in views if view is not None]


def _view(name: bytes, raw: bytes, now: float) -> ReplicaView | None:
    """Return the replica of an entry; None if the entry is malformed, as any client of Redis may write one."""
    at_ms, _, record = raw.partition(b" ")
    try:
        told = orjson.loads(record)
        minute = _checked(LastMinute, told.pop("minute", None) or {}, waits=_waits)
        age_s = max(0.0, now - int(at_ms) / 1000)
        return ReplicaView(name.decode("ascii"), age_s, _checked(Announcement, told, minute=lambda _: minute))
    except (ValueError, TypeError, AttributeError):
        return None


def _checked(kind: type[Any], told: Mapping[str, Any], **readers: Any) -> Any:
    """Return an object of class ``kind`` with the fields of ``told``; fields of a newer version are left out.

    Raises TypeError for a field of another type.
    """
    known: dict[str, Any] = {name: read(told.get(name)) for name, read in readers.items()}
    for name in {known_field.name for known_field in fields(kind)} & told.keys() - readers.keys():
        if type(told[name]) is not type(getattr(kind(), name)):
            raise TypeError(name)
        known[name] = told[name]
    return kind(**known)


def _waits(told: Any) -> dict[int, int]:
    if not isinstance(told, dict) or len(told) > MAX_BUCKETS:
        return {}
    return {int(bucket): int(count) for bucket, count in told.items()}
