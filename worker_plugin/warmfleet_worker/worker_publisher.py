"""The thread that writes one engine core's events into Redis: the other half of the protocol in lua/README.md.

The engine's thread only ever appends to bounded queues (``Tracker``, ``progress``). Everything here runs in one
daemon thread, and every wait, error and retry happens there. The thread shares the engine's GIL, so its work is
paced: at most DRAIN_RECORDS or BURST_CHUNKS chunks between two round trips to Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from warmfleet_worker.config import Command, Due, Load, PublisherConfig, PublisherState, Recent, Rival
from warmfleet_worker.protocol import wire
from warmfleet_worker.snapshot import Snapshot
from warmfleet_worker.stream import MAX_PENDING, Outage, StreamGone, StreamWriter, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from warmfleet_worker.tracker import Run, Transitions

__all__ = ["Load", "PublisherConfig", "PublisherState", "WorkerPublisher"]

logger = logging.getLogger("warmfleet")

DRAIN_RECORDS = 4_096  # transitions made into entries between two round trips
BURST_CHUNKS = 32  # snapshot chunks (36 kB) in one round trip
PROGRESS_QUEUE = 4_096
SELF_RESYNC_SECONDS = 2 * wire.HEARTBEAT_SECONDS  # events were lost and nobody asked for a snapshot: send one


class WorkerPublisher:
    """Publishes what ``tracker`` sees and what ``load()`` says. ``start``, ``progress``, ``stop``; nothing blocks.

    ``load`` is called in the publisher's thread.
    """

    def __init__(self, config: PublisherConfig, tracker: Transitions, load: Callable[[], Load] = Load) -> None:
        keys = wire.Keys(config.model)
        self.config = config
        self._tracker = tracker
        self._load = load
        self._command_key = keys.command(config.worker_id)
        self._stream = StreamWriter(
            connect(config.redis_url, keys.tag),
            keys.events(wire.check_name(config.worker_id)),
            (keys.hello, f"events:{config.worker_id}"),
            wire.events_maxlen(config.capacity_blocks),
        )
        self._progress: deque[tuple[str, int, int]] = deque(maxlen=PROGRESS_QUEUE)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._outage = Outage(self._stopping)
        self._thread = threading.Thread(target=self._run, name="warmfleet-publisher", daemon=True)
        self._state = PublisherState()
        self._digest = wire.Digest()  # of everything published
        self._evicted = 0
        self._snapshot: Snapshot | None = None
        self._runs: deque[Run] = deque()  # drained, not yet numbered
        self._snapshot_wanted: tuple[str | None] | None = None  # (command id,)
        self._stale_since: float | None = None  # events were lost: the index cannot equal the table
        self._lost_seen, self._joined_at = 0, 0.0
        self._obeyed: deque[str] = deque(maxlen=64)
        self._told, self._due, self._rival, self._recent = Load(), Due(), Rival(), Recent()

    # ------------------------------------------------ any thread

    @property
    def state(self) -> PublisherState:
        dropped = self._tracker.dropped + self._stream.lost_blocks
        return replace(self._state, number=self._stream.number, dropped=dropped, errors=self._outage.errors)

    def start(self) -> None:
        self._thread.start()

    def progress(self, reservation_id: str, cached_tokens: int, prompt_tokens: int) -> None:
        """The prefill of a reservation is done: in Redis within 20 ms. Called by the engine's thread."""
        self._progress.append((reservation_id, cached_tokens, prompt_tokens))
        if not self._wake.is_set():
            self._wake.set()

    def stop(self, timeout: float = 1.0) -> None:
        """Say goodbye and end the thread; gives up after ``timeout`` seconds (the fleet's TTL does the rest)."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # ------------------------------------------------ the thread

    def _run(self) -> None:
        while self._state.stopped is None:
            try:
                self.step(time.monotonic())
            except StreamGone:
                logger.warning("warmfleet: the stream of %s is gone: joining again", self.config.worker_id)
                self._update(joined=False, acknowledged=False)
                self._stopping.wait(wire.FLUSH_SECONDS)
            except Exception as error:  # noqa: BLE001 - a bug here must not end the reports of a healthy engine
                self._outage.wait(error)
                if self._stopping.is_set():
                    break
            else:
                self._outage.over()
                if self._stopping.is_set():
                    break
                self._wait()
        self._stream.close()

    def _wait(self) -> None:
        if self._wake.wait(self._due.next() - time.monotonic()) and not self._stopping.is_set():
            time.sleep(wire.PROGRESS_FLUSH_SECONDS / 4)  # what else finishes prefill in the same engine steps
        self._wake.clear()

    def step(self, now: float) -> None:
        """Everything that is due ``now`` (monotonic seconds). Of the thread, or of whoever has a clock of its own."""
        if not self._state.joined or (self._stream.moved and not self._state.acknowledged):
            self._join(now)
        self._stream.flush()  # what a failed round has left
        prefilled = len(self._progress)
        self._notice_losses(now)
        if self._snapshot_wanted is not None and self._snapshot is None:
            self._begin(*self._snapshot_wanted)
        if self._snapshot is None:
            self._put_transitions()
        else:
            self._put_chunks(self._snapshot)
        self._put_progress(prefilled)
        if self._stopping.is_set():
            self._stream.put("leave")
        elif self._heartbeat_due(now):
            self._put_heartbeat(now)
        self._stream.flush()
        if now >= self._due.command and not self._stopping.is_set():
            self._read_command(now)
        self._due.flush = now + (0.0 if self._more() else wire.FLUSH_SECONDS)

    def _more(self) -> bool:
        """Work is left that need not wait for the next period."""
        if self._snapshot is not None:
            return self._room() > 0
        return bool(self._runs) or len(self._tracker) > DRAIN_RECORDS or self._snapshot_wanted is not None

    def _update(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    # ------------------------------------------------ join

    def _join(self, now: float) -> None:
        """Begin a new incarnation: its index is empty, so the table follows as a snapshot."""
        self._stream.join(self.config.join())
        self._update(joined=True, acknowledged=False, joins=self._state.joins + 1, applied=self._stream.number)
        self._digest, self._snapshot = wire.Digest(), None
        if self._cut() and self._snapshot_wanted is None:
            self._snapshot_wanted = (None,)
        self._due, self._joined_at, self._rival = Due(heartbeat=now, command=now), now, Rival()
        logger.info("warmfleet: %s joined %s", self.config.worker_id, self.config.model)

    # ------------------------------------------------ events

    def _put_progress(self, prefilled: int) -> None:
        """Those done before the tracker was drained, so that a prompt's blocks are told before its prefill."""
        told = [self._progress.popleft() for _ in range(prefilled)]
        for start in range(0, prefilled, wire.PROGRESS_PER_ENTRY):
            self._stream.put("progress", wire.dumps(told[start : start + wire.PROGRESS_PER_ENTRY]))

    def _put_transitions(self) -> None:
        if not self._runs:
            self._runs.extend(self._tracker.drain(DRAIN_RECORDS))
        while self._runs:
            while self._runs and self._stream.pending < MAX_PENDING:
                self._put_run(self._runs.popleft())
            if self._runs:
                self._stream.flush()

    def _put_run(self, run: Run) -> None:
        blocks = len(run.packed) // wire.HASH_BYTES
        if run.operation == "cleared":
            self._digest = wire.Digest()
        else:
            self._digest.add(run.packed, 1 if run.operation == "stored" else -1)
        self._evicted += blocks if run.operation == "removed" else 0
        self._stream.put(run.operation, run.packed, blocks)

    def _notice_losses(self, now: float) -> None:
        """Lost transitions: leave a gap, so that the fleet asks for a snapshot; if nobody asks, send one anyway."""
        lost = self._stream.lost_entries
        if (self._tracker.overflowed or lost > self._lost_seen) and self._stale_since is None:
            logger.warning("warmfleet: block events were lost (%d so far): resync follows", self.state.dropped)
            self._stream.skip()
            self._stale_since = now
        self._lost_seen = lost
        if self._stale_since is not None and now - self._stale_since > SELF_RESYNC_SECONDS:
            self._snapshot_wanted = self._snapshot_wanted or (None,)

    # ------------------------------------------------ snapshot

    def _room(self) -> int:
        """Entries that may still be sent before the fleet acknowledges more: MAXLEN must not eat a snapshot."""
        return wire.UNACKNOWLEDGED_ENTRIES - (self._stream.number - self._state.applied)

    def _cut(self) -> Sequence[bytes]:
        """The whole table; whatever waited to be published is contained in it."""
        self._runs.clear()
        self._stale_since = None
        return self._tracker.cut()

    def _begin(self, command: str | None) -> None:
        self._snapshot = Snapshot(self._cut(), self._tracker.pick, command)
        self._snapshot_wanted = None
        self._stream.put("begin", self._snapshot.begin())
        self._due.command = 0.0

    def _put_chunks(self, snapshot: Snapshot) -> None:
        for _ in range(min(BURST_CHUNKS, self._room(), MAX_PENDING - self._stream.pending)):
            if snapshot.finished:
                self._stream.put("end", snapshot.end())
                self._digest = snapshot.digest
                self._snapshot = None
                self._update(snapshots=self._state.snapshots + 1)
                return
            chunk = snapshot.chunk()
            if chunk:
                self._stream.put("chunk", chunk, (len(chunk) - len(snapshot.id)) // wire.HASH_BYTES)

    # ------------------------------------------------ heartbeat and command

    def _heartbeat_due(self, now: float) -> bool:
        if now >= self._due.heartbeat:
            return True
        if now < self._due.load:
            return False
        self._due.after_look(now)
        return self._recent.told(self._load(), now).differs_from(self._told)

    def _put_heartbeat(self, now: float) -> None:
        load = self._told = self._recent.told(self._load(), now)
        # Without a digest nothing is compared: during a snapshot, and when it cannot tell that events were lost.
        known = self._snapshot is None and self._snapshot_wanted is None and self._stale_since is None
        heartbeat = wire.Heartbeat(
            running=load.running,
            waiting=load.waiting,
            blocks=self._digest.count,
            foreign_prefill_tokens=load.foreign_prefill_tokens,
            foreign_decode_tokens=load.foreign_decode_tokens,
            speed_tps=load.speed_tps,
            evicted=self._evicted,
            digest=self._digest if known else None,
        )
        self._stream.put("heartbeat", heartbeat.encode())
        self._evicted = 0
        self._due.after_heartbeat(now)

    def _read_command(self, now: float) -> None:
        raw = self._stream.client.get(self._command_key)
        self._due.after_command(now, sending=self._snapshot is not None, acknowledged=self._state.acknowledged)
        try:
            command = Command.parse(raw) if raw is not None else None
        except ValueError as error:
            logger.warning("warmfleet: %s: %s", self._command_key, error)
            return
        if command is None or command.nonce != self._stream.nonce:
            self._not_taken(command, now)
            return
        self._update(acknowledged=True, applied=command.applied)
        if command.id and command.id not in self._obeyed:
            self._obey(command.do, command.id)

    def _not_taken(self, command: Command | None, now: float) -> None:
        """The fleet has not read our join yet; another process joined later, alive or not; or Redis lost our join."""
        if command and command.joined > self._stream.joined:
            if self._rival.writes(command, now):
                reason = f"another process has joined as {self.config.worker_id}"
                logger.error("warmfleet: %s: this engine is no longer reported. Give each server its own id", reason)
                self._update(stopped=reason, joined=False)
                return
            if not self._rival.silent(now):
                return
        elif not self._state.acknowledged and now - self._joined_at < wire.WORKER_TTL_SECONDS:
            return  # else it was lost, or the hint to it
        logger.warning("warmfleet: the join of %s was lost: joining again", self.config.worker_id)
        self._update(joined=False, acknowledged=False)

    def _obey(self, do: str, command: str) -> None:
        self._obeyed.append(command)
        logger.info("warmfleet: told to %s", do)
        if do == "resync":
            self._snapshot, self._snapshot_wanted = None, (command,)  # the one under way has failed
        elif do == "rejoin":
            self._snapshot_wanted = (command,)
            self._update(joined=False, acknowledged=False)
        elif do == "drain":
            self._update(draining=True)
