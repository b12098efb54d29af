"""The reservations that an engine has, and those that it has ended, as the publisher tells them to Redis.

A reservation may be several requests of the engine (several answers or prompts, the steps of a beam search), and ends
with the last one. So the engine's thread counts the requests of each as they come and go, and appends those that have
ended to a bounded queue; all else is the work of the publisher's thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    #: A reservation's id, the number of tokens of its answers, and why it ended: a word of vLLM's, or LOST.
    End = tuple[str, int, str]

ENDED_QUEUE = 4_096  # most ended requests that wait for the publisher; those beyond are noticed at a heartbeat
MOST_RUNNING = 2_048  # with more reservations the engine cannot tell which it has, so routers must renew them
LOST = "lost"  # the reason of an end that was noticed only because the engine no longer has the request


class Reservations:
    """What Redis was told about reservations.

    The engine's thread calls ``arrive`` and ``end``, the publisher's thread all else.
    requests: returns the engine's own ids of the requests that it has and has not finished; None if it cannot tell.
    """

    def __init__(self, requests: Callable[[], Collection[str] | None]) -> None:
        self._requests = requests
        self._counts: dict[str, int] = {}  # the number of requests that the engine has of each reservation
        self._ended: deque[tuple[str, int, str, bool]] = deque(maxlen=ENDED_QUEUE)  # the last: none was left
        self._back: deque[str] = deque(maxlen=ENDED_QUEUE)  # told as ended, but the engine has more of their requests
        self._running: dict[str, None] = {}  # the reservations that Redis was told the engine has, in that order
        self._tokens: dict[str, int] = {}  # tokens of the ended requests of a reservation that has others
        self._over: OrderedDict[str, int] = OrderedDict()  # tokens of those last told as ended, ENDED_QUEUE at most
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

    def arrive(self, request_id: str) -> None:
        """Note that the engine has one more request."""
        found = wire.reservation_of(request_id)
        if found is None:
            return
        reservation, _child = found
        count = self._counts.get(reservation, 0)
        self._counts[reservation] = count + 1
        if not count and reservation in self._over:
            self._back.append(reservation)

    def end(self, request_id: str, output_tokens: int, reason: str) -> None:
        """Note that the engine has finished or aborted one of its requests."""
        found = wire.reservation_of(request_id)
        if found is None:
            return
        reservation, _child = found
        left = self._counts.pop(reservation, 1) - 1
        if left:
            self._counts[reservation] = left
        self._ended.append((reservation, output_tokens, reason, not left))

    def forget(self) -> None:
        """Forget all that was told, because another pool is told from now on."""
        told = self._counts, self._ended, self._back, self._running, self._tokens, self._over, self._gone, self._untold
        for kept in told:
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
        touched = [self._back.popleft() for _ in range(len(self._back))] + [reservation for reservation, *_ in taken]
        back = [each for each in dict.fromkeys(touched) if each in self._over]
        self._tokens.update((each, self._over.pop(each)) for each in back)
        self.start(back)
        reasons: dict[str, str] = {}
        for reservation, tokens, reason, last in taken:
            self._tokens[reservation] = self._tokens.get(reservation, 0) + tokens
            reasons.pop(reservation, None)
            if last and reservation not in self._counts:  # none has come since
                reasons[reservation] = reason
        return back, self._told([(each, self._tokens.pop(each), reason) for each, reason in reasons.items()])

    def compare(self) -> tuple[list[End], list[str]] | None:
        """Compare what Redis was told with what the engine has. Call it once in HEARTBEAT_SECONDS.

        Returns reservations whose end was missed, and those that the engine has had since the last look without telling
        (they wait for their prefill). A look may fall between two reports, so a difference counts at the second look.
        None: the engine cannot tell what it has.
        """
        present = self._present()
        if present is None:
            return None
        gone = {*self._running, *list(self._counts), *self._tokens} - present  # ``list`` of a dict is one atomic call
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
            if len(self._over) > ENDED_QUEUE:
                self._over.popitem(last=False)
        return ends

    def _present(self) -> set[str] | None:
        requests = self._requests()
        if requests is None:
            return None
        present = {found[0] for found in map(wire.reservation_of, requests) if found is not None}
        return present if len(present) <= MOST_RUNNING else None
