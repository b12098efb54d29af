"""Scenarios of tests, in which the load or the members of a fleet change, each with arrivals of its own.

Engines need 8e-4 s for a token, and prompts have 350 tokens on average, so that an engine with an empty cache serves
3.5 requests a second. ``seconds`` scales a scenario. Each returns figures.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.bench.virtual_figures import figures, tails
from tests.bench.virtual_fleet import Cluster, Plan, play
from tests.bench.virtual_plans import DIRECT, WORKLOADS, engine, merged, steady

from warmfleet.fleet import LoadRow
from warmfleet_loadtest.measuring.figures import over_mean
from warmfleet_loadtest.simulator.scheduler import Request, hash_blocks
from warmfleet_loadtest.traces import trace as traces
from warmfleet_loadtest.traces.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.simulator.virtual_clock import Answered

COSTS = WORKLOADS["generated"].costs
ONE = engine(COSTS, 1_024)
PER_ENGINE = 3.5  # requests per second that keep one engine busy
HOT_BLOCKS = 100
HOT_SHARE = 0.6
BIN_S = 2.0  # in which an engine has a share of the requests


# ---------------------------------------------------------------- a hot prefix


async def hot(url: str, plan: Plan, seconds: float = 120.0) -> dict[str, float]:
    """From 1/6 to 1/2 of the time, 60 % of the requests begin with the same 100 blocks; before and after that, none."""
    engines = len(plan.engines)
    begin, end, rate = seconds / 6, seconds / 2, 0.55 * PER_ENGINE * engines
    trace, prefix = _hot_trace(rate, (begin, end, seconds), plan.seed)
    key, holders = Request("", prefix, 1, [0]), [(0.0, 0.0)]
    hash_blocks(plan.engines[0].scheme, key)

    async def watch(cluster: Cluster, now: float) -> None:
        held: Any = cluster.store.sync.scard(cluster.fleets[0].keys.block(key.hashes[-1]))
        holders.append((now, float(held)))

    played = await play(url, trace, replace(plan, speed=1.0, watch=watch, watch_s=0.5))
    during = [held for at, held in holders if (begin + end) / 2 <= at < end]
    level = statistics.median(during)
    spread = next((at - begin for at, held in holders if at > begin and held >= 0.9 * level), end - begin)
    left = next((at - end for at, held in holders if at > end and held <= level / 2), seconds - end)
    told = {"holders": level, "holders_max": max(held for _, held in holders), "holders_end": holders[-1][1]}
    told |= {"spread_s": spread, "contracted_to_half_s": left, "holders_before_end": during[-1]}
    for name, since, until in (("before", begin / 3, begin), ("first", begin, begin + 5), ("during", begin, end)):
        served = [request for request in played.served if since <= request.at_s < until]
        told |= {f"{what[:-2]}_{name}_s": value for what, value in tails(served).items()}
    of_hot = [request.engine for request in played.served if request.session >= DIRECT]
    told["share_of_busiest"] = max(of_hot.count(number) for number in range(engines)) / len(of_hot)
    return told


def _hot_trace(rate: float, times: tuple[float, float, float], seed: int) -> tuple[Trace, Sequence[int]]:
    """Return the arrivals. Hot requests have sessions from DIRECT on, to tell them apart; none of them is direct."""
    begin, end, seconds = times
    generator = random.Random(seed)
    prefix = [token for number in range(HOT_BLOCKS) for token in traces.block((1 << 41) + number)]
    normal = steady(rate, seconds, seed)
    kept, heated = [], []
    for arrival in normal.arrivals:
        is_hot = begin <= arrival.at_s < end and generator.random() < HOT_SHARE
        if is_hot:
            tail = arrival.prompt[: 8 * traces.BLOCK_TOKENS]
            heated.append(replace(arrival, session=DIRECT + arrival.session, prompt=[*prefix, *tail]))
        else:
            kept.append(arrival)
    return merged(Trace("normal", tuple(kept)), Trace("hot", tuple(heated))), prefix


# ---------------------------------------------------------------- engines that differ


async def speeds(url: str, plan: Plan, seconds: float = 60.0) -> dict[str, float]:
    """Four engines of speeds 1:1:2:4, which the fleet has to learn, at 75 % of their capacity."""
    factors = (1.0, 1.0, 2.0, 4.0)
    engines = tuple(engine(COSTS.scaled(1 / factor), 1_024) for factor in factors)
    trace = steady(0.75 * PER_ENGINE * sum(factors), seconds, plan.seed)
    played = await play(url, trace, replace(plan, engines=engines, speed=1.0))
    packed: Any = played.cluster.rows
    learned = [LoadRow.unpack(packed[worker.worker_id]).speed_tps for worker in played.cluster.workers]
    work = [worker.engine.work_tokens for worker in played.cluster.workers]
    busy = [worker.engine.busy_s for worker in played.cluster.workers]
    found = figures(played)
    told = {name: found[name] for name in ("busy", "ttft_mean_s", "ttft_p99_s")} | {
        "busy_max_over_mean": over_mean(busy)
    }
    for number, factor in enumerate(factors):
        told[f"learned_{number}_tps"] = learned[number]
        told[f"learned_{number}_over_slowest"] = learned[number] / learned[0]
        told[f"work_share_{number}"] = work[number] / sum(work)
        told[f"fair_share_{number}"] = factor / sum(factors)
    return told


# ---------------------------------------------------------------- load that the fleet did not route


async def foreign(url: str, plan: Plan, seconds: float = 120.0) -> dict[str, float]:
    """Requests past the fleet take half of an engine's capacity, of four engines; a run for each kind of report."""
    engines = plan.engines[:4]
    direct = steady(0.5 * PER_ENGINE, seconds, plan.seed + 77, session=DIRECT)
    trace = merged(steady(0.58 * PER_ENGINE * 4, seconds, plan.seed), direct)
    past = {arrival.session: 0 for arrival in direct.arrivals}
    told: dict[str, float] = {}
    for known in ("reported", "booked", "no"):
        changed = replace(plan, engines=engines, speed=1.0, direct=past, known=known)
        played = await play(url, trace, changed)
        found = figures(played)
        told |= {f"{name}_{known}": found[name] for name in ("ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "busy")}
    told["p99_reported_over_booked"] = told["ttft_p99_s_reported"] / told["ttft_p99_s_booked"]
    told["mean_reported_over_booked"] = told["ttft_mean_s_reported"] / told["ttft_mean_s_booked"]
    return told


# ---------------------------------------------------------------- an engine that joins


async def join(url: str, plan: Plan, seconds: float = 80.0) -> dict[str, float]:
    """Conversations keep all engines but one 75 % busy. That one joins in the middle, with an empty cache."""
    last, at_s = len(plan.engines) - 1, seconds / 2
    speed = 0.75 * PER_ENGINE * last / 3.0
    trace = traces.generate(round(3.0 * speed * seconds), plan.seed)
    played = await play(url, trace, replace(plan, speed=speed, joins_s={last: at_s}))
    shares = _shares(played.served, last, seconds)
    after = [share for at, share in shares if at_s <= at < at_s + 10]
    told = {"fair_share": 1 / (last + 1), "share_first_10s": statistics.fmean(after), "share_max_2s": max(after)}
    told["share_last"] = statistics.fmean(share for at, share in shares if at >= at_s + 0.25 * seconds)
    spans = {"before": (at_s - 20, at_s), "after": (at_s, at_s + 20)}
    for name, (since, until) in spans.items():
        served = [request for request in played.served if since <= request.at_s < until]
        told |= {f"{what[:-2]}_{name}_s": value for what, value in tails(served).items()}
    own = [request for request in played.served if request.engine == last and request.at_s < at_s + 20]
    told |= {f"{what[:-2]}_joiner_s": value for what, value in tails(own).items()}
    return told


def _shares(served: Sequence[Answered], number: int, seconds: float) -> list[tuple[float, float]]:
    """Return the share of the requests of each BIN_S that engine ``number`` got."""
    shares = []
    for at in (BIN_S * index for index in range(int(seconds / BIN_S))):
        found = [answered.engine == number for answered in served if at <= answered.at_s < at + BIN_S]
        shares.append((at, statistics.fmean(found) if found else 0.0))
    return shares
