"""An engine core behind the bridge: a thread reads its events into a table, a publisher writes the table's changes."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmfleet_worker.bridge.block_table import BlockTable
from warmfleet_worker.bridge.kv_events import Cleared, EventError, decode
from warmfleet_worker.bridge.sequence import Sequence
from warmfleet_worker.bridge.zmq_events import EventSockets
from warmfleet_worker.pool_assignment import core_assignment
from warmfleet_worker.protocol import wire
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import zmq

    from warmfleet_worker.bridge.engine_api import EngineFacts, EventSource
    from warmfleet_worker.bridge.group_ends import Group
    from warmfleet_worker.config import PublisherConfig
    from warmfleet_worker.load import Load

logger = logging.getLogger("warmfleet")

VERIFY_SECONDS = 5.0  # time between two replays; for each the engine looks through all batches that it keeps
LONGEST_VERIFY_SECONDS = 60.0  # longest such time while replays fail, because each failure delays live batches by 3 s
BATCHES_AT_ONCE = 256  # most batches applied between two checks whether a replay is due
WAIT_SECONDS = 0.2
REPORT_SECONDS = 60.0  # time between two log lines about blocks that were left out
STOP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class RankCounts:
    """A rank's counters at one moment. complete: all events since the engine's start or last reset were applied."""

    blocks: int = 0
    batches: int = 0
    gaps: int = 0
    lost: int = 0
    malformed: int = 0
    complete: bool = True
    unproved: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineSide:
    """The part of a ``BridgedEngine`` that its ranks use. group: the KV cache group whose blocks are reported.

    lora_path: the path of an adapter, by its name. load: the engine's work at this moment. ps_per_byte: the measured
    time to load a byte from its tiers, by kind. on_restart: called in the rank's thread when another process than
    before sends the events. host: of the engine's URL. groups: its other KV cache groups, by number.
    """

    group: int
    lora_path: Callable[[str], str | None]
    load: Callable[[], Load]
    ps_per_byte: Callable[[], Mapping[str, int]]
    on_restart: Callable[[], object]
    host: str
    groups: Mapping[int, Group] = field(default_factory=dict)


class Rank:
    """Follows the KV events of one engine core from ``start`` to ``stop``; it cannot be started again."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        source: EventSource,
        facts: EngineFacts,
        config: PublisherConfig,
        engine: EngineSide,
    ) -> None:
        self.tracker = Tracker()
        tiers = {kind: Tracker() for kind in config.sets if kind != wire.ENDS}
        self.table = BlockTable(
            self.tracker,
            facts.page_tokens,
            facts.capacity_blocks,
            engine.group,
            engine.lora_path,
            config.scheme.lookahead,
            tiers,
            engine.groups,
        )
        ends = {} if self.table.ends is None else {wire.ENDS: self.table.ends}
        self.config = config
        self.caught_up = threading.Event()
        self._sglang = facts.sglang
        self._sockets = EventSockets(context, source.endpoint, source.replay)
        self._sequence = Sequence(self, self._sockets.replay)
        self._publisher = WorkerPublisher(
            self.config,
            self.tracker,
            engine.load,
            core_assignment(self.config, engine.host),
            sets={**tiers, **ends},
            ps_per_byte=engine.ps_per_byte,
        )
        self._on_restart = engine.on_restart
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"warmfleet-events-{config.worker_id}", daemon=True)
        self._batches = self._malformed = 0
        self._complete = True
        self._reported, self._report_due = 0, 0.0

    def start(self) -> None:
        self._thread.start()

    def publish(self) -> None:
        """Join the fleet, and publish the blocks of the table."""
        self._publisher.start()

    @property
    def follows(self) -> bool:
        """Whether the engine's events are still read."""
        return self._thread.is_alive()

    @property
    def stopped(self) -> str | None:
        """Why the publisher has stopped for good; None while it works."""
        return self._publisher.state.stopped

    @property
    def counts(self) -> RankCounts:
        sequence, table = self._sequence, self.table
        unproved = dict(table.unproved.copy())
        return RankCounts(
            len(table), self._batches, sequence.gaps, sequence.lost, self._malformed, self._complete, unproved
        )

    def stop(self, *, leave: bool) -> None:
        """End the threads. leave: tell the fleet that the engine is gone; without it only the bridge ends."""
        self._stopping.set()
        if leave:
            self._publisher.stop(STOP_SECONDS)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    # ------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            with self._sockets:
                self._follow()
        except Exception:  # a bug of ours: the table may be wrong from now on, so the engine joins anew
            logger.exception("warmfleet: cannot follow the events of %s", self.config.worker_id)
            self.table.clear()
            if not self._stopping.is_set():
                self._on_restart()
        finally:
            self.caught_up.set()

    def _follow(self) -> None:
        if not self._sequence.verify():
            self._complete = False
            logger.warning(
                "warmfleet: %s has no replay of its events: blocks that it holds already are not known until it "
                "stores them again (set replay_endpoint in its --kv-events-config)",
                self.config.worker_id,
            )
        self.caught_up.set()
        pause = VERIFY_SECONDS
        due = time.monotonic() + pause
        while not self._stopping.is_set():
            self._sockets.wait(WAIT_SECONDS)
            if self._sockets.reconnected() or time.monotonic() >= due:
                pause = VERIFY_SECONDS if self._sequence.verify() else min(2 * pause, LONGEST_VERIFY_SECONDS)
                due = time.monotonic() + pause
            for number, payload in self._sockets.received(BATCHES_AT_ONCE):
                self._sequence.live(number, payload)
            self._report()

    # ------------------------------------------------ calls of the sequence

    def batch(self, payload: bytes) -> None:
        self._batches += 1
        try:
            events = decode(payload, sglang=self._sglang)
        except EventError as error:
            self._malformed += 1
            logger.warning("warmfleet: %s: %s", self.config.worker_id, error)
            self.lost()
            return
        overflows = self.table.unproved["overflow"]
        self.table.apply(events)
        if self.table.unproved["overflow"] > overflows:
            self._complete = False  # the table was emptied, but the engine's cache was not
        elif not self._complete:
            self._complete = any(isinstance(event, Cleared) for event in events)

    def lost(self) -> None:
        self._complete = False
        self.table.doubt()
        logger.warning(
            "warmfleet: events of %s are lost for good: its blocks are known again as they are used",
            self.config.worker_id,
        )

    def restarted(self) -> None:
        logger.info("warmfleet: %s has restarted", self.config.worker_id)
        self.table.clear()
        self._complete = True
        self._on_restart()

    def _report(self) -> None:
        """Log every REPORT_SECONDS how many blocks were left out, if the number has grown."""
        now, total = time.monotonic(), sum(self.table.unproved.values())
        if total > self._reported and now >= self._report_due:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.table.unproved.items()))
            logger.warning("warmfleet: %s: blocks left out so far: %s", self.config.worker_id, reasons)
            self._reported, self._report_due = total, now + REPORT_SECONDS
