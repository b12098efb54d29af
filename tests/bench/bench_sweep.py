"""Sweeps of policies, weights and loads on a virtual clock, with the real scripts and the plugin's publishers.

    make -s bench NAME=sweep POLICY=cost,least_loaded,round_robin          # the conversation trace, six times as fast
    make -s bench NAME=sweep ARGS="--vary lambda_=1,2,3 --vary kappa=0,1.25 --speed 6,8 --seeds 3"
    make -s bench NAME=sweep ARGS="--workload agents --rows 600 --vary pressure_price=0,1 --jobs 2"
    make -s bench NAME=sweep ARGS="--utilisation 0.3,0.7,0.95 --plot out/util.svg" POLICY=cost,least_loaded
    make -s bench NAME=sweep ARGS="--scenario hot --plot out/hot.svg"      # or speeds, foreign, join
    make -s bench NAME=sweep ARGS="--workload generated --rows 300"        # needs no trace

Nothing waits, so 2,400 requests take about ten seconds of one core. A progress bar goes to standard error. The last
line of standard output is one JSON object, whose ``rows`` are the figures of every setting, as means over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench.virtual_figures import figures, together
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import WORKLOADS, arrivals, engine
from tests.bench.virtual_plots import draw_lines, draw_rows, drawn
from tests.bench.virtual_scenarios import ONE, SCENARIOS
from tests.bench.virtual_store import private_server

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import QueueLimits, Weights
from warmfleet.settings import POLICIES
from warmfleet_loadtest.measuring.figures import markdown
from warmfleet_loadtest.measuring.progress import Progress
from warmfleet_loadtest.simulator.step_costs import load_costs
from warmfleet_loadtest.stacks.processes import end_on_signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

COLUMNS = (
    "hit_ratio",
    "ttft_mean_s",
    "ttft_p50_s",
    "ttft_p90_s",
    "ttft_p99_s",
    "busy",
    "work_max_over_mean",
    "evicted_max_over_mean",
)


@dataclass(frozen=True)
class Job:
    """One run, as plain values that another process can read. name: the setting without its seed."""

    name: str
    workload: str
    rows: int | None
    speed: float
    policy: str
    seed: int
    engines: int = 8
    replicas: int = 1
    mode: str = "step"
    blocks: int | None = None
    step_time: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    scenario: str = ""
    seconds: float | None = None
    stock: int = 0
    queue: float = 0.0

    def run(self) -> dict[str, Any]:
        weights = replace(Weights(), **self.weights)  # type: ignore[arg-type]
        if self.scenario:
            return self._play(weights)
        workload = WORKLOADS[self.workload]
        costs = load_costs(self.step_time) if self.step_time else workload.costs
        config = engine(costs, self.blocks or workload.blocks, self.mode, self.speed)
        plan = Plan((config,) * self.engines, self.policy, weights, self.replicas, self.speed, self.seed)
        plan = replace(plan, stock=frozenset(range(self.stock)), queue=QueueLimits(self.queue))
        with private_server() as url:
            return figures(uvloop.run(play(url, arrivals(self.workload, self.rows), plan)))

    def _play(self, weights: Weights) -> dict[str, Any]:
        plan = Plan((ONE,) * self.engines, self.policy, weights, self.replicas, seed=self.seed)
        options = {} if self.seconds is None else {"seconds": self.seconds}
        with private_server() as url:
            told = uvloop.run(SCENARIOS[self.scenario](url, plan, **options))
        return told.figures | {f"line {name}": line for name, line in told.lines.items()}


def every(args: argparse.Namespace) -> Iterator[Job]:
    """Return the jobs of every combination of varied settings, policies and speeds, seed by seed."""
    names = [name for name, _ in args.vary]
    speeds = args.speed or [WORKLOADS[args.workload].speed]
    if args.utilisation:
        speeds = [round(value / WORKLOADS[args.workload].busy, 3) for value in args.utilisation]
    fixed: dict[str, Any] = {"engines": args.engines, "replicas": args.replicas, "mode": args.mode}
    fixed |= {"blocks": args.blocks, "step_time": args.step_time, "scenario": args.scenario, "seconds": args.seconds}
    fixed |= {"stock": args.stock, "queue": args.queue}
    for policy, speed in itertools.product(args.policy, [0.0] if args.scenario else speeds):
        for values in itertools.product(*(values for _, values in args.vary)):
            weights = dict(zip(names, values, strict=True))
            words = [policy, *(f"{name}={value:g}" for name, value in weights.items())]
            words.append(args.scenario or f"{speed:g}x")
            for seed in range(args.seeds):
                yield Job(" ".join(words), args.workload, args.rows, speed, policy, seed, **fixed, weights=weights)


def gather(jobs: Sequence[Job], processes: int) -> dict[str, dict[str, Any]]:
    """Run all jobs; return a row for each name, in the order of the jobs."""
    runs: dict[str, list[dict[str, Any]]] = {job.name: [] for job in jobs}
    if processes == 1:
        return _collect(jobs, map(Job.run, jobs), runs)
    with ProcessPoolExecutor(processes) as pool:
        return _collect(jobs, pool.map(Job.run, jobs), runs)


def _collect(
    jobs: Sequence[Job], answers: Iterable[dict[str, Any]], runs: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    progress = Progress("sweep", len(jobs))
    for job, answer in zip(jobs, answers, strict=True):
        runs[job.name].append(answer)
        progress.tick(failed=False)
    return {name: together(found) for name, found in runs.items()}


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row per setting; for a scenario, with a column per setting."""
    names, first = list(rows), next(iter(rows.values()))
    if set(COLUMNS) <= set(first):
        head: Sequence[str] = COLUMNS
        cells = [(name, [row[column] for column in COLUMNS]) for name, row in rows.items()]
    else:
        head = names
        figures_of = [name for name, value in first.items() if not isinstance(value, list)]
        cells = [(figure, [row[figure] for row in rows.values()]) for figure in figures_of]
    return markdown(("", *head), [(name, *(f"{value:.3f}" for value in values)) for name, values in cells])


def _varied(text: str) -> tuple[str, list[float]]:
    name, _, values = text.partition("=")
    known = {one.name: one.type for one in fields(Weights)}
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=value,value...") from None
    return name, [int(value) for value in numbers] if known[name] == "int" else numbers


def _policies(text: str) -> list[str]:
    names = list(POLICIES) if text == "all" else text.split(",")
    if strangers := set(names).difference(POLICIES):
        raise argparse.ArgumentTypeError(f"{min(strangers)!r} is no policy; known are {', '.join(POLICIES)}, and all")
    return names


def _numbers(text: str) -> list[float]:
    """Parse a list of numbers. Raises ValueError unless all are above 0."""
    numbers = [float(value) for value in text.split(",")]
    if min(numbers) <= 0:
        raise ValueError(text)
    return numbers


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    load = made.add_argument_group("load")
    trace = os.environ.get("TRACE", "")
    workload = trace if trace in WORKLOADS else "conversation"
    load.add_argument("--workload", choices=WORKLOADS, default=workload, help="$TRACE: this, its file or its folder")
    load.add_argument("--rows", type=int, help="first so many requests (default: all of the trace)")
    load.add_argument("--speed", type=_numbers, help="trace seconds per second, joined by commas (conversation: 6)")
    load.add_argument("--utilisation", type=_numbers, help="instead of --speed: what least_loaded would be busy by it")
    load.add_argument(
        "--scenario", choices=SCENARIOS, default="", help="arrivals of its own, and engines of 1,024 blocks"
    )
    load.add_argument("--seconds", type=float, help="of a scenario, virtual (default: its own)")
    load.add_argument("--seeds", type=int, default=1, help="runs of every setting (default %(default)s)")
    fleet = made.add_argument_group("fleet")
    names = os.environ.get("POLICY") or "cost"
    fleet.add_argument("--policy", type=_policies, default=names, help="$POLICY (cost); all: every one")
    replicas = os.environ.get("REPLICAS") or "1"
    fleet.add_argument("--replicas", type=int, default=replicas, help="one number here; $REPLICAS (default 1)")
    fleet.add_argument("--engines", type=int, default=8)
    fleet.add_argument("--stock", type=int, default=0, help="so many of them have no plugin (default %(default)s)")
    fleet.add_argument("--queue", type=float, default=0.0, help="MAX_ENGINE_WAIT_S (default: requests never wait)")
    fleet.add_argument("--blocks", type=int, help="of 16 tokens, per engine (default: the workload's)")
    fleet.add_argument("--step-time", help="preset or file of calibrate (default: the workload's)")
    fleet.add_argument("--mode", choices=("step", "fcfs"), default="step")
    weights = ", ".join(f"{one.name} {one.default}" for one in fields(Weights))
    fleet.add_argument("--vary", type=_varied, action="append", default=[], metavar="NAME=A,B", help=f"of: {weights}")
    made.add_argument("--jobs", type=int, default=1, help="runs at a time (default %(default)s)")
    made.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace, nothing to draw, or a script that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    if args.utilisation and not WORKLOADS[args.workload].busy:
        parser().error(f"{args.workload} is a closed loop: it has no utilisation to be set")
    if args.seeds < 1:
        parser().error("--seeds from 1 on")
    try:
        if not args.scenario:
            arrivals(args.workload, args.rows)
        rows = gather(list(every(args)), args.jobs)
    except (OSError, ValueError, WarmfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    print(json.dumps({"workload": args.workload, "mode": args.mode, "rows": rows}), flush=True)
    return drawn(partial(_draw, args, rows)) if args.plot else 0


def _draw(args: argparse.Namespace, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises OSError, ValueError."""
    if args.scenario:
        draw_lines(args.plot, args.scenario, rows)
    else:
        draw_rows(args.plot, f"{args.workload}, {args.mode} mode", rows)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
