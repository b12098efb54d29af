"""Sends Redis the outcomes of this replica's bookings without waiting, and knows when all have been answered."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from warmfleet.fleet.bookings import Outcome, Told

if TYPE_CHECKING:
    from warmfleet.errors import WarmfleetError
    from warmfleet.fleet import Moved, SessionEnd, Shortfall
    from warmfleet.metrics import Counter, Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.tickets import Tickets
    from warmfleet.tracing.request_record import TryRecord

logger = logging.getLogger("warmfleet.routing.settlements")


class Settlements:
    """Sends Redis the outcomes of attempts, in the background.

    ``tickets``: the replica's tickets, which are polled soon when an outcome frees room. ``settled``: the
    counters of attempts that have ended, by outcome.
    """

    def __init__(self, tickets: Tickets, metrics: Metrics) -> None:
        self.tickets = tickets
        self.settled: dict[Outcome, Counter] = {word: metrics.settled.labels(word) for word in get_args(Outcome)}
        self._failures = metrics.settle_failures
        self._under_way = 0  # outcomes that Redis has neither taken nor refused
        self._none_left = asyncio.Event()

    def settle_later(
        self,
        pool: Pool,
        reservation: str,
        outcome: Told,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        record: TryRecord | None = None,
        session: SessionEnd | None = None,
        moved: Moved | None = None,
    ) -> None:
        """Send Redis an outcome without waiting. A background round repeats an outcome that Redis did not take, with
        nothing else. record: gets the cached tokens, if the engine's plugin has reported them.

        Redis takes the outcome before every later decision, because all go over one connection.
        """
        self._under_way += 1
        answered = partial(self._answered, pool, reservation, outcome, record=record)
        pool.fleet.bookings.settle_later(reservation, outcome, answered, tokens, shortfall, session, moved)

    def _answered(
        self,
        pool: Pool,
        reservation: str,
        outcome: Told,
        answer: list[Any] | None,
        error: WarmfleetError | None,
        *,
        record: TryRecord | None = None,
    ) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._none_left.set()
        if error is None:
            if record is not None and answer is not None and len(answer) > 1:
                record.cached_tokens = answer[1]
            self.tickets.room_freed(pool)
            return
        self._failures.inc()
        if outcome != "started" and outcome != "due":
            pool.reservations.keep_outcome(reservation, outcome)
        logger.info("settle %s: %s; a final outcome is sent again, and the lease expires by itself", outcome, error)

    def gateway_settled(self, pool: Pool, outcome: Outcome) -> None:
        """Note that Redis took the outcome of a gateway's reservation."""
        self.settled[outcome].inc()
        self.tickets.room_freed(pool)

    async def drained(self) -> None:
        """Return when Redis has taken or refused every outcome, and no ticket is left to give up."""
        while self._under_way:
            self._none_left.clear()
            await self._none_left.wait()
        await self.tickets.drained()
