"""Bookings: decide chooses a worker and books a request there, settle ends the booking, renew keeps it alive.

The rules of the choice are in lua/decide.lua and its parts.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from base64 import urlsafe_b64encode
from binascii import b2a_base64
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from warmfleet.errors import BadArgument
from warmfleet.fleet.client import redis_errors
from warmfleet.fleet.client_limits import ClientUse
from warmfleet.fleet.codes import Mark, Mode
from warmfleet.fleet.connection.packing import NOTHING, pack, pack_bytes, pack_int, pack_names, pack_text
from warmfleet.fleet.handovers import Moved, PrefillLeg, Split, Way, prefill_leg
from warmfleet.fleet.ledger import Hold
from warmfleet.fleet.rows import Flag, Lease, LoadRow, Stage
from warmfleet.fleet.script_loader import SCRIPT_ARGS
from warmfleet.protocol.wire import HASH_BYTES, RESERVATION_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from warmfleet.fleet.client import Scripts
    from warmfleet.fleet.client_limits import ClientLimits
    from warmfleet.fleet.connection.multiplexed import OnAnswer
    from warmfleet.fleet.connection.packing import Argument
    from warmfleet.prompt.block_hashes import Chain

Outcome = Literal["started", "finished", "failed", "cancelled", "unsent"]  # unsent: the engine never got the request
Told = Outcome | Literal["due"]  # due: no first token was reported, but by the engine's speed it must have come
REAP_AT_ONCE = 512  # most expired reservations that one call of ``reap`` ends
URL_SAFE = bytes.maketrans(b"+/", b"-_")
ID_CHARACTERS = 21  # characters of a reservation's id behind its mark: 126 random bits
REAPED_PER_SETTLE = 8  # expired leases that lua/settle.lua gives back in one call with an id that was never booked
RENEW_AT_ONCE = 200  # most reservations in one call of lua/renew.lua
ANSWER_FIELDS = 16  # number of fields in decide's answer to a booked request; an explanation may follow
#: The flags as plain numbers, because to look up a member of an enum takes longer than to compare.
APPROXIMATE, UNHEARD, TRIAL = int(Flag.APPROXIMATE), int(Flag.UNHEARD), int(Flag.TRIAL)
ENDS = int(Flag.ENDS)
DECIDE_ARGS, CHAIN_ARGS = len(SCRIPT_ARGS["decide"]), 3
FIRST_CLASS, LAST_CLASS = -8, 7  # priorities outside this range count as the nearer end of it
NO_OBJECTIVE = pack(0.0)
TENANT_BYTES = 8
TIERS = {1: "cpu", 2: "disk"}  # kinds of tiers by their numbers in lua/parts/shared/further_sets.lua
NO_LOAD = (0, 0.0, "")
NO_TENANT = bytes(TENANT_BYTES)
NO_BLOCK = bytes(HASH_BYTES)
PACKED_OUTCOMES = {outcome: pack_text(outcome) for outcome in (*get_args(Outcome), "due")}


def new_reservation(prompts: int, *, exact: bool = True, key: bytes = b"", client: str = "") -> str:
    """Make an id for a request. prompts: number of its prompts. exact: their token ids are known. key: equal keys get
    equal ids; without a key the id is random. client: tag of a client with limits (``ClientLimits.tag``).

    The id begins with a mark (``codes.Mark``), by which scripts know how to count an engine's reports of prefills.
    """
    mark = Mark.SEVERAL_PROMPTS if prompts != 1 else Mark.ONE_PROMPT if exact else Mark.ESTIMATED
    code = urlsafe_b64encode(hashlib.sha256(key).digest()) if key else b2a_base64(os.urandom(16)).translate(URL_SAFE)
    return RESERVATION_PREFIX + mark + code[:ID_CHARACTERS].decode() + client


# Question and Decision are made for each request and never changed. ``frozen`` would cost 5 µs a request.
@dataclass(slots=True)
class Question:
    """A request, as ``decide`` needs it; the fields from ``tenant`` on set its place in the queue.

    decode_tokens: tokens in the cache while the request decodes (prompt and answer). seed: breaks ties; 0: made from
    the reservation's id. exclude: worker ids not to choose. prefix_tokens: the most tokens of a match that count (0:
    all). order: worker ids as the policy's hash ring orders them for this request. objective_s: a time to first token
    that is short enough (0: none). limits: of the client, whose tag is then at the end of the reservation's id.

    tenant: 8 bytes that stand for the client in the queue's fair order. waited_ms: time since the request came. barred:
    ids of workers that can never serve the request. (A worker that failed a moment ago is only in exclude: a later
    decision for the same request may use it.) may_wait: False if the request gets no ticket and loses one that it has.
    displaces: in a full queue the request may take the place of a ticket of the tenant with the most tickets.
    session: empty for a request without a part in the ledger of sessions; else a byte, the sum of ``Hint`` values, and
    the session's id: made by the replica if the client named the session, else that of an earlier answer, or nothing.
    only: ids of the workers to choose among; empty: all. split: whether two engines may serve the request.
    """

    reservation: str
    chains: tuple[Chain, ...]
    prompt_tokens: int
    decode_tokens: int
    policy: str = "cost"
    exclude: tuple[str, ...] = ()
    seed: int = 0
    prefix_tokens: int = 0
    order: tuple[str, ...] = ()
    objective_s: float = 0.0
    limits: ClientLimits | None = None
    tenant: bytes = NO_TENANT
    priority: int = 0
    waited_ms: int = 0
    barred: tuple[str, ...] = ()
    may_wait: bool = True
    displaces: bool = True
    session: bytes = b""
    only: tuple[str, ...] = ()
    split: Split = Split.ROLES_IGNORED

    @property
    def tie_seed(self) -> int:
        return self.seed or zlib.crc32(self.reservation.encode())


@dataclass(slots=True)
class Decision:
    """The worker of a request, and the load that was booked there.

    outcome: ``known`` if this id was booked before; then cost_s, wait_tokens, speculative and flagged are 0.
    speculative: some matched blocks are still being computed for another request. flagged: matched_tokens is uncertain
    (the search in the index was cut short, or the worker's index may be outdated).
    wait_tokens: prefill tokens ahead of the request when the worker was chosen. trial: the worker was ejected, and this
    request shows whether it serves again (lua/eject.lua). why: one word, see lua/parts/decide/cost_rule.lua. seen: None
    unless ``explain`` was set. session: the id of the request's session in the ledger, empty without one; ``settle``
    wants it at the end. use: how much of its limits the client uses; None if it has none or the id was known.
    tier_tokens: of matched_tokens, those that the engine must load from a tier, which takes tier_s; tier: its kind.
    reports_ends: the engine reports the request's end, so its load is given back even if nobody settles it.
    prefill: the engine that computes the prompt before, in a request that is split; matched_tokens are then those that
    ``worker_id`` need not take from it, and what the engines have of the prompt is compared only there.
    """

    reservation: str
    outcome: Literal["booked", "known"]
    worker_id: str
    server_id: str
    url: str
    matched_tokens: int
    prompt_tokens: int
    speculative: bool
    flagged: bool
    cost_s: float
    wait_tokens: int
    approximate: bool
    prefill_tokens: int
    decode_tokens: int
    trial: bool = False
    why: str = ""
    seen: Seen | None = None
    use: ClientUse | None = None
    session: bytes = b""
    tier_tokens: int = 0
    tier_s: float = 0.0
    tier: str = ""
    reports_ends: bool = False
    prefill: PrefillLeg | None = None

    @property
    def reused_tokens(self) -> int:
        """The matched tokens of the engine that computes the prompt."""
        return self.matched_tokens if self.prefill is None else self.prefill.matched_tokens


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a choice saw besides its ``Question``.

    context: median_tps, block_tokens, turn (counter of policy round_robin), now_ms (modulo 2**32). rows: for each
    candidate worker_id, matched_tokens, speculative_tokens, load row, cost_s, terms, tier_tokens, tier_s, number of the
    tier's kind. waits: the request must wait in the queue first. tie_s: the most seconds above the lowest cost that
    counted as equal. room: if tickets were in the queue, but the request was booked at once, the numbers of the rows
    (from 1) whose workers had room, joined by commas. turn_s, turn_at: if the request must wait, ``Queued.turn_s`` and
    the number of its worker's row; else 0. hold: if the request's session would be held, its place in the line. ways:
    if the request may be split, the cheapest engine alone, and the cheapest pair; one of them if there is no other.
    """

    context: tuple[int, int, int, int]
    rows: list[Any]
    waits: bool
    tie_s: float
    room: str = ""
    turn_s: float = 0.0
    turn_at: int = 0
    hold: Hold | None = None
    ways: tuple[Way, ...] = ()

    @classmethod
    def of(cls, answer: list[Any]) -> Seen:
        """Read the part of an answer of ``decide`` that follows its ``why``."""
        *numbers, waits, tie_s, room, turn_s, turn_at, held, best = answer[0]
        median, block_tokens, turn, now_ms = map(int, numbers)
        context, rows = (median, block_tokens, turn, now_ms), answer[1:]
        hold = Hold.of(held) if held else None
        ways = tuple(Way.of(told, rows) for told in best)
        return cls(context, rows, waits == b"1", float(tie_s), room.decode(), float(turn_s), int(turn_at), hold, ways)

    @property
    def candidates(self) -> list[Candidate]:
        return [_ToldCandidate(*row).candidate for row in self.rows]


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a cost in seconds, each with its weight, so that their sum is the cost
    (lua/parts/decide/cost_rule.lua).

    wait_s: for the work ahead at the worker. compute_s: for the prompt's tokens that the worker must compute. again_s:
    for those of them that another worker is computing now. leave_s: for those of them that only one other worker has in
    its cache. evict_s: for evictions, if the cache is fuller than others or crowded. busy_s: for the worker's recent
    share of time in prefill. label_s: for preferred labels that the worker lacks. decode_s: for answers
    under way that the prompt makes slower. load_s: for loading what only a tier of the worker holds. room_s: until the
    worker's cache has room. partner_s: for the engine that takes the prompt over (lua/parts/decide/joint.lua).
    """

    wait_s: float
    compute_s: float
    again_s: float
    leave_s: float
    evict_s: float
    busy_s: float
    label_s: float
    decode_s: float
    load_s: float
    room_s: float = 0.0
    partner_s: float = 0.0

    @classmethod
    def of(cls, told: bytes) -> Terms:
        return cls(*map(float, told.split(b",")))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as a decision sees it. matched_tokens: of the prompt, cached or being computed for other requests.

    tier_tokens, tier_s, tier: as in ``Decision``.
    """

    worker_id: str
    matched_tokens: int
    speculative_tokens: int
    prefill_tokens: int
    decode_tokens: int
    in_flight: int
    foreign_prefill_tokens: int
    speed_tps: int
    blocks: int
    capacity_blocks: int
    flags: int
    cost_s: float
    terms: Terms
    tier_tokens: int
    tier_s: float
    tier: str


class Shortfall(NamedTuple):
    """An approximate worker (without the plugin) had fewer blocks of a prompt cached than the decision said.

    held_blocks: number that it had when the prompt reached it. age_s: seconds since the router got the request.
    """

    held_blocks: int
    age_s: float


class SessionEnd(NamedTuple):
    """The end of a request of a session in the ledger. session: its id, from the decision.

    finish: ``t`` the answer ended in tool calls, ``e`` the client said that the session ends, ``o`` another end, ``?``
    there was no whole answer. tokens: of prompt and answer; 0: not known.
    """

    session: bytes
    finish: Literal["t", "e", "o", "?"]
    tokens: int = 0


class Renewal(NamedTuple):
    """A reservation that is still open. prefill_tokens: still booked for it, 0 after its first token."""

    reservation: str
    worker_id: str
    prefill_tokens: int
    decode_tokens: int
    started: bool = False


class Bookings:
    """``decide`` books a request, ``settle`` ends the booking, ``renew`` extends it; else it expires."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts
        self._packed_prefix = pack(scripts.prefix)
        self._decide, self._settle = scripts.packed["decide"], scripts.packed["settle"]
        self._decide_heads: dict[int, bytes] = {}  # number of chains -> a call's bytes up to the reservation's id
        self._settle_head = self._settle.head(len(SCRIPT_ARGS["settle"])) + self._packed_prefix

    async def decide(self, question: Question, *, explain: bool = False) -> Decision:
        """Choose a worker and book the request there, whether or not other requests wait.

        A repeated reservation id gets the same answer. explain: the decision has ``seen``, too, unless the id was
        known. Raises NoWorker, CancelledReservation, BadArgument, FleetUnavailable.
        """
        command = self.decide_command(question, Mode.EXPLAIN if explain else Mode.BOOK, in_turn=False)
        answer = await self._scripts.call("decide", command, self._scripts.timeouts.request_s)
        return self.decision(question, answer)

    def decision(self, question: Question, answer: list[Any]) -> Decision:
        """Return the Decision in decide's answer to a request that is booked."""
        use = ClientUse(*answer.pop()) if question.limits is not None and answer[0] == b"BOOKED" else None
        (
            outcome,
            worker,
            matched,
            speculative,
            flagged,
            cost,
            url,
            wait,
            prompt,
            prefill,
            decode,
            flags,
            why,
            sid,
            load,
            leg,
        ) = answer[:ANSWER_FIELDS]
        worker_id = worker.decode()
        approximate = flags & APPROXIMATE != 0
        return Decision(
            question.reservation,
            "booked" if outcome == b"BOOKED" else "known",
            worker_id,
            worker_id if approximate else worker_id.rpartition(".")[0],
            url.decode(),
            matched,
            prompt,
            speculative == 1,
            flagged == 1 or flags & UNHEARD != 0,  # the index of an unheard worker may be outdated
            float(cost),
            wait,
            approximate,
            prefill,
            decode,
            flags & TRIAL != 0,
            why.decode(),
            Seen.of(answer[ANSWER_FIELDS:]) if len(answer) > ANSWER_FIELDS else None,
            use,
            sid,
            *(_load(*load.split()) if load else NO_LOAD),
            flags & ENDS != 0,
            _ToldLeg(*leg).of(question.reservation) if leg else None,
        )

    async def settle(
        self,
        reservation: str,
        outcome: Told,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        session: SessionEnd | None = None,
        moved: Moved | None = None,
    ) -> str:
        """Report the first token or the end of a reservation; returns STARTED, SETTLED, UNKNOWN or SAME.

        A repeated call changes nothing. tokens: of the answer, counted as used by a client with limits. shortfall:
        corrects the mirror of an approximate worker's cache. moved: with ``finished`` of a prefill leg, what the other
        engine took from it. Raises FleetUnavailable.
        """
        command = self.settle_command(reservation, outcome, tokens, shortfall, session, moved)
        answer = await self._scripts.call("settle", command, self._scripts.timeouts.upkeep_s)
        return str(answer[0].decode())

    def settle_later(
        self,
        reservation: str,
        outcome: Told,
        on_answer: OnAnswer,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        session: SessionEnd | None = None,
        moved: Moved | None = None,
    ) -> None:
        """Send ``settle`` without waiting: Redis executes it before every later call of this client.

        ``settle`` goes to Redis with the next other call, or after two milliseconds.
        """
        command = self.settle_command(reservation, outcome, tokens, shortfall, session, moved)
        self._scripts.send("settle", command, self._scripts.timeouts.upkeep_s, on_answer, patient=True)

    def settle_command(
        self,
        reservation: str,
        outcome: Told,
        tokens: int = 0,
        shortfall: Shortfall | None = None,
        session: SessionEnd | None = None,
        moved: Moved | None = None,
    ) -> bytes:
        """Return the packed call of settle; arguments as in ``settle``."""
        rest = (PACKED_OUTCOMES.get(outcome) or pack_text(outcome)) + self._scripts.constants.settle_spans
        if not tokens and shortfall is None and session is None and moved is None:
            return self._settle_head + pack_text(reservation) + rest
        more = [pack_int(tokens) if tokens else NOTHING]
        if shortfall is not None:
            more += [pack_int(shortfall.held_blocks), pack_int(round(1_000 * shortfall.age_s))]
        if session is not None:
            more += [NOTHING] * (3 - len(more))
            more += [pack_bytes(session.session), pack_text(session.finish), pack_int(session.tokens)]
        if moved is not None:
            more += [NOTHING] * (6 - len(more))
            more += [pack_int(moved.slot), pack_int(moved.tokens), pack(moved.seconds)]
        head = self._settle.head(len(SCRIPT_ARGS["settle"]) + len(more)) + self._packed_prefix
        return b"".join((head, pack_text(reservation), rest, *more))

    async def reap(self) -> int:
        """End at most REAP_AT_ONCE expired reservations, whose load leaves their workers; return how many had expired.

        Each ``decide`` ends up to eight of them, so ``reap`` is for a fleet without requests.
        """
        scripts = self._scripts
        now_ms = int((await scripts.ask("TIME"))[0]) * 1000
        expired: int = await scripts.ask("ZCOUNT", scripts.keys.leases, "-inf", now_ms)
        # For an id that was never booked, `finished` makes lua/settle.lua end expired reservations, and nothing else.
        for _ in range(-(-min(expired, REAP_AT_ONCE) // REAPED_PER_SETTLE)):
            await self.settle("nothing", "finished")
        return expired

    async def renew(self, renewals: Sequence[Renewal]) -> tuple[int, int, int]:
        """Keep at most RENEW_AT_ONCE reservations alive; returns (renewed, rebuilt after Redis lost them, refused)."""
        rest: list[Argument] = []
        for renewal in renewals:
            rest += [renewal.reservation, renewal.worker_id, renewal.prefill_tokens]
            rest += [renewal.decode_tokens, int(renewal.started)]
        scripts = self._scripts
        lease_ms = scripts.constants.spans.lease_ms
        renewed, rebuilt, refused = await scripts.keep("renew", rest, prefix=scripts.prefix, lease_ms=lease_ms)
        return renewed, rebuilt, refused

    async def lease(self, reservation: str) -> Lease | None:
        """Read the lease of a reservation; None if Redis has none. Raises FleetUnavailable."""
        scripts = self._scripts
        with redis_errors():
            packed = await cast("Awaitable[bytes | None]", scripts.redis.hget(scripts.keys.lease, reservation))
        return None if packed is None else Lease.unpack(packed)

    async def prefilled(self, reservation: str) -> bool:
        """Return whether the worker has reported that this reservation's prefill has ended. Raises FleetUnavailable."""
        lease = await self.lease(reservation)
        return lease is not None and lease.stage >= Stage.STARTED

    def decide_command(self, question: Question, mode: Mode = Mode.BOOK, *, in_turn: bool = True) -> bytes:
        """Return the packed call of decide: its arguments in the order of SCRIPT_ARGS, then the chains.

        in_turn: False for a request that never waits in the queue, even if others wait.

        Raises BadArgument for a reservation without an id.
        """
        if not question.reservation:
            raise BadArgument("a reservation needs an id")
        chains = question.chains
        head = self._decide_heads.get(len(chains))
        if head is None:
            head = self._decide.head(DECIDE_ARGS + CHAIN_ARGS * len(chains)) + self._packed_prefix
            self._decide_heads[len(chains)] = head
        pieces = [
            head,
            pack_text(question.reservation),
            self._scripts.constants.argument,
            _packed_policy(question.policy),
            pack_int(question.prompt_tokens),
            pack_int(question.decode_tokens),
            pack_int(mode),
            pack_names(question.exclude) if question.exclude else NOTHING,
            b"$10\r\n%010d\r\n" % question.tie_seed,
            pack_int(question.prefix_tokens),
            pack_names(question.order) if question.order else NOTHING,
            pack(question.objective_s) if question.objective_s else NO_OBJECTIVE,
            pack_bytes(question.tenant) if in_turn else NOTHING,
            pack_int(min(max(question.priority, FIRST_CLASS), LAST_CLASS) - FIRST_CLASS),
            pack_int(question.waited_ms),
            pack_int((1 if question.displaces else 2) if question.may_wait else 0),
            pack_names(question.barred) if question.barred else NOTHING,
            question.limits.packed if question.limits is not None else NOTHING,
            pack_bytes(question.session) if question.session else NOTHING,
            pack_names(question.only) if question.only else NOTHING,
            _packed_ending(chains),
            pack_int(question.split),
        ]
        for chain in chains:
            pieces += (_packed_scheme(chain.scheme_id, chain.block_tokens), pack_bytes(chain.hashes))
        return b"".join(pieces)


@lru_cache(maxsize=64)
def _packed_policy(policy: str) -> bytes:
    return pack_text(policy)


@lru_cache(maxsize=64)
def _packed_scheme(scheme_id: int, block_tokens: int) -> bytes:
    return pack_int(scheme_id) + pack_int(block_tokens)


def _packed_ending(chains: Sequence[Chain]) -> bytes:
    for chain in chains:
        if chain.last:
            return pack_bytes(b"".join([chain.last or NO_BLOCK for chain in chains]))
    return NOTHING


def _load(tokens: bytes, seconds: bytes, kind: bytes) -> tuple[int, float, str]:
    """Read what must be loaded from a tier: tokens, seconds, kind of tier."""
    return int(tokens), float(seconds), TIERS.get(int(kind), "")


@dataclass(frozen=True, slots=True)
class _ToldLeg:
    """A prefill leg in the order in which decide tells it (lua/parts/decide/prefill_leg.lua)."""

    worker: bytes
    url: bytes
    matched: int
    speculative: int
    wait: int
    prefill: int
    decode: int
    flags: int
    load: bytes

    def of(self, reservation: str) -> PrefillLeg:
        """Return the prefill leg of the request with this reservation."""
        worker_id, approximate = self.worker.decode(), self.flags & APPROXIMATE != 0
        return PrefillLeg(
            prefill_leg(reservation),
            worker_id,
            worker_id if approximate else worker_id.rpartition(".")[0],
            self.url.decode(),
            self.matched,
            self.speculative == 1,
            self.wait,
            self.prefill,
            self.decode,
            approximate,
            self.flags & TRIAL != 0,
            self.flags & ENDS != 0,
            *(_load(*self.load.split()) if self.load else NO_LOAD),
        )


@dataclass(frozen=True, slots=True)
class _ToldCandidate:
    """A candidate in the order in which decide tells it (``Seen.rows``)."""

    worker: bytes
    matched: int
    speculative: int
    row: bytes
    cost_s: bytes
    terms: bytes
    tier_tokens: bytes
    tier_s: bytes
    tier: bytes

    @property
    def candidate(self) -> Candidate:
        row = LoadRow.unpack(self.row)
        busy = (row.prefill_tokens, row.decode_tokens, row.in_flight, row.foreign_prefill_tokens, row.speed_tps)
        cache = (row.blocks, row.capacity_blocks, row.flags)
        return Candidate(
            self.worker.decode(),
            self.matched,
            self.speculative,
            *busy,
            *cache,
            float(self.cost_s),
            Terms.of(self.terms),
            *_load(self.tier_tokens, self.tier_s, self.tier),
        )
