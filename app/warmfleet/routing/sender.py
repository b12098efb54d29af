"""Sends a job to an engine: with the reservation's id, the rank and the priority in its headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmfleet.engines.engine_priority import PRIORITY_HEADER

if TYPE_CHECKING:
    from warmfleet.engines.engine_connection import EngineResponse
    from warmfleet.engines.upstream import Upstream
    from warmfleet.fleet import Decision, PrefillLeg
    from warmfleet.pools.pool import Pool
    from warmfleet.routing.call import Job
    from warmfleet.settings import Settings


class Sender:
    """Sends the jobs of one replica."""

    def __init__(self, upstream: Upstream, settings: Settings) -> None:
        self._upstream = upstream
        self._sends_priority = settings.engine_priority

    def send(
        self, job: Job, pool: Pool, engine: Decision | PrefillLeg, request_id: str, body: bytes, more: bytes
    ) -> EngineResponse:
        """Send the job with this body; the caller awaits ``head`` and calls ``close``.

        request_id: for the engine; it begins with the reservation. more: header lines of this try.
        """
        call = job.call
        return self._upstream.start(
            call.method, engine.url, call.target, body, self.headers(job, pool, engine, request_id, more)
        )

    def complete(self, url: str, body: bytes, headers: bytes) -> EngineResponse:
        """Ask the engine at ``url`` for a completion of this replica's own; as ``send``. headers: of ``headers``."""
        return self._upstream.start("POST", url, "/v1/completions", body, headers)

    def headers(self, job: Job, pool: Pool, engine: Decision | PrefillLeg, request_id: str, more: bytes) -> bytes:
        """Return the header lines of a job for this engine."""
        call = job.call
        headers = b"%bX-Request-Id: %b\r\n%b" % (call.headers, request_id.encode(), more)
        rank = pool.view.ranks.get(engine.worker_id)
        if rank is not None:
            headers += f"X-data-parallel-rank: {rank}\r\n".encode()
        if self._sends_priority and (number := job.engine_priority(pool, engine)) is not None:
            headers += f"{PRIORITY_HEADER}: {number}\r\n".encode()
        return headers
