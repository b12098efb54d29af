"""The thread that writes one engine core's stream into Redis. The protocol is tabled in lua/README.md.

The engine's thread only appends to bounded queues (``Transitions``, ``progress``, ``Reservations``). Everything else
runs in one daemon thread, and every wait, error and retry happens there. That thread shares the GIL with the engine, so
its work is paced: at most DRAIN_RECORDS changes or BURST_CHUNKS chunks between two round trips to Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from warmfleet_worker.block_set import BlockSet
from warmfleet_worker.command import Command, Rival
from warmfleet_worker.config import Due, PublisherConfig, PublisherState
from warmfleet_worker.load import LOAD_CHECK_SECONDS, Load, SmoothedLoad, Standstill
from warmfleet_worker.protocol import wire
from warmfleet_worker.seen_images import SeenImages
from warmfleet_worker.snapshot import Snapshot
from warmfleet_worker.stream import MAX_PENDING, Outage, Refused, StreamGone, StreamWriter, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet_worker.pool_assignment import PoolAssignment
    from warmfleet_worker.reservations import End, Reservations
    from warmfleet_worker.tracker import Run, Transitions

logger = logging.getLogger("vllm.warmfleet")

DRAIN_RECORDS = 4_096  # most changes that become entries between two round trips
BURST_CHUNKS = 32  # most snapshot chunks (36 kB in all) in one round trip
PROGRESS_QUEUE = 4_096
IMAGES_AT_ONCE = 16  # most reports of images in one round trip; each counts as a few blocks where it is applied
SELF_RESYNC_SECONDS = 2 * wire.HEARTBEAT_SECONDS  # time after lost events until a snapshot is sent unasked


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """All block hashes shall be sent. command_id: of the fleet's command for that; None if the fleet did not ask."""

    command_id: str | None = None


class WorkerPublisher:
    """Publishes the changes that ``transitions`` queues and the load that ``load()`` returns.

    ``start``, ``progress`` and ``stop`` may be called from any thread; only ``stop`` waits, up to its timeout. ``load``
    is called in the publisher's thread. assignment: names the pool to join; without it, the pool is ``config.model``.
    moved: called in the publisher's thread when the worker has left a pool for another. yielded: called there with the
    reservations whose sessions the engine shall evict first; without it, nobody asks for them. sets: the changes of
    further sets of blocks, by kind. ps_per_byte: returns by kind of tier the measured picoseconds that loading a byte
    takes; called there. reservations: of an engine that reports there all requests that come and end; the report of an
    end wakes nobody up, and goes with the next flush. ``images``: what the engine has seen, which its thread notes
    there.
    """

    def __init__(
        self,
        config: PublisherConfig,
        transitions: Transitions,
        load: Callable[[], Load] = Load,
        assignment: PoolAssignment | None = None,
        moved: Callable[[], None] = lambda: None,
        yielded: Callable[[list[str]], None] | None = None,
        sets: Mapping[str, Transitions] | None = None,
        ps_per_byte: Callable[[], Mapping[str, int]] = dict,
        reservations: Reservations | None = None,
    ) -> None:
        self.config = config = replace(config, ends=reservations is not None)
        self.reservations = reservations
        self._main = BlockSet(transitions)
        self._further = [BlockSet(further, kind) for kind, further in (sets or {}).items()]
        self._ps_per_byte = ps_per_byte
        self._load = load
        self._assignment = assignment
        self._moved = moved
        self._yielded = yielded
        self.images = SeenImages()
        self._open(config.model)
        self._progress: deque[tuple[str, int, int]] = deque(maxlen=PROGRESS_QUEUE)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._outage = Outage(self._stopping)
        self._thread = threading.Thread(target=self._run, name="warmfleet-publisher", daemon=True)
        self._state = PublisherState()
        self._evicted_blocks = 0
        self._snapshot: Snapshot | None = None
        self._drained: deque[tuple[BlockSet, Run]] = deque()  # changes taken off the queues, not yet numbered
        self._snapshot_request: SnapshotRequest | None = None
        self._loss_noticed_at: float | None = None  # when events were lost; until a snapshot Redis has wrong blocks
        self._joined_at = 0.0
        self._obeyed_ids: deque[str] = deque(maxlen=64)
        self._reported_load, self._due, self._rival, self._smoothed_load = Load(), Due(), Rival(), SmoothedLoad()
        self._standstill, self._stands_still = Standstill(), False
        self._can_tally = True  # whether the engine can tell which requests it has
        self._tells_all = False  # whether the fleet needs a list of all reservations that the engine has

    def _open(self, tag: str) -> None:
        """Write into the stream of this pool from now on."""
        config, keys = self.config, wire.Keys(tag)
        self._tag, self._lost_entries_seen = tag, 0
        self._command_key, self._yields_key = keys.command(config.worker_id), keys.yields(config.worker_id)
        self._stream = StreamWriter(
            connect(config.redis_url, keys.tag),
            keys.events(wire.check_name(config.worker_id)),
            (keys.hello, f"events:{config.worker_id}"),
            wire.events_maxlen(config.capacity_blocks),
        )

    # ------------------------------------------------ any thread

    @property
    def tag(self) -> str:
        """The pool in which this worker is or, before its join, will be."""
        return self._tag

    @property
    def _sets(self) -> list[BlockSet]:
        return [self._main, *self._further]

    @property
    def state(self) -> PublisherState:
        dropped = sum(each.transitions.dropped for each in self._sets) + self._stream.lost_blocks
        return replace(self._state, number=self._stream.number, dropped=dropped, errors=self._outage.errors)

    def start(self) -> None:
        self._thread.start()

    def progress(self, reservation_id: str, cached_tokens: int, prompt_tokens: int) -> None:
        """Report the end of this reservation's prefill to Redis, within 20 ms. Called by the engine's thread."""
        self._progress.append((reservation_id, cached_tokens, prompt_tokens))
        if not self._wake.is_set():
            self._wake.set()

    def stop(self, timeout: float = 1.0) -> None:
        """Say goodbye to the fleet and end the thread.

        Gives up after ``timeout`` seconds; the fleet then notices the missing heartbeats.
        """
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    # ------------------------------------------------ the thread

    def _run(self) -> None:
        while self._state.stopped is None:
            leaving = self._stopping.is_set()  # before the step: if it is set by then, the step writes the leave entry
            try:
                self.step(time.monotonic())
            except StreamGone:
                logger.warning("warmfleet: the stream of %s is gone: joining again", self.config.worker_id)
                self._update(joined=False, acknowledged=False)
                if self._assignment is not None:
                    self._assignment.doubt()  # the pool may have been removed
                self._stopping.wait(wire.FLUSH_SECONDS)
            except Exception as error:  # noqa: BLE001 - a bug here must not end the reports of a healthy engine
                self._outage.wait(error)
                if self._stopping.is_set():
                    break
            else:
                self._outage.over()
                if leaving:
                    logger.info("warmfleet: %s said goodbye", self.config.worker_id)
                    break
                self._wait()
        self._stream.close()
        if self._assignment is not None:
            self._assignment.close()

    def _wait(self) -> None:
        if self._wake.wait(self._due.next() - time.monotonic()) and not self._stopping.is_set():
            time.sleep(wire.PROGRESS_FLUSH_SECONDS / 4)  # one entry then reports all prefills of the same engine steps
        self._wake.clear()

    def step(self, now: float) -> None:
        """Do everything that is due ``now`` (monotonic seconds).

        The thread calls it; tests and simulations that have a clock of their own call it instead of the thread.
        """
        if self._assignment is not None and not self._stopping.is_set():
            self._sit(self._assignment.look(now))
        if not self._state.joined or (self._stream.moved and not self._state.acknowledged):
            self._join(now)
        self._stream.flush()  # entries that an earlier, failed step has not sent
        ended = len(self.reservations or ())  # read before `progress`, which the engine calls first
        prefilled = len(self._progress)
        self._notice_losses(now)
        if self._snapshot_request is not None and self._snapshot is None:
            self._begin_snapshot(self._snapshot_request.command_id)
        if self._snapshot is None:
            self._put_changes()
            self._put_copies()
            self._put_images()
        else:
            self._put_chunks(self._snapshot)
        self._put_progress(prefilled)
        if self.reservations is not None:
            back, ends = self.reservations.take(ended)
            self._put_running(back, whole=False)
            self._put_ends(ends)
            self._tell_all(self.reservations)
        if self._stopping.is_set():
            self._stream.put("leave")
        elif (load := self._heartbeat_due(now)) is not None:
            self._put_heartbeat(load, now)
        self._send(now)
        if now >= self._due.command and not self._stopping.is_set():
            self._read_command(now)
        self._due.flush = now + (0.0 if self._has_more() else wire.FLUSH_SECONDS)

    def _send(self, now: float) -> None:
        """Send what is pending, and read which sessions yield; an engine that stores no blocks needs no room."""
        if self._yielded is None or now < self._due.yields or not self._stream.pending:
            self._stream.flush()
            return
        self._due.yields = now + wire.YIELDS_SECONDS
        yielded = self._stream.flush(self._yields_key)
        if yielded:
            self._yielded(yielded)

    def _has_more(self) -> bool:
        """Return True if work is left that need not wait for the next period."""
        if self._snapshot is not None:
            return self._room() > 0
        if self._copies:
            return self._burst() > 1
        waiting = any(len(each.transitions) > DRAIN_RECORDS for each in self._sets)
        return bool(self._drained) or waiting or self._snapshot_request is not None

    def _update(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)

    # ------------------------------------------------ join

    def _sit(self, tag: str) -> None:
        """Be in the pool ``tag``. A worker that changes its pool keeps its blocks, so a snapshot follows its join."""
        if tag == self._tag:
            return
        if self._state.joined:
            logger.info("warmfleet: %s moves from %s to %s", self.config.worker_id, self._tag, tag)
            with suppress(RedisError, Refused, StreamGone, OSError):  # if this fails, the old pool misses heartbeats
                self._stream.put("leave")
                self._stream.flush()
        self._stream.close()
        self._open(tag)
        if self.reservations is not None:
            self.reservations.forget()
        self._update(joined=False, acknowledged=False)
        if self._state.joins:
            self._moved()

    def _join(self, now: float) -> None:
        """Write a join with a new nonce. It clears this worker's blocks in Redis, so a snapshot follows."""
        self._stream.join(self.config.join())
        self._update(joined=True, acknowledged=False, joins=self._state.joins + 1, applied=self._stream.number)
        self._snapshot = None
        self.images.begin_anew()
        for each in self._sets:
            each.digest = wire.Digest()
        held = any([self._cut(), *[each.transitions.table for each in self._further]])
        if held and self._snapshot_request is None:
            self._snapshot_request = SnapshotRequest()
        self._due, self._joined_at, self._rival = Due(heartbeat=now, command=now), now, Rival()
        self._tells_all = True
        logger.info("warmfleet: %s joined %s", self.config.worker_id, self._tag)

    # ------------------------------------------------ events

    def _put_progress(self, prefilled: int) -> None:
        """Report the first ``prefilled`` finished prefills, which ended before the block changes were drained.

        So the blocks of a prompt are always reported before its prefill.
        """
        done = [self._progress.popleft() for _ in range(prefilled)]
        for start in range(0, prefilled, wire.PROGRESS_PER_ENTRY):
            some = done[start : start + wire.PROGRESS_PER_ENTRY]
            self._stream.put("progress", wire.dumps(some))
            if self.reservations is not None:
                self.reservations.start([reservation for reservation, _cached, _prompt in some])

    def _put_ends(self, ends: Sequence[End]) -> None:
        for start in range(0, len(ends), wire.PROGRESS_PER_ENTRY):
            self._stream.put("ended", wire.dumps(ends[start : start + wire.PROGRESS_PER_ENTRY]))

    def _put_running(self, reservations: Sequence[str], *, whole: bool) -> None:
        """Tell reservations that the engine has; whole: these are all."""
        for start in range(0, max(len(reservations), whole), wire.PROGRESS_PER_ENTRY):
            if self._stream.pending >= MAX_PENDING:
                self._stream.flush()
            some = reservations[start : start + wire.PROGRESS_PER_ENTRY]
            self._stream.put("running", wire.dumps([int(whole and not start), *some]))

    def _tell_all(self, reservations: Reservations) -> None:
        if not self._tells_all:
            return
        self._tells_all = False
        running = reservations.restart()
        if running is not None:
            self._put_running(running, whole=True)
            self._stream.put("tally", wire.dumps(reservations.digest().as_list()))

    def _put_tally(self, reservations: Reservations, now: float) -> None:
        """Tell the digest of what the engine has, before a heartbeat, and mend what was told of it before."""
        if now >= self._due.compare:
            self._due.compare = now + wire.HEARTBEAT_SECONDS
            differences = reservations.compare()
            self._note_whether_it_can_tell(differences is not None)
            ends, waiting = differences or ([], [])
            self._put_ends(ends)
            self._put_running(waiting, whole=False)
        if self._can_tally:
            self._stream.put("tally", wire.dumps(reservations.digest().as_list()))

    def _note_whether_it_can_tell(self, can: bool) -> None:
        if can != self._can_tally:
            told = "can tell again" if can else "cannot tell: routers renew their reservations"
            logger.warning("warmfleet: which requests the engine %s has, it %s", self.config.worker_id, told)
        self._can_tally = can

    def _put_images(self) -> None:
        for report in self.images.reports(min(IMAGES_AT_ONCE, MAX_PENDING - self._stream.pending)):
            self._stream.put("image", report)

    def _put_changes(self) -> None:
        if not self._drained:
            for each in self._sets:
                if not each.copying:  # the changes since the copy was made wait for its end
                    self._drained.extend((each, run) for run in each.transitions.drain(DRAIN_RECORDS))
        while self._drained:
            while self._drained and self._stream.pending < MAX_PENDING:
                self._put_run(*self._drained.popleft())
            if self._drained:
                self._stream.flush()

    @property
    def _copies(self) -> bool:
        """Whether copies of further sets are under way."""
        return any(each.copying for each in self._further)

    def _put_copies(self) -> None:
        """Send pieces of the further sets whose copy is under way, one set after the other."""
        for each in self._further:
            if each.copying:
                for run in each.pieces(self._burst() - 1):
                    self._put_run(each, run)
                return

    def _put_run(self, block_set: BlockSet, run: Run) -> None:
        blocks = len(run.packed) // wire.HASH_BYTES
        self._evicted_blocks += blocks if run.operation == "removed" and block_set is self._main else 0
        self._stream.put(block_set.published(run), run.packed, blocks)

    def _notice_losses(self, now: float) -> None:
        """After lost events skip a number, so that the fleet asks for a snapshot; if it does not, send one later."""
        lost = self._stream.lost_entries
        overflowed = any(each.transitions.overflowed for each in self._sets)
        if (overflowed or lost > self._lost_entries_seen) and self._loss_noticed_at is None:
            logger.warning("warmfleet: block events were lost (%d so far): a snapshot follows", self.state.dropped)
            self._stream.skip()
            self._loss_noticed_at = now
        self._lost_entries_seen = lost
        if self._loss_noticed_at is not None and now - self._loss_noticed_at > SELF_RESYNC_SECONDS:
            self._snapshot_request = self._snapshot_request or SnapshotRequest()

    # ------------------------------------------------ snapshot

    def _room(self) -> int:
        """Return how many more entries may wait for the fleet; with more, MAXLEN would cut off a snapshot's begin."""
        return wire.UNACKNOWLEDGED_ENTRIES - (self._stream.number - self._state.applied)

    def _burst(self) -> int:
        """Return how many entries of a snapshot or a copy may be made now."""
        return min(BURST_CHUNKS, self._room(), MAX_PENDING - self._stream.pending)

    def _cut(self) -> Sequence[bytes]:
        """Copy the keys of the whole table, which contain all changes that waited to be published.

        Changes of the further sets are dropped, too, because their copies follow the snapshot.
        """
        self._drained.clear()
        self._loss_noticed_at = None
        for each in self._further:
            each.drop_changes()
        return self._main.transitions.cut()

    def _begin_snapshot(self, command_id: str | None) -> None:
        self._snapshot = Snapshot(self._cut(), self._main.transitions.pick, command_id)
        self._snapshot_request = None
        self.images.begin_anew()
        self._stream.put("begin", self._snapshot.begin())
        self._due.command = 0.0

    def _put_chunks(self, snapshot: Snapshot) -> None:
        for _ in range(self._burst()):
            if snapshot.finished:
                self._stream.put("end", snapshot.end())
                self._main.digest = snapshot.digest
                self._snapshot = None
                for each in self._further:
                    each.copy()
                self._update(snapshots=self._state.snapshots + 1)
                return
            chunk = snapshot.chunk()
            if chunk:
                self._stream.put("chunk", chunk, (len(chunk) - len(snapshot.id)) // wire.HASH_BYTES)

    # ------------------------------------------------ heartbeat and command

    def _heartbeat_due(self, now: float) -> Load | None:
        """Return the load if a heartbeat is due, else None. An engine that stands still sends none."""
        if now < min(self._due.heartbeat, self._due.load):
            return None
        self._due.after_load(now)
        load = self._load()
        self._note_standstill(load, now)
        if self._stands_still:
            self._due.heartbeat = now + LOAD_CHECK_SECONDS
            return None
        load = self._smoothed_load.smooth(load, now)
        return load if now >= self._due.heartbeat or load.differs_from(self._reported_load) else None

    def _note_standstill(self, load: Load, now: float) -> None:
        before, self._stands_still = self._stands_still, self._standstill.look(load, now)
        if before != self._stands_still:
            told = f"stands still with {load.running} requests: no heartbeats" if self._stands_still else "works again"
            logger.warning("warmfleet: the engine %s %s", self.config.worker_id, told)

    def _put_heartbeat(self, load: Load, now: float) -> None:
        self._reported_load = load
        # The fleet compares its block set with this digest, so none is sent in a snapshot and after lost events.
        comparable = self._snapshot is None and self._snapshot_request is None and self._loss_noticed_at is None
        heartbeat = wire.Heartbeat(
            running=load.running,
            waiting=load.waiting,
            blocks=self._main.digest.count,
            foreign_prefill_tokens=load.foreign_prefill_tokens,
            foreign_decode_tokens=load.foreign_decode_tokens,
            speed_tps=load.speed_tps,
            evicted=self._evicted_blocks,
            digest=self._main.digest if comparable else None,
            paused=load.paused,
            step_us=load.step_us,
        )
        if self._further and comparable and not any(each.copying for each in self._further):
            self._put_digests()
        if self.reservations is not None:
            self._put_tally(self.reservations, now)
        self._stream.put("heartbeat", heartbeat.encode())
        self._evicted_blocks = 0
        self._due.after_heartbeat(now)

    def _put_digests(self) -> None:
        """Tell what the further sets are, before the heartbeat: it alone would say that no snapshot is needed."""
        rates = self._ps_per_byte()
        told = {each.kind: each.digest.as_list() for each in self._further}
        told = {kind: [*sums, rates[kind]] if rates.get(kind) else sums for kind, sums in told.items()}
        self._stream.put("digests", wire.dumps(told))

    def _read_command(self, now: float) -> None:
        raw = self._stream.client.get(self._command_key)
        sending = self._snapshot is not None or self._copies
        self._due.after_command(now, sending=sending, acknowledged=self._state.acknowledged)
        try:
            command = Command.parse(raw) if raw is not None else None
        except ValueError as error:
            logger.warning("warmfleet: %s: %s", self._command_key, error)
            return
        if command is None or command.nonce != self._stream.nonce:
            self._not_acknowledged(command, now)
            return
        self._update(acknowledged=True, applied=command.applied)
        if command.id and command.id not in self._obeyed_ids:
            self._obey(command.do, command.id)

    def _not_acknowledged(self, command: Command | None, now: float) -> None:
        """Wait, stop for good, or join again, because the command is missing or names another incarnation.

        Either the fleet has not read our join yet, or another process joined after us (it may be alive or dead), or
        Redis has lost our join.
        """
        if command and command.joined > self._stream.joined:
            if self._rival.is_alive(command, now):
                reason = f"another process has joined as {self.config.worker_id}"
                logger.error("warmfleet: %s: this engine is no longer reported. Give each server its own id", reason)
                self._update(stopped=reason, joined=False)
                return
            if not self._rival.had_time(now):
                return
        elif not self._state.acknowledged and now - self._joined_at < wire.WORKER_TTL_SECONDS:
            return  # after this time without an answer, the join or its entry in ``hello`` was lost
        logger.warning("warmfleet: the join of %s was lost: joining again", self.config.worker_id)
        self._update(joined=False, acknowledged=False)

    def _obey(self, do: str, command_id: str) -> None:
        self._obeyed_ids.append(command_id)
        logger.info("warmfleet: the fleet asks this worker to %s", do)
        if do == "resync":
            self._snapshot = None  # a snapshot under way has failed
            self._snapshot_request = SnapshotRequest(command_id)
        elif do == "list":
            self._tells_all = True
        elif do == "rejoin":
            self._snapshot_request = SnapshotRequest(command_id)
            self._update(joined=False, acknowledged=False)
