"""The runs of the bench ``tlru``: plain values that another process can read, and the figures that come back."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvloop
from tests.bench.tail_conversations import ALPHA_MS, turns
from tests.bench.tail_policies import EndedLru, EndedTailLru, Lru, PluginLru, TailBelady, TailLru, ThresholdLru
from tests.bench.virtual_figures import figures
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import WORKLOADS, arrivals, engine
from tests.bench.virtual_store import private_server

from warmfleet_loadtest.measuring.figures import quantile
from warmfleet_loadtest.simulator.virtual_clock import Clock, VirtualEngine, VirtualFleet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.simulator.scheduler import Request
    from warmfleet_loadtest.traces.trace import Arrival

PAPER_XI_MS = (50, 100, 150, 200, 300)
OBJECTIVE_MS = 200.0  # a turn that takes longer misses the objective
LRU, AUTO = "LRU", "auto"
WARM_UP = 0.1  # the share of a trace's requests that is left out

Figures = dict[str, float]
Cells = dict[str, Figures]  # by policy


@dataclass(frozen=True, slots=True)
class ConversationRun:
    """The stochastic conversation model under every policy. capacity: tokens."""

    gap_s: float
    capacity: int
    seed: int
    turns: int

    def run(self) -> Cells:
        played, blocks = turns(self.turns, self.seed, self.gap_s), self.capacity // 16
        policies: dict[str, Lru] = {LRU: Lru(blocks), "Threshold-LRU": ThresholdLru(blocks)}
        policies |= {f"T-LRU {xi} ms": TailLru(blocks, round(xi / ALPHA_MS)) for xi in PAPER_XI_MS}
        tokens = round(OBJECTIVE_MS / ALPHA_MS)
        policies["knows ended"] = EndedLru(blocks)
        policies["knows ended, T-LRU 200 ms"] = EndedTailLru(blocks, tokens)
        policies["tail-optimised Belady"] = TailBelady(blocks, tokens)
        policies[AUTO] = PluginLru(blocks, AUTO)
        made = {}
        for name, policy in policies.items():
            ttft_ms = [ALPHA_MS * policy.serve(turn) for turn in played]
            made[name] = _figures(ttft_ms) | {"misses": float(sum(ttft > OBJECTIVE_MS for ttft in ttft_ms))}
        return made


@dataclass(frozen=True, slots=True)
class TraceRun:
    """A trace through one engine under several targets. blocks: of the cache. speed: trace seconds per second."""

    workload: str
    blocks: int
    speed: float
    rows: int | None
    targets: Sequence[str]

    def run(self) -> Cells:
        names = {"": LRU, AUTO: AUTO}
        return {names.get(target, f"T-LRU {target} s"): self._play(target) for target in self.targets}

    def _play(self, target: str) -> Figures:
        costs, clock = WORKLOADS[self.workload].costs, Clock()
        config = replace(engine(costs, self.blocks, "step", self.speed), ttft_target=target)
        one = VirtualEngine(config.scheduler(clock=lambda: clock.now), costs)
        fleet = VirtualFleet([one], _OnlyEngine(), self.speed, clock)
        served = sorted(asyncio.run(fleet.run(arrivals(self.workload, self.rows))), key=lambda answered: answered.at_s)
        counted = served[int(WARM_UP * len(served)) :]
        prompt, cached = sum(each.prompt_tokens for each in counted), sum(each.cached_tokens for each in counted)
        return _figures([each.ttft_s for each in counted]) | {
            "uncached": prompt - cached,
            "uncached_p90": quantile(sorted(each.prompt_tokens - each.cached_tokens for each in counted), 0.9),
            "hit_ratio": cached / prompt,
            "busy": one.busy_s / max(each.at_s for each in served),
        }


@dataclass(frozen=True, slots=True)
class FleetRun:
    """A trace through eight engines behind the real scripts, with and without T-LRU. blocks: of each engine."""

    workload: str
    blocks: int
    speed: float
    rows: int | None
    policies: Sequence[str]
    seed: int
    target: str = AUTO
    engines: int = 8

    def run(self) -> Cells:
        return {
            f"{policy}{', T-LRU' if target else ''}": self._play(policy, target)
            for policy in self.policies
            for target in ("", self.target)
        }

    def _play(self, policy: str, target: str) -> Figures:
        config = engine(WORKLOADS[self.workload].costs, self.blocks, "step", self.speed)
        plan = Plan((replace(config, ttft_target=target),) * self.engines, policy, speed=self.speed, seed=self.seed)
        with private_server() as url:
            played = uvloop.run(play(url, arrivals(self.workload, self.rows), plan))
        served = sorted(played.served, key=lambda answered: answered.at_s)
        told = figures(played, WARM_UP)
        made = _figures([each.ttft_s for each in served[int(WARM_UP * len(served)) :]])
        return made | {name: told[name] for name in ("hit_ratio", "busy", "foreseen")}


class _OnlyEngine:
    """The router of a fleet of one."""

    async def choose(self, request: Request, arrival: Arrival, now: float) -> int:
        return 0

    async def started(self, request: Request, engine: int, now: float) -> None: ...
    async def finished(self, request: Request, engine: int, now: float) -> None: ...


def _figures(ttft: Sequence[float]) -> Figures:
    ordered = sorted(ttft)
    return {"mean": statistics.fmean(ordered)} | {f"p{q}": quantile(ordered, q / 100) for q in (50, 90, 95, 99)}


def mean_of(runs: Sequence[Cells]) -> Cells:
    """Return each figure of each policy as its mean over runs that differ in their seed only."""
    return {
        policy: {name: statistics.fmean(run[policy][name] for run in runs) for name in cell}
        for policy, cell in runs[0].items()
    }


def changes(runs: Sequence[Cells], base: str) -> Cells:
    """Return the change of each figure against the policy ``base`` in %, as its mean over runs.

    ``…_sd`` is its standard deviation, if there are several runs.
    """
    made: Cells = {}
    for policy, cell in runs[0].items():
        found: Figures = {}
        for name in cell:
            values = [100 * (run[policy][name] / run[base][name] - 1) if run[base][name] else 0.0 for run in runs]
            found[name] = round(statistics.fmean(values), 2)
            if len(values) > 1:
                found[f"{name}_sd"] = round(statistics.stdev(values), 2)
        made[policy] = found
    return made
