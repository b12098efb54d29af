"""The only package that speaks to Redis: index, load, reservations and upkeep of one model's fleet.

Keys and scripts are described in lua/README.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from warmfleet.fleet.artifacts import Artifacts
from warmfleet.fleet.bookings import (
    RENEW_AT_ONCE,
    TENANT_BYTES,
    Bookings,
    Candidate,
    Decision,
    Question,
    Renewal,
    Seen,
    SessionEnd,
    Shortfall,
    Terms,
    new_reservation,
)
from warmfleet.fleet.client import Scripts, Timeouts, connect
from warmfleet.fleet.client_limits import KEEP_AT_ONCE, MAX_LIMIT, ClientCounts, ClientLimits, ClientUse
from warmfleet.fleet.codes import Hint, Standing
from warmfleet.fleet.connection.redis_connections import RedisConnections
from warmfleet.fleet.constants import QUEUE_PATIENCE, Constants, QueueLimits, SessionLimits, Spans, Weights
from warmfleet.fleet.handovers import Moved, PrefillLeg, Role, Split, Way, prefill_leg, roles_of
from warmfleet.fleet.image_reports import ImageReports
from warmfleet.fleet.index import Index, Memory, Truth, WorkerTruth
from warmfleet.fleet.ledger import EngineLedger, Hold, HoldLine, Ledger, LedgerView, Session
from warmfleet.fleet.operator import OperatorKeys
from warmfleet.fleet.probes import Probes, Proof
from warmfleet.fleet.queueing import POLL_AT_ONCE, Line, Queue, Queued
from warmfleet.fleet.replicas import ANNOUNCE_S, Announcement, LastMinute, Replicas, ReplicaView
from warmfleet.fleet.rows import Flag, Lease, LoadRow, Place, Stage
from warmfleet.fleet.script_loader import SCRIPT_ARGS, SCRIPT_KEYS
from warmfleet.fleet.upkeep import Applied, Audited, Step, Tick, Upkeep
from warmfleet.fleet.worker.state import WorkerState
from warmfleet.fleet.workers import Check, Registered, Workers, WorkerView

if TYPE_CHECKING:
    import redis.asyncio as aioredis


class Fleet:
    """All calls of a router on one model's keys in Redis. Closing a Fleet closes the Redis client that it was given."""

    def __init__(
        self,
        redis: aioredis.Redis,
        model: str,
        timeouts: Timeouts | None = None,
        constants: Constants | None = None,
    ) -> None:
        self.scripts = Scripts(redis, model, timeouts, constants)
        self.redis = redis
        self.keys = self.scripts.keys
        self.bookings = Bookings(self.scripts)
        self.queue = Queue(self.scripts, self.bookings)
        self.ledger = Ledger(self.scripts)
        self.clients = ClientCounts(self.scripts)
        self.workers = Workers(self.scripts)
        self.probes = Probes(self.scripts)
        self.artifacts = Artifacts(self.scripts, self.workers)
        self.index = Index(self.scripts)
        self.upkeep = Upkeep(self.scripts)
        self.operator = OperatorKeys(self.scripts)
        self.replicas = Replicas(self.scripts)
        self.images = ImageReports(self.scripts)

    @property
    def constants(self) -> Constants:
        """The constants that this fleet's scripts compute with."""
        return self.scripts.constants

    def use(self, **changes: Any) -> None:
        """Replace constants, named as the fields of ``Constants``, from the next call of a script on."""
        self.scripts.constants = replace(self.scripts.constants, **changes)

    async def close(self) -> None:
        await self.redis.aclose()
