"""A try to serve a job at one engine: its bookings in the pools that were asked, and the pool that serves it.

Only ``Attempt.release`` gives all of them back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from warmfleet.fleet import new_reservation
from warmfleet.routing.booking import Booking

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.engines.output_tokens import OutputTokens
    from warmfleet.engines.reported_usage import AnswerTail
    from warmfleet.fleet import Decision, Queued, Shortfall
    from warmfleet.fleet.bookings import Outcome
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Job
    from warmfleet.routing.client_limits import Counted
    from warmfleet.routing.settlements import Settlements


class Comparison(Protocol):
    """Chooses among the model's pools for one attempt (``pool_choice``)."""

    async def choose(self, *, may_wait: bool) -> Decision | Queued:
        """Choose a worker, or take a ticket, as ``Chooser`` describes."""


class Attempt:
    """One try to serve a job at an engine, from before a worker is chosen until everything is given back.

    ``bookings``: one for each pool that was asked. ``chosen``: the booking that serves the job; before a pool was
    chosen, the booking in the pool by which the prompt was identified. ``record``: the record of this try.
    ``on_first_byte`` is called before the client is answered; None unless two attempts race. ``output`` counts the
    tokens of the answer, only for a client with limits. ``tail``: the end of the answer, of an approximate worker,
    whose usage shows the ``shortfall`` (cached blocks that the worker lacked), or of a session. ``comparison``,
    ``counted``: None if the model has one pool; else the choice of a pool so far, and the request's count for a client
    with limits.

    A field that was not set has the value of the class, which saves time.
    """

    on_first_byte: Callable[[Attempt], None] | None = None
    output: OutputTokens | None = None
    tail: AnswerTail | None = None
    shortfall: Shortfall | None = None
    comparison: Comparison | None = None
    counted: Counted | None = None
    _over = False

    def __init__(
        self,
        settlements: Settlements,
        job: Job,
        failed_workers: tuple[str, ...] = (),
        *,
        avoids_failing: bool = True,
        key: bytes = b"",
    ) -> None:
        """Begin an attempt, which the caller must ``release`` in every case.

        failed_workers: workers that failed earlier attempts at this job. avoids_failing: see ``Booking.excluded``.
        key: see ``new_reservation``.
        """
        prompt, limits = job.prompt, job.limits
        tag = "" if limits is None else limits.tag
        self.reservation = new_reservation(prompt.prompt_count, exact=prompt.kind == "exact", key=key, client=tag)
        self.failed_workers = failed_workers
        self._avoids_failing = avoids_failing
        self._settlements = settlements
        self.bookings: list[Booking] = []
        self.chosen = self.book(job.pool, prompt)
        self.record = job.call.record.begin_try(self.reservation)

    def book(self, pool: Pool, prompt: IdentifiedPrompt) -> Booking:
        """Begin a booking in this pool. prompt: the prompt with that pool's token ids."""
        never, failed = prompt.unable_workers, self.failed_workers
        booking = Booking(
            self._settlements,
            pool,
            prompt,
            self.reservation,
            (*never, *failed) if failed else never,
            avoids_failing=self._avoids_failing,
        )
        self.bookings.append(booking)
        return booking

    def choose(self, booking: Booking) -> None:
        """Let this booking serve the job. Give back the others as unsent: their engines never got the request."""
        for other in self.bookings:
            if other is not booking:
                other.release("unsent")
        self.bookings = [booking]
        self.chosen = booking

    @property
    def avoided_some(self) -> bool:
        """Whether a decision passed over workers that had failed other requests."""
        return any(booking.avoided for booking in self.bookings)

    def hand_over(self) -> str | None:
        """Leave the lease to a gateway; return its reservation. Without a lease, give all back and return None."""
        if not self.chosen.hand_over():
            self.release("cancelled")
            return None
        self._over = True
        return self.reservation if self.counted is None else self.counted.hand_over()

    def release(self, outcome: Outcome) -> None:
        """Give back everything that this attempt took; a second call does nothing.

        A release never waits, so no cancellation can stop it half-way. Redis gets the outcome before the next decision.
        """
        if self._over:
            return
        self._over = True
        chosen, tokens = self.chosen, 0 if self.output is None else self.output.count
        if len(self.bookings) > 1:
            self.choose(chosen)
        if self.counted is not None:
            self.counted.end(None if outcome == "failed" or chosen.decision is None else tokens)
        if chosen.release(outcome, tokens, self.shortfall, self.record, self.tail):
            self._settlements.settled[outcome].inc()
        self.record.end(outcome)
