"""The only package that speaks to Redis: index, load, reservations and upkeep of one model's fleet.

Keys and scripts are described in lua/README.md.
"""

from __future__ import annotations

from warmfleet.fleet.client import Timeouts, connect
from warmfleet.fleet.client_limits import KEEP_AT_ONCE, MAX_LIMIT, ClientCounts, ClientLimits, ClientUse
from warmfleet.fleet.codes import Standing
from warmfleet.fleet.connection.redis_connections import RedisConnections
from warmfleet.fleet.constants import QUEUE_PATIENCE, QueueLimits, Spans, Weights
from warmfleet.fleet.index_health import Truth, Truths, WorkerTruth
from warmfleet.fleet.operator import OperatorKeys
from warmfleet.fleet.queueing import POLL_AT_ONCE, Line, Queue, Queued
from warmfleet.fleet.replicas import ANNOUNCE_S, Announcement, LastMinute, Replicas, ReplicaView
from warmfleet.fleet.reservations import (
    RENEW_AT_ONCE,
    TENANT_BYTES,
    Candidate,
    Decision,
    Question,
    Renewal,
    Reservations,
    Seen,
    Shortfall,
    Terms,
    new_reservation,
)
from warmfleet.fleet.rows import Flag, Lease, LoadRow, Stage
from warmfleet.fleet.script_loader import SCRIPT_ARGS, SCRIPT_KEYS
from warmfleet.fleet.upkeep import Applied, Audited, Tick, Upkeep
from warmfleet.fleet.views import Check, Memory, Proof, Registered, Views, WorkerView
from warmfleet.fleet.worker.state import WorkerState


class Fleet(Queue, ClientCounts, Views, Truths, Upkeep, OperatorKeys, Replicas):
    """All calls of a router on one model's keys in Redis. Closing a Fleet closes the Redis client that it was given."""

    async def close(self) -> None:
        await self.redis.aclose()


__all__ = [
    "ANNOUNCE_S",
    "KEEP_AT_ONCE",
    "MAX_LIMIT",
    "POLL_AT_ONCE",
    "QUEUE_PATIENCE",
    "RENEW_AT_ONCE",
    "SCRIPT_ARGS",
    "SCRIPT_KEYS",
    "TENANT_BYTES",
    "Announcement",
    "Applied",
    "Audited",
    "Candidate",
    "Check",
    "ClientLimits",
    "ClientUse",
    "Decision",
    "Flag",
    "Fleet",
    "LastMinute",
    "Lease",
    "Line",
    "LoadRow",
    "Memory",
    "Proof",
    "Question",
    "Queue",
    "QueueLimits",
    "Queued",
    "RedisConnections",
    "Registered",
    "Renewal",
    "ReplicaView",
    "Reservations",
    "Seen",
    "Shortfall",
    "Spans",
    "Stage",
    "Standing",
    "Terms",
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
