"""Engines that hand prompts over, on the virtual clock: vLLM's pull over NIXL as far as placement and load see it.

One engine computes a prompt and a first token that nobody gets. It keeps the blocks until the other engine has taken
them. That one takes what its GPU lacks once it has room for the whole prompt, over a link on which each engine's
transfers stand in line, and computes the last token anew. The first transfer's handshake is left out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import sub
from typing import TYPE_CHECKING, Any

from tests.bench.virtual_fleet import Cluster, Plan

from warmfleet.fleet import Decision, LoadRow, Moved, PrefillLeg, Question, Renewal, Role, Split
from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.simulator.plugin_pool import PluginPool
from warmfleet_loadtest.simulator.scheduler import Output, Request, Scheduler, Step, hash_blocks
from warmfleet_loadtest.simulator.step_costs import StepWork
from warmfleet_loadtest.simulator.virtual_clock import VirtualFleet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.bench.virtual_store import VirtualStore

    from warmfleet.fleet import Fleet
    from warmfleet_loadtest.simulator.block_pool import BlockPool
    from warmfleet_loadtest.simulator.virtual_clock import Answered, VirtualEngine
    from warmfleet_loadtest.traces.trace import Arrival
    from warmfleet_worker.protocol import wire
    from warmfleet_worker.tracker import Tracker

HANDOVER_S = 0.005
TOKEN_BYTES = 131_072  # of the 8B model
GIVES, TAKES, BOTH = Role(1, 0, alone=False), Role(0, 1, alone=True), Role(1, 1, alone=True)


@dataclass(slots=True)
class Transfer:
    """A transfer under way. source: the scheduler of the engine that has the blocks, as the request ``leg``."""

    ends: float
    request: Request
    source: PairScheduler
    leg: Request


class PairScheduler(Scheduler):
    """vLLM's scheduler with a NIXL connector. clock: the time of the simulation.

    Steps that only give each running request its next token, without a new block, are counted and applied together.
    paced: called with each of these requests and the ends of the steps.
    """

    def __init__(
        self, pool: BlockPool, scheme: wire.Scheme, limits: Any, clock: Callable[[], float], token_s: float
    ) -> None:
        super().__init__(pool, scheme, limits)
        self.link_free = 0.0
        self.legs: set[Request] = set()  # requests whose blocks another engine will take
        self.sources: dict[Request, tuple[PairScheduler, Request]] = {}  # of requests that take blocks
        self.landed: Callable[[Transfer], None] = lambda _transfer: None
        self._kept: dict[Request, list[int]] = {}
        self._moving: list[Transfer] = []
        self._clock = clock
        self._token_s = token_s
        self.paced: Callable[[Request, Sequence[float]], None] = lambda _request, _ends: None
        self._disturbed = False  # since the last step was planned: more requests, or more room for them
        self._steady = False  # the last step gave each running request one token, and no request can be admitted
        self._alike = 0  # steps like the last one that follow
        self._counted: tuple[list[Request], int] = [], 0  # requests and context tokens of the steps that are counted
        self._ends: list[float] = []

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._moving)

    def add(self, request: Request) -> None:
        super().add(request)
        self._disturb()

    def schedule(self) -> Step | None:
        self.collect(self._clock())
        if not self._alike:
            self._apply_counted()
            self._alike = min(map(self._steps_alike, self.running), default=0) if self._steady else 0
            self._counted = self.running.copy(), sum(request.tokens for request in self.running)
        if self._alike:
            self._alike -= 1
            requests, context = self._counted
            decodes = len(requests)
            return Step([], StepWork(decode_requests=decodes, decode_context=context + decodes * len(self._ends)))
        self._disturbed = False
        return super().schedule()

    def complete(self, step: Step, now: float = 0.0) -> list[Output]:
        if not step.tokens:
            self._ends.append(now)
            return []
        outputs = super().complete(step, now)
        alike = not step.work.prefill_tokens and len(outputs) == len(step.tokens) == len(self.running)
        ended = any(output.first or output.finished for output in outputs)
        self._steady = alike and not ended and not self._disturbed
        return outputs

    def _steps_alike(self, request: Request) -> int:
        """Return the steps in which a request ends neither its answer nor a block."""
        size = self.limits.block_tokens
        within_block = size - 1 - request.computed % size if request.computed % size else 0
        return min(within_block, request.max_tokens - request.output_tokens - 1)

    def _disturb(self) -> None:
        """The next step may be of another kind."""
        self._disturbed, self._steady, self._alike = True, False, 0

    def _apply_counted(self) -> None:
        ends, self._ends = self._ends, []
        for request in self._counted[0] if ends else ():
            request.computed += len(ends)
            request.output_tokens += len(ends)
            hash_blocks(self.scheme, request)
            self.paced(request, ends)

    def next_due(self) -> float | None:
        return min((transfer.ends for transfer in self._moving), default=None)

    def collect(self, now: float) -> list[Output]:
        """Let the requests run whose blocks have come."""
        for transfer in [moving for moving in self._moving if moving.ends <= now]:
            self._moving.remove(transfer)
            self._run(transfer)
            self.landed(transfer)
        return []

    def let_go(self, leg: Request) -> None:
        """Free the blocks of a leg."""
        self._disturb()
        self.pool.release(reversed(self._kept.pop(leg)))

    def _free(self, request: Request) -> None:
        if request in self.legs and request.finished:
            self.legs.remove(request)
            self._kept[request], request.blocks = request.blocks, []
        super()._free(request)

    def _schedule_waiting(self, planned: dict[Request, int], budget: int) -> None:
        size = self.limits.block_tokens
        while self.waiting and budget > 0 and len(self.running) + len(self._moving) < self.limits.max_requests:
            request = self.waiting[0]
            hit = self._cached(request, (request.tokens - 1) // size)
            lacks = -(-request.tokens // size) - len(hit)
            if lacks + self.pool.idle(hit) > self.pool.free:
                return
            self.waiting.popleft()
            if request in self.sources:
                self._take(request, hit, lacks)
                continue
            self._admit(request, hit)
            tokens = min(request.tokens - request.computed, budget)
            self._grow(request, tokens)
            planned[request] = tokens
            budget -= tokens

    def _take(self, request: Request, hit: list[int], lacks: int) -> None:
        """Begin the transfer of a request for which there is room. lacks: blocks beyond those in ``hit``."""
        size = self.limits.block_tokens
        source, leg = self.sources.pop(request)
        self.pool.touch(hit)
        request.blocks, request.entered = [*hit, *self.pool.allocate(lacks)], len(hit)
        request.cached_tokens, request.admitted = len(hit) * size, True
        starts = max(self._clock(), self.link_free, source.link_free)
        self.link_free = source.link_free = starts + (request.tokens - len(hit) * size) * self._token_s
        self._moving.append(Transfer(self.link_free + HANDOVER_S, request, source, leg))

    def _run(self, transfer: Transfer) -> None:
        request = transfer.request
        full = min(request.tokens // self.limits.block_tokens, len(request.hashes))
        for index in range(request.entered, full):
            self.pool.insert(request.blocks[index], request.hashes[index])
        request.entered, request.computed = max(full, request.entered), request.tokens - 1
        transfer.source.let_go(transfer.leg)
        self.running.append(request)
        self._disturb()


@dataclass(frozen=True, slots=True)
class PairConfig(EngineConfig):
    """An engine that can hand over or take. bytes_per_s: of its link."""

    bytes_per_s: float = 12.5e9

    def scheduler(self, listener: Tracker | None = None, clock: Callable[[], float] | None = None) -> Scheduler:
        if clock is None:
            raise ValueError("an engine that hands prompts over needs a clock")
        pool = PluginPool(self.blocks, self._eviction(), listener, clock)
        made = PairScheduler(pool, self.scheme, self.limits, clock, TOKEN_BYTES / self.bytes_per_s)
        made.follower = pool
        return made


@cache
def hashes_of(scheme: wire.Scheme, prompt: Sequence[int]) -> tuple[tuple[bytes, ...], bytes | None]:
    """Return the hashes of a prompt's blocks and the last one's whole digest."""
    request = Request("", prompt, 1, ())
    hash_blocks(scheme, request)
    return tuple(request.hashes), request.last_digest


class PairFleet(VirtualFleet):
    """Engines of which some compute prompts for others, and the gaps between the tokens of each answer."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gaps: dict[Request, list[float]] = {}
        self._of_answer: dict[int, Request] = {}
        self._latest: dict[Request, float] = {}
        self._legs: dict[Request, Callable[[float], Awaitable[None]]] = {}
        for engine in self.engines:
            assert isinstance(engine.scheduler, PairScheduler)
            engine.scheduler.paced = self._paced

    def request_of(self, arrival: Arrival) -> Request:
        """Hash prompts that can be told apart without reading them (those of the traces) once in all runs."""
        if not isinstance(arrival.prompt, Hashable):
            return super().request_of(arrival)
        answer = range(1_000_000, 1_000_000 + arrival.output_tokens)  # ids that occur in no prompt
        request = Request("", arrival.prompt, arrival.output_tokens, answer)
        hashes, request.last_digest = hashes_of(self.engines[0].scheduler.scheme, arrival.prompt)
        request.hashes = list(hashes)
        return request

    def _paced(self, request: Request, ends: Sequence[float]) -> None:
        before = (self._latest[request], *ends[:-1])
        self.gaps.setdefault(request, []).extend(map(sub, ends, before))
        self._latest[request] = ends[-1]

    def send_leg(self, leg: Request, number: int, now: float, done: Callable[[float], Awaitable[None]]) -> None:
        """Let an engine compute a prompt for another; ``done`` is called with the time at which it has answered."""
        self._left += 1
        self._legs[leg] = done
        scheduler = self.engines[number].scheduler
        assert isinstance(scheduler, PairScheduler)
        scheduler.legs.add(leg)
        scheduler.add(leg)
        self.at(now, partial(self._next_step, number))

    def gaps_of(self, answered: Answered) -> Sequence[float]:
        request = self._of_answer[id(answered)]
        return self.gaps.get(request, ())

    async def _outputs(self, outputs: Sequence[Output], engine: VirtualEngine, now: float) -> None:
        others = []
        for output in outputs:
            if output.request in self._legs:
                self._left -= 1
                await self._legs.pop(output.request)(now)
                continue
            others.append(output)
            before = self._latest.get(output.request)
            self._latest[output.request] = now
            if before is not None:
                self.gaps.setdefault(output.request, []).append(now - before)
        served = len(self.served)
        await super()._outputs(others, engine, now)
        first = [output.request for output in others if output.first]
        self._of_answer |= {id(each): request for each, request in zip(self.served[served:], first, strict=True)}


# ---------------------------------------------------------------- rules of routers


@dataclass(frozen=True, slots=True)
class PairPlan(Plan):
    """A run. roles: of each engine; empty: none has one. ours: the rule of decide/joint decides. Else ``splits`` does:
    with the tokens of the prompt, and of those the ones that the best engine alone lacks (None: each request is split).
    Then the best pair serves it, or the best of the engines that take prompts over.
    """

    roles: tuple[Role, ...] = ()
    ours: bool = True
    splits: Callable[[int, int], bool] | None = None


class PairCluster(Cluster):
    """A cluster whose engines have roles."""

    def __init__(self, store: VirtualStore, plan: PairPlan) -> None:
        super().__init__(store, plan)
        self.pairs: PairFleet = PairFleet([worker.engine for worker in self.workers], self, plan.speed, store.clock)
        self.virtual = self.pairs
        self.rule = plan
        self.split = 0  # requests that were split
        self._slots: dict[str, int] = {}
        self._numbers = {id(worker.engine.scheduler): number for number, worker in enumerate(self.workers)}
        self._copies: dict[Request, Request] = {}  # of split requests, the one at the engine that computes the prompt
        self._legs: dict[Request, tuple[Fleet, PrefillLeg, float, int]] = {}  # of requests whose prompt is computed

    async def start(self) -> None:
        await super().start()
        rows: Any = self.store.sync.hgetall(self.fleets[0].keys.load)
        self._slots = {name.decode(): LoadRow.unpack(row).slot for name, row in rows.items()}
        for worker in self.workers:
            scheduler = worker.engine.scheduler
            assert isinstance(scheduler, PairScheduler)
            scheduler.landed = self._poke
        roles = self.rule.roles if self.rule.ours else [role._replace(alone=False) for role in self.rule.roles]
        for fleet in self.fleets:
            fleet.use(
                roles={
                    self._slots[worker.worker_id]: role for worker, role in zip(self.workers, roles, strict=bool(roles))
                }
            )

    def _poke(self, transfer: Transfer) -> None:
        """The engine that had the blocks has room for others."""
        number = self._numbers[id(transfer.source)]
        self.virtual.at(self.store.clock.now, partial(self.pairs._next_step, number), duty=True)

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int | None:
        fleet = next(iter(self._balancer.choice(self.replicas).values()))
        ask = self._ask(self._reservation(), request, arrival.session)
        decision = await self._decide(fleet, ask)
        number, leg = self._booked(fleet, request, decision, now), decision.prefill
        if leg is None:
            return number
        self.split += 1
        copy = Request(f"cmpl-{leg.reservation}.{self.split}", request.prompt, 1, request.answer)
        copy.hashes, copy.last_digest = list(request.hashes), request.last_digest
        source = self.number_of[leg.worker_id]
        self._open[copy] = fleet, Renewal(leg.reservation, leg.worker_id, leg.prefill_tokens, leg.decode_tokens)
        lacks = request.prompt_tokens - decision.matched_tokens

        async def computed(at: float) -> None:
            self.workers[source].prefilled(leg.reservation, copy, at)
            self._open[copy] = fleet, self._open[copy][1]._replace(prefill_tokens=0, started=True)
            await fleet.bookings.settle(leg.reservation, "started")
            giving, taking = self.workers[source].engine.scheduler, self.workers[number].engine.scheduler
            assert isinstance(giving, PairScheduler)
            assert isinstance(taking, PairScheduler)
            taking.sources[request] = giving, copy
            self._legs[request] = fleet, leg, at, lacks
            self._copies[request] = copy
            self.virtual.send(request, number, at)

        self.pairs.send_leg(copy, source, now, computed)
        return None

    async def started(self, request: Request, engine: int, now: float) -> None:
        if request in self._legs:
            fleet, leg, since, lacks = self._legs.pop(request)
            self._open.pop(self._copies.pop(request))
            moved = Moved(self._slots[self.workers[engine].worker_id], lacks, now - since)
            await fleet.bookings.settle(leg.reservation, "finished", moved=moved)
        await super().started(request, engine, now)

    async def _decide(self, fleet: Fleet, ask: Question) -> Decision:
        if not self.rule.roles:
            return await fleet.bookings.decide(ask)
        if self.rule.ours:
            return await fleet.bookings.decide(replace(ask, split=Split.ALLOWED))
        takers = tuple(
            worker.worker_id for worker, role in zip(self.workers, self.rule.roles, strict=True) if role.takes
        )
        alone = replace(ask, only=takers)
        if self.rule.splits is not None:
            best, _, seen = await fleet.queue.consider(alone)
            held = next(row.matched_tokens for row in seen.candidates if row.worker_id == best)
            if not self.rule.splits(ask.prompt_tokens, ask.prompt_tokens - held):
                return await fleet.bookings.decide(alone)
        return await fleet.bookings.decide(replace(ask, split=Split.ALLOWED))


def within(gaps: Sequence[float], limit_s: float) -> bool:
    """Tell whether 99 % of an answer's gaps are within a limit."""
    return not gaps or sorted(gaps)[min(len(gaps) - 1, math.ceil(0.99 * len(gaps)) - 1)] <= limit_s
