"""The settings of a ``WorkerPublisher``, its counters, and the times of its next duties."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmfleet_worker.load import LOAD_CHECK_SECONDS
from warmfleet_worker.protocol import wire
from warmfleet_worker.protocol.labels import read_labels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet_worker.protocol.transfer import Transfer

logger = logging.getLogger("vllm.warmfleet")

COMMAND_DELAY_SECONDS = 0.5  # time that the fleet may take to answer a heartbeat, in the key ``command``


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """The announcement of an engine core when it joins.

    model: the fleet's model tag. worker_id: server_id and data-parallel rank. closed: the block set is prefix-closed,
    so that a held block's predecessors are always held, too. labels: see ``protocol.labels``. sets: the further sets of
    blocks that it reports, by kind; of a tier its capacity_blocks and bytes_per_token, and the name of its `store` if
    several engines may read it. ends: it reports the ends of requests. transfer: how it exchanges blocks with others.
    step_tokens: the most tokens that a step computes; 0: not known.
    """

    redis_url: str
    model: str
    worker_id: str
    server_id: str
    rank: int
    scheme: wire.Scheme
    capacity_blocks: int
    max_model_len: int
    version: str
    closed: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    ends: bool = False
    transfer: Transfer | None = None
    step_tokens: int = 0

    def join(self) -> str:
        """Return the data of a join entry."""
        further: dict[str, Any] = {"ends": 1} if self.ends else {}
        if self.transfer is not None:
            further["transfer"] = self.transfer.as_dict()
        if self.sets:
            further["sets"] = {kind: dict(told) for kind, told in self.sets.items()}
        return wire.dumps(
            {
                **further,
                "schema": wire.SCHEMA,
                "worker_id": self.worker_id,
                "server_id": self.server_id,
                "rank": self.rank,
                "scheme": self.scheme.as_dict(),
                "scheme_id": self.scheme.scheme_id,
                "capacity_blocks": self.capacity_blocks,
                "max_model_len": self.max_model_len,
                "step_tokens": self.step_tokens,
                "version": self.version,
                "closed": int(self.closed),
                "labels": dict(self.labels),
            }
        )


def labels_of_environment() -> dict[str, str]:
    """Read the labels in WARMFLEET_LABELS. A malformed value is logged, and the engine joins without labels."""
    try:
        return read_labels(os.environ.get("WARMFLEET_LABELS", ""))
    except wire.WireError as error:
        logger.warning("warmfleet: WARMFLEET_LABELS has no effect: %s", error)
        return {}


@dataclass(frozen=True, slots=True)
class PublisherState:
    """The publisher's state and counters at one moment."""

    joined: bool = False
    acknowledged: bool = False  # the fleet has read the join
    stopped: str | None = None  # why the publisher stopped for good
    joins: int = 0
    snapshots: int = 0
    number: int = 0  # number of the last stream entry that was made
    applied: int = 0  # the number of the last entry that the fleet has acknowledged
    dropped: int = 0  # number of block changes that never reached Redis
    errors: int = 0  # failed calls to Redis


@dataclass(slots=True)
class Due:
    """Monotonic seconds at which the publisher next flushes, sends a heartbeat, checks the load, reads ``command``."""

    flush: float = 0.0
    heartbeat: float = 0.0
    load: float = 0.0
    command: float = 0.0
    compare: float = 0.0  # the reservations of the engine's requests with those that Redis was told of
    yields: float = 0.0  # read with the next entries that are sent from then on, so it wakes nobody up
    reply: float = float("inf")  # when the key ``command`` may hold the answer to the last heartbeat

    def next(self) -> float:
        """Return when the first duty is due."""
        return min(self.flush, self.heartbeat, self.load, self.command)

    def after_heartbeat(self, now: float) -> None:
        """Let the key ``command`` be read at once, and again when it may hold the answer to this heartbeat."""
        self.heartbeat = now + wire.HEARTBEAT_SECONDS
        self.after_load(now)
        self.command = now
        self.reply = now + COMMAND_DELAY_SECONDS

    def after_load(self, now: float) -> None:
        self.load = now + LOAD_CHECK_SECONDS

    def after_command(self, now: float, *, sending: bool, acknowledged: bool) -> None:
        """Read ``command`` again in 0.1 s in a snapshot, in 0.5 s until the join is acknowledged, else at ``reply``."""
        if sending:
            self.command = now + wire.FLUSH_SECONDS
        elif not acknowledged:
            self.command = now + COMMAND_DELAY_SECONDS
        else:
            self.command, self.reply = self.reply, float("inf")
