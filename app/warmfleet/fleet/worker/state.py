"""The states of a worker, and how its state is read from Redis.

A worker's state has two layers. Its *standing* says whether its model and block hashes are as claimed: unproved,
proved, or found wrong. A *hold* keeps it from taking requests whatever its standing is: it left, its heartbeats or its
API server are missing, its stream is broken, it does not serve its pool's name, its engine is paused, or the
operator drains it. While a hold lasts, the standing remains below it, and may change; when the last hold ends, the
standing is the worker's state again. One hold does not keep requests away: a worker whose heartbeats are missing while
its engine answers over HTTP is ``unheard``, and routable. ``app/docs/worker-life.md`` draws the causes of each change
of state.

Redis stores no state by name. ``state_of`` derives it from the flags of the load row, which ``decide`` reads, the age
of the last heartbeat, and the record. All readers in Python use only this state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from warmfleet.fleet.rows import Flag
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class WorkerState(StrEnum):
    """A state of a worker; the value is the word that ``/workers`` and ``warmfleet workers`` show."""

    # Standings: what the last probe found
    GONE = "gone"  # Redis has no record of the worker: it never joined, or it was forgotten
    PENDING = "pending"  # the worker joined, and no probe has a result yet
    WARMING = "warming"  # the probe passed; a replica sends it the most used prefixes before it takes requests
    PROVEN = "proven"  # its identity was verified, so its blocks may be matched
    SUSPECTED = "suspected"  # proven, but an answer or a stream entry was not as expected: a probe is due
    LOAD_ONLY = "load-only"  # its identity is wrong or untested: it takes requests, its blocks are never matched
    UNREACHABLE = "unreachable"  # its URL is missing or did not answer the probe
    APPROXIMATE = "approximate"  # an engine without the plugin: only the prompts that were sent to it are known
    # Holds: what keeps the worker from requests (all but UNHEARD), whatever its standing
    LEFT = "left"  # its engine core or its API server announced its end, and neither has joined since
    SILENT = "silent"  # no heartbeat for a TTL; its entries in the index stay
    JOINING = "joining"  # its engine core is heard, but its API server has sent nothing yet, or nothing for a TTL
    HOSTILE = "hostile"  # its stream broke the rules: it must join anew
    MISNAMED = "misnamed"  # the worker does not serve its pool's name, so requests for that name would fail
    DRAINING = "draining"  # the operator drains it: it finishes its requests and gets no new ones
    PAUSED = "paused"  # somebody paused its engine or put it to sleep
    EJECTED = "ejected"  # the worker failed requests that others served: it gets none for a while, then a trial
    UNHEARD = "unheard"  # no heartbeat, but its engine answers: it takes requests, and its last known blocks count

    @property
    def routable(self) -> bool:
        """Whether a decision may choose the worker (lua/parts/shared/candidates.lua), if only for a trial."""
        return self in ROUTABLE

    @property
    def matched(self) -> bool:
        """Whether a probe has shown that the engine computes the same block hashes as routers."""
        return self in (WorkerState.PROVEN, WorkerState.SUSPECTED)

    @property
    def unproved(self) -> bool:
        """Whether no probe has passed yet, so that the worker takes no requests."""
        return self in UNPROVED

    @property
    def alive(self) -> bool:
        """Whether the worker's engine core and API server are both heard, whatever hold the worker has."""
        return self not in (WorkerState.GONE, WorkerState.LEFT, WorkerState.SILENT, WorkerState.JOINING)


#: The standings in which a worker takes requests.
SERVING = frozenset({WorkerState.PROVEN, WorkerState.SUSPECTED, WorkerState.LOAD_ONLY, WorkerState.APPROXIMATE})
ROUTABLE = SERVING | {WorkerState.UNHEARD}
UNPROVED = (WorkerState.PENDING, WorkerState.UNREACHABLE)
#: The label of the metric ``warmfleet_workers``; all other states count as UNROUTABLE.
METRIC_LABELS: Mapping[WorkerState, str] = {
    WorkerState.PROVEN: "proven",
    WorkerState.SUSPECTED: "proven",
    WorkerState.LOAD_ONLY: "identity",
    WorkerState.APPROXIMATE: "approximate",
    WorkerState.WARMING: "warming",
    WorkerState.MISNAMED: "misnamed",
    WorkerState.DRAINING: "draining",
    WorkerState.PAUSED: "paused",
    WorkerState.EJECTED: "ejected",
    WorkerState.UNHEARD: "unheard",
    WorkerState.LEFT: "left",
}
UNROUTABLE = "unroutable"


def heard(heartbeat_age_s: float | None) -> bool:
    """Return whether a heartbeat came within the TTL. heartbeat_age_s: None after a goodbye, or if none ever came."""
    return heartbeat_age_s is not None and heartbeat_age_s <= WORKER_TTL_SECONDS


def state_of(flags: int, record: Mapping[str, Any], url: str, heartbeat_age_s: float | None, now: float) -> WorkerState:
    """Return the state of a worker that has a load row. flags: of that row. now: Redis' clock, in seconds.

    A hold hides the standing, and the hold that is checked first hides the others. If the row and the record differ
    for a moment, the row counts, because ``decide`` reads only the row.
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
    """Return the result of the last probe: ``pending`` (no result yet), ``proven``, ``identity``, ``url``, ``warming``.

    A warming whose lease is over counts as ``pending``: the replica that warmed the worker is gone.
    """
    proof = str(record.get("proof", "pending"))
    over = proof == "warming" and now >= (record.get("warming") or {}).get("ends", 0) / 1000
    return "pending" if over else proof
