"""The order in which an engine evicts blocks: those of ended and paused sessions, then T-LRU's or the LRU ones."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from warmfleet_worker.eviction.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from warmfleet_worker.eviction.finished import Finished
    from warmfleet_worker.eviction.tail_eviction import TailEviction

MOST_YIELDS = 1_024  # most reservations whose sessions yield, and that nobody has looked at yet
MOST_NOTES = 256  # number of freed requests at which the engine's thread looks at them itself


class Eviction:
    """Chooses the blocks that an engine gives up first. Its methods are for the engine's thread, and none waits there.

    Another thread calls ``yield_sessions`` and, a few times a second, ``catch_up``: so the engine's thread only notes
    which requests were freed. tail: T-LRU, or None where everything but ended and paused sessions is LRU. given_up:
    number of blocks since the start.
    """

    def __init__(self, block_tokens: int, blocks: int, tail: TailEviction | None = None) -> None:
        self.tail = tail
        self.given_up = 0
        self._notes: deque[Finished] = deque()
        self._ends = False  # True if a noted request ends its session
        self._yields: deque[str] = deque(maxlen=MOST_YIELDS)
        self._lock = threading.Lock()  # for the sessions
        self._sessions = Sessions(block_tokens, blocks)

    @property
    def chooses(self) -> bool:
        """Tell whether ``give_up`` may return blocks."""
        return bool(self._ends or self._yields or self._sessions.leaving or (self.tail is not None and self.tail.tags))

    def yield_sessions(self, reservations: Iterable[str]) -> None:
        """Let the sessions whose latest requests have these reservations be given up first. For any thread."""
        self._yields.extend(reservations)

    def catch_up(self) -> None:
        """Look at the requests that were freed since the last call. For any thread but the engine's."""
        with self._lock:
            self._look()

    def freed(self, request: Finished, now: float) -> None:
        """Note a finished or preempted request, whose blocks have become free ``now`` (monotonic seconds)."""
        self._notes.append(request)
        if request.ended and not request.preempted:
            self._ends = True
        if len(self._notes) >= MOST_NOTES and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        if self.tail is not None and not request.preempted:
            self.tail.finished(request, now)

    def is_silent(self, number: int, now: float) -> bool:
        """Tell whether this free block is evicted before those that are given up."""
        return self.tail is not None and self.tail.is_silent(number, now)

    def give_up(self, count: int, valid: Callable[[int, bytes], bool]) -> list[int]:
        """Return the numbers of up to ``count`` blocks that are given up in place of others, in order.

        valid: tells whether the block of this number is free and still has this hash.
        """
        taken = self._of_sessions(count, valid)
        if self.tail is not None and len(taken) < count:
            others = self.tail.give_up(
                count - len(taken), lambda number, block_hash: number not in taken and valid(number, block_hash)
            )
            taken |= dict.fromkeys(others)
        self.given_up += len(taken)
        return list(taken)

    def _of_sessions(self, count: int, valid: Callable[[int, bytes], bool]) -> dict[int, None]:
        if not self._lock.acquire(blocking=False):
            return {}  # the other thread looks at requests: it will be done by the next allocation
        try:
            self._ends = False
            self._look()
            while self._yields:
                self._sessions.give_up(self._yields.popleft())
            return self._sessions.take(count, valid)
        finally:
            self._lock.release()

    def _look(self) -> None:
        while self._notes:
            self._sessions.freed(self._notes.popleft())
