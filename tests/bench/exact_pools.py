"""Many engines in pools, simulated exactly: what a choice between pools costs against one decision over all engines.

No Redis and no scripts run, so a thousand engines take minutes. An engine computes one prompt at a time, in the order
in which it got them, and has an LRU cache of blocks; answers cost it nothing. A decision knows all caches and all work
and takes no time. Inside a pool it follows the cost rule (wait, uncached, lost, share of time) and the queue (a request
waits for the engine that is cheapest for it, small ones first); between pools it is the routers' own code. Left out are
ties by eviction and fill, `kappa`, pressure, decoding, speculation and heartbeats.

Times are seconds of the trace.
"""

from __future__ import annotations

import heapq
import random
import struct
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from warmfleet.fleet import Weights
from warmfleet.pools.home_pools import Beginnings, in_order
from warmfleet.prompt.block_hashes import Chain
from warmfleet.routing.pool_choice import HOMES, Offer, prices, turn_s
from warmfleet_loadtest.traces.trace import BLOCK_TOKENS, DECODE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from tests.bench.overlays import Blocks

    from warmfleet_loadtest.traces.trace import Arrival

    Floats = NDArray[np.float64]

SHARE_S = 60.0  # of the trace, over which the share of time in prefill is taken; the scripts' 15 s are 60 to 150 of it
TIE = 0.02  # of the prompt: costs that differ by less are equal
LEAST_WAIT_PRICE = 0.1  # as in lua/parts/shared/turns.lua
LOOKED_AT = 64  # tickets that a turn looks at
RULE = Weights()


@dataclass(frozen=True, slots=True)
class Setup:
    """sizes: engines of each pool. blocks: of an engine's cache. token_s: of prefill. scale: see ``Trace``.

    depth_tokens: of a prompt's beginning. room_s: of work, up to which an engine gets more. choice: how many pools are
    asked, in the routers' order or at random.
    """

    sizes: tuple[int, ...]
    blocks: int
    token_s: float
    scale: float
    depth_tokens: int = 32
    room_s: float = 0.3
    patience: float = 1.0
    homes: int = HOMES
    at_random: bool = False
    seed: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """A request. size_s: of what its best engine would compute. computed_s: booked for it, then spent on it."""

    at_s: float
    session: int
    chain: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    size_s: float = 0.0
    computed_s: float = 0.0

    @property
    def matchable(self) -> int:
        """The blocks of the prompt that may be matched: the engine always computes the last token."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS


class Answer(NamedTuple):
    """A pool's answer. engine: None if the request would have to wait."""

    pool: int
    engine: int | None
    offer: Offer


class Served(NamedTuple):
    at_s: float
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Engine:
    """cache: blocks, the longest unused first. making: how many of its requests make a block."""

    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    making: dict[int, int] = field(default_factory=dict)
    line: deque[Job] = field(default_factory=deque)
    job: Job | None = None
    busy_s: float = 0.0


class Engines:
    """All engines, with the data for decisions. ready_s: when each has done all its work."""

    def __init__(self, number: int, setup: Setup) -> None:
        self._setup = setup
        self._engines = [Engine() for _ in range(number)]
        self._share, self._share_at = np.zeros(number), np.zeros(number)
        self._holders: dict[int, int] = {}  # of each block, as bits
        self.ready_s = np.zeros(number)
        self.served: list[Served] = []  # in the order in which engines began them

    @property
    def busy_s(self) -> list[float]:
        return [engine.busy_s for engine in self._engines]

    def wait_s(self, pool: slice, now: float) -> Floats:
        return np.maximum(self.ready_s[pool] - now, 0.0)

    def share(self, pool: slice, now: float) -> Floats:
        """The share of its time that each engine of a pool spent in prefill lately."""
        return np.minimum(self._share[pool] * np.exp((self._share_at[pool] - now) / SHARE_S), 1.0)

    def matched(self, job: Job, pool: slice) -> Floats:
        """The tokens of a prompt that each engine of a pool holds or is about to hold."""
        size = pool.stop - pool.start
        found, left, depth = np.zeros(size), (1 << size) - 1, 0
        for depth, block in enumerate(job.chain[: job.matchable]):
            held = self._holders.get(block, 0) >> pool.start & left
            if held != left:
                _put(found, left & ~held, depth)
                left = held
                if not left:
                    return found
        _put(found, left, job.matchable)
        return found

    def book(self, job: Job, number: int, matched: float, now: float) -> float | None:
        """Give a request to an engine. Returns as ``begin``."""
        engine, bit = self._engines[number], 1 << number
        job.computed_s = self._setup.token_s * max(1.0, job.prompt_tokens - matched)
        self.ready_s[number] = max(self.ready_s[number], now) + job.computed_s
        engine.line.append(job)
        for block in job.chain:
            engine.making[block] = engine.making.get(block, 0) + 1
            self._holders[block] = self._holders.get(block, 0) | bit
        return self.begin(number, now)

    def begin(self, number: int, now: float) -> float | None:
        """Let an engine begin its next request. Returns when that is computed; None if it is busy or has none."""
        engine = self._engines[number]
        if engine.job or not engine.line:
            return None
        job = engine.job = engine.line.popleft()
        held = 0
        for block in job.chain[: job.matchable]:
            if block not in engine.cache:
                break
            engine.cache.move_to_end(block)
            held += 1
        spent_s = self._setup.token_s * (job.prompt_tokens - held * BLOCK_TOKENS)
        self.ready_s[number] += spent_s - job.computed_s
        job.computed_s = spent_s
        engine.busy_s += spent_s
        self.served.append(Served(job.at_s, now + spent_s - job.at_s, job.prompt_tokens, held * BLOCK_TOKENS))
        return now + spent_s

    def end(self, number: int, now: float) -> Job:
        """The engine has computed its request: the prompt's blocks are in its cache."""
        engine, bit = self._engines[number], 1 << number
        job, engine.job = engine.job, None
        assert job is not None
        for block in reversed(job.chain):  # ends are evicted before beginnings
            engine.cache[block] = None
            engine.cache.move_to_end(block)
            engine.making[block] -= 1
            if not engine.making[block]:
                del engine.making[block]
        while len(engine.cache) > self._setup.blocks:
            block, _ = engine.cache.popitem(last=False)
            if block not in engine.making:
                self._holders[block] &= ~bit
                if not self._holders[block]:
                    del self._holders[block]
        decay = exp((self._share_at[number] - now) / SHARE_S)
        self._share[number] = self._share[number] * decay + job.computed_s / SHARE_S
        self._share_at[number] = now
        return job


def _put(found: Floats, engines: int, blocks: int) -> None:
    """Note that the engines of these bits hold ``blocks`` blocks."""
    if not engines or not blocks:
        return
    if engines.bit_count() <= 8:
        while engines:
            lowest = engines & -engines
            found[lowest.bit_length() - 1] = blocks * BLOCK_TOKENS
            engines ^= lowest
        return
    raw = np.frombuffer(engines.to_bytes((len(found) + 7) // 8, "little"), dtype=np.uint8)
    found[np.unpackbits(raw, count=len(found), bitorder="little") > 0] = blocks * BLOCK_TOKENS


class ExactPools:
    """The engines of one served model in pools. ``run`` plays arrivals."""

    def __init__(self, setup: Setup) -> None:
        self.engines = Engines(sum(setup.sizes), setup)
        self._setup = setup
        edges = [0, *accumulate(setup.sizes)]
        self._pools = [slice(first, end) for first, end in pairwise(edges)]
        self._pool_of = [pool for pool, size in enumerate(setup.sizes) for _ in range(size)]
        self._number = {f"m#{pool + 1}": pool for pool in range(len(setup.sizes))}
        self._weights = {tag: setup.sizes[pool] for tag, pool in self._number.items()}
        self._lines: list[list[Job]] = [[] for _ in setup.sizes]  # requests that wait for an engine with room
        self._beginnings = Beginnings()
        self._random = random.Random(setup.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0

    # ------------------------------------------------ the run

    def run(self, arrivals: Sequence[tuple[int, Arrival]], blocks: Blocks) -> list[Served]:
        """Play arrivals, each with its copy, in the order of time; return them as they were served."""
        following: dict[int, list[tuple[int, Arrival]]] = {}
        for copy, arrival in reversed(arrivals):
            if arrival.think_s is not None:
                following.setdefault(arrival.session, []).append((copy, arrival))
        coming = deque(arrival for arrival in arrivals if arrival[1].think_s is None)
        self._following, self._blocks = following, blocks
        while coming or self._events:
            if coming and (not self._events or coming[0][1].at_s <= self._events[0][0]):
                copy, arrival = coming.popleft()
                self._now = arrival.at_s
                self._arrive(copy, arrival)
            else:
                self._now, _, event = heapq.heappop(self._events)
                event()
        return self.engines.served

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _arrive(self, copy: int, arrival: Arrival) -> None:
        chain = self._blocks.chain(arrival.prompt, copy)
        job = Job(self._now, arrival.session, chain, len(arrival.prompt), arrival.output_tokens)
        answer = self._choose(job)
        matched_tokens = answer.offer.matched_tokens
        if answer.engine is not None:
            self._book(job, answer.engine, matched_tokens)
        else:
            job.size_s = self._setup.token_s * (job.prompt_tokens - matched_tokens)
            self._lines[answer.pool].append(job)
            self._take_turns(answer.pool)

    def _book(self, job: Job, number: int, matched: float) -> None:
        self._end_at(number, self.engines.book(job, number, matched, self._now))

    def _end_at(self, number: int, when: float | None) -> None:
        if when is not None:
            self._at(when, lambda: self._end(number))

    def _end(self, number: int) -> None:
        job = self.engines.end(number, self._now)
        self._end_at(number, self.engines.begin(number, self._now))
        self._take_turns(self._pool_of[number])
        if after := self._following.get(job.session):
            copy, arrival = after.pop()
            answered = self._now + DECODE_S * job.output_tokens * self._setup.scale
            self._at(answered + (arrival.think_s or 0.0), lambda: self._arrive(copy, arrival))

    # ------------------------------------------------ between pools

    def _choose(self, job: Job) -> Answer:
        """The cheapest answer of the pools that are asked, as in ``routing/pool_choice``."""
        if len(self._pools) == 1:
            return self._ask(job, 0)
        answers = [self._ask(job, pool) for pool in self._in_order(job)[: self._setup.homes]]
        priced = prices([answer.offer for answer in answers], RULE.stay)
        return answers[priced.index(min(priced))]

    def _in_order(self, job: Job) -> list[int]:
        if self._setup.at_random:
            return self._random.sample(range(len(self._pools)), len(self._pools))
        packed = struct.pack(f">{job.matchable}Q", *job.chain[: job.matchable])
        chain = (Chain(0, BLOCK_TOKENS, packed),)
        key = self._beginnings.key(chain, self._setup.depth_tokens, len(self._pools)) or self._random.randbytes(8)
        return [self._number[tag] for tag in in_order(key, self._weights)]

    # ------------------------------------------------ inside a pool

    def _ask(self, job: Job, number: int) -> Answer:
        pool, line = self._pools[number], self._lines[number]
        wait_s, matched = self.engines.wait_s(pool, self._now), self.engines.matched(job, pool)
        at, cost_s = self._chosen(job, self._costs(job, pool, wait_s, matched), matched)
        token_s = self._setup.token_s
        own_s = token_s * (job.prompt_tokens - matched)
        if not line and wait_s[at] <= self._setup.room_s:
            offer = Offer(cost_s, turn_s(float(wait_s[at]), float(own_s[at])), int(matched[at]), token_s)
            return Answer(number, pool.start + at, offer)
        near = int(
            (self._wait_price(self.engines.share(pool, self._now)) * wait_s + own_s).argmin()
        )  # as decide/wait_turn.lua has it
        turn = turn_s(float(wait_s[near]) + sum(request.size_s for request in line) / len(wait_s), float(own_s[near]))
        return Answer(number, None, Offer(None, turn, int(matched[near]), token_s))

    def _wait_price(self, share: Floats) -> float:
        """The price of a second of waiting: see lua/parts/shared/turns.lua."""
        return max(1 - float(share.mean()), LEAST_WAIT_PRICE)

    def _costs(self, job: Job, pool: slice, wait_s: Floats, matched: Floats) -> Floats:
        """The costs of engines, as in lua/parts/decide/cost_rule.lua."""
        token_s, most = self._setup.token_s, matched.max()
        weight = RULE.lambda_ if wait_s.min() > 0 else 1.0
        costs: Floats = RULE.wait_price * wait_s + token_s * weight * (job.prompt_tokens - matched)
        if most and len(matched) > 1:
            second = np.partition(matched, -2)[-2]
            costs += (RULE.stay - 1) * token_s * (most - np.maximum(matched, second))
        return costs + RULE.place * token_s * job.prompt_tokens * self.engines.share(pool, self._now)

    def _chosen(self, job: Job, costs: Floats, matched: Floats) -> tuple[int, float]:
        """The engine of the least cost, and its cost. Of equals, an engine that holds most."""
        least = float(costs.min())
        near = np.flatnonzero(costs <= least + TIE * job.prompt_tokens * self._setup.token_s)
        steps = np.floor(matched[near] / (TIE * job.prompt_tokens))
        near = near[steps == steps.max()]
        return int(near[self._random.randrange(len(near))]), least

    def _take_turns(self, number: int) -> None:
        """Give engines with room to requests that wait, small ones first (lua/parts/shared/turns.lua)."""
        line, setup, pool = self._lines[number], self._setup, self._pools[number]
        if not line or self.engines.wait_s(pool, self._now).min() > setup.room_s:
            return
        line.sort(key=lambda job: job.at_s + setup.patience * job.size_s)
        wait_s = self.engines.wait_s(pool, self._now)
        share = self.engines.share(pool, self._now)
        wait_price = self._wait_price(share)
        ahead_s = wait_price * wait_s
        left: list[Job] = []
        for at, job in enumerate(line):
            full = wait_s > setup.room_s
            if full.all() or len(left) >= LOOKED_AT:
                left += line[at:]
                break
            matched = self.engines.matched(job, pool)
            own_s = setup.token_s * (job.prompt_tokens - matched)
            job.size_s = float(own_s.min())
            costs = ahead_s + own_s
            near, free = int(costs.argmin()), int(np.lexsort((share, np.where(full, np.inf, costs)))[0])
            more = max(1 - 2 * float(share[free]), wait_price) / wait_price - 1  # by the work that the engine has to do
            saved_s = costs[free] - costs[near] + more * (ahead_s[free] - ahead_s[near])
            if saved_s > TIE * job.prompt_tokens * setup.token_s:
                ahead_s[near] += wait_price * job.size_s  # the request waits for that engine
                left.append(job)
                continue
            ruled = np.where(full, np.inf, self._costs(job, pool, wait_s, matched))
            best, _ = self._chosen(job, ruled, matched)
            self._book(job, pool.start + best, matched[best])
            wait_s[best] = self.engines.ready_s[pool.start + best] - self._now
            ahead_s[best] = wait_price * wait_s[best]
        self._lines[number] = left


def simulate(setup: Setup, arrivals: Sequence[tuple[int, Arrival]], blocks: Blocks) -> tuple[list[Served], list[float]]:
    """Play arrivals. Returns them as they were served, and the share of time that each pool was busy."""
    played = ExactPools(setup)
    served = played.run(arrivals, blocks)
    ends, busy_s = max(request.at_s for request in served), iter(played.engines.busy_s)
    return served, [sum(next(busy_s) for _ in range(size)) / size / ends for size in setup.sizes]
