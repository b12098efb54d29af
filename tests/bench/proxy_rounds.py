"""The rounds of ``bench_proxy``: every router gets the same burst of requests of each kind, and figures are medians."""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.bench.output import say
from tests.bench.proxy_client import at_rate, burst_of, connected, in_turn, request
from tests.bench.proxy_requests import (
    KINDS,
    LONG_CHUNKS,
    PLAIN,
    STREAM_CHUNKS,
    STREAMED,
    Kind,
    body,
    known_large,
    known_talk,
)
from tests.bench.proxy_routers import Fleet, OtherWork, Router, cpu_s

from warmfleet_loadtest.stacks.processes import StackError

if TYPE_CHECKING:
    from collections.abc import Sequence

SATURATING = Kind("max", PLAIN[0].messages, 4.0, together=48)
KNOWN_S = 60.0  # until the index must hold the prompts that the engines have computed
LATENCY_SHARE = 0.5  # of a router's most requests a second, while latency is measured
LATENCY_S = 3.0
WARM_UP_S = 0.5  # of each measurement of latency
LATENCY_TRIES = 5
QUIET = 0.05  # of one core: other programs use less while latency is measured
CHUNK = "chunk"  # the part of a run that compares streams of few and of many chunks


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of a measurement.

    count: requests of a burst of the smallest kind. rest_s: how long routers rest. idle_engines: of the fleet whose
    routers show what they use at rest; 0 = that is not measured. profile_s: CPU time that is sampled of each kind.
    known: prompts that the engines know before the rounds. only: the parts to measure (see ``parser``); empty = all.
    """

    bursts: int
    count: int
    rest_s: float
    engines: int
    idle_engines: int
    profile_s: float
    known: int
    only: frozenset[str] = frozenset()

    def has(self, part: str) -> bool:
        return not self.only or part in self.only

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that are measured."""
        return [kind for kind in (*KINDS, SATURATING) if self.has(CHUNK if kind.gap_ms else kind.key)]

    def requests(self, kind: Kind) -> int:
        """The number of requests in a burst of this kind."""
        return max(1, int(self.count * kind.share))


@dataclass
class Measured:
    """The results of a router: by key, a value for each round. tokens: of a prompt, by kind."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, value: float) -> None:
        self.rounds.setdefault(key, []).append(value)

    def median(self, key: str) -> float:
        return statistics.median(self.rounds[key])


class Rounds:
    """The measurements over the routers of one fleet, which take turns."""

    def __init__(self, fleet: Fleet, routers: Sequence[Router], plan: Plan) -> None:
        self.fleet, self.routers, self.plan = fleet, routers, plan
        self.measured = defaultdict[str, Measured](Measured)
        self.store_idle = 0.0

    # ------------------------------------------------ before the rounds

    async def rest(self) -> None:
        """Learn what routers and store use without requests."""
        before, started = [cpu_s(router.pids) for router in self.routers], time.perf_counter()
        store = cpu_s(self.fleet.store)
        await asyncio.sleep(self.plan.rest_s)
        lasted = time.perf_counter() - started
        self.store_idle = (cpu_s(self.fleet.store) - store) / lasted
        for router, spent in zip(self.routers, before, strict=True):
            router.idle = (cpu_s(router.pids) - spent) / lasted

    async def make_known(self) -> None:
        """Let each known prompt be computed by an engine, and wait until the index shows all of it."""
        say("giving the engines the prompts that they know already ...")
        inner = self.fleet.engines.inner
        for number, port in enumerate(inner):
            mine = range(number, self.plan.known, len(inner))
            requests = [request(body(make(number))) for number in mine for make in (known_large, known_talk)]
            burst = burst_of(requests)
            await in_turn(burst, await connected(port, burst, 2))
        ours, deadline = self.routers[0], time.monotonic() + KNOWN_S
        while await self.matched_share(ours) < 0.9:
            if time.monotonic() > deadline:
                raise StackError("the index does not learn what the engines hold")

    async def matched_share(self, router: Router) -> float:
        """Of known prompts, the share of the tokens that the router found at the chosen workers."""
        burst = burst_of([request(body(known_large(number))) for number in range(self.plan.known)])
        await in_turn(burst, await connected(router.port, burst, 4))
        matched, tokens = (
            sum(_number(head, name) for head in burst.heads) for name in (b"matched-tokens", b"prompt-tokens")
        )
        return matched / max(1, tokens)

    # ------------------------------------------------ rounds

    async def round(self, number: int) -> None:
        """Give every router a burst of every kind. Each round begins with another router; round 0 is not counted."""
        for kind in self.plan.kinds:
            count = self.plan.requests(kind)
            requests = kind.requests(f"{number} {kind.key.removesuffix('_stream')}{kind.chunks}", count)
            for router in _turn(self.routers, number):
                values = await self.burst(router, kind, requests)
                for key, value in values.items() if number else ():
                    self.measured[router.name].add(f"{key}_{kind.key}", value)
            self.fleet.check()

    async def burst(self, router: Router, kind: Kind, requests: Sequence[bytes]) -> dict[str, float]:
        """Send the requests; returns CPU µs of router and store per request, requests per second, busy share."""
        burst = burst_of(requests)
        idle = await connected(router.port, burst, min(kind.together, len(requests)))
        started, spent, store = time.perf_counter(), cpu_s(router.pids), cpu_s(self.fleet.store)
        await in_turn(burst, idle)
        lasted = time.perf_counter() - started
        spent, store = cpu_s(router.pids) - spent, cpu_s(self.fleet.store) - store
        if not all(router.needs in head for head in burst.heads):
            raise StackError(f"{router.name}: an answer came without a decision of the store")
        if router.needs:
            tokens = [_number(head, b"prompt-tokens") for head in burst.heads]
            self.measured[router.name].tokens[kind.key] = round(statistics.mean(tokens))
        return {
            "us": (spent - router.idle * lasted) / len(requests) * 1e6,
            "redis_us": (store - self.store_idle * lasted) / len(requests) * 1e6,
            "rps": len(requests) / lasted,
            "busy": spent / lasted,
        }

    async def latency(self, number: int) -> None:
        """Half of what saturates each router, at random times: latency beside that of the stubs alone.

        The first requests are not counted: they find every cache of the processor cold. A measurement beside which
        other programs worked is repeated a few times, for its slowest requests only tell of them.
        """
        for router in _turn(self.routers, number):
            measured = self.measured[router.name]
            rate = measured.median("rps_max") * LATENCY_SHARE
            requests = SATURATING.requests(f"latency {number}", max(20, int(rate * min(LATENCY_S, self.plan.rest_s))))
            for _ in range(LATENCY_TRIES):
                mine = (*router.pids, *self.fleet.store, *self.fleet.engine_pids, os.getpid())
                with OtherWork(mine) as others:
                    through = _waits(await at_rate(router.port, requests, rate, number))
                if others.core_share < QUIET:
                    break
            direct = _waits(await at_rate(self.fleet.engines.stubs[0], requests, rate, number))
            measured.add("others", others.core_share)
            for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
                measured.add(name, (quantile(through, share) - quantile(direct, share)) * 1e3)

    async def run(self) -> None:
        await asyncio.sleep(self.plan.rest_s)  # until the work of the start has ended
        await self.rest()
        if any("_warm" in kind.key for kind in self.plan.kinds):
            await self.make_known()
        for number in range(self.plan.bursts + 1):
            say(f"round {number} of {self.plan.bursts} ...")
            await self.round(number)
        for number in range(self.plan.bursts) if self.plan.has(SATURATING.key) else ():
            say(f"latency, {number + 1} of {self.plan.bursts} ...")
            await self.latency(number)

    # ------------------------------------------------ figures

    def figures(self, router: Router) -> dict[str, Any]:
        """Return the figures of one router; ``bench_proxy`` explains the keys."""
        median, plan = self.measured[router.name].median, self.plan
        found: dict[str, Any] = {key: round(median(key)) for key in self.plain_keys}
        found["least"] = {key: round(min(self.measured[router.name].rounds[key])) for key in self.plain_keys}
        if plan.has(CHUNK):
            found["us_stream_18_slow"] = round(median("us_slow_short"))
            found["us_chunk"] = round(statistics.median(self.chunks(router)), 1)
            found["least"]["us_chunk"] = round(min(self.chunks(router)), 1)
        if plan.has(SATURATING.key):
            found |= {"max_rps": round(median("rps_max")), "max_rps_busy": round(median("busy_max"), 2)}
            found |= {name: round(median(name), 2) for name in ("p50_ms", "p99_ms")}
            found["others_core_share"] = round(median("others"), 3)
        return found

    @property
    def plain_keys(self) -> list[str]:
        return [f"us_{kind.key}" for kind in self.plan.kinds if kind in (*PLAIN, *STREAMED)]

    def chunks(self, router: Router) -> list[float]:
        """CPU µs of a chunk, round by round."""
        rounds = self.measured[router.name].rounds
        pairs = zip(rounds["us_slow_short"], rounds["us_slow_long"], strict=True)
        return [(long - short) / (LONG_CHUNKS - STREAM_CHUNKS) for short, long in pairs]

    def ratios(self, peer: Router) -> dict[str, float]:
        """Our figures over those of a peer: medians of the ratios within a round."""
        ours, theirs = (self.measured[router.name].rounds for router in (self.routers[0], peer))
        found = {key: _ratio(ours[key], theirs[key]) for key in self.plain_keys}
        if self.plan.has(CHUNK):
            found["us_chunk"] = _ratio(self.chunks(self.routers[0]), self.chunks(peer))
        return found

    def result(self) -> dict[str, Any]:
        ours, *others = self.routers
        measured = self.measured[ours.name]
        found, kinds = self.figures(ours), [kind.key for kind in self.plan.kinds if kind in PLAIN]
        if PLAIN[0].key in kinds:
            found["redis_us_per_request"] = round(measured.median(f"redis_us_{PLAIN[0].key}"))
        found["redis_us"] = {key: round(measured.median(f"redis_us_{key}")) for key in kinds}
        found["tokens"] = {key: measured.tokens[key] for key in kinds}
        for router in others:
            found[key_of(router)] = self.figures(router) | {"ours_over_theirs": self.ratios(router)}
        return found


def key_of(router: Router) -> str:
    return router.name.replace("-", "_")


def _turn(routers: Sequence[Router], number: int) -> list[Router]:
    first = number % len(routers)
    return [*routers[first:], *routers[:first]]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(statistics.median(our / their for our, their in zip(ours, theirs, strict=True)), 2)


def _waits(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds that requests took, without those of the warm-up; all of them if there are no others."""
    counted = min(sent for sent, _ in spans) + WARM_UP_S
    return [end - sent for sent, end in spans if sent > counted] or [end - sent for sent, end in spans]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.floor(share * len(values)))]


def _number(head: bytes, name: bytes) -> int:
    """The number in our header ``name`` of an answer's head."""
    return int(head.partition(b"x-warmfleet-" + name + b":")[2].partition(b"\r\n")[0] or 0)
