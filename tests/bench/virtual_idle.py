"""Measures how long engines of a virtual fleet are idle while requests wait that they could serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.bench.virtual_fleet import Cluster

SAMPLE_S = 0.01


class IdleGaps:
    """Looks at a cluster every SAMPLE_S, as the ``watch`` of a ``Plan``.

    An engine without a step under way counts if a request is on its way to it, or if it is the turn of a request that
    waits and nobody has sent it yet. An engine stands free for a good reason while every request that waits is cheaper
    to serve by another, busy one (lua/parts/shared/turns.lua): that counts as ``idle_by_choice``.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._idle = 0
        self._beside = 0

    async def __call__(self, cluster: Cluster, _now: float) -> None:
        engines = [worker.engine for worker in cluster.workers]
        waits = any(tickets.waiting for tickets in cluster.tickets.values())
        idle = [number for number, engine in enumerate(engines) if engine.step is None and not engine.scheduler.waiting]
        if not waits and len(idle) == len(engines):
            return  # before the first request, and after the last one
        self._looks += len(engines)
        if waits and idle:
            on_way = sum(cluster.on_way[number] > 0 for number in idle)
            turns = (await cluster.fleets[0].queue.poll()).turns if on_way < len(idle) else ()
            self._idle += min(len(idle), on_way + len(turns))
            self._beside += len(idle)

    def figures(self) -> dict[str, float]:
        """Shares of all engines' time, while any of them had something to do."""
        looks = max(1, self._looks)
        return {"idle_while_waiting": self._idle / looks, "idle_by_choice": (self._beside - self._idle) / looks}
