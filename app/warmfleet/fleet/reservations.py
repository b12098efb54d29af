"""The read path: decide (choose and book in one call), settle, renew. The policy itself lives in lua/decide.lua."""

from __future__ import annotations

import secrets
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from warmfleet.errors import BadArgument, FleetUnavailable
from warmfleet.fleet.client import ScriptClient, Timeouts, redis_errors
from warmfleet.fleet.rows import Flag, LoadRow
from warmfleet.protocol.wire import RESERVATION_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

    from warmfleet.prompt.block_hashes import Chain

Outcome = Literal["started", "finished", "failed", "cancelled"]
REAP_AT_ONCE = 512
SETTLES_AT_ONCE = 128  # of 256 connections: decisions need some while Redis hangs
RENEW_AT_ONCE = 200  # lua/renew.lua takes no more

BOOK, DRY, TELL = 0, 1, 2  # modes of lua/decide.lua
NO_QUEUE = ("", 0, 0, "", 0, 0, 0, "")  # what decide_in_turn tells of a place; max_engine_wait_s 0: there is no queue


#: First character of a reservation's random part, for scripts. An engine tells of each prompt's prefill by itself; of
#: several prompts each may give back only its share of what was booked. Only what was foreseen exactly is compared.
ONE_PROMPT, SEVERAL_PROMPTS, ESTIMATED = "0", "-", "_"


def new_reservation(prompts: int, *, exact: bool = True) -> str:
    """A random id for a request with so many prompts. exact: their token ids are known."""
    mark = SEVERAL_PROMPTS if prompts != 1 else ONE_PROMPT if exact else ESTIMATED
    return RESERVATION_PREFIX + mark + secrets.token_urlsafe(16)[1:]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as ``decide`` needs it. decode_tokens: resident context while it decodes (prompt + answer).

    ``seed`` breaks ties; 0 takes one from the reservation id. ``exclude``: worker ids not to choose.
    ``prefix_tokens``: of a match no more is useful (0: all of it). ``order``: where a hash ring would look.
    ``objective_s``: a time to first token that is enough (0: none).
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

    @property
    def tie_seed(self) -> int:
        return self.seed or zlib.crc32(self.reservation.encode())


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and what was booked for it. ``wait_tokens``: prefill ahead of it when it was chosen.

    ``speculative``: the match is what an open reservation will make. ``flagged``: the match is a lower bound.
    Of an answer that was known already, cost, wait and the two flags are 0.
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
    why: str = ""
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a choice saw besides its ``Ask``: median_tps, block_tokens, turn, now_ms (modulo 2**32), and ``rows``.

    A row: worker_id, matched_tokens, speculative_tokens, load row, cost_s. waits: what is only considered would have to
    wait for its turn first.
    """

    context: tuple[int, int, int, int]
    rows: list[Any]
    waits: bool

    @classmethod
    def of(cls, answer: list[Any]) -> Seen:
        """From an answer of ``decide``, after its ``why``."""
        median, block_tokens, turn, now_ms, waits = map(int, answer[0])
        return cls((median, block_tokens, turn, now_ms), answer[1:], bool(waits))

    @property
    def candidates(self) -> list[Candidate]:
        return [_candidate(*row) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a decision sees it: ``matched_tokens`` is the deeper of confirmed and speculative."""

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


@dataclass(frozen=True, slots=True)
class Renewal:
    """A reservation that is still open: prefill_tokens is what is booked of it, 0 once it started."""

    reservation: str
    worker_id: str
    prefill_tokens: int
    decode_tokens: int
    started: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """Of the cost rule in lua/decide.lua: lambda_, kappa, pressure_price, wait_price are factors. max_probes: calls.

    A match under min_match_tokens counts for nothing.
    """

    lambda_: float = 2.0  # of an uncached token while no worker is idle: then it delays somebody else too
    kappa: float = 2.5  # the least, at this wait_price, that keeps one new prefix on at most two workers
    pressure_price: float = 1.0
    decode_s_per_token: float = 1e-7
    wait_price: float = 1.5  # of a token ahead: who joins a line makes it longer for those who come after
    max_probes: int = 64
    min_match_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Spans:
    """Milliseconds that the scripts count with."""

    lease_ms: int = 30_000  # renewed every 10 s: two renewals may be lost
    worker_ttl_ms: int = 15_000
    tombstone_ms: int = 60_000
    ticket_ms: int = 1_000  # asked about every 50 ms: who stalls for longer gets its old place back, by arrival
    linger_ms: int = 500  # a finished request's blocks are reported within 0.2 s; evictions must not go unseen long


class Reservations(ScriptClient):
    """``decide`` takes, ``settle`` gives back, ``renew`` keeps: a reservation also expires by itself."""

    def __init__(
        self,
        redis: aioredis.Redis,
        model: str,
        timeouts: Timeouts | None = None,
        weights: Weights | None = None,
        spans: Spans | None = None,
    ) -> None:
        super().__init__(redis, model, timeouts)
        self.weights = weights or Weights()
        self.spans = spans or Spans()
        self._settles = 0

    async def decide(self, ask: Ask, *, tell: bool = False) -> Decision:
        """Choose a worker and book the request there. The same reservation id again gets the same answer.

        tell: with all that the choice saw, unless the answer was known.
        Raises NoWorker, CancelledReservation, BadArgument, FleetUnavailable.
        """
        return self._decision(ask, await self.run("decide", *self._ask_args(ask, TELL if tell else BOOK)))

    def _decision(self, ask: Ask, answer: list[Any]) -> Decision:
        outcome, worker, matched, speculative, flagged, cost, url, wait, prompt, prefill, decode, flags, why = answer[
            :13
        ]
        worker_id = worker.decode()
        approximate = bool(flags & Flag.APPROXIMATE)
        return Decision(
            reservation=ask.reservation,
            outcome="booked" if outcome == b"BOOKED" else "known",
            worker_id=worker_id,
            server_id=worker_id if approximate else worker_id.rpartition(".")[0],
            url=url.decode(),
            matched_tokens=matched,
            prompt_tokens=prompt,
            speculative=speculative == 1,
            flagged=flagged == 1,
            cost_s=float(cost),
            wait_tokens=wait,
            approximate=approximate,
            prefill_tokens=prefill,
            decode_tokens=decode,
            why=why.decode(),
            seen=Seen.of(answer[13:]) if len(answer) > 13 else None,
        )

    async def settle(self, reservation: str, outcome: Outcome) -> str:
        """Tell what became of a reservation; returns STARTED, SETTLED, UNKNOWN or SAME. Safe to repeat.

        Raises FleetUnavailable, also while SETTLES_AT_ONCE are waited for.
        """
        if self._settles >= SETTLES_AT_ONCE:
            raise FleetUnavailable(f"{SETTLES_AT_ONCE} outcomes are on their way already.")
        spans = self.spans
        self._settles += 1
        try:
            answer = await self.keep("settle", self._prefix, reservation, outcome, spans.tombstone_ms, spans.linger_ms)
        finally:
            self._settles -= 1
        return str(answer[0].decode())

    async def reap(self) -> int:
        """Give back expired leases, at most REAP_AT_ONCE; returns how many had expired. decide and settle reap, too."""
        with redis_errors():
            now_ms = (await self.redis.time())[0] * 1000
            expired = int(await self.redis.zcount(self.keys.leases, "-inf", now_ms))
        for _ in range(-(-min(expired, REAP_AT_ONCE) // 8)):  # a settle of nothing reaps eight
            await self.settle("nothing", "finished")
        return expired

    async def renew(self, renewals: Sequence[Renewal]) -> tuple[int, int, int]:
        """Keep at most RENEW_AT_ONCE reservations alive; returns (renewed, rebuilt after Redis lost them, refused)."""
        args: list[Any] = [self.spans.lease_ms]
        for one in renewals:
            args += [one.reservation, one.worker_id, one.prefill_tokens, one.decode_tokens, int(one.started)]
        renewed, rebuilt, refused = await self.keep("renew", *args)
        return renewed, rebuilt, refused

    def _ask_args(self, ask: Ask, mode: int = BOOK, queue: tuple[Any, ...] = NO_QUEUE) -> list[Any]:
        if not ask.reservation:
            raise BadArgument("a reservation needs an id")
        weights, spans = self.weights, self.spans
        args: list[Any] = [
            self._prefix,
            ask.reservation,
            ask.policy,
            ask.prompt_tokens,
            ask.decode_tokens,
            spans.lease_ms,
            spans.worker_ttl_ms,
            weights.max_probes,
            mode,
            ",".join(ask.exclude),
            ask.tie_seed,
            weights.lambda_,
            weights.kappa,
            weights.pressure_price,
            weights.decode_s_per_token,
            weights.wait_price,
            ask.prefix_tokens,
            weights.min_match_tokens,
            ",".join(ask.order),
            ask.objective_s,
            *queue,
        ]
        for chain in ask.chains:
            args += (chain.scheme_id, chain.block_tokens, chain.hashes)
        return args


def _candidate(worker_id: bytes, matched: int, speculative: int, packed: bytes, cost_s: bytes) -> Candidate:
    row = LoadRow.unpack(packed)
    load = (row.prefill_tokens, row.decode_tokens, row.in_flight, row.foreign_prefill_tokens, row.speed_tps)
    return Candidate(
        worker_id.decode(), matched, speculative, *load, row.blocks, row.capacity_blocks, row.flags, float(cost_s)
    )
