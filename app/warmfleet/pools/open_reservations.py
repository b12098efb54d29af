"""Keeps this replica's open reservations, and the outcomes of ended ones that could not be sent to Redis yet."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet.fleet import Renewal
    from warmfleet.fleet.bookings import Outcome

MAX_OUTCOMES = 10_000  # most outcomes kept; the leases of further ones expire by themselves
KEPT_S = 30.0  # time for which an outcome is kept; by then its lease has expired, so nothing is left to give back


class OpenReservations:
    """The reservations that this replica holds for one model, from the booking decision until they are given back.

    Background rounds renew the open ones, so that they do not expire, and send again outcomes that Redis did not take.
    """

    def __init__(self) -> None:
        self._open: dict[str, Renewal] = {}
        self._outcomes: dict[str, tuple[Outcome, float]] = {}  # outcome, monotonic time at which it is dropped

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, reservation: str) -> bool:
        return reservation in self._open

    def add(self, renewal: Renewal) -> None:
        """Keep a reservation that was just booked, and drop the outcome of an earlier booking under its id."""
        self._open[renewal.reservation] = renewal
        self._outcomes.pop(renewal.reservation, None)

    def prefill_done(self, reservation: str) -> bool:
        """Note that this reservation's prefill is done. False if that was noted before, or it is not open."""
        renewal = self._open.get(reservation)
        if renewal is None or renewal.started:
            return False
        self._open[reservation] = renewal._replace(prefill_tokens=0, started=True)
        return True

    def remove(self, reservation: str) -> None:
        """Renew this reservation no longer; nothing happens if it is not open."""
        self._open.pop(reservation, None)

    def renewals(self) -> list[Renewal]:
        """Return the renewals of all reservations that are open now."""
        return list(self._open.values())

    def renewal(self, reservation: str) -> Renewal | None:
        """Return the renewal of this reservation; None if it is not open any more."""
        return self._open.get(reservation)

    def keep_outcome(self, reservation: str, outcome: Outcome) -> None:
        """Remember an outcome that Redis did not take, so that a background round repeats it for KEPT_S.

        Nothing is kept if the reservation is open: the request was then booked here a second time under the same id,
        and the outcome belongs to its first booking.
        """
        if reservation not in self._open and len(self._outcomes) < MAX_OUTCOMES:
            self._outcomes[reservation] = outcome, time.monotonic() + KEPT_S

    def outcomes(self) -> list[tuple[str, Outcome]]:
        """Return the outcomes to send again, each with its reservation, except those older than KEPT_S."""
        now = time.monotonic()
        self._outcomes = {name: kept for name, kept in self._outcomes.items() if kept[1] > now}
        return [(reservation, outcome) for reservation, (outcome, _) in self._outcomes.items()]

    def outcome_taken(self, reservation: str) -> None:
        """Note that Redis has the outcome of this reservation now."""
        self._outcomes.pop(reservation, None)
