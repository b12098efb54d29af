"""Causes why an engine had cached fewer or more blocks than a decision predicted. Each cause has a rule that can fail.

A prediction says exactly what the index says at that moment, but the engine looks later. Meanwhile blocks are evicted
and made, and the index knows of each change only after up to ``REPORT_S``. Any other difference is ``unexplained``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.vllm.history import Concurrency

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.vllm.history import Booking, Engine, Index, Stay

REPORT_S = 1.0  # 0.1 s to publish, 0.05 s to apply, 0.5 s of credit that lingers, and a reserve for a busy machine
HEAL_S = 7.0  # after Redis is back: one period of 5 s, 1 s, and a snapshot
#: So long the index expects the prompt of a decision that its replica gave up, or whose client left. A starved replica
#: waits 1.05 s for the decision and 2 s for the settle, and repeats the settle after 1 s.
GIVEN_UP_S = 4.1
LEASE_S = 31.0  # leases stay open this long after a replica was killed, or Redis lost a settle
CROWD = 16  # differences at this many concurrent requests, or more, are counted apart


@dataclass(frozen=True)
class Strikes:
    """The seconds at which Redis was killed, came back, and replicas were killed."""

    redis_lost: Sequence[float] = ()
    redis_back: Sequence[float] = ()
    replica_lost: Sequence[float] = ()

    def healing(self, at: float) -> bool:
        return any(0 <= at - back <= HEAL_S for back in self.redis_back)

    def orphaned(self, maker: Booking, ended: float | None, at: float) -> bool:
        """Whether a kill of a replica or of Redis while ``maker`` ran kept its outcome from the index."""
        return any(
            maker.at <= lost <= at <= lost + LEASE_S and (ended is None or ended >= lost - REPORT_S)
            for lost in (*self.redis_lost, *self.replica_lost)
        )


@dataclass
class Verdict:
    """Counts of causes. crowded: those at CROWD or more concurrent requests. odd: evidence of unexplained ones."""

    causes: Counter[str] = field(default_factory=Counter)
    crowded: Counter[str] = field(default_factory=Counter)
    blocks: Counter[str] = field(default_factory=Counter)  # sum of the differences in blocks
    lags: list[float] = field(default_factory=list)  # seconds between a change and a decision that did not know it
    odd: list[str] = field(default_factory=list)

    @property
    def compared(self) -> int:
        return self.causes.total()

    def table(self) -> str:
        rows = [f"{'cause':34}{'requests':>9}{'of these at 16+':>17}{'blocks':>8}"]
        for cause, count in self.causes.most_common():
            rows.append(f"{cause:34}{count:9}{self.crowded[cause]:17}{self.blocks[cause]:8}")
        rows.append(f"{'all':34}{self.compared:9}{self.crowded.total():17}{self.blocks.total():8}")
        return "\n".join(rows)


class Judge:
    """Compares every prediction with what the engine found at schedule time."""

    def __init__(self, index: Index, engines: Mapping[str, Engine], strikes: Strikes) -> None:
        self._index = index
        self._engines = engines
        self._strikes = strikes
        self._lags: list[float] = []

    def verdict(self) -> Verdict:
        verdict, concurrent = Verdict(lags=self._lags), Concurrency(self._engines.values())
        for worker_id, engine in self._engines.items():
            for stay in engine.stays.values():
                if stay.ran is None or stay.probe:
                    continue  # the request was cancelled while it waited
                booking = self._index.bookings.get(stay.reservation)
                cause = self._unwitnessed(stay) if booking is None else self._cause(booking, stay, worker_id)
                verdict.causes[cause] += 1
                verdict.crowded[cause] += concurrent.at(stay.looked) >= CROWD
                verdict.blocks[cause] += abs(booking.matched - stay.cached) if booking else 0
                if cause.endswith("unexplained"):
                    verdict.odd.append(f"{cause}: {self._evidence(booking, stay, engine)}")
        return verdict

    def _evidence(self, booking: Booking | None, stay: Stay, engine: Engine) -> str:
        """Return the known facts about one request, for a person to judge."""
        if booking is None or booking.chain != stay.chain or booking.matched == stay.cached:
            return f"{booking} {stay}"
        block = booking.chain[min(booking.matched, stay.cached)]
        makers = [
            (
                maker.reservation,
                maker.at,
                maker.matched,
                self._index.told.get(maker.reservation),
                made and (made.came, made.ran, made.preempted, made.ended, made.cached),
            )
            for maker in self._index.makers_of(booking, block)
            for made in [engine.stays.get(maker.reservation)]
        ]
        return (
            f"{booking.reservation} decided {booking.at:.3f} slot {booking.slot} matched {booking.matched} of"
            f" {len(booking.chain)}, looked {stay.looked:.3f} cached {stay.cached}; block {block.hex()}: engine"
            f" {engine.blocks.last(block, stay.looked)}, index"
            f" {self._index.blocks.there((booking.slot, block), booking.place)}; makers {makers}"
        )

    def _unwitnessed(self, stay: Stay) -> str:
        """Judge a request without a decision: the last lines of MONITOR are lost when the server is killed."""
        if any(abs(stay.came - lost) <= REPORT_S for lost in self._strikes.redis_lost):
            return "decided as Redis was killed"
        return "no decision: unexplained"

    def _cause(self, booking: Booking, stay: Stay, worker_id: str) -> str:
        if booking.worker_id != worker_id or booking.chain != stay.chain:
            return "another prompt: unexplained"
        if booking.matched == stay.cached:
            return "exact"
        if booking.matched > stay.cached:
            cause = self._short(booking, stay, self._engines[worker_id])
        else:
            cause = self._over(booking, stay, self._engines[worker_id])
        if cause.endswith("unexplained") and self._strikes.healing(booking.at):
            return f"{cause.partition(':')[0]}: Redis had just come back"
        return cause

    # ------------------------------------------------ less than was predicted

    def _short(self, booking: Booking, stay: Stay, engine: Engine) -> str:
        missing = booking.chain[stay.cached]
        _, gone = engine.blocks.last(missing, stay.looked)
        if gone is not None and gone >= booking.at:
            return "short: evicted while it waited"
        if self._index.blocks.there((booking.slot, missing), booking.place):
            return self._known_late("short: eviction not yet reported", booking, gone)
        for maker in self._index.makers_of(booking, missing):
            cause = self._of_maker(maker, booking, stay, engine, gone)
            if cause:
                return cause
        return "short: unexplained"

    def _known_late(self, cause: str, booking: Booking, changed: float | None) -> str:
        if changed is None or not self._recent(changed, booking.at):
            return cause.partition(":")[0] + ": unexplained"
        return cause

    def _recent(self, changed: float, at: float) -> bool:
        """Whether a change was too young to be in the index by ``at``. Time without any replica does not count."""
        lag = at - changed
        if lag > REPORT_S:
            lag -= self._index.stalled(changed, at)
        if lag <= REPORT_S:
            self._lags.append(at - changed)
        return lag <= REPORT_S

    def _of_maker(self, maker: Booking, booking: Booking, stay: Stay, engine: Engine, gone: float | None) -> str:
        """Why a block that the reservation ``maker`` was to make is missing, or an empty string."""
        made = engine.stays.get(maker.reservation)
        ended = made.ended if made else None
        if made is None or made.ran is None or made.ran > stay.looked:
            if ended is not None and ended <= stay.looked:
                return "short: its maker was cancelled"
            if made is None and booking.at - maker.at > REPORT_S:
                if self._index.told.get(maker.reservation, float("inf")) - maker.at <= GIVEN_UP_S:
                    return "short: its maker never came, told late"
                return "short: credit of a lost outcome" if self._lost(maker, ended, booking) else ""
            return "short: its maker waits, too"
        if made.preempted is not None and made.preempted <= stay.looked:
            return "short: its maker was preempted"
        if ended is None or ended > stay.looked:
            return "short: its maker is at it"
        if booking.at <= ended:
            return "short: its maker was cancelled"
        if gone is not None and self._recent(gone, booking.at):
            return "short: evicted, credit lingered"
        if (gone is None or gone < made.ran) and booking.at - ended <= REPORT_S:
            return "short: its maker was cancelled"  # before it made this block, and its replica had not settled it yet
        return "short: credit of a lost outcome" if self._lost(maker, ended, booking) else ""

    def _lost(self, maker: Booking, ended: float | None, booking: Booking) -> bool:
        return maker.reservation in self._index.restored or self._strikes.orphaned(maker, ended, booking.at)

    # ------------------------------------------------ more than was predicted

    def _over(self, booking: Booking, stay: Stay, engine: Engine) -> str:
        found = booking.chain[booking.matched]
        there, came = engine.blocks.last(found, stay.looked)
        if not there or came is None:
            return "over: not in the table: unexplained"
        if came >= booking.at:
            return "over: made while it waited"
        if self._index.blocks.there((booking.slot, found), booking.place):
            return "over: was in the index: unexplained"
        return self._known_late("over: block not yet reported", booking, came)
