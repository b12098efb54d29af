"""The fleet beside choosers that look into its engines, on the virtual clock: how far is it from the best choice?

    make -s bench NAME=order                                     # all of it: half an hour of two cores
    make -s bench NAME=order ARGS="--case starve"                # no starvation, and tenants: one minute
    make -s bench NAME=order ARGS="--quick"                      # a first look: one minute
    make -s bench NAME=order ARGS="--case agents-tight --loads 0.6 --fleets ours,oracle,sticky --seeds 1"
    make -s bench NAME=order ARGS="--case generated --rows 600"  # needs no trace
    make -s bench NAME=order ARGS="--case decodes --fleets ours,undecoded"  # what the decode terms are worth
    make -s bench NAME=order ARGS="--policies all --fleets ours --case conversation --mode step"
    make -s bench NAME=order ARGS="--fleets ours --rule kappa0:kappa=0 --rule half:stock=4"

Every fleet gets the same arrivals and the same eight engines. `ours` and `engines` are four replicas with the real
scripts: with the default weights and limits, and with engines that sort their waiting prompts themselves
(`WARMFLEET_ENGINE_PRIORITY`). `--policies` adds fleets of other policies, `--rule` fleets of other weights or limits,
or with `stock` engines that have no plugin. `oracle`, `sticky` and `central` are choosers that read the engines' block
pools and queues (`warmfleet_loadtest.simulator.choosers`); no router runs. A load is the share of time that engines
compute under the oracle: the trace is played as fast as that takes. Each seed begins the trace at another place, and
has a speed of its own: busy hours come early or late then, so engines would be more or less busy at one speed for all.

In the case `decodes` engines and tokens are those of `virtual_sessions`, times are real seconds, and a load is a share
of the requests that the engines can serve. `tpot` is the mean time of an answer's token, `end` that to an answer's end.
`undecoded` is `ours` without the decode terms of the cost. In `decodes-join` the last engine joins half-way.

The case `starve` is another load, of the fleet `ours` alone (`virtual_starve`): prompts of 100,000 tokens beside short
ones for ten minutes at .9 busy, and two tenants of which one wants ten times as much as the other.

Tables go to standard error. The last line of standard output is one JSON object: `rows` has the figures of every case,
load and fleet (means over seeds, trace seconds). Its bounds are `hot_mean_over_oracle` and `hot_p99_over_oracle`
(conversation, worst of the loads from .8 on), `mid_mean_over_oracle` (worst of those from .4 to .6),
`agents_mean_over_best` and `agents_p99_over_best` (over the better of oracle and sticky, worst of all agents' loads),
`decoding_mean`, `decoding_p99`, `decoding_end` (`ours` over `undecoded`, worst of the loads up to .85),
`starved_worst_over_bound` (the worst wait over its bound) and `tenants_work_ratio`. The latter is told for four pools,
too: with `_spread` at its end if no prompts begin alike, with `_alike` if all of the tenant that wants less do. A bound
whose loads were not played is missing. `idle_while_waiting` of a row is the share of time in which engines have
nothing to do while a request waits that they could serve. A request is on its way to its engine for DISPATCH_S, which
the TTFT leaves out: the rivals ask over no network.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench.jobs import run_all
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_idle import SAMPLE_S, IdleGaps
from tests.bench.virtual_plans import QUEUE, arrivals, engine
from tests.bench.virtual_plots import draw_panels, drawn
from tests.bench.virtual_rivals import RIVALS, opened, play_rival, rotated
from tests.bench.virtual_sessions import DECODES_FREE, ENGINE, scaled
from tests.bench.virtual_starve import starve, tenants
from tests.bench.virtual_store import private_server

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import QueueLimits, Weights
from warmfleet.settings import POLICIES
from warmfleet_loadtest.measuring.figures import markdown, quantile
from warmfleet_loadtest.simulator.step_costs import load_costs
from warmfleet_loadtest.stacks.processes import end_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from warmfleet_loadtest.engine import EngineConfig
    from warmfleet_loadtest.simulator.virtual_clock import Answered
    from warmfleet_loadtest.traces.trace import Trace

ENGINES, REPLICAS = 8, 4
SKIP = 0.1  # share of the requests that warm up
TRIES = 12  # runs of the oracle at most until its engines are as busy as wanted
NEAR = 0.01  # a share of time this close to the wanted one is good enough
DISPATCH_S = 0.003  # HTTP to the engine and vLLM's own work before the scheduler sees the prompt
LOADS = (0.3, 0.5, 0.7, 0.83, 0.95)


@dataclass(frozen=True, slots=True)
class Case:
    """A trace with engines that suit it.

    speed: keeps them about half busy. rows: of the trace. closed: False makes a closed loop an open one.
    seeds: beginnings of the trace. Ten for agents: means of three of them differ from that of ten by up to 10 %.
    most_per_s: requests that the engines can serve, if a load is a share of them; tokens and times are real then.
    joins: share of the time after which the last engine joins the fleet; it has no answers under way then.
    """

    workload: str
    step_time: str
    blocks: int
    speed: float
    rows: int | None = None
    closed: bool = True
    loads: tuple[float, ...] = (0.4, 0.6, 0.8)
    seeds: int = 10
    most_per_s: float = 0.0
    joins: float = 0.0


CASES = {
    "conversation": Case("conversation", "trace", 1_953, 5.0, loads=LOADS, seeds=3),
    "agents-tight": Case("agents", "agents", 512, 5.0, 1_500),
    "agents-roomy": Case("agents", "agents", 1_024, 6.0, 1_500),
    "agents-tight-open": Case("agents", "agents", 512, 5.0, 1_500, closed=False),
    "agents-roomy-open": Case("agents", "agents", 1_024, 6.0, 1_500, closed=False),
    "decodes": Case("conversation", "", 0, 1.0, loads=(0.5, 0.7, 0.85), seeds=3, most_per_s=9.2),
    "decodes-join": Case("conversation", "", 0, 1.0, loads=(0.5, 0.7, 0.85), seeds=3, most_per_s=8.6, joins=0.5),
    "generated": Case("generated", "trace", 1_024, 5.0, 1_200, loads=LOADS, seeds=3),
}
PUBLIC = tuple(name for name in CASES if name not in ("generated", "decodes", "decodes-join"))
STARVE = "starve"
OURS: Mapping[str, float] = {"max_engine_wait_s": QUEUE.max_engine_wait_s, "patience": QUEUE.patience}
#: Values of the routers' fleets in place of the defaults of ``Weights`` and ``QueueLimits``; names that these do not
#: have are left out. ``sorting``: requests wait in the engines, which take them by the priority that routers send.
#: ``stock``: the number of engines without the plugin.
RULES: Mapping[str, Mapping[str, float]] = {
    "ours": OURS,
    "undecoded": {**OURS, **DECODES_FREE},
    "engines": {"max_engine_wait_s": 2.0, "patience": 0.0, "sorting": 1.0},
}
FLEETS = (*RULES, *RIVALS)
USUAL = tuple(name for name in FLEETS if name not in ("engines", "undecoded"))


@dataclass(frozen=True, slots=True)
class Job:
    """A run, as plain values that another process can read.

    rule, policy: of a fleet with routers, rule as in RULES. speed: 0 while it is not known.
    """

    case: str
    load: float
    fleet: str
    seed: int
    seeds: int
    mode: str
    rows: int | None
    rule: Mapping[str, float]
    speed: float = 0.0
    policy: str = "cost"

    def trace(self) -> Trace:
        case = CASES[self.case]
        found = rotated(arrivals(case.workload, self.rows or case.rows), self.seed / self.seeds)
        if case.most_per_s:
            found = replace(found, arrivals=tuple(scaled(arrival, found.scale) for arrival in found.arrivals))
        return found if case.closed else opened(found)

    def engines(self, speed: float) -> tuple[EngineConfig, ...]:
        case = CASES[self.case]
        if case.most_per_s:
            return (ENGINE,) * ENGINES
        costs = load_costs(case.step_time + ("-fcfs" if self.mode == "fcfs" else ""))
        # A token of an arrival stands for `scale` tokens of the trace, which take so many times as long to decode.
        return (engine(costs, case.blocks, self.mode, speed / self.trace().scale),) * ENGINES

    @property
    def second(self) -> float:
        """The case's seconds in a second of the run."""
        return 1.0 if CASES[self.case].most_per_s else self.speed

    @property
    def place(self) -> tuple[str, float, int]:
        return self.case, self.load, self.seed

    def joins_s(self, trace: Trace) -> dict[int, float]:
        """Return when engines join later, by their numbers."""
        share = CASES[self.case].joins
        return {ENGINES - 1: share * trace.arrivals[-1].at_s / self.speed} if share else {}

    def find_speed(self) -> float:
        """Return the speed at which the oracle's engines are busy for `load` of the time.

        Agents whose caches are tight tip over: a speed 2 % higher may raise the share by half. So it is searched for
        between the fastest speed that is too slow and the slowest that is too fast.
        """
        if most_per_s := CASES[self.case].most_per_s:
            came = self.trace().arrivals
            return self.load * most_per_s * came[-1].at_s / len(came)
        trace, speed = self.trace(), CASES[self.case].speed * self.load * 2
        slow, fast, nearest = 0.0, math.inf, (math.inf, speed)
        for _ in range(TRIES):
            busy = uvloop.run(play_rival("oracle", trace, self.engines(speed), speed)).busy
            nearest = min(nearest, (abs(busy - self.load), speed))
            if nearest[0] <= NEAR * self.load:
                break
            slow, fast = (max(slow, speed), fast) if busy < self.load else (slow, min(fast, speed))
            guess = speed * self.load / busy
            speed = guess if slow < guess < fast else (slow + fast) / 2
        return nearest[1]

    def run(self) -> dict[str, float]:
        trace, engines = self.trace(), self.engines(self.speed)
        if self.rule.get("sorting"):
            engines = tuple(replace(engine, limits=replace(engine.limits, sorts=True)) for engine in engines)
        if self.fleet in RIVALS:
            told = uvloop.run(play_rival(self.fleet, trace, engines, self.speed, self.seed))
            return figures(told.served, [engine.busy_s for engine in told.engines], self.second)
        plan = Plan(engines, self.policy, _with(Weights(), self.rule), REPLICAS, self.speed, self.seed)
        stock = frozenset(range(int(self.rule.get("stock", 0))))
        plan = replace(plan, queue=_with(QueueLimits(), self.rule), sorting=bool(self.rule.get("sorting")), stock=stock)
        gaps = IdleGaps()
        plan = replace(plan, dispatch_s=DISPATCH_S, watch=gaps, watch_s=SAMPLE_S, joins_s=self.joins_s(trace))
        with private_server() as url:
            played = uvloop.run(play(url, trace, plan))
        if len(played.served) < len(trace.arrivals):
            raise RuntimeError(f"{self.case} at {self.load}: {self.fleet} refused requests, its queue was full")
        served = [
            replace(request, at_s=request.at_s + DISPATCH_S, ttft_s=request.ttft_s - DISPATCH_S)
            for request in played.served
        ]
        busy_s = [worker.engine.busy_s for worker in played.cluster.workers]
        return figures(served, busy_s, self.second) | gaps.figures()


def _with(defaults: Any, rule: Mapping[str, float]) -> Any:
    """Return ``defaults`` with the rule's values in their place."""
    types = {field.name: int if field.type == "int" else float for field in fields(defaults)}
    return replace(defaults, **{name: types[name](value) for name, value in rule.items() if name in types})


def figures(served: Sequence[Answered], busy_s: Sequence[float], second: float) -> dict[str, float]:
    """Return the figures of a run without its first requests, in the case's seconds."""
    own = sorted(served, key=lambda request: request.at_s)
    counted = own[int(SKIP * len(own)) :]
    ttft = sorted(request.ttft_s * second for request in counted)
    lasted = [(second * (request.ended_s - request.at_s), request) for request in counted]
    return {
        "mean": statistics.fmean(ttft),
        **{f"p{q}": quantile(ttft, q / 100) for q in (50, 90, 99)},
        "hit_ratio": sum(request.cached_tokens for request in counted)
        / sum(request.prompt_tokens for request in counted),
        "tpot": statistics.fmean(
            (end - second * request.ttft_s) / max(1, request.output_tokens - 1) for end, request in lasted
        ),
        "end": statistics.fmean(end for end, _ in lasted),
        "busy": statistics.fmean(busy_s) / own[-1].at_s,
        "requests": len(own),
    }


# ---------------------------------------------------------------- all runs


def fairness(seed: int) -> dict[str, float]:
    """Return the figures of the case ``starve``."""
    queue = _with(QueueLimits(), OURS)
    with private_server() as url:
        told = uvloop.run(starve(url, queue, seed=seed)) | uvloop.run(tenants(url, queue, seed=seed))
        for name, alike in (("spread", False), ("alike", True)):
            found = uvloop.run(tenants(url, queue, pools=4, alike=alike, seconds=30.0, seed=seed))
            told |= {f"{figure}_{name}": value for figure, value in found.items()}
        return told


@dataclass(frozen=True, slots=True)
class Row:
    """A fleet's figures in one case at one load, and its speed, as means over seeds."""

    case: str
    load: float
    fleet: str
    speed: float
    figures: Mapping[str, float]


def measured(wanted: Sequence[Job], processes: int) -> list[Row]:
    """Run the jobs of all fleets and seeds; return a row for each case, load and fleet."""
    found: dict[tuple[str, float, str], list[tuple[float, dict[str, float]]]] = {}
    for job, result in run_all(wanted, processes):
        found.setdefault((job.case, job.load, job.fleet), []).append((job.speed, result))
    return [
        Row(*key, statistics.fmean(speed for speed, _ in runs), _mean([row for _, row in runs]))
        for key, runs in found.items()
    ]


def _mean(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}


def over(rows: Iterable[Row], figure: str, fleet: str, rivals: Sequence[str]) -> dict[tuple[str, float], float]:
    """Return a fleet's figure over that of the best of ``rivals``, by case and load, where all of them were played."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row.case, row.load), {})[row.fleet] = row.figures[figure]
    return {
        place: row[fleet] / min(row[rival] for rival in rivals)
        for place, row in found.items()
        if row.keys() >= {fleet, *rivals}
    }


def bounds(rows: Sequence[Row], fleet: str = "ours") -> dict[str, float]:
    """Return the worst ratios that bound the fleet, of those whose loads were played."""
    told: dict[str, float] = {}

    def worst(name: str, figure: str, rivals: Sequence[str], places: Callable[[str, float], bool]) -> None:
        ratios = [ratio for place, ratio in over(rows, figure, fleet, rivals).items() if places(*place)]
        if ratios:
            told[name] = round(max(ratios), 4)

    def chats(low: float, high: float) -> Callable[[str, float], bool]:
        return lambda case, load: not case.startswith(("agents", "decodes")) and low <= load <= high

    worst("hot_mean_over_oracle", "mean", ["oracle"], chats(0.8, 1.0))
    worst("hot_p99_over_oracle", "p99", ["oracle"], chats(0.8, 1.0))
    worst("mid_mean_over_oracle", "mean", ["oracle"], chats(0.4, 0.6))
    for figure in ("mean", "p99", "end"):
        played = [row for row in rows if row.case == "decodes" and row.load <= 0.85]
        ratios = over(played, figure, fleet, ["undecoded"]).values()
        if ratios:
            told[f"decoding_{figure}"] = round(max(ratios), 4)
    for figure in ("mean", "p99"):
        agents = [row for row in rows if row.case.startswith("agents")]
        ratios = over(agents, figure, fleet, ["oracle", "sticky"]).values()
        if ratios:
            told[f"agents_{figure}_over_best"] = round(max(ratios), 4)
    return told


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table with a row for each case, load and fleet."""
    names = ("mean", "p50", "p90", "p99", "tpot", "end", "hit_ratio", "busy", "idle_while_waiting")
    cells = []
    for row in rows:
        told = (f"{row.figures[name]:.3f}" if name in row.figures else "" for name in names)
        cells.append((row.case, f"{row.load:g}", f"{row.speed:.2f}x", row.fleet, *told))
    return markdown(("case", "load", "speed", "fleet", *names), cells)


# ---------------------------------------------------------------- the command


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if strangers := set(names).difference(known):
            raise argparse.ArgumentTypeError(f"{min(strangers)!r} is none of {', '.join(known)}")
        return names

    return parse


def _rule(text: str) -> tuple[str, dict[str, float]]:
    """Parse NAME:SETTING=VALUE,... into a fleet's name and its rule. Raises ValueError."""
    name, _, values = text.partition(":")
    known = {weight.name for defaults in (Weights, QueueLimits) for weight in fields(defaults)} | {"stock"}
    rule = {setting: float(value) for setting, _, value in (item.partition("=") for item in values.split(","))}
    if name in FLEETS or rule.keys() - known:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME:SETTING=VALUE, settings of {', '.join(sorted(known))}")
    return name, {**OURS, **rule}


def _policies(text: str) -> list[str]:
    return list(POLICIES) if text == "all" else _names(POLICIES)(text)


def _loads(text: str) -> list[float]:
    """Parse shares of time. Raises ValueError unless all are between 0 and 1."""
    loads = [float(value) for value in text.split(",")]
    if not 0 < min(loads) <= max(loads) < 1:
        raise ValueError(text)
    return loads


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=order", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--case", type=_names((*CASES, STARVE)), help=f"joined by commas (default: {','.join((*PUBLIC, STARVE))})"
    )
    made.add_argument("--loads", type=_loads, help="shares of time, joined by commas (default: each case's own)")
    made.add_argument(
        "--fleets", type=_names(FLEETS), default=list(USUAL), help=f"of {','.join(FLEETS)} (all but engines)"
    )
    made.add_argument(
        "--rule", type=_rule, action="append", default=[], metavar="NAME:SETTING=VALUE,...",
        help="one more fleet of routers: the default rule with other weights or limits; may be repeated",
    )  # fmt: skip
    made.add_argument("--policies", type=_policies, default=[], help="more fleets of routers: `policy-NAME`; or all")
    made.add_argument("--seeds", type=int, help="beginnings of the trace (3, of agents 10; with --quick 1)")
    made.add_argument("--rows", type=int, help="first so many requests (default: each case's own; with --quick 600)")
    made.add_argument("--mode", choices=("fcfs", "step"), default="fcfs", help="of the engines (default %(default)s)")
    made.add_argument("--quick", action="store_true", help="one seed, 600 rows, the loads .5 and .83, agents at .6")
    made.add_argument("--jobs", type=int, default=2, help="runs at a time (default %(default)s)")
    made.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png")
    return made


def every(args: argparse.Namespace) -> list[Job]:
    """Return the jobs of the command line."""
    rows = args.rows or (600 if args.quick else None)
    fleets = {name: (RULES.get(name, {}), "cost") for name in args.fleets}
    fleets |= {name: (rule, "cost") for name, rule in args.rule}
    fleets |= {f"policy-{name}": (OURS, name) for name in args.policies}
    jobs = []
    for name in [name for name in args.case or PUBLIC if name != STARVE]:
        quick = (0.6,) if name.startswith("agents") else (0.5, 0.83)
        seeds = args.seeds or (1 if args.quick else CASES[name].seeds)
        for load in args.loads or (quick if args.quick else CASES[name].loads):
            for fleet, (rule, policy) in fleets.items():
                about: Any = {"mode": args.mode, "rows": rows, "rule": rule, "policy": policy}
                jobs += [Job(name, load, fleet, seed, seeds, **about) for seed in range(seeds)]
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace, nothing to draw, or a script that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    if min(args.seeds or 1, args.rows or 1, args.jobs) < 1:
        parser().error("--seeds, --rows and --jobs from 1 on")
    try:
        wanted = every(args)
        for job in wanted:
            arrivals(CASES[job.case].workload, job.rows or CASES[job.case].rows)
        rows = measured(wanted, args.jobs)
        print(table(rows), file=sys.stderr, flush=True)  # before the last part, whose failure must not lose it
        told_of_fairness = fairness(0) if STARVE in (args.case or ([] if args.quick else [STARVE])) else {}
    except (OSError, ValueError, WarmfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    told = [{"case": row.case, "load": row.load, "fleet": row.fleet, "speed": row.speed, **row.figures} for row in rows]
    fair = {name: round(value, 4) for name, value in told_of_fairness.items()}
    print(json.dumps({"mode": args.mode, **bounds(rows), **fair, "rows": told}), flush=True)
    return drawn(partial(_draw, args.plot, rows)) if args.plot else 0


def _draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw the ratios to the oracle over the load. Raises OSError, ValueError."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for figure in ("mean", "p99"):
        for fleet in dict.fromkeys(row.fleet for row in rows):
            for (case, load), ratio in over(rows, figure, fleet, ["oracle"]).items():
                panels.setdefault(f"{case}: {figure}", {}).setdefault(fleet, []).append((load, ratio))
    draw_panels(path, "TTFT over the oracle's", panels)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
