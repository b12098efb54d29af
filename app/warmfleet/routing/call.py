"""A client's request, as a replica has read it (``Call``) and as it is ready to be decided (``Job``).

They are named tuples, which are immutable like frozen dataclasses, but made in a quarter of the time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.engines.engine_priority import priority
from warmfleet.pools.identified_prompt import as_of
from warmfleet.prompt.request import NO_LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.engines.followed_stream import Continuable
    from warmfleet.fleet import ClientLimits, Decision, PrefillLeg
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.prompt.request import Request
    from warmfleet.routing.booking import Booking
    from warmfleet.tracing.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class Hints:
    """The client's wishes for its request.

    session: the key of its conversation, empty if it has none. prefix_tokens: how many tokens at the beginning of the
    prompt are shared with other requests; 0: perhaps all of them. explain: the client asks why the worker was chosen.
    continues: another worker shall go on with the stream if its engine dies (``recovery/continuation``); None: as the
    operator decided. ended: the conversation ends with this request, so its blocks may be evicted first.
    labels: only workers with all of them may serve it. ttft_s: a time to first token that is short enough; 0: as the
    operator decided.
    """

    session: bytes = b""
    prefix_tokens: int = 0
    explain: bool = False
    continues: bool | None = None
    ended: bool = False
    labels: frozenset[str] = NO_LABELS
    ttft_s: float = 0.0


NO_HINTS = Hints()


class Call(NamedTuple):
    """A request as it was read from its connection.

    record: the record of the request, for logs. headers: the header lines that the engine gets. tenant: the value of
    the tenant header, empty unless tenants are kept apart. flow: 8 bytes made of the tenant header's value; the queue
    serves flows in turn. patience_s: the longest wait in the queue that the client accepts. received_at: when the body
    was complete, by ``time.perf_counter``. target: path and query, as the engine gets them. models: the names that the
    client may use, None for all. limits: the limits of the client's key, None if it has none. content_type: the type of
    the body. named: the client gave the request's id in a header, which counts before one in the body.
    """

    path: EnginePath
    body: bytes
    record: RequestRecord
    headers: bytes
    tenant: bytes = b""
    flow: bytes = b""
    patience_s: float = math.inf
    received_at: float = 0.0
    hints: Hints = NO_HINTS
    method: str = "POST"
    target: str = ""
    models: frozenset[str] | None = None
    limits: ClientLimits | None = None
    content_type: bytes = b""
    named: bool = True


class Job(NamedTuple):
    """A call that was parsed and identified: everything that all attempts at it share.

    body: the body for an engine, with the tenant's salt. pool: the pool by whose workers the prompt was identified.
    pools: where to look for a worker, in this order; the first two (home pools) are asked first. several: the model has
    more than one pool. limits: those of the client, which the only pool's decision checks; None if ``several``.
    priority: a lower one goes first in the queue. logged: whether its decisions are written to the
    decision log. continuable: how another worker may continue its stream; None: not at all. session: as for Question,
    with the id that an earlier attempt learned. only: ids of the workers to choose among; empty: all. alone: one engine
    serves it, also where requests may be split over two.
    """

    call: Call
    request: Request
    body: bytes
    pool: Pool
    prompt: IdentifiedPrompt
    pools: Sequence[Pool]
    several: bool = False
    limits: ClientLimits | None = None
    priority: int = 0
    logged: bool = False
    continuable: Continuable | None = None
    session: bytes = b""
    only: tuple[str, ...] = ()
    alone: bool = False

    @property
    def worker_count(self) -> int:
        """The number of the model's workers at the last readings of its pools; without any, the last known number."""
        count = 0
        for pool in self.pools:
            count += len(pool.view.workers or pool.last_known.workers)
        return count

    def engine_priority(self, pool: Pool, decision: Decision | PrefillLeg) -> int | None:
        """Return the request's priority for the chosen worker's engine; None if the engine does not use priorities."""
        speed_tps = pool.view.sorting.get(decision.worker_id)
        if speed_tps is None:
            return None
        came_at_s = time.time() - (time.perf_counter() - self.call.received_at)
        return priority(self.request.priority, came_at_s, decision.prefill_tokens, speed_tps)

    def as_of_now(self) -> Job:
        """Return the job with the workers that cannot serve it by the last reading; the same object if unchanged."""
        prompt = as_of(self.prompt, self.request, self.pool.view)
        return self if prompt is self.prompt else self._replace(prompt=prompt)

    def session_as(self, known: bytes) -> bytes:
        """Return ``session`` with the id by which Redis knows it. known: empty if Redis told none."""
        return self.session[:1] + known if self.session and known else self.session

    def admitted_in(self, booking: Booking) -> Job:
        """Return the job for another attempt, with prompt and session as known in this booking's pool.

        The client's limits admitted the job before, so they do not refuse another attempt.
        """
        session = self.session_as(booking.session)
        job, limits = self._replace(pool=booking.pool, prompt=booking.prompt, session=session), self.call.limits
        if limits is None:
            return job
        let_in = limits.of_admitted
        return job._replace(call=self.call._replace(limits=let_in), limits=self.limits and let_in)
