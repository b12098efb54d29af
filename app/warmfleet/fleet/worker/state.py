"""The life of a worker: its states, what moves it from one to the next, and how its state is read from Redis.

A worker's state has two layers. Its *standing* says what is known of its identity: unproved, proved, or found wrong. A
*hold* keeps it from taking requests whatever its standing is: it said goodbye, nobody hears it, its API server is
missing, its stream is broken, it does not serve its pool's name, its engine is paused, or the operator drains it. While
a hold lasts, the standing underneath stays, and may change; when the last hold ends, the worker is where its standing
says. One hold does not keep requests away: a worker whose heartbeats are missing while its engine answers over HTTP is
``unheard``, and routable. ``app/docs/worker-life.md`` draws both tables.

Redis keeps no state by name. ``state_of`` derives it from the flags of the load row, which ``decide`` goes by, the age
of the last heartbeat, and the record. Every reader in Python goes by the state and by nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from warmfleet.fleet.rows import Flag
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class WorkerState(StrEnum):
    """The value is the word that ``/workers`` and ``warmfleet workers`` show."""

    # Standings
    GONE = "gone"  # Redis knows nothing of it: it never joined, or it was forgotten
    PENDING = "pending"  # it joined, and no probe has told anything yet
    WARMING = "warming"  # the probe passed; a replica sends it the most used prefixes before it takes requests
    PROVEN = "proven"  # its identity is right: its blocks may be matched
    SUSPECTED = "suspected"  # proven, but an answer or its stream was not as expected: a probe is due
    LOAD_ONLY = "load-only"  # its identity is wrong or untested: it takes requests, its blocks are never matched
    UNREACHABLE = "unreachable"  # its URL is missing or did not answer the probe
    APPROXIMATE = "approximate"  # a stock engine without the plugin: only what was sent to it is known
    # Holds
    LEFT = "left"  # its engine core or its API server said goodbye, and neither has joined since
    SILENT = "silent"  # no heartbeat for a TTL; its entries in the index stay
    JOINING = "joining"  # one half only: its API server has not been heard, or not for a TTL
    HOSTILE = "hostile"  # its stream broke the rules: it must join anew
    MISNAMED = "misnamed"  # it does not serve its pool's name: requests for that would fail there
    DRAINING = "draining"  # the operator lets it finish what it has
    PAUSED = "paused"  # somebody paused its engine or put it to sleep
    EJECTED = "ejected"  # it failed requests that others served: it gets none for a while, then one to try it
    UNHEARD = "unheard"  # no heartbeat, but its engine answers: it takes requests, by its index as last known

    @property
    def routable(self) -> bool:
        """A decision may choose it."""
        return self in ROUTABLE

    @property
    def matched(self) -> bool:
        """The block hashes of its engine are known to be those that routers compute."""
        return self in (WorkerState.PROVEN, WorkerState.SUSPECTED)

    @property
    def unproved(self) -> bool:
        """No probe has passed: until one does, it takes no requests."""
        return self in UNPROVED

    @property
    def alive(self) -> bool:
        """Its engine core and its API server are both heard, whatever else holds it."""
        return self not in (WorkerState.GONE, WorkerState.LEFT, WorkerState.SILENT, WorkerState.JOINING)


#: The standings in which a worker takes requests.
SERVING = frozenset({WorkerState.PROVEN, WorkerState.SUSPECTED, WorkerState.LOAD_ONLY, WorkerState.APPROXIMATE})
ROUTABLE = SERVING | {WorkerState.UNHEARD}
#: A hold hides the standing, and of several holds the first in this list is the state.
HOLDS = (
    WorkerState.LEFT,
    WorkerState.SILENT,
    WorkerState.JOINING,
    WorkerState.HOSTILE,
    WorkerState.MISNAMED,
    WorkerState.DRAINING,
    WorkerState.PAUSED,
    WorkerState.EJECTED,
    WorkerState.UNHEARD,
)


class Event(StrEnum):
    """What moves a worker; the value is the sentence in the drawing."""

    CORE_JOINS = "its engine core joins"
    SERVER_JOINS = "a new process of its API server joins"
    REGISTERED = "a replica finds the stock engine healthy"
    PROBE_PASSES = "a probe passes"
    IDENTITY_FAILS = "a probe finds another identity, or cannot test it"
    URL_FAILS = "a probe gets no answer at its URL"
    WARMING_BEGINS = "a probe passes and a replica warms it"
    WARMING_ENDS = "it is warm, or warming is given up"
    WARMING_STALLS = "it does not answer while it is warmed"
    WARMING_EXPIRES = "the replica that warms it is gone"
    SUSPICION = "answers or blocks differ from what was expected"
    FORGOTTEN = "it was silent for ten minutes"
    GOODBYE = "its engine core or its API server says goodbye"
    FALLS_SILENT = "no heartbeat for a TTL, or a failed health check"
    HEARD = "it is heard again"
    STREAM_BREAKS = "its stream breaks the rules"
    SERVER_LOST = "its API server is silent for a TTL"
    SERVER_HEARD = "its API server is heard"
    MISNAMED = "it does not serve its pool's name"
    RENAMED = "it serves its pool's name"
    DRAIN = "warmfleet drain"
    UNDRAIN = "warmfleet drain --undo"
    PAUSED = "its engine is paused or put to sleep"
    RESUMED = "its engine is resumed or woken up"
    VOUCHED = "its heartbeats are missing, but its engine answers a replica"
    LAPSES = "its engine answers no replica either"
    EJECTED = "it fails requests that other workers serve"
    ACQUITTED = "it serves a request on trial, or other workers are gone"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of standing, from each of ``before``. by: the script that makes it. reason: why it is right."""

    before: tuple[WorkerState, ...]
    event: Event
    after: WorkerState
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hold:
    """A state that hides the standing from ``begins`` to ``ends``. by: the scripts that set it and take it back."""

    state: WorkerState
    begins: Event
    ends: Event
    by: str
    reason: str


_W, _E = WorkerState, Event
#: The standings of a worker with the plugin, and those of them in which the result of a probe is recorded.
JOINED = (_W.PENDING, _W.WARMING, _W.PROVEN, _W.SUSPECTED, _W.LOAD_ONLY, _W.UNREACHABLE)
PROBED = (_W.PENDING, _W.PROVEN, _W.SUSPECTED, _W.LOAD_ONLY, _W.UNREACHABLE)
UNPROVED = (_W.PENDING, _W.UNREACHABLE)
CHANGES: tuple[Change, ...] = (
    Change((_W.GONE,), _E.CORE_JOINS, _W.PENDING, "apply_control", "a new worker has an empty index"),
    Change(JOINED, _E.CORE_JOINS, _W.PENDING, "apply_control", "a restarted engine has an empty cache, and a new slot"),
    Change(JOINED, _E.SERVER_JOINS, _W.PENDING, "apply_server", "another process at its URL has proved nothing"),
    Change(PROBED, _E.PROBE_PASSES, _W.PROVEN, "prove", "its blocks came as the router had computed them"),
    Change(PROBED, _E.IDENTITY_FAILS, _W.LOAD_ONLY, "prove", "a match would be wrong, an answer is not"),
    Change(UNPROVED, _E.URL_FAILS, _W.UNREACHABLE, "prove", "requests that are sent there would fail"),
    Change(UNPROVED, _E.WARMING_BEGINS, _W.WARMING, "prove", "a cold worker would compute shared prefixes again"),
    Change((_W.WARMING,), _E.WARMING_ENDS, _W.PROVEN, "prove", "the probe had passed before"),
    Change((_W.WARMING,), _E.WARMING_STALLS, _W.PENDING, "prove", "an engine that does not answer is probed again"),
    Change((_W.WARMING,), _E.WARMING_EXPIRES, _W.PENDING, "prove", "another replica takes over from one that died"),
    Change(
        (_W.PROVEN,), _E.SUSPICION, _W.SUSPECTED, "apply", "clients can cause suspicions, so only a probe downgrades"
    ),
    Change((_W.GONE,), _E.REGISTERED, _W.APPROXIMATE, "register", "an engine without the plugin cannot join by itself"),
    Change(
        (*JOINED, _W.APPROXIMATE), _E.FORGOTTEN, _W.GONE, "forget", "its slot is retired, its entries are collected"
    ),
)
HELD: tuple[Hold, ...] = (
    Hold(_W.LEFT, _E.GOODBYE, _E.CORE_JOINS, "apply_control, apply_server", "nothing is wrong with it: it has ended"),
    Hold(_W.SILENT, _E.FALLS_SILENT, _E.HEARD, "apply, register", "a short outage keeps its entries"),
    Hold(_W.JOINING, _E.SERVER_LOST, _E.SERVER_HEARD, "apply_server, tick", "only the API server takes requests"),
    Hold(_W.HOSTILE, _E.STREAM_BREAKS, _E.CORE_JOINS, "apply_control", "nothing of a broken stream can be believed"),
    Hold(_W.MISNAMED, _E.MISNAMED, _E.RENAMED, "apply_server, register", "requests for that name would fail there"),
    Hold(_W.DRAINING, _E.DRAIN, _E.UNDRAIN, "drain", "requests that run there finish, no other is sent there"),
    Hold(
        _W.PAUSED,
        _E.PAUSED,
        _E.RESUMED,
        "apply, register",
        "a paused engine lets new requests wait until it is resumed",
    ),
    Hold(_W.EJECTED, _E.EJECTED, _E.ACQUITTED, "eject, tick", "requests that others serve would fail there"),
    Hold(_W.UNHEARD, _E.VOUCHED, _E.HEARD, "vouch, tick", "a lost messenger is no reason to take an engine for dead"),
)
#: From one hold to another.
TURNS: tuple[Change, ...] = (
    Change((_W.SILENT,), _E.VOUCHED, _W.UNHEARD, "vouch", "its engine answers again, its plugin is still cut off"),
    Change((_W.UNHEARD,), _E.LAPSES, _W.SILENT, "tick", "a worker that answers neither way is dead"),
)
#: The label of the metric ``warmfleet_workers``; all other states count as UNROUTABLE.
METRIC_LABELS: Mapping[WorkerState, str] = {
    _W.PROVEN: "proven",
    _W.SUSPECTED: "proven",
    _W.LOAD_ONLY: "identity",
    _W.APPROXIMATE: "approximate",
    _W.WARMING: "warming",
    _W.MISNAMED: "misnamed",
    _W.DRAINING: "draining",
    _W.PAUSED: "paused",
    _W.EJECTED: "ejected",
    _W.UNHEARD: "unheard",
    _W.LEFT: "left",
}
UNROUTABLE = "unroutable"


def heard(heartbeat_age_s: float | None) -> bool:
    """A heartbeat came within the TTL. heartbeat_age_s: None if the worker said goodbye or was never heard."""
    return heartbeat_age_s is not None and heartbeat_age_s <= WORKER_TTL_SECONDS


def state_of(flags: int, record: Mapping[str, Any], url: str, heartbeat_age_s: float | None, now: float) -> WorkerState:
    """The state of a worker that has a load row. flags: of that row. now: Redis' clock, in seconds.

    Where the row and the record differ for a moment, the row decides: ``decide`` reads nothing else.
    """
    unheard = bool(flags & Flag.UNHEARD)
    if not unheard and not heard(heartbeat_age_s):
        return WorkerState.LEFT if record.get("left") else WorkerState.SILENT
    if not flags & Flag.SERVER:
        return WorkerState.LEFT if record.get("left") else WorkerState.JOINING
    if flags & Flag.HOSTILE:
        return WorkerState.HOSTILE
    if flags & Flag.MISNAMED:
        return WorkerState.MISNAMED
    if flags & Flag.DRAINING:
        return WorkerState.DRAINING
    if flags & Flag.PAUSED:
        return WorkerState.PAUSED
    standing = _standing(flags, record, url, now)
    if flags & (Flag.EJECTED | Flag.TRIAL) and standing in SERVING:
        return WorkerState.EJECTED
    return WorkerState.UNHEARD if unheard and standing in SERVING else standing


def _standing(flags: int, record: Mapping[str, Any], url: str, now: float) -> WorkerState:
    if flags & Flag.URL:
        if not url:
            return WorkerState.UNREACHABLE  # the record of its API server cannot be read
        if flags & Flag.APPROXIMATE:
            return WorkerState.APPROXIMATE
        if not flags & Flag.PROVEN:
            return WorkerState.LOAD_ONLY
        return WorkerState.SUSPECTED if record.get("suspect") else WorkerState.PROVEN
    proof = proof_of(record, now)
    unproved = {"warming": WorkerState.WARMING, "url": WorkerState.UNREACHABLE}
    return unproved.get(proof, WorkerState.PENDING)


def proof_of(record: Mapping[str, Any], now: float) -> str:
    """What the last probe said: ``pending`` (nothing yet), ``proven``, ``identity``, ``url``, or ``warming``.

    A warming whose lease is over counts as ``pending``: the replica that had it is gone.
    """
    proof = str(record.get("proof", "pending"))
    over = proof == "warming" and now >= (record.get("warming") or {}).get("ends", 0) / 1000
    return "pending" if over else proof
