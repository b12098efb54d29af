"""The reservations that an engine has, and those that it has ended, as the publisher tells them to Redis.

A reservation may be several requests of the engine (several answers or prompts, the steps of a beam search), and ends
with the last of them. The engine's thread only appends the requests that come and those that go to two bounded queues;
to find their reservations and to count is the work of the publisher's thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    #: A reservation's id, the number of tokens of its answers, and why it ended: a word of vLLM's, or LOST.
    End = tuple[str, int, str]

MOST_WAITING = 4_096  # most requests in each queue; those beyond are noticed at a heartbeat
MOST_RUNNING = 2_048  # with more reservations the engine cannot tell which it has, so routers must renew them
LOST = "lost"  # the reason of an end that was noticed only because the engine no longer has the request


class Reservations:
    """What Redis was told about reservations.

    The engine's thread calls ``arrive`` with the engine's own id of each request that comes, and ``end`` with (id,
    output tokens, status) of some that it has finished or aborted, after the publisher was told of their prefills. Both
    are methods of a ``deque``: between two steps of an engine a Python call costs microseconds. The publisher's thread
    calls all else. requests: returns the ids of the requests that the engine has and has not finished; None if it
    cannot tell. reason_of: returns the word of vLLM's for a status.
    """

    def __init__(
        self, requests: Callable[[], Collection[str] | None], reason_of: Callable[[object], str] = str
    ) -> None:
        self._requests, self._reason_of = requests, reason_of
        self._arrived: deque[str] = deque(maxlen=MOST_WAITING)
        self._ended: deque[tuple[str, int, object]] = deque(maxlen=MOST_WAITING)
        self.arrive, self.end = self._arrived.append, self._ended.extend
        self._counts: dict[str, int] = {}  # the number of requests that the engine has of each reservation
        self._running: dict[str, None] = {}  # the reservations that Redis was told the engine has, in that order
        self._tokens: dict[str, int] = {}  # tokens of the ended requests of a reservation that has others
        self._over: OrderedDict[str, int] = OrderedDict()  # tokens of those last told as ended, MOST_WAITING at most
        self._gone: set[str] = set()  # of all the above, those that the engine did not have at the last look
        self._untold: set[str] = set()  # those that it had then, though Redis was not told

    def __len__(self) -> int:
        """Return the number of ended requests that wait."""
        return len(self._ended)

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def digest(self) -> wire.Digest:
        return wire.reservations_digest(self._running)

    def forget(self) -> None:
        """Forget all that was told, because another pool is told from now on."""
        waiting, told = (self._arrived, self._ended), (self._running, self._tokens, self._over)
        for kept in (*waiting, *told, self._counts, self._gone, self._untold):
            kept.clear()

    def restart(self) -> list[str] | None:
        """Return all reservations that the engine has now, to be told as a whole list; None if it cannot tell."""
        present = self._present()
        if present is None:
            return None
        self._running = dict.fromkeys(sorted(present))
        self._gone.clear()
        self._untold.clear()
        return self.running

    def start(self, reservations: Sequence[str]) -> None:
        """Note the reservations of entries that tell Redis that the engine has them."""
        for start in range(0, len(reservations), wire.PROGRESS_PER_ENTRY):
            some = reservations[start : start + wire.PROGRESS_PER_ENTRY]
            if len(self._running) + len(some) <= 2 * MOST_RUNNING:  # as lua/parts/apply/reservations.lua does
                self._running.update(dict.fromkeys(some))

    def take(self, number: int) -> tuple[list[str], list[End]]:
        """Take the first ``number`` ended requests off the queue.

        Returns reservations that were told as ended too early, which must be told as the engine's again, and then
        those that have ended now, with the tokens of all their requests.
        """
        taken = [self._ended.popleft() for _ in range(number)]
        back = self._count_arrivals()  # after the line above, so that every request that has ended is counted
        reasons: dict[str, str] = {}
        for request_id, tokens, status in taken:
            reservation = _reservation_of(request_id)
            if not reservation:
                continue
            back += self._again(reservation)
            self._tokens[reservation] = self._tokens.get(reservation, 0) + tokens
            left = self._counts.pop(reservation, 1) - 1
            if left:
                self._counts[reservation] = left
            else:
                reasons[reservation] = self._reason_of(status)
        self.start(back)
        return back, self._told([(each, self._tokens.pop(each), reason) for each, reason in reasons.items()])

    def _count_arrivals(self) -> list[str]:
        """Count the requests that have come. Returns reservations among them that were told as ended."""
        back: list[str] = []
        for _ in range(len(self._arrived)):
            reservation = _reservation_of(self._arrived.popleft())
            if reservation:
                self._counts[reservation] = self._counts.get(reservation, 0) + 1
                back += self._again(reservation)
        return back

    def _again(self, reservation: str) -> list[str]:
        """Return the reservation if it was told as ended, which is undone; else nothing."""
        tokens = self._over.pop(reservation, None)
        if tokens is None:
            return []
        self._tokens[reservation] = tokens
        return [reservation]

    def compare(self) -> tuple[list[End], list[str]] | None:
        """Compare what Redis was told with what the engine has. Call it once in HEARTBEAT_SECONDS.

        Returns reservations whose end was missed, and those that the engine has had since the last look without telling
        (they wait for their prefill). A look may fall between two reports, so a difference counts at the second look.
        None: the engine cannot tell what it has.
        """
        present = self._present()
        if present is None:
            return None
        gone = {*self._running, *self._counts, *self._tokens} - present
        untold = present - self._running.keys()
        lost, waiting = sorted(gone & self._gone), sorted(untold & self._untold)
        self._gone, self._untold = gone, untold
        ends: list[End] = [(each, self._tokens.get(each, 0), LOST) for each in lost if each in self._running]
        for each in lost:
            self._counts.pop(each, None)
            self._tokens.pop(each, None)
        self.start(waiting)
        return self._told(ends), waiting

    def _told(self, ends: list[End]) -> list[End]:
        """Note that Redis is told of these ends."""
        for reservation, tokens, _reason in ends:
            self._running.pop(reservation, None)
            self._over[reservation] = tokens
            if len(self._over) > MOST_WAITING:
                self._over.popitem(last=False)
        return ends

    def _present(self) -> set[str] | None:
        requests = self._requests()
        if requests is None:
            return None
        present = set(map(_reservation_of, requests)) - {""}
        return present if len(present) <= MOST_RUNNING else None


def _reservation_of(request_id: str) -> str:
    """Return the reservation of an engine's request; empty if no router sent the request."""
    found = wire.reservation_of(request_id)
    return found[0] if found is not None else ""
