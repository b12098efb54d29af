"""Empties copies of tokenizers and templates that no router will read.

Every server stores its own files, about 1 MB, and the files of those that announce the same are equal. Routers ask the
first few of them in turn, so the copies of all others only take memory: they are emptied. An empty key tells its server
that the file is there. When a server comes to be one of the first, its empty keys are deleted, so that it stores them
again. No server's files depend on another server's: each has its own keys, and routers check every digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.background import announced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from warmfleet.fleet import Fleet, WorkerView
    from warmfleet.pools.pool import Pool, Pools

LOOK_S = 30.0  # between two looks; until then a server that has just joined keeps its copy
KEPT = announced.MAX_SERVERS  # whole copies of equal files: no router, of this version or the last, asks more servers
MOST_EMPTIED = 128  # servers in one look at a pool, so that it takes a tenth of a second


class SpareFiles:
    """Looks at the files of the servers of every pool."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._groupings: dict[str, announced.Grouping] = {}
        self._done: dict[str, set[tuple[str, str]]] = {}  # by tag: servers behind the first, with their incarnations

    async def look(self) -> None:
        """Look at every pool once. Raises FleetUnavailable."""
        await self._pools.each(self._look_at)
        tags = {pool.tag for pool in self._pools.all}
        self._groupings = {tag: kept for tag, kept in self._groupings.items() if tag in tags}
        self._done = {tag: kept for tag, kept in self._done.items() if tag in tags}

    async def _look_at(self, pool: Pool) -> None:
        workers = [worker for worker in pool.view.workers if worker.heard and worker.server]
        if len(workers) <= KEPT:
            return
        done = set[tuple[str, str]]()
        for group in self._groupings.setdefault(pool.tag, announced.Grouping()).by_identity(workers).values():
            done |= await _empty(pool.fleet, _servers(group), self._done.get(pool.tag, set()))
        self._done[pool.tag] = done


def _servers(group: Sequence[WorkerView]) -> dict[str, Mapping[str, Any]]:
    """The records of the servers of these workers, in the order in which routers ask them."""
    return {str(worker.record.get("server_id", "")): worker.server or {} for worker in group}


async def _empty(
    fleet: Fleet, servers: Mapping[str, Mapping[str, Any]], known: set[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Empty the copies of all of these servers behind the first KEPT whole ones; returns those that are done.

    known: those that were done at the last look.
    """
    whole, emptied, wanted, done = 0, 0, 0, set[tuple[str, str]]()
    for server_id, server in servers.items():
        incarnation = server_id, str(server.get("nonce"))
        if whole == KEPT and incarnation in known:
            done.add(incarnation)
            continue
        pieces = announced.pieces(server)
        if all(await fleet.piece_sizes(server_id, pieces)):
            if whole < KEPT:
                whole += 1
            elif emptied < MOST_EMPTIED:
                emptied += 1
                await fleet.empty_pieces(server_id, pieces)
                done.add(incarnation)
        elif whole == KEPT:
            done.add(incarnation)
        elif wanted < KEPT:
            wanted += 1
            await fleet.want_pieces(server_id, pieces)
        else:
            break  # until these have stored theirs again, all others keep what they have
    return done
