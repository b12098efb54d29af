"""One request of a client: as it was read from its connection, and as it is ready to be decided.

A named tuple cannot be changed, as a frozen dataclass, and is made in a quarter of the time.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from warmfleet.engines.engine_priority import priority
from warmfleet.pools.identified_prompt import as_of
from warmfleet.protocol.wire import ENDED_MARK

if TYPE_CHECKING:
    from warmfleet.engines.followed_stream import Continuable
    from warmfleet.fleet import ClientLimits, Decision
    from warmfleet.fleet.reservations import Outcome
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.prompt.request import Request
    from warmfleet.routing.token_handoff import Offer
    from warmfleet.tracing.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client told about its request.

    session: the key of its conversation, empty if it has none. prefix_tokens: how many tokens at the beginning of the
    prompt are shared with other requests; 0: perhaps all of them. explain: the client asks why the worker was chosen.
    continues: another worker shall go on with the stream if its engine dies (``rescue/continuation``); None: as the
    operator decided. ended: the conversation ends with this request, so its blocks may be evicted first.
    """

    session: bytes = b""
    prefix_tokens: int = 0
    explain: bool = False
    continues: bool | None = None
    ended: bool = False


NO_HINTS = Hints()


class Call(NamedTuple):
    """One request as it was read from its connection.

    record: of what happens to the request. headers: the lines of the headers that the engine gets. tenant: the
    value of the tenant header, empty unless tenants are kept apart. flow: 8 bytes made of the tenant header's
    value; the queue takes turns by them. patience_s: the longest wait in the queue that the client accepts.
    received_at: when the body was complete, by ``time.perf_counter``. query: of the URL, as the client wrote it.
    models: the names that the client may use, None for all. limits: of the client's key, None if it has none.
    content_type: of the body. named: the client gave the request's id in a header, which counts before one in the
    body.
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
    query: str = ""
    models: frozenset[str] | None = None
    limits: ClientLimits | None = None
    content_type: bytes = b""
    named: bool = True

    @property
    def request_id(self) -> str:
        """The client's name for the request, or a name that the router gave it."""
        return self.record.request_id

    @property
    def target(self) -> str:
        """The path and the query, as the engine gets them."""
        return f"{self.path.path}?{self.query}" if self.query else self.path.path

    def id_at_engine(self, owner: str) -> str:
        """The X-Request-Id that an engine gets. owner: the reservation, by which the worker plugin reports on it."""
        return f"{owner}.{ENDED_MARK if self.hints.ended else ''}{self.request_id}"


class Handover(NamedTuple):
    """What a gateway asks for besides the call that it will send by itself.

    key: the same key gets the same reservation; empty: a new one. exclude: ids of workers that must not be chosen.
    """

    key: bytes = b""
    exclude: tuple[str, ...] = ()


class Ending(NamedTuple):
    """How a gateway's call ended. status: of the engine's answer, None if none came or the gateway does not say.

    failed_workers: workers that had failed this call before another one served it. output_tokens: of the answer.
    """

    outcome: Outcome
    status: int | None = None
    failed_workers: tuple[str, ...] = ()
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """What the client's limit of tokens counts besides the prompt: a failure costs nothing."""
        return 0 if self.outcome == "failed" else self.output_tokens

    @property
    def served(self) -> bool:
        return self.outcome == "finished" and (self.status or 200) < 400

    @property
    def broke_off(self) -> bool:
        """A good answer had begun, so what ended it is the worker's own fault, whatever the call was."""
        return self.outcome == "failed" and self.status is not None and 200 <= self.status < 300


class Placement(NamedTuple):
    """Where a gateway is to send its call.

    reservation: None if Redis booked nothing. model: by which it is settled. url: of the worker, without a path.
    headers: must go with the call. cache_salt: must be set in the body; None: the body stays as it is. expires_in_s:
    the life of the reservation, counted from now, unless it is renewed.
    """

    reservation: str | None
    model: str
    worker: str
    url: str
    matched_tokens: int
    prompt_tokens: int
    expires_in_s: float
    headers: dict[str, str]
    cache_salt: str | None


class Job(NamedTuple):
    """A call that was parsed and identified: everything that all attempts at it share.

    body: as an engine gets it, with the tenant's salt. priority: a lower one goes first in the queue. offer: the token
    ids that an engine may get in place of the text, or why it may get none. logged: whether its decisions belong into
    the decision log. continuable: how its stream goes on at another worker; None: not at all.
    """

    call: Call
    request: Request
    body: bytes
    pool: Pool
    prompt: IdentifiedPrompt
    offer: Offer
    priority: int = 0
    logged: bool = False
    continuable: Continuable | None = None
    homes: tuple[Pool, ...] = ()

    @property
    def has_another_worker(self) -> bool:
        """Whether the model had more than one worker when its pools were last read."""
        return self.worker_count > 1

    @property
    def worker_count(self) -> int:
        """How many workers the model had when its pools were last read; those that were known last, if it had none."""
        if self.homes:
            return sum([len(pool.view.workers or pool.last_known.workers) for pool in self.homes])
        return len(self.pool.view.workers or self.pool.last_known.workers)

    def engine_priority(self, decision: Decision) -> int | None:
        """The request's priority for the engine of the chosen worker; None if that does not go by priorities."""
        speed_tps = self.pool.view.sorting.get(decision.worker_id)
        if speed_tps is None:
            return None
        came_at_s = time.time() - (time.perf_counter() - self.call.received_at)
        return priority(self.request.priority, came_at_s, decision.prefill_tokens, speed_tps)

    def as_of_now(self) -> Job:
        """The job with the workers that cannot serve it by the last reading; itself if these are the same."""
        prompt = as_of(self.prompt, self.request, self.pool.view)
        return self if prompt is self.prompt else self._replace(prompt=prompt)

    def admitted(self) -> Job:
        """The job for another attempt: the limits of its client have let it in, and do not refuse it half-way."""
        limits = self.call.limits
        return self if limits is None else self._replace(call=self.call._replace(limits=limits.of_admitted))
