"""Announces this replica and its figures in Redis, so that every replica can show all replicas."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Announcement
from warmfleet.pools.served_models import all_of
from warmfleet.version import version

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.fleet import LastMinute
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The address of a replica. name: host and port, for lists. url: where operators reach it; empty if unknown."""

    name: str
    url: str = ""


class ReplicaAnnouncements:
    """Announces this replica in each of its pools.

    draining: returns whether this replica is about to stop. waiting: returns how many of its requests wait for a pool.
    """

    def __init__(
        self,
        pools: Pools,
        place: ReplicaPlace,
        draining: Callable[[], bool],
        waiting: Callable[[Pool], int],
        last_minute: Callable[[Pool], LastMinute],
    ) -> None:
        self._pools = pools
        self._place = place
        self._draining = draining
        self._waiting = waiting
        self._last_minute = last_minute
        self._started = round(time.time())

    async def round(self) -> None:
        """Announce the replica once. Raises FleetUnavailable if a pool's Redis is away, after all other pools."""
        await self._pools.each(self._announce)

    async def close(self) -> None:
        """Take the announcements back, because the replica stops in an orderly manner."""
        with suppress(FleetUnavailable):
            await all_of(pool.fleet.replicas.announce(self._place.name, None) for pool in self._pools.all)

    async def _announce(self, pool: Pool) -> None:
        told = Announcement(
            url=self._place.url,
            version=version(),
            started=self._started,
            policy=pool.policy.name,
            draining=self._draining(),
            in_flight=pool.degraded.in_flight.total(),
            waiting=self._waiting(pool),
            minute=self._last_minute(pool),
        )
        await pool.fleet.replicas.announce(self._place.name, told)
