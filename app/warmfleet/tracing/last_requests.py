"""The last requests of this replica, kept for people who ask why one of them was slow (``warmfleet why``).

A busy replica has thousands in a minute, and somebody who waited asks later. So the slowest of each minute are kept for
an hour besides, and the last ones that failed.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from warmfleet.protocol.wire import ENDED_MARK, RESERVATION_LENGTH, RESERVATION_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.tracing.request_record import RequestRecord

#: Of the last requests, each about 1.5 kB. With more than the cache of a core holds, each request costs 5 us more.
KEPT = 512
SLOWEST, MINUTES = 16, 60  # so many of each minute, for so many minutes in which there were requests
FAILED = 256  # of the last requests that the fleet failed, or whose client hung up
MINUTE_S = 60.0
UNBOOKED = "unbooked."  # before the request's id, in the id that an engine got of a request that Redis did not book
_RESERVATION = re.compile(rf"{RESERVATION_PREFIX}[A-Za-z0-9_-]{{{RESERVATION_LENGTH - len(RESERVATION_PREFIX)}}}")

Slow = tuple[float, int, "RequestRecord"]  # how late, a number that no other has, the request


class LastRequests:
    """``begun`` and ``ended`` are called for every request; everything else only when somebody asks."""

    def __init__(self) -> None:
        self._last: deque[RequestRecord] = deque(maxlen=KEPT)
        self._failed: deque[RequestRecord] = deque(maxlen=FAILED)
        self._minutes: deque[list[Slow]] = deque(maxlen=MINUTES)
        self._minute: list[Slow] = []  # a heap of the slowest since the minute began
        self._minute_ends_at = self._least_s = 0.0
        self._numbers = count()

    def begun(self, record: RequestRecord) -> None:
        """Keep a request from now on, while it is under way, too."""
        record.kept = True
        self._last.append(record)

    def ended(self, record: RequestRecord) -> None:
        """The request is over: keep it for longer if it failed, or is among the slowest of this minute.

        A request that was never kept, as its client is not known, displaces none.
        """
        if not record.kept:
            return
        if record.error_status >= 500 or not record.complete:
            self._failed.append(record)
        ended_at = record.ended_at  # nobody waited longer at a stretch than the request took
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
        """Every request that is kept, the newest first."""
        return sorted({*self._last, *self._failed, *self._slow()}, key=lambda record: -record.began_at)

    def _slow(self) -> Iterator[RequestRecord]:
        return (record for minute in self._minutes for _, _, record in minute)

    def failed(self) -> list[RequestRecord]:
        """Those that the fleet failed, and those whose answer did not reach its end; the newest first."""
        return list(reversed(self._failed))

    def slowest(self) -> list[RequestRecord]:
        """The slowest first, those that are still under way among them."""
        now, under_way = time.perf_counter(), (record for record in self._last if not record.ended_at)
        return sorted({*self._slow(), *under_way}, key=lambda record: -lateness_s(record, now))

    def found(self, asked: str, request_id: str) -> list[RequestRecord]:
        """The requests with this id, the newest first.

        asked: an id that has a reservation in it, as an engine's log, the id in the body of an answer, or a gateway's
        placement. Without one it is the X-Request-Id of a client, as routers read it in ``request_id``.
        """
        reservations = {found[0] for found in _RESERVATION.finditer(asked)}
        if reservations:
            return [one for one in self.all() if any(booked in reservations for booked in _reservations(one))]
        _, unbooked, behind = asked.partition(UNBOOKED)
        if not unbooked:
            return [one for one in self.all() if one.request_id == request_id]
        behind = behind.removeprefix(ENDED_MARK)  # an engine puts more behind the id that it got
        found = [one for one in self.all() if behind.startswith(one.request_id)]
        longest = max((len(one.request_id) for one in found), default=0)
        return [one for one in found if len(one.request_id) == longest]


def _reservations(record: RequestRecord) -> Iterator[str]:
    return (one.reservation[:RESERVATION_LENGTH] for one in record.tries)


def lateness_s(record: RequestRecord, now: float = 0.0) -> float:
    """How long the client waited at a stretch: for the first byte, or in the middle of its answer.

    now: counts for a request that is still under way.
    """
    first_s = gap_s = 0.0
    for one in record.tries:
        if one.first_byte_at and not first_s:
            first_s = one.first_byte_at - record.began_at
        if one.gap_s > gap_s:
            gap_s = one.gap_s
    return max(first_s or (record.ended_at or now) - record.began_at, gap_s)
