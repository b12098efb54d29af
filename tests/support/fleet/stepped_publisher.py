"""An engine core with its real publisher, run by hand: one round when a test says so, and no waiting."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from redis.exceptions import RedisError
from tests.support.fleet.reporting_worker import SCHEME

from warmfleet_worker import tracker, worker_publisher
from warmfleet_worker.config import Due, PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.stream import Refused, StreamGone
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def small_pieces() -> Iterator[None]:
    """Batches of 8 blocks and 2 chunks of a snapshot a round, so that 60 blocks show all that a million would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "BATCH_BLOCKS", 8)
        patch.setattr(tracker, "BATCH_BLOCKS", 8)
        patch.setattr(worker_publisher, "BURST_CHUNKS", 2)
        patch.setattr(wire, "UNACKNOWLEDGED_ENTRIES", 6)
        yield


#: The further sets of blocks of each worker of ``chaos``; the third has none.
FURTHER = {"a.0": ("cpu", "ends"), "b.0": ("cpu",)}


class SteppedPublisher:
    """An engine core: its table, and its real publisher, run by hand instead of by its thread."""

    def __init__(self, store: Any, worker_id: str, queue: int) -> None:
        self.tracker = tracker.Tracker(queue)
        self.further = {kind: tracker.Tracker(queue) for kind in FURTHER.get(worker_id, ())}
        config = PublisherConfig("redis://unused", "chaos", worker_id, worker_id[:-2], 0, SCHEME, 1000, 4096, "1")
        config = replace(config, sets={kind: {"capacity_blocks": 1000} for kind in self.further})
        self.publisher = WorkerPublisher(config, self.tracker, sets=self.further)
        self.stream = self.publisher._stream
        self.stream.client = store
        self.forged = ""  # another process has written under this nonce, too
        self.sent: deque[dict[bytes, bytes]] = deque(maxlen=8)
        put, join = self.stream.put, self.stream.join

        def noting_join(data: str) -> None:
            join(data)
            self.sent.append(wire.entry(self.stream.nonce, self.stream.number, "join", data))

        def noting(operation: str, data: bytes | str = b"", blocks: int = 0) -> None:
            put(operation, data, blocks)
            self.sent.append(wire.entry(self.stream.nonce, self.stream.number, operation, data))

        setattr(self.stream, "put", noting)  # noqa: B010 - mypy knows that they are methods
        setattr(self.stream, "join", noting_join)  # noqa: B010

    @property
    def running(self) -> bool:
        return self.publisher.state.stopped is None

    @property
    def table(self) -> set[bytes]:
        return set(self.tracker.table)

    @property
    def busy(self) -> bool:
        """Whether a snapshot is wanted or under way, or copies of further sets are."""
        publisher = self.publisher
        copying = any(each.copying for each in publisher._further)
        return self.running and (copying or publisher._snapshot is not None or publisher._snapshot_request is not None)

    def round(self, *, beat: bool = False, listen: bool = False) -> None:
        """Run one round of the publisher's thread. beat: send a heartbeat. listen: read the command."""
        if not self.running:
            return
        self.publisher._due = Due(heartbeat=0 if beat else math.inf, load=math.inf, command=0 if listen else math.inf)
        try:
            self.publisher.step(time.monotonic())
        except StreamGone:
            self.publisher._update(joined=False, acknowledged=False)
        except (RedisError, Refused):
            pass  # kept, and sent again in the next round

    def half_a_minute_passes(self) -> None:
        if self.publisher._loss_noticed_at is not None:
            self.publisher._loss_noticed_at -= 30
        self.publisher._joined_at -= 30
        self.publisher._rival.first_read -= 8  # twice that is a TTL: a living process has written in between
