"""Measures the queue's longest waits: prompts of 100,000 tokens beside short ones, and two tenants of unequal demand.

No prompt shares anything with another, so all engines are the same to a request, and its size is known.

The bound on a wait: nobody is overtaken by requests that come later than patience times its own prefill after it. So a
request waits no longer than that, and then as long as in a line of first come, first served in which it had come so
much later. Engines do not interrupt a prefill: with n of them both lines may be late by (n - 1) / n of the longest one.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import SCHEME, merged

from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.measuring.figures import quantile
from warmfleet_loadtest.simulator.scheduler import Limits
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.traces.trace import Arrival, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet.fleet import QueueLimits

ENGINES, REPLICAS = 4, 4
SPEED_TPS = 5_000  # of each engine
LONG, SHORT = 100_000, 1_000  # tokens; of SHORT the mean
LONG_SHARE = 0.5  # of the work
LITTLE, MUCH = 1.3, 13.0  # demand of two tenants over the half of what the engines can do
TENANT_TOKENS = 2_000  # of each of their prompts
PLACES = 64  # in the queue of these tenants, in each pool
HEAD_TOKENS = 64  # with which a tenant's prompts begin where its home pools are to be the same: twice the depth


def _engines(count: int = ENGINES) -> tuple[EngineConfig, ...]:
    limits = Limits(max_model_len=131_072)
    return (EngineConfig(SCHEME, limits, 16_384, StepCosts(0.0, 1 / SPEED_TPS), "fcfs", 0.01),) * count


def _arrivals(
    rate: float, seconds: float, seed: int, first: int, sizes: tuple[int, float], head: Sequence[int] = ()
) -> Trace:
    """Return Poisson arrivals. sizes: mean tokens of a prompt, and sigma of the lognormal distribution. head: with
    which all prompts begin.
    """
    generator, made = random.Random(seed), list[Arrival]()
    mean, sigma = sizes
    now = generator.expovariate(rate)
    while now < seconds:
        session = first + len(made)
        size = round(mean * generator.lognormvariate(-sigma * sigma / 2, sigma)) if sigma else mean
        own = [256 + session // 4_096, 256 + session % 4_096]
        prompt = [*head, *own, *[300] * (max(30, size) - len(head))]
        made.append(Arrival(now, session, prompt, 8))
        now += generator.expovariate(rate)
    return Trace("steady", tuple(made))


# ---------------------------------------------------------------- long prompts beside short ones


@dataclass(slots=True)
class FirstCome:
    """A line of first come, first served before equal engines."""

    free: list[float]  # when each engine will be free, as a heap

    def wait(self, at: float) -> float:
        return max(0.0, self.free[0] - at)

    def take(self, at: float, seconds: float) -> None:
        heapq.heapreplace(self.free, max(at, self.free[0]) + seconds)


def bounds_s(came: Sequence[tuple[float, float]], patience: float, engines: int) -> tuple[list[float], list[float]]:
    """Return for each request (arrival, seconds of its prefill) its wait in a line of first come, first served, and the
    bound on its wait in the fleet's queue.
    """
    line, waits, told = FirstCome([0.0] * engines), [], []
    late_s = 2 * (engines - 1) / engines * max(seconds for _, seconds in came)
    for number, (at, seconds) in enumerate(came):
        waits.append(line.wait(at))
        later, until = FirstCome(list(line.free)), at + patience * seconds
        for other_at, other_s in came[number + 1 :]:
            if other_at > until:
                break
            later.take(other_at, other_s)
        told.append(patience * seconds + later.wait(until) + late_s)
        line.take(at, seconds)
    return waits, told


async def starve(
    url: str, queue: QueueLimits, *, long: int = LONG, busy: float = 0.9, seconds: float = 600.0, seed: int = 0
) -> dict[str, float]:
    """Return figures of requests that all belong to one tenant, half of their work in prompts of ``long`` tokens.

    ``starved_worst_over_bound`` is of all requests. The figures of long prompts are their times to first token over
    those of first come, first served: the sums, the longest, and the worst ratio of a single one.
    """
    rate = busy * ENGINES * SPEED_TPS
    large = _arrivals(LONG_SHARE * rate / long, seconds, seed, 0, (long, 0.0))
    small = _arrivals((1 - LONG_SHARE) * rate / SHORT, seconds, seed + 1, len(large.arrivals), (SHORT, 0.8))
    trace = merged(large, small)
    played = await play(url, trace, Plan(_engines(), replicas=REPLICAS, speed=1.0, seed=seed, queue=queue))
    came = [(arrival.at_s, len(arrival.prompt) / SPEED_TPS) for arrival in trace.arrivals]
    first_come, bound = bounds_s(came, queue.patience, ENGINES)
    place = {arrival.session: number for number, arrival in enumerate(trace.arrivals)}
    ttft = {place[request.session]: request.ttft_s for request in played.served}
    if len(ttft) < len(came):
        raise RuntimeError(f"{len(came) - len(ttft)} of {len(came)} requests were refused")
    of_long = [number for number, arrival in enumerate(trace.arrivals) if len(arrival.prompt) > long]
    mine = sorted(ttft[number] for number in of_long)
    theirs = sorted(first_come[number] + came[number][1] for number in of_long)
    ratios = [ttft[number] / (first_come[number] + came[number][1]) for number in of_long]
    return {
        "starved_worst_over_bound": max((ttft[number] - came[number][1]) / bound[number] for number in ttft),
        "long_mean_over_first_come": sum(mine) / sum(theirs),
        "long_worst_over_first_come": mine[-1] / theirs[-1],
        "long_worst_ratio": max(ratios),
        "long_worst_s": mine[-1],
        "all_mean_over_first_come": sum(ttft.values()) / sum(first_come[n] + came[n][1] for n in ttft),
        "short_p99_s": quantile(sorted(ttft[number] for number in ttft if number not in set(of_long)), 0.99),
        "requests": len(came),
    }


# ---------------------------------------------------------------- two tenants


async def tenants(
    url: str, queue: QueueLimits, *, pools: int = 1, alike: bool = False, seconds: float = 120.0, seed: int = 0
) -> dict[str, float]:
    """Return the shares of two tenants, of which the first wants ten times as much as the second.

    ``tenants_work_ratio``: the work done for it, over the other's. Either of them alone has more than half of what the
    engines can do. The first sixth of the time is not counted. pools: of the model; several have two engines each.
    alike: all prompts of the tenant with less demand begin alike, so it has two home pools.
    """
    engines = _engines(ENGINES if pools == 1 else 2 * pools)
    half, size = len(engines) * SPEED_TPS / 2 / TENANT_TOKENS, (TENANT_TOKENS, 0.0)
    little = _arrivals(LITTLE * half, seconds, seed, 0, size, [7] * HEAD_TOKENS if alike else ())
    much = _arrivals(MUCH * half, seconds, seed + 1, len(little.arrivals), size)
    of_much = {arrival.session for arrival in much.arrivals}
    plan = Plan(engines, replicas=REPLICAS, speed=1.0, seed=seed, queue=replace(queue, tickets=PLACES))
    plan = replace(plan, tenants=dict.fromkeys(of_much, b"another "), pools=(2,) * pools if pools > 1 else ())
    played = await play(url, merged(little, much), plan)
    done = {True: 0, False: 0}
    for request in played.served:
        if seconds / 6 <= request.at_s + request.ttft_s < seconds:
            done[request.session in of_much] += request.prompt_tokens
    return {"tenants_work_ratio": done[True] / done[False]}
