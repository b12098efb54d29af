"""The only Redis module: index, load, reservations and upkeep of one model's fleet. See lua/README.md."""

from __future__ import annotations

from warmfleet.fleet.approvals import Approvals
from warmfleet.fleet.client import SCRIPT_KEYS, Timeouts, connect
from warmfleet.fleet.index_health import Truth, Truths, WorkerTruth
from warmfleet.fleet.queueing import POLL_AT_ONCE, TENANT_BYTES, Line, Place, Queue, Queued, QueueLimits, Standing
from warmfleet.fleet.reservations import (
    RENEW_AT_ONCE,
    Ask,
    Candidate,
    Decision,
    Renewal,
    Reservations,
    Seen,
    Weights,
    new_reservation,
)
from warmfleet.fleet.rows import Flag, Lease, LoadRow, Stage
from warmfleet.fleet.switches import Switches
from warmfleet.fleet.upkeep import Applied, Audited, Tick, Upkeep
from warmfleet.fleet.views import Memory, Views, WorkerView
from warmfleet.fleet.worker.state import WorkerState


class Fleet(Queue, Views, Truths, Upkeep, Approvals, Switches):
    """Everything that routers do with one model's keys. Closing it closes the client that it was given."""

    async def close(self) -> None:
        await self.redis.aclose()


__all__ = [
    "POLL_AT_ONCE",
    "RENEW_AT_ONCE",
    "SCRIPT_KEYS",
    "TENANT_BYTES",
    "Applied",
    "Ask",
    "Audited",
    "Candidate",
    "Decision",
    "Flag",
    "Fleet",
    "Lease",
    "Line",
    "LoadRow",
    "Memory",
    "Place",
    "Queue",
    "QueueLimits",
    "Queued",
    "Renewal",
    "Reservations",
    "Seen",
    "Stage",
    "Standing",
    "Tick",
    "Timeouts",
    "Truth",
    "Upkeep",
    "Views",
    "Weights",
    "WorkerState",
    "WorkerTruth",
    "WorkerView",
    "connect",
    "new_reservation",
]
