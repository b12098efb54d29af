"""Reads the images that engines have reported, which lua/apply.lua keeps in one sorted set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.fleet.client import pairs

if TYPE_CHECKING:
    from warmfleet.fleet.client import Scripts

AT_ONCE = 32  # most reports in one answer, because answers to decisions wait behind it: mostly 10 KB
READS = 16  # most readings in a round, so that a new replica has read all after eight rounds


class ImageReports:
    """The reports of one pool, in the order in which Redis got them."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._read_to = "-inf"  # the score of the last report that was read

    async def news(self) -> list[bytes]:
        """Return the reports since the last call, at most AT_ONCE * READS. Raises FleetUnavailable."""
        found: list[bytes] = []
        for _ in range(READS):
            key, least = self._scripts.keys.images, self._read_to
            words = ("ZRANGE", key, least, "+inf", "BYSCORE", "LIMIT", 0, AT_ONCE, "WITHSCORES")
            scores = pairs(await self._scripts.ask(*words))
            found += scores
            if scores:
                self._read_to = f"({float(max(scores.values(), key=float)):.0f}"
            if len(scores) < AT_ONCE:
                break
        return found
