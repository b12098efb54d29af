"""The constants of a replica, packed once into the one argument in which decide, queue and replay take them all."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from warmfleet.fleet.connection.packing import pack, pack_int

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet.handovers import Role

#: Version of the packed record, raised when a field changes. Scripts refuse a record of every other version.
VERSION = 7
#: The packed fields in order, as lua/parts/shared/constants.lua names them. The numbers of label prices and of roles
#: come last.
FIELDS = (
    "lease_ms",
    "ttl_ms",
    "ticket_ms",
    "max_probes",
    "lambda",
    "kappa",
    "pressure_price",
    "decode_s_per_token",
    "wait_price",
    "stay",
    "place",
    "decode_price",
    "context_price",
    "min_match_tokens",
    "queue_max",
    "max_engine_wait_s",
    "patience",
    "paused_max_ms",
    "held_max_ms",
)
RECORD = struct.Struct(">B4I10dI2d4I")
LABEL_PRICE = struct.Struct(">Id")
HANDING = struct.Struct(">IIIB")


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of the cost rule (lua/parts/decide/cost_rule.lua), and two bounds on the matching of prefixes."""

    lambda_: float = 2.0  # weight of an uncached token while no worker is idle: its prefill delays other requests
    kappa: float = 2.5  # weight of a token that another worker is computing now; if lower, more than two compute it
    pressure_price: float = 2.0  # weight of expected evictions; at 0 all sessions of one system prompt share a worker
    decode_s_per_token: float = 1e-7
    wait_price: float = 1.5  # weight of a prefill token ahead: each request booked at a worker delays later ones
    stay: float = 2.0  # weight of a token that only one other worker has cached: a session that moves recomputes it
    place: float = 3.0  # weight of a prompt token at an always busy worker: the session's next turns go there, too
    decode_price: float = 0.22  # weight of an uncached token per request in flight: its prefill delays their answers
    context_price: float = 0.2  # weight of a context token: each step of decoding reads all of them
    max_probes: int = 64  # most Redis calls in one decision to find how much confirmed prefix the workers hold
    min_match_tokens: int = 0  # least tokens by which a match must exceed the shortest one to count as longer


@dataclass(frozen=True, slots=True)
class Spans:
    """Lifetimes in milliseconds that the scripts use."""

    lease_ms: int = 30_000  # replicas renew leases every 10 s, so two renewals may be lost
    worker_ttl_ms: int = 15_000
    tombstone_ms: int = 60_000
    #: Lifetime of an unrenewed ticket. Replicas renew every 0.2 s, more rarely if Redis is slow (routing/tickets). If a
    #: replica stalls for longer, its requests get new tickets, at their old places by time of arrival.
    ticket_ms: int = 1_000
    linger_ms: int = 500  # time for which a finished request's blocks count until the engine reports them


#: Time within which later, smaller requests may overtake a request, as a multiple of its own prefill time. With 1, a
#: prompt of 3 s waits at worst as if it had come 3 s later to a queue in order of arrival.
QUEUE_PATIENCE = 1.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the fleet-wide queue of one pool; each pool has a queue of its own."""

    max_engine_wait_s: float = 0.0  # a worker has room below this many seconds of booked prefill; 0: no queue
    tickets: int = 1_024  # most tickets in the queue at a time, of all replicas together
    patience: float = 0.0  # see QUEUE_PATIENCE; above 0, small requests go first; 0: order of arrival


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of the waits in the line of sessions (lua/parts/shared/sessions.lua)."""

    paused_max_ms: int = 60_000  # a session that lost its place gets another at the latest after this
    held_max_ms: int = 0  # a new session whose predicted wait is longer is refused; 0: no ledger, nobody is held


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of one pool in this replica, in their packed forms, too.

    block_tokens: scheme of block hashes -> tokens in a block. label_prices: slot (index number of a worker) -> seconds
    by which its cost is raised because it lacks preferred labels. roles: slot -> ``Role`` of each engine that hands
    prompts over. packed: the argument ``constants`` of the scripts;
    argument: ``packed`` in Redis' protocol. settle_spans: tombstone_ms and linger_ms for settle, in Redis' protocol.
    Raises struct.error or OverflowError for a number that does not fit.
    """

    weights: Weights = field(default_factory=Weights)
    spans: Spans = field(default_factory=Spans)
    limits: QueueLimits = field(default_factory=QueueLimits)
    block_tokens: Mapping[int, int] = field(default_factory=dict)
    label_prices: Mapping[int, float] = field(default_factory=dict)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    roles: Mapping[int, Role] = field(default_factory=dict)
    packed: bytes = field(init=False, repr=False, compare=False)
    argument: bytes = field(init=False, repr=False, compare=False)
    settle_spans: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        packed, spans = self._pack(), self.spans
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "argument", pack(packed))
        object.__setattr__(self, "settle_spans", pack_int(spans.tombstone_ms) + pack_int(spans.linger_ms))

    def _pack(self) -> bytes:
        weights, spans, limits = self.weights, self.spans, self.limits
        record = RECORD.pack(
            VERSION,
            spans.lease_ms,
            spans.worker_ttl_ms,
            spans.ticket_ms,
            weights.max_probes,
            weights.lambda_,
            weights.kappa,
            weights.pressure_price,
            weights.decode_s_per_token,
            weights.wait_price,
            weights.stay,
            weights.place,
            weights.decode_price,
            weights.context_price,
            weights.min_match_tokens,
            limits.tickets,
            limits.max_engine_wait_s,
            limits.patience,
            self.sessions.paused_max_ms,
            self.sessions.held_max_ms,
            len(self.label_prices),
            len(self.roles),
        )
        record += b"".join(LABEL_PRICE.pack(*price) for price in self.label_prices.items())
        record += b"".join(HANDING.pack(slot, *role) for slot, role in self.roles.items())
        return record + ",".join(f"{scheme}={tokens}" for scheme, tokens in self.block_tokens.items()).encode()
