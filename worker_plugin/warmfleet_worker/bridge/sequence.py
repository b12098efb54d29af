"""Follows the numbered batches of one engine core: every batch once and in order, or the loss is known.

vLLM and SGLang number their batches from 0 and keep the last 10,000 for replay. A subscriber may miss batches: while it
connects, when a connection breaks, when it is slow. A gap in the numbers shows only with the next batch, so the
sequence also asks for a replay now and then (``verify``).

A restarted engine begins with 0 again. Its numbers alone do not show that, so every replay begins with the last batch
that was applied: only the same process has that very batch, with the same bytes and the same time in it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("warmfleet")

REMEMBERED = 16_384  # number of latest batches remembered, to tell a repeated batch from one of a restarted engine
TRIES = 3  # number of replays in a row that lack the next batch, after which that batch counts as lost


class ReplayError(Exception):
    """The engine has no replay endpoint, or the endpoint does not answer."""


class Listener(Protocol):
    """Receives the calls of a ``Sequence``."""

    def batch(self, payload: bytes) -> object:
        """Apply the next batch."""

    def lost(self) -> object:
        """Note that batches before the next one are missing for good."""

    def restarted(self) -> object:
        """Note that the engine is another process than before, which began with an empty cache."""


class Sequence:
    """Gives ``listener`` each batch once, in order. Call ``verify`` first and every few seconds, ``live`` for each one.

    replay: returns (number, payload) of the batches from a number on that the engine still has; some may be missing.
    Raises ReplayError. last: number of the last batch that was applied, -1 before the first.
    """

    def __init__(self, listener: Listener, replay: Callable[[int], Iterator[tuple[int, bytes]]]) -> None:
        self.last = -1
        self.gaps = self.lost = self.restarts = self.repeated = 0  # counters
        self._listener = listener
        self._replay = replay
        self._known: dict[int, int] = {}  # number -> hash of the payload

    def live(self, number: int, payload: bytes) -> None:
        """Take a batch that was received from the engine."""
        if number == self.last + 1:
            self._apply(number, payload)
            return
        if number <= self.last and self._known.get(number) == hash(payload):
            self.repeated += 1
            return
        self.gaps += number > self.last
        replayed = self.verify()
        for _ in range(TRIES):
            if not replayed or number <= self.last + 1:
                break
            replayed = self.verify()
        if not replayed and number <= self.last:
            self._forget()  # without a replay this can only be the batch of a restarted engine
        self._take(number, payload)

    def verify(self) -> bool:
        """Apply the batches that were missed, and notice a restart; returns False if the engine has no replay."""
        try:
            self._catch_up()
        except ReplayError as error:
            logger.debug("warmfleet: %s", error)
            return False
        return True

    def _catch_up(self) -> None:
        """Apply all batches after the last applied one, as far as the engine still has them. Raises ReplayError."""
        tries = 0
        while True:
            before, first = self.last, True
            for number, payload in self._replay(max(before, 0)):
                if first and not self._continues(number, payload):
                    self._forget()
                    return self._catch_up()
                if number > self.last + 1 and not first and tries < TRIES:
                    break  # the reply lost batches on its way: ask again
                first = False
                self._take(number, payload)
            else:
                if first and self.last >= 0:  # an empty replay: another process than before
                    self._forget()
                    return self._catch_up()
                return None
            tries = tries + 1 if self.last == before else 0

    def _continues(self, number: int, payload: bytes) -> bool:
        """Tell whether the first batch of a replay may come from the process that sent the last applied batch.

        True also if the replay begins with a later batch: batches are then lost, even if the process is the same.
        """
        return number > self.last or (number == self.last and self._known.get(number) == hash(payload))

    def _take(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return
        if number > self.last + 1:
            self.lost += number - self.last - 1
            self._listener.lost()
        self._apply(number, payload)

    def _forget(self) -> None:
        self.restarts += 1
        self.last = -1
        self._known.clear()
        self._listener.restarted()

    def _apply(self, number: int, payload: bytes) -> None:
        self.last = number
        self._known[number] = hash(payload)
        if len(self._known) > REMEMBERED:  # numbers may jump, so the oldest cannot be computed from this one
            del self._known[next(iter(self._known))]
        self._listener.batch(payload)
