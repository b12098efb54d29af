"""The order in which an engine evicts blocks: those of ended and paused sessions, then T-LRU's or the LRU ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from warmfleet_worker.eviction.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from warmfleet_worker.eviction.finished import Finished
    from warmfleet_worker.eviction.tail_eviction import TailEviction

MOST_YIELDS = 1_024  # most reservations whose sessions yield, and that the engine has not looked at yet


class Eviction:
    """Chooses the blocks that an engine gives up first. No method waits; ``yield_sessions`` is for any thread.

    tail: T-LRU, or None where everything but ended and paused sessions is LRU. given_up: blocks since the start.
    """

    def __init__(self, block_tokens: int, blocks: int, tail: TailEviction | None = None) -> None:
        self.tail = tail
        self.given_up = 0
        self._sessions = Sessions(block_tokens, blocks)
        self._yields: deque[str] = deque(maxlen=MOST_YIELDS)

    @property
    def chooses(self) -> bool:
        """Tell whether ``give_up`` may return blocks."""
        return bool(self._yields or self._sessions.leaving or (self.tail is not None and self.tail.tags))

    def yield_sessions(self, reservations: Iterable[str]) -> None:
        """Let the sessions whose latest requests have these reservations be given up first."""
        self._yields.extend(reservations)

    def freed(self, request: Finished, now: float) -> None:
        """Note a finished or preempted request, whose blocks have become free ``now`` (monotonic seconds)."""
        self._sessions.freed(request)
        if self.tail is not None and not request.preempted:
            self.tail.finished(request, now)

    def is_silent(self, number: int, now: float) -> bool:
        """Tell whether this free block is evicted before those that are given up."""
        return self.tail is not None and self.tail.is_silent(number, now)

    def give_up(self, count: int, valid: Callable[[int, bytes], bool]) -> list[int]:
        """Return the numbers of up to ``count`` blocks that are given up in place of others, in order.

        valid: tells whether the block of this number is free and still has this hash.
        """
        while self._yields:
            self._sessions.give_up(self._yields.popleft())
        taken = self._sessions.take(count, valid)
        if self.tail is not None and len(taken) < count:
            others = self.tail.give_up(
                count - len(taken), lambda number, block_hash: number not in taken and valid(number, block_hash)
            )
            taken |= dict.fromkeys(others)
        self.given_up += len(taken)
        return list(taken)
