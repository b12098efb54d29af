"""The last requests of this replica, kept for people who ask why one of them was slow (``warmfleet why``).

A busy replica has thousands of requests in a minute, and people ask later. So the slowest requests of each minute are
kept for an hour as well, and the last requests that failed.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from warmfleet.protocol.wire import ENDED_MARK, RESERVATION, RESERVATION_LENGTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.tracing.request_record import RequestRecord

#: Number of last requests kept, each of about 1.5 kB. If the CPU's cache does not hold them, a request costs 5 us more.
KEPT = 512
SLOWEST, MINUTES = 16, 60  # number of slow requests kept of each minute; number of minutes (only those with requests)
FAILED = 256  # number of last failed requests kept: the fleet failed, or the client hung up
MINUTE_S = 60.0
UNBOOKED = "unbooked."  # prefix of the id that an engine gets for a request that Redis did not book
_RESERVATION = re.compile(RESERVATION)

Slow = tuple[float, int, "RequestRecord"]  # seconds that the client waited, a unique number, the request


class LastRequests:
    """Keeps the records of some requests. Each request calls ``begun`` and ``ended``; people ask by other methods."""

    def __init__(self) -> None:
        self._last: deque[RequestRecord] = deque(maxlen=KEPT)
        self._failed: deque[RequestRecord] = deque(maxlen=FAILED)
        self._minutes: deque[list[Slow]] = deque(maxlen=MINUTES)
        self._minute: list[Slow] = []  # a heap of the slowest since the minute began
        self._minute_ends_at = self._least_s = 0.0
        self._numbers = count()

    def begun(self, record: RequestRecord) -> None:
        """Keep a request from its beginning on."""
        record.kept = True
        self._last.append(record)

    def ended(self, record: RequestRecord) -> None:
        """Keep a request that is over for longer if it failed, or is among the slowest of this minute.

        A request of an unknown client was never kept (``begun`` was not called), so that it displaces no other.
        """
        if not record.kept:
            return
        if record.error_status >= 500 or not record.complete:
            self._failed.append(record)
        ended_at = record.ended_at  # a cheap test first: no wait of a request is longer than the request
        if ended_at - record.began_at > self._least_s or ended_at >= self._minute_ends_at:
            self._keep_slow(lateness_s(record), record)

    def _keep_slow(self, late_s: float, record: RequestRecord) -> None:
        if record.ended_at >= self._minute_ends_at:
            self._minute_ends_at = record.ended_at + MINUTE_S
            self._minute = []
            self._minutes.append(self._minute)
        slow, heap = (late_s, next(self._numbers), record), self._minute
        if len(heap) == SLOWEST and late_s <= heap[0][0]:
            return
        if len(heap) < SLOWEST:
            heapq.heappush(heap, slow)
        else:
            heapq.heapreplace(heap, slow)
        self._least_s = heap[0][0] if len(heap) == SLOWEST else 0.0

    def all(self) -> list[RequestRecord]:
        """Return every request that is kept, the newest first."""
        return sorted({*self._last, *self._failed, *self._slow()}, key=lambda record: -record.began_at)

    def _slow(self) -> Iterator[RequestRecord]:
        return (record for minute in self._minutes for _, _, record in minute)

    def failed(self) -> list[RequestRecord]:
        """Return the requests that the fleet failed, or whose answer broke off; the newest first."""
        return list(reversed(self._failed))

    def slowest(self) -> list[RequestRecord]:
        """Return the slowest requests, the slowest first. Requests that are still under way are among them."""
        now, under_way = time.perf_counter(), (record for record in self._last if not record.ended_at)
        return sorted({*self._slow(), *under_way}, key=lambda record: -lateness_s(record, now))

    def found(self, identifier: str, request_id: str) -> list[RequestRecord]:
        """Return the requests with this id, the newest first.

        identifier: an id with a reservation in it, as in an engine's log, in the body of an answer, or in a gateway's
        placement; else a client's X-Request-Id. request_id: that id without unsafe characters.
        """
        reservations = {match[0][:RESERVATION_LENGTH] for match in _RESERVATION.finditer(identifier)}
        if reservations:
            return [record for record in self.all() if reservations.intersection(_reservations(record))]
        _, unbooked, behind = identifier.partition(UNBOOKED)
        if not unbooked:
            return [record for record in self.all() if record.request_id == request_id]
        behind = behind.removeprefix(ENDED_MARK)  # an engine appends characters to the id that it got
        found = [record for record in self.all() if behind.startswith(record.request_id)]
        longest = max((len(record.request_id) for record in found), default=0)
        return [record for record in found if len(record.request_id) == longest]


def _reservations(record: RequestRecord) -> Iterator[str]:
    return (attempt.reservation[:RESERVATION_LENGTH] for attempt in record.tries)


def lateness_s(record: RequestRecord, now: float = 0.0) -> float:
    """Return the client's longest single wait in seconds, for the first byte or in the middle of its answer.

    now: the end of the wait, for a request that is still under way.
    """
    first_s = gap_s = 0.0
    for attempt in record.tries:
        if attempt.first_byte_at and not first_s:
            first_s = attempt.first_byte_at - record.began_at
        if attempt.gap_s > gap_s:
            gap_s = attempt.gap_s
    return max(first_s or (record.ended_at or now) - record.began_at, gap_s)
