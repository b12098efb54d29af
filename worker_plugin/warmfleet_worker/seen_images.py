"""The images that an engine has seen, for routers that cannot compute an image's tokens themselves.

The engine's thread notes identifier and tokens of each image of a request; the publisher's thread makes reports of
them. The tokens of an identifier do not change, so each is told once, and again after AGAIN_SECONDS if it is still
seen, because Redis keeps only the images of a pool that were told last. Both memories are bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING

from warmfleet_worker.protocol.image_tokens import MAX_ID, MAX_IMAGE_BYTES
from warmfleet_worker.protocol.wire import dumps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

logger = logging.getLogger("vllm.warmfleet")

MOST_TOLD = 4_096  # most identifiers that are known as told, as many as Redis keeps for a pool
MOST_WAITING = 256  # most images that wait for the publisher: 10 MB of token ids if each has 5,000
AGAIN_SECONDS = 300.0


class SeenImages:
    """A queue of images, without those that were told lately. dropped: images that are not told, since the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._told: dict[str, float] = {}  # identifier -> when it was told last; the oldest first
        self._waiting: deque[tuple[str, Sequence[int]]] = deque()

    def note(self, identifier: str, prompt: Sequence[int], offset: int, length: int) -> None:
        """Queue the image whose ``length`` tokens begin at ``offset`` of this prompt. Called by the engine's thread."""
        now = self._clock()
        with self._lock:
            if self._told.get(identifier, -AGAIN_SECONDS) > now - AGAIN_SECONDS:
                return
            if len(self._waiting) >= MOST_WAITING or len(identifier) > MAX_ID:
                self._drop("too many at once, or its identifier is too long")
                return
            self._told.pop(identifier, None)
            self._told[identifier] = now
            if len(self._told) > MOST_TOLD:
                del self._told[next(iter(self._told))]
            self._waiting.append((identifier, prompt[offset : offset + length]))

    def begin_anew(self) -> None:
        """Tell all images again when they are seen: reports may have been lost, or the pool is another."""
        with self._lock:
            self._told.clear()

    def reports(self, limit: int) -> Iterator[str]:
        """Take up to ``limit`` images off the queue; yield JSON of identifier and runs of each."""
        for _ in range(min(limit, len(self._waiting))):
            identifier, ids = self._waiting.popleft()
            runs = [number for token, run in groupby(ids) for number in (token, len(list(run)))]
            report = dumps([identifier, runs])
            if len(report) <= MAX_IMAGE_BYTES:
                yield report
            else:
                self._drop("its tokens have too many runs")

    def _drop(self, reason: str) -> None:
        if not self.dropped:
            logger.warning("warmfleet: an image is not told to routers: %s (logged once)", reason)
        self.dropped += 1
