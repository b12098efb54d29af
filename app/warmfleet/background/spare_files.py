"""Empties copies of tokenizers and templates that no router will read.

Every server stores its own files in Redis, about 1 MB, and servers with equal announcements have equal files. Routers
read the files of the first few servers, so the copies of all others only take memory and are emptied. A server
takes an empty key for a stored file. When a server becomes one of the first, its empty keys are deleted, so that the
server stores its files again. Each server has its own keys, and routers check every digest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from warmfleet.background import announced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from warmfleet.fleet import Fleet, WorkerView
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

    Incarnation = tuple[str, str]  # a server's id and its nonce

LOOK_S = 30.0  # time between two looks at the servers' copies of files; a new copy stays until the next look
FORGET_S = 600.0  # time until known copies are looked at again, because another replica may have changed them
KEPT = announced.MAX_SERVERS  # number of whole copies kept of equal files: routers ask no more servers for them
MOST_EMPTIED = 128  # most servers whose copies one look at a pool empties; so many take a tenth of a second


class SpareFiles:
    """Finds and empties, in every pool, the copies of tokenizers and templates in Redis that no router reads."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._groupings: dict[str, announced.Grouping] = {}
        self._whole: dict[str, dict[Incarnation, bool]] = {}  # tag -> whether each copy was whole at the last look
        self._forgets_at = 0.0

    async def look(self) -> None:
        """Look at every pool once. Raises FleetUnavailable."""
        if time.monotonic() >= self._forgets_at:
            self._forgets_at = time.monotonic() + FORGET_S
            self._whole.clear()
        await self._pools.each(self._look_at)
        tags = {pool.tag for pool in self._pools.all}
        self._groupings = {tag: kept for tag, kept in self._groupings.items() if tag in tags}
        self._whole = {tag: kept for tag, kept in self._whole.items() if tag in tags}

    async def _look_at(self, pool: Pool) -> None:
        workers = [worker for worker in pool.view.workers if worker.heard and worker.server]
        known, self._whole[pool.tag] = self._whole.get(pool.tag, {}), {}
        for group in self._groupings.setdefault(pool.tag, announced.Grouping()).by_identity(workers).values():
            self._whole[pool.tag] |= await _empty(pool.fleet, _servers(group), known)


def _servers(group: Sequence[WorkerView]) -> dict[str, Mapping[str, Any]]:
    """Return the records of the servers of these workers, in the order in which routers ask them."""
    return {str(worker.record.get("server_id", "")): worker.server or {} for worker in group}


async def _empty(
    fleet: Fleet, servers: Mapping[str, Mapping[str, Any]], known: Mapping[Incarnation, bool]
) -> dict[Incarnation, bool]:
    """Empty the copies of these servers but the first KEPT whole copies; return whether each copy is whole.

    known: whether each was whole at the last look. A server whose copy changes now is looked at again next time.
    """
    found: dict[Incarnation, bool] = {}
    whole, emptied, wanted = 0, 0, 0
    for server_id, server in servers.items():
        incarnation, pieces = (server_id, str(server.get("nonce"))), announced.pieces(server)
        is_whole = known.get(incarnation)
        if is_whole is not (whole < KEPT):  # not known to be as wanted: whole among the first KEPT, else empty
            is_whole = all(await fleet.artifacts.sizes(server_id, pieces))
        if is_whole is (whole < KEPT):
            found[incarnation] = is_whole
            whole += is_whole
        elif is_whole:
            if emptied < MOST_EMPTIED:
                emptied += 1
                found[incarnation] = False
                await fleet.artifacts.empty(server_id, pieces)
        elif wanted < KEPT:
            wanted += 1
            await fleet.artifacts.want(server_id, pieces)
        else:
            break  # KEPT servers were asked to store their copies again; no further copy is emptied before they have
    return found
