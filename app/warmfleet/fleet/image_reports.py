"""Reads the images that engines have reported, which lua/apply.lua keeps in one sorted set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.client import pairs

if TYPE_CHECKING:
    from warmfleet.fleet.client import Scripts

AT_ONCE = 32  # most reports in one answer: answers to decisions wait behind it, and to take it lasts 1 to 4 ms


class ImageReports:
    """The reports of one pool, in the order in which Redis got them."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._read_to: float | None = None  # the score of the last report that was read

    def begin_anew(self) -> None:
        """Read all reports once more."""
        self._read_to = None

    async def news(self) -> dict[bytes, float]:
        """Return the next reports, at most AT_ONCE, and when each was told (s since 1970). Raises FleetUnavailable.

        The last report that was read is asked for, too. If nothing comes, Redis has lost it: all is read anew.
        """
        before = self._read_to
        least, count = ("-inf", AT_ONCE) if before is None else (f"{before:.0f}", AT_ONCE + 1)
        words = ("ZRANGE", self._scripts.keys.images, least, "+inf", "BYSCORE", "LIMIT", 0, count, "WITHSCORES")
        told = pairs(await self._scripts.ask(*words))
        scores = {report: float(score) for report, score in told.items()}
        if self._read_to != before:
            return {}  # reading began anew, or another call has read these
        self._read_to = max(scores.values(), default=None)
        return {report: score / 1e6 for report, score in scores.items() if score != before}
