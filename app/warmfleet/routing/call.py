"""What one request is on its way, and each of its tries. Plain data: who changes it is on the road in ``route``."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warmfleet.routing.client_hints import NONE, Hints
from warmfleet.routing.token_handoff import NOTHING, Offer

if TYPE_CHECKING:
    from warmfleet.fleet import Decision
    from warmfleet.fleet.reservations import Outcome
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.request import Endpoint

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class Call:
    """One request of a client. headers: what is passed on to the worker. tenant: whose it is, if they are kept apart.
    ``flow``: whose turn it takes in the queue. patience_s: longest wait there, by the client; priority: likewise.
    ``complete``: its answer is on the way out. ``offer``: its token ids. ``order``: asks where a hash ring would look;
    ``rings``: the same by policy, for the decision log. ``explained``: what the client asked for of its decision.
    """

    endpoint: Endpoint
    body: bytes
    request_id: str
    headers: dict[str, str]
    send: Send
    tenant: bytes = b""
    flow: bytes = b""
    patience_s: float = math.inf
    priority: int = 0
    began: float = 0.0  # perf_counter
    started: bool = False
    complete: bool = False
    offer: Offer = NOTHING
    hints: Hints = NONE
    order: Callable[[], tuple[str, ...]] = tuple
    rings: dict[str, tuple[str, ...]] | None = None
    explained: bytes = b""


@dataclass(slots=True)
class Trip:
    """One try: a reservation from before it is booked until it is settled."""

    reservation: str
    pool: Pool
    last: bool
    decision: Decision | None = None
    booked: bool = False
    ticket: bool = False  # it may have one in the queue
    may_wait: bool = True  # there is room for its body
    spared: tuple[str, ...] = ()  # workers that its decision passed over: they failed others a moment ago
    outcome: Outcome = "cancelled"  # until something better is known
    tells_start: bool = True  # by its first streamed byte; of several prompts only the engine knows
    word: str = "fallback"  # what the client is told of the reservation
