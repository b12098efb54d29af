"""A whole fleet on a virtual clock: our scripts on a real Redis, the plugin's publishers, and simulated engines.

Replicas use ``Fleet`` as in production: decide and settle for each request, a step of upkeep every
``apply_interval_s``, renewals, and the polls of the queue where the plan has one (``virtual_queue``). There is no
text and no probe (workers are proven when they join), and a decision takes no time.
"""

from __future__ import annotations

import random
import string
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from tests.bench.virtual_pools import HomePools
from tests.bench.virtual_queue import VirtualTickets
from tests.bench.virtual_store import VirtualStore
from tests.bench.virtual_workers import MODEL, StockWorker, VirtualWorker

from warmfleet.engines.engine_priority import priority
from warmfleet.fleet import (
    RENEW_AT_ONCE,
    Decision,
    Fleet,
    Question,
    Queued,
    QueueLimits,
    Renewal,
    SessionEnd,
    SessionLimits,
    Shortfall,
    Weights,
)
from warmfleet.fleet.codes import Mark
from warmfleet.pools.cache_reports import TOLERATED_SHARE
from warmfleet.prompt.block_hashes import Chain
from warmfleet.timing import Timing
from warmfleet_loadtest.simulator.virtual_clock import VirtualFleet
from warmfleet_worker.protocol.wire import RESERVATION_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from warmfleet_loadtest.engine import EngineConfig
    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.simulator.virtual_clock import Answered
    from warmfleet_loadtest.traces.trace import Arrival, Trace

    Watch = Callable[["Cluster", float], Awaitable[None]]

IDLE_S = 0.4  # less than a second, after which the scripts would take all routers for away
WORDS = string.ascii_letters + string.digits
TENANT = b"one     "


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. engines: one configuration each. joins_s: numbers of the engines that join later, and their times.

    direct: sessions that go past the fleet to the engine of this number. known: how the fleet knows of them:
    ``reported`` by heartbeats, ``booked`` at once as if it had sent them, or ``no``.
    stock: numbers of the engines that have no plugin, of which the fleet knows what it sent and what their answers say.
    queue: limits of the fleet's queue; by default requests never wait. sessions: limits of the ledger; by default there
    is none. forgets: engines evict the blocks of ended and paused sessions first. tenants: 8 bytes for sessions that
    are not of the same tenant as all others. dispatch_s: from a decision until its request is at the engine.
    sorting: each request gets the priority that routers send to engines that sort.
    pools: how many engines each pool of the served model has; empty: it has one pool. depth_tokens: of a prompt's
    beginning, by which its home pools are found.
    watch: called every watch_s virtual seconds, with the cluster and the time.
    """

    engines: tuple[EngineConfig, ...]
    policy: str = "cost"
    weights: Weights = field(default_factory=Weights)
    replicas: int = 1
    speed: float = 6.0
    seed: int = 0
    joins_s: Mapping[int, float] = field(default_factory=dict)
    direct: Mapping[int, int] = field(default_factory=dict)
    known: Literal["reported", "booked", "no"] = "reported"
    stock: frozenset[int] = frozenset()
    queue: QueueLimits = field(default_factory=QueueLimits)
    sessions: SessionLimits = field(default_factory=SessionLimits)
    forgets: bool = True
    tenants: Mapping[int, bytes] = field(default_factory=dict)
    dispatch_s: float = 0.0
    sorting: bool = False
    pools: tuple[int, ...] = ()
    depth_tokens: int = 32
    watch: Watch | None = None
    watch_s: float = 1.0

    @property
    def tags(self) -> tuple[str, ...]:
        """The pools' tags."""
        return tuple(f"{MODEL}#{number + 1}" for number in range(len(self.pools))) or (MODEL,)

    def pool_of_engines(self) -> list[str]:
        """Return the pool of each engine. Raises ValueError unless every engine has one."""
        sizes = self.pools or (len(self.engines),)
        if sum(sizes) != len(self.engines):
            raise ValueError(f"{len(self.engines)} engines are not {' + '.join(map(str, sizes))}")
        return [tag for tag, size in zip(self.tags, sizes, strict=True) for _ in range(size)]


@dataclass(slots=True)
class Played:
    """The result of a run: requests in the order of their first tokens, the cluster, and CPU seconds, also Redis'."""

    served: list[Answered]
    cluster: Cluster
    cpu_s: float


class Cluster:
    """Redis, replicas and workers of one run. Each request goes to a random replica, as behind a load balancer."""

    def __init__(self, store: VirtualStore, plan: Plan) -> None:
        self.plan = plan
        self.store = store
        self._pools = plan.pool_of_engines()
        self.workers: list[VirtualWorker | StockWorker] = [
            StockWorker(config, number)
            if number in plan.stock
            else VirtualWorker(store, config, number, pool, forgets=plan.forgets)
            for number, (config, pool) in enumerate(zip(plan.engines, self._pools, strict=True))
        ]
        self.replicas = [{pool: store.fleet(pool, plan.weights) for pool in plan.tags} for _ in range(plan.replicas)]
        token_s = plan.engines[0].costs.prefill_token_s
        self._homes = {
            next(iter(pools.values())): HomePools(pools, Counter(self._pools), plan.depth_tokens, token_s)
            for pools in self.replicas
        }
        self.fleets = [fleet for replica in self.replicas for fleet in replica.values()]
        self.virtual = VirtualFleet([worker.engine for worker in self.workers], self, plan.speed, store.clock)
        self.number_of = {worker.worker_id: number for number, worker in enumerate(self.workers)}
        self.routed: list[tuple[float, int, Request]] = []  # (time, engine, request) of the fleet's own requests
        self.predicted: dict[Request, int] = {}  # matched tokens
        self.rows: dict[str, bytes] = {}  # load rows at the end
        self.queued = 0  # keys of the queue that are left at the end
        self.corrections = 0  # answers of engines without the plugin with fewer cached tokens than predicted
        self._believed: dict[Request, tuple[float, int]] = {}  # (time, matched tokens) at engines without the plugin
        self._balancer = random.Random(plan.seed)
        self._ids = random.Random(plan.seed)
        self._open: dict[Request, tuple[Fleet, Renewal]] = {}
        self._session: dict[Request, bytes] = {}  # ids in the ledger
        self.on_way = [0] * len(self.workers)  # requests that are sent and not yet at their engine, by its number
        self.tickets: dict[Fleet, VirtualTickets] = {}
        for fleet in self.fleets if plan.queue.max_engine_wait_s else ():
            scheme = plan.engines[0].scheme
            blocks = {scheme.scheme_id: scheme.block_tokens}
            fleet.use(limits=plan.queue, sessions=plan.sessions, block_tokens=blocks)
            self.tickets[fleet] = VirtualTickets(fleet, self.virtual, self._booked, self._send)

    # ------------------------------------------------ the run

    async def start(self) -> None:
        """Start the engines that do not join later."""
        clock = self.store.clock
        first = [worker for number, worker in enumerate(self.workers) if number not in self.plan.joins_s]
        clock.now = -1.0 - 0.2 * len(first)
        for worker in first:
            await worker.join(self._fleet_of(worker), clock)
        clock.now = 0.0
        for worker in first:
            worker.keep_going(self.virtual)
        for number, at_s in self.plan.joins_s.items():
            self.virtual.at(at_s, self._join_later(self.workers[number]), duty=True)
        for fleet in self.fleets:  # all at the same moments: the tick lets one of them do the work
            self._every(Timing.apply_interval_s, self._step(fleet), 0.0)
        self._every(Timing.renew_interval_s, self._renew, Timing.renew_interval_s)
        if self.plan.watch is not None:
            self._every(self.plan.watch_s, self._watch, 0.0)

    def _fleet_of(self, worker: VirtualWorker | StockWorker) -> Fleet:
        return self.replicas[0][self._pools[self.number_of[worker.worker_id]]]

    def _every(self, period_s: float, work: Any, first_s: float) -> None:
        async def again(now: float) -> None:
            await work(now)
            self.virtual.at(now + period_s, again, duty=True)

        self.virtual.at(first_s, again, duty=True)

    def _step(self, fleet: Fleet) -> Any:
        """Do the upkeep of one replica. A step that would find no entry is left out, except once in IDLE_S."""
        seen, due = 0, 0.0

        async def step(now: float) -> None:
            nonlocal seen, due
            if self.store.written[fleet.keys.tag] != seen or now >= due:
                blocks = (await fleet.upkeep.step()).blocks
                busy = blocks or self.store.written[fleet.keys.tag] != seen
                seen, due = self.store.written[fleet.keys.tag], now if busy else now + IDLE_S

        return step

    def _join_later(self, worker: VirtualWorker | StockWorker) -> Any:
        async def join(now: float) -> None:
            await worker.join(self._fleet_of(worker), self.store.clock)
            self.store.clock.now = now
            worker.keep_going(self.virtual)

        return join

    async def _renew(self, _now: float) -> None:
        for fleet in self.fleets:
            mine = [renewal for owner, renewal in self._open.values() if owner is fleet]
            for start in range(0, len(mine), RENEW_AT_ONCE):
                await fleet.bookings.renew(mine[start : start + RENEW_AT_ONCE])

    async def _watch(self, now: float) -> None:
        if self.plan.watch is not None:
            await self.plan.watch(self, now)

    # ------------------------------------------------ a request

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int | None:
        direct = self.plan.direct.get(arrival.session)
        if direct is not None:
            await self._past_the_fleet(request, direct)
            return direct
        pools = self._balancer.choice(self.replicas)
        ask, fleet = self._ask(self._reservation(), request, arrival.session), next(iter(pools.values()))
        if len(pools) > 1:
            number = await self._in_home_pools(self._homes[fleet], request, ask, now)
        elif tickets := self.tickets.get(fleet):
            number = await tickets.choose(request, ask, now)
        else:
            number = self._booked(fleet, request, await fleet.bookings.decide(ask), now)
        if number is None or not self.plan.dispatch_s:
            return number
        self._send(request, number, now)
        return None

    def _send(self, request: Request, number: int, now: float) -> None:
        """Send a request that was kept back, which takes dispatch_s."""

        async def arrive(at: float) -> None:
            self.on_way[number] -= 1
            self.virtual.send(request, number, at)

        if self.plan.dispatch_s:
            self.on_way[number] += 1
            self.virtual.at(now + self.plan.dispatch_s, arrive, duty=True)
        else:
            self.virtual.send(request, number, now)

    async def _in_home_pools(self, homes: HomePools, request: Request, ask: Question, now: float) -> int | None:
        fleet, answer, others = await homes.decide(ask)
        if isinstance(answer, Decision):
            return self._booked(fleet, request, answer, now)

        async def instead(line: Queued, at: float) -> int | None:
            for other in others:
                asked = replace(ask, reservation=self._reservation())
                decision = await homes.instead(asked, (fleet, line), other)
                if decision is not None:
                    return self._booked(other, request, decision, at)
            return None

        self.tickets[fleet].keep(request, ask, answer, now, instead)
        return None

    def _booked(self, fleet: Fleet, request: Request, decision: Decision, now: float) -> int:
        """Note a decision; returns the number of the engine."""
        request.request_id = f"cmpl-{decision.reservation}.{len(self.routed)}"
        number = self.number_of[decision.worker_id]
        renewal = (decision.reservation, decision.worker_id, decision.prefill_tokens, decision.decode_tokens)
        self._open[request] = fleet, Renewal(*renewal)
        if decision.session:
            self._session[request] = decision.session
        self.predicted[request] = decision.matched_tokens
        if decision.approximate and not decision.speculative:
            self._believed[request] = now, decision.matched_tokens
        self.routed.append((now, number, request))
        if self.plan.sorting:
            speed_tps = self.workers[number].engine.meter.speed_tps
            request.priority = priority(None, now, decision.prefill_tokens, speed_tps)
        return number

    def _ask(self, reservation: str, request: Request, session: int) -> Question:
        scheme, prompt, policy = self.plan.engines[0].scheme, request.prompt_tokens, self.plan.policy
        whole = (prompt - 1) // scheme.block_tokens  # the engine always computes the last token
        chain = Chain(scheme.scheme_id, scheme.block_tokens, b"".join(request.hashes[:whole]))
        keys = {"session": b"%d" % session, "chwbl": request.hashes[0] if request.hashes else b""}
        order = self._ring(keys[policy]) if policy in keys else ()
        tenant, chains = self.plan.tenants.get(session, TENANT), (chain,) if whole else ()
        return Question(reservation, chains, prompt, prompt + request.max_tokens, policy, order=order, tenant=tenant)

    def _ring(self, key: bytes) -> tuple[str, ...]:
        """Return worker ids in the order of a hash ring. The key is a session, or the block of 100 characters."""
        return tuple(sorted(self.number_of, key=lambda worker: blake2b(worker.encode() + key).digest()))

    async def _past_the_fleet(self, request: Request, number: int) -> None:
        """Send a request past the fleet. Its id decides whether the engine reports it as foreign."""
        known, reservation = self.plan.known, self._reservation()
        request.request_id = f"cmpl-{reservation}.direct" if known != "reported" else "cmpl-direct"
        if known == "booked":
            size, worker = self.plan.engines[number].limits.block_tokens, self.workers[number]
            held = worker.engine.scheduler.pool.prefix(request.hashes, (request.prompt_tokens - 1) // size)
            uncached, context = request.prompt_tokens - size * len(held), request.prompt_tokens + request.max_tokens
            fleet = self._fleet_of(worker)
            self._open[request] = fleet, Renewal(reservation, worker.worker_id, uncached, context)
            await fleet.bookings.renew([self._open[request][1]])

    async def started(self, request: Request, engine: int, now: float) -> None:
        """Handle the first token: the engine core reports progress, and the replica sees the first byte."""
        if request in self._open:
            fleet, booked = self._open[request]
            self.workers[engine].prefilled(booked.reservation, request, now)
            self._open[request] = fleet, booked._replace(prefill_tokens=0, started=True)
            await fleet.bookings.settle(booked.reservation, "started")
            self._room_freed(fleet, now)

    async def finished(self, request: Request, engine: int, now: float) -> None:
        if request in self._open:
            fleet, booked = self._open.pop(request)
            shortfall, end = self._shortfall(request, engine, now), self._end_of(request)
            await fleet.bookings.settle(booked.reservation, "finished", 0, shortfall, end)
            self._room_freed(fleet, now)

    def _end_of(self, request: Request) -> SessionEnd | None:
        """Return what Redis learns of the session at a request's end."""
        session = self._session.pop(request, b"")
        if not session:
            return None
        return SessionEnd(session, self._finish(request), request.prompt_tokens + request.max_tokens)

    def _finish(self, request: Request) -> Literal["t", "e", "o", "?"]:
        return "o"

    def _room_freed(self, fleet: Fleet, now: float) -> None:
        if tickets := self.tickets.get(fleet):
            tickets.ask_soon(now)

    def _shortfall(self, request: Request, engine: int, now: float) -> Shortfall | None:
        """The missing cached tokens in an answer of an engine without the plugin, as in ``pools/cache_reports``."""
        asked, believed = self._believed.pop(request, (0.0, 0))
        block = self.plan.engines[engine].scheme.block_tokens
        if believed - request.cached_tokens <= max(block, TOLERATED_SHARE * believed):
            return None
        self.corrections += 1
        return Shortfall(request.cached_tokens // block, now - asked)

    def _reservation(self) -> str:
        """Return an id like those of ``new_reservation``, but the same in every run."""
        return RESERVATION_PREFIX + Mark.ONE_PROMPT + "".join(self._ids.choices(WORDS, k=21))


async def play(url: str, trace: Trace, plan: Plan, made: Callable[[VirtualStore, Plan], Cluster] = Cluster) -> Played:
    """Empty Redis, and run the plan on the cluster that ``made`` returns."""
    store = VirtualStore(url)
    began = time.process_time() + store.cpu_s()
    try:
        cluster = made(store, plan)
        await cluster.start()
        served = await cluster.virtual.run(trace)
        for fleet in cluster.replicas[0].values():
            rows: Any = store.sync.hgetall(fleet.keys.load)
            cluster.rows |= {name.decode(): row for name, row in rows.items()}
        cluster.queued = sum(b":queue" in key for key in store.sync.scan_iter(count=1_000))
        return Played(served, cluster, time.process_time() + store.cpu_s() - began)
    finally:
        await store.close()
