"""Sweep the weights of the cost rule on traces, on virtual clocks: a fleet of engines and one router in one process.

    python -m warmfleet_loadtest.sim_fleet                                  # policies on the trace that is found
    python -m warmfleet_loadtest.sim_fleet --kappa 0,0.5,1,2 --pressure 0,1 --seeds 3
    python -m warmfleet_loadtest.sim_fleet --trace my.jsonl.xz --rows 600 --speed 4 --blocks 1000

The rule is a model of the one in lua/decide.lua, for sweeps only: cache contents are exact, what is booked counts at
once, fill and evictions are known without delay. What it says about weights is to be confirmed on real processes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.costs import load_costs
from warmfleet_loadtest.engine import EngineConfig
from warmfleet_loadtest.replay import quantile
from warmfleet_loadtest.scheduler import Limits
from warmfleet_loadtest.trace import open_trace
from warmfleet_loadtest.virtual import Router, VirtualEngine, VirtualFleet
from warmfleet_worker import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.scheduler import Request
    from warmfleet_loadtest.trace import Trace

EVICTION_WINDOW_S = 5.0  # evictions count since the last heartbeat


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights of the cost rule, as in lua/decide.lua. policy: ``cost``, ``least_loaded``, ``round_robin``."""

    policy: str = "cost"
    lambda_: float = 2.0
    kappa: float = 1.25
    pressure_price: float = 1.0
    decode_s_per_token: float = 1e-7


@dataclass(slots=True)
class Books:
    """What is booked on one engine. Tokens; making: blocks that open requests will make; evicted: (when, in all)."""

    prefill: int = 0
    decode: int = 0
    in_flight: int = 0
    making: Counter[bytes] = field(default_factory=Counter)
    evicted: deque[tuple[float, int]] = field(default_factory=lambda: deque([(0.0, 0)]))


class RuleRouter:
    """One router that knows what engines hold and what it has booked; ``speed_tps``: prefill tokens per second."""

    def __init__(self, engines: Sequence[VirtualEngine], rule: Rule, speed_tps: float, seed: int = 0) -> None:
        self._engines = engines
        self._rule = rule
        self._speed = speed_tps
        self._random = random.Random(seed)
        self._books = [Books() for _ in engines]
        self._booked: dict[Request, int] = {}
        self._turn = 0

    def choose(self, request: Request, now: float) -> int:
        matched = [self._matched(number, request, one.making) for number, one in enumerate(self._books)]
        chosen = self._pick(request, matched, now)
        books = self._books[chosen]
        self._booked[request] = request.prompt_tokens - matched[chosen]
        books.prefill += self._booked[request]
        books.in_flight += 1
        books.making.update(request.hashes)
        return chosen

    def started(self, request: Request, engine: int) -> None:
        self._books[engine].prefill -= self._booked.pop(request)
        self._books[engine].decode += request.prompt_tokens

    def finished(self, request: Request, engine: int) -> None:
        books = self._books[engine]
        books.decode -= request.prompt_tokens
        books.in_flight -= 1
        books.making.subtract(request.hashes)
        for block_hash in request.hashes:
            if books.making[block_hash] <= 0:
                del books.making[block_hash]

    def _held(self, number: int, request: Request) -> int:
        return self._matched(number, request, Counter())

    def _matched(self, number: int, request: Request, making: Counter[bytes]) -> int:
        size = self._engines[number].scheduler.limits.block_tokens
        pool = self._engines[number].scheduler.pool
        depth = 0
        for block_hash in request.hashes[: (request.prompt_tokens - 1) // size]:
            if block_hash not in pool and block_hash not in making:
                break
            depth += size
        return depth

    def _pick(self, request: Request, matched: list[int], now: float) -> int:
        rule, books = self._rule, self._books
        if rule.policy == "round_robin":
            self._turn += 1
            return self._turn % len(books)
        waits = [one.prefill for one in books]
        if rule.policy == "least_loaded":
            rank, bar = [float(wait) for wait in waits], float(min(waits))
            keys = [(0.0, 0.0, one.in_flight, self._random.random()) for one in books]
        else:
            rank = self._costs(request, matched)
            slack = max(self._engines[0].scheduler.limits.block_tokens, 0.02 * request.prompt_tokens)
            bar = min(rank) + max(slack / self._speed, 0.005)
            keys = [
                (self._evictions(number, now), self._fill(number), one.in_flight, self._random.random())
                for number, one in enumerate(books)
            ]
        return min((number for number, cost in enumerate(rank) if cost <= bar), key=lambda number: keys[number])

    def _costs(self, request: Request, matched: list[int]) -> list[float]:
        rule, prompt = self._rule, request.prompt_tokens
        fills = [self._fill(number) for number in range(len(self._books))]
        mean = statistics.fmean(fills)
        beyond = [own for number, own in enumerate(matched) if own > self._held(number, request)]
        making = max(beyond, default=0)
        each = rule.lambda_ if all(one.prefill for one in self._books) else 1.0
        return [
            (
                one.prefill
                + each * (prompt - own)
                + rule.kappa * max(0, making - own)
                + rule.pressure_price * max(0.0, fill - mean) * prompt
            )
            / self._speed
            + rule.decode_s_per_token * one.decode
            for one, own, fill in zip(self._books, matched, fills, strict=True)
        ]

    def _fill(self, number: int) -> float:
        pool = self._engines[number].scheduler.pool
        return pool.distinct / pool.blocks

    def _evictions(self, number: int, now: float) -> float:
        seen = self._books[number].evicted
        total = self._engines[number].scheduler.pool.evicted
        if now - seen[-1][0] > EVICTION_WINDOW_S / 10:
            seen.append((now, total))
        while len(seen) > 1 and now - seen[1][0] > EVICTION_WINDOW_S:
            seen.popleft()
        return float(total - seen[0][1])


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Engines and their speed; ``speed``: of the trace."""

    config: EngineConfig
    engines: int = 8
    speed: float = 6.0
    skip: float = 0.1


def play(trace: Trace, plan: FleetPlan, rule: Rule, seed: int = 0) -> dict[str, Any]:
    """One run. TTFT in wall seconds."""
    engines = [VirtualEngine(plan.config.scheduler(), plan.config.costs) for _ in range(plan.engines)]
    router: Router = RuleRouter(engines, rule, 1 / plan.config.costs.prefill_token_s, seed)
    served = VirtualFleet(engines, router, plan.speed).run(trace)
    counted = served[int(plan.skip * len(served)) :]
    ttft = sorted(one.ttft_s for one in counted)
    prompt, cached = sum(one.prompt_tokens for one in counted), sum(one.cached_tokens for one in counted)
    busy = [engine.busy_s for engine in engines]
    return {
        "hit_ratio": cached / prompt,
        "recomputed_tokens": prompt - cached,
        "ttft_mean_s": statistics.fmean(ttft),
        **{f"ttft_p{q}_s": quantile(ttft, q / 100) for q in (50, 90, 99)},
        "busy": statistics.fmean(busy) / max(one.at_s for one in served),
        "busiest_over_mean": max(busy) / statistics.fmean(busy),
    }


def means(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m warmfleet_loadtest.sim_fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--trace", metavar="FILE")
    made.add_argument("--rows", type=int)
    made.add_argument("--engines", type=int, default=8)
    made.add_argument("--blocks", type=int, default=1_953, help="of 16 tokens, per engine (default %(default)s)")
    made.add_argument("--speed", type=float, default=6.0, help="trace seconds per second (default %(default)s)")
    made.add_argument("--step-time", default="trace", help="preset or file (default %(default)s)")
    made.add_argument("--mode", choices=("step", "fcfs"), default="step")
    made.add_argument("--kappa", default="1.25", help="values, joined by commas (default %(default)s)")
    made.add_argument("--pressure", default="1", help="values, joined by commas (default %(default)s)")
    made.add_argument("--lambda", dest="lambda_", default="2", help="values, joined by commas (default %(default)s)")
    made.add_argument("--decode", default="1e-7", help="seconds per resident token, values joined by commas")
    made.add_argument("--seeds", type=int, default=1)
    return made


def rules(args: argparse.Namespace) -> dict[str, Rule]:
    """The baselines, then every combination of weights."""
    made = {name: Rule(name) for name in ("round_robin", "least_loaded")}
    for lambda_ in map(float, args.lambda_.split(",")):
        for kappa in map(float, args.kappa.split(",")):
            for price in map(float, args.pressure.split(",")):
                for decode in map(float, args.decode.split(",")):
                    name = f"cost lambda={lambda_:g} kappa={kappa:g} pressure={price:g} decode={decode:g}"
                    made[name] = Rule("cost", lambda_, kappa, price, decode)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    trace = open_trace(args.trace, args.rows)
    costs = load_costs(args.step_time)
    scheme = wire.Scheme("sha256_cbor", wire.default_none_hash("sha256_cbor"), 16)
    limits = Limits(max_model_len=min(32_768, (args.blocks - 1) * 16))
    config = EngineConfig(scheme, limits, args.blocks, costs, args.mode, 0.02 / args.speed)
    plan = FleetPlan(config, args.engines, args.speed)
    print(f"{trace.name}: {len(trace.arrivals)} requests, {args.engines} engines of {args.blocks} blocks, {args.mode}")
    for name, rule in rules(args).items():
        print(
            f"{name:50s} {json.dumps(means([play(trace, plan, rule, seed) for seed in range(args.seeds)]))}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
