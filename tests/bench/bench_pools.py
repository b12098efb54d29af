"""A served model in several pools, on the virtual clock: what does the choice of a pool cost?

    make -s bench NAME=pools                                  # all of it: an hour of two cores
    make -s bench NAME=pools ARGS="--quick"                   # a first look: two minutes
    make -s bench NAME=pools ARGS="--quick --case generated"  # the same without a trace
    make -s bench NAME=pools ARGS="--case agents-roomy --pools 1,8 --seeds 3 --no-thousand --no-rest"
    make -s bench NAME=pools ARGS="--case conversation --loads 0.7 --pools 1,8 --rows 600 --no-thousand --no-rest"
    make -s bench NAME=pools ARGS="--sizes 2,2,4,8,8,8,16,16 --rows 400"        # pools of unequal size only

64 simulated engines are one pool, or 2, 4 or 8 pools of equal size. They get the same arrivals: a trace laid over
itself eight times, in which system prompts are the same in all copies and all other text differs (`overlays`).
Replicas use the real scripts on a real store, and the routers' own choice of home pools. A load is the share of
time that engines compute if an oracle chooses among eight of them for one copy of the trace.

The second part, 1,024 engines as one pool and as 16 pools of 64, needs more of a store than a bench can wait for.
It is an exact simulation (`exact_pools`): it knows the caches and the work of all engines, chooses by the cost
rule, and takes the queue into account. It plays the first 150 requests of each of 128 copies, unless --rows is given.

Runs of one pool and of the most pools are repeated with other seeds: copies that begin at other places and whose text,
hence whose home pools, is another. Ratios are those of the means over the seeds: the P99 of a few agents' conversations
varies by a tenth. All other runs have one seed, unless --seeds is given.

Tables go to standard error. The last line of standard output is one JSON object: `rows` has the figures of every
case, load and number of pools (trace seconds). `eight_over_one_mean` and `eight_over_one_p99` are the TTFT with
eight pools over that with one, `thousand_over_one_mean` that of 16 pools of 64 over one of 1,024; each is the worst
of all cases and loads. With --sizes, `sizes_over_one_mean` and `sizes_over_one_p99` are those of pools of these sizes
over one of all their engines, by the exact simulation. `idle_core_share_8`, `idle_core_share_1000` and the same with
`work` are those of bench `rest`. A figure whose runs were not made is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from tests.bench import bench_rest
from tests.bench.bench_order import CASES, OURS, SKIP, figures
from tests.bench.bench_order import Job as OrderJob
from tests.bench.exact_pools import Served, Setup, simulate
from tests.bench.jobs import run_all
from tests.bench.overlays import Blocks, copies, overlaid
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import arrivals, engine
from tests.bench.virtual_plots import draw_panels
from tests.bench.virtual_store import private_server

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import QueueLimits
from warmfleet_loadtest.measuring.figures import markdown, quantile
from warmfleet_loadtest.simulator.step_costs import load_costs
from warmfleet_loadtest.stacks.processes import StackError, end_on_signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from warmfleet_loadtest.traces.trace import Trace

ENGINES, COPIES = 64, 8
THOUSAND, THOUSAND_POOLS = 1_024, 16
THOUSAND_ROWS = 150  # of each of 128 copies: one pool of 600 takes twenty minutes
POOLS = (1, 2, 4, 8)
SEEDS = 3  # of the runs with one pool and with the most
LOADS = (0.5, 0.7, 0.85)
DEPTH_TOKENS = 1_024  # of the trace's own tokens
CASES_OF_POOLS = ("conversation", "agents-roomy", "generated")
PUBLIC = ("conversation", "agents-roomy")
OF_THOUSAND = ("conversation", "generated")


@dataclass(frozen=True, slots=True)
class Job:
    """A run, as plain values that another process can read. speed: 0 while it is not known.

    exact: by the exact simulation, without the scripts. rows: of one copy of the trace; None for all. unequal: engines
    of each pool; empty: all have as many. seed: of the copies.
    """

    case: str
    load: float
    pools: int
    rows: int | None
    engines: int = ENGINES
    exact: bool = False
    speed: float = 0.0
    unequal: tuple[int, ...] = ()
    seed: int = 0

    @property
    def place(self) -> tuple[str, float]:
        return self.case, self.load

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.unequal or (self.engines // self.pools,) * self.pools

    def trace(self) -> Trace:
        case = CASES[self.case]
        return arrivals(case.workload, self.rows or case.rows)

    def find_speed(self) -> float:
        """Return the speed at which an oracle keeps eight engines busy for `load` of the time with one copy."""
        return OrderJob(self.case, self.load, "oracle", 0, 1, "fcfs", self.rows, {}).find_speed()

    def run(self) -> dict[str, float]:
        return self._simulated() if self.exact else self._played()

    def _played(self) -> dict[str, float]:
        case, trace = CASES[self.case], self.trace()
        config = engine(load_costs(f"{case.step_time}-fcfs"), case.blocks, "fcfs", self.speed / trace.scale)
        limits = QueueLimits(max_engine_wait_s=OURS["max_engine_wait_s"], patience=OURS["patience"])
        plan = Plan((config,) * self.engines, queue=limits, speed=self.speed)
        plan = replace(plan, pools=self.sizes, depth_tokens=round(DEPTH_TOKENS / trace.scale))
        with private_server() as url:
            played = uvloop.run(play(url, overlaid(trace, COPIES * self.engines // ENGINES, self.seed), plan))
        return figures(played.served, [worker.engine.busy_s for worker in played.cluster.workers], self.speed)

    def _simulated(self) -> dict[str, float]:
        case, trace = CASES[self.case], self.trace()
        setup = Setup(
            self.sizes,
            case.blocks,
            load_costs(f"{case.step_time}-fcfs").prefill_token_s * self.speed,
            trace.scale,
            depth_tokens=round(DEPTH_TOKENS / trace.scale),
            room_s=OURS["max_engine_wait_s"] * self.speed,
            patience=OURS["patience"],
        )
        served, busy = simulate(setup, copies(trace, self.engines // 8, self.seed), Blocks(trace))
        return told(served, statistics.fmean(busy))


def told(served: Sequence[Served], busy: float) -> dict[str, float]:
    """Return the figures of a simulation without its first requests, as ``bench_order.figures``."""
    counted = sorted(served)[int(SKIP * len(served)) :]
    ttft = sorted(request.ttft_s for request in counted)
    return {
        "mean": statistics.fmean(ttft),
        **{f"p{q}": quantile(ttft, q / 100) for q in (50, 90, 99)},
        "hit_ratio": sum(request.cached_tokens for request in counted)
        / sum(request.prompt_tokens for request in counted),
        "busy": busy,
        "requests": len(served),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a case at one load with one number of pools."""

    job: Job
    figures: Mapping[str, float]


def measured(wanted: Sequence[Job], processes: int) -> list[Row]:
    """Run the jobs; return a row for each. The longest are begun first."""
    return [Row(job, row) for job, row in run_all(wanted, processes)]


def over_one(rows: Iterable[Row], figure: str, pools: int, *, exact: bool) -> dict[tuple[str, float], float]:
    """Return the figure with ``pools`` pools over that with one, by case and load, where both were played.

    With several seeds it is the mean over the seeds, over the same mean.
    """
    found: dict[tuple[str, float], dict[int, list[float]]] = {}
    for row in rows:
        if row.job.exact == exact:
            of_place = found.setdefault((row.job.case, row.job.load), {})
            of_place.setdefault(row.job.pools, []).append(row.figures[figure])
    means = {
        place: {count: statistics.fmean(seeds) for count, seeds in by_count.items()}
        for place, by_count in found.items()
    }
    return {place: by_count[pools] / by_count[1] for place, by_count in means.items() if by_count.keys() >= {1, pools}}


def over_seeds(rows: Iterable[Row]) -> list[Row]:
    """Return a row for all seeds of a job, with the means of their figures."""
    found: dict[Job, list[Mapping[str, float]]] = {}
    for row in rows:
        found.setdefault(replace(row.job, seed=0), []).append(row.figures)
    return [
        Row(job, {name: statistics.fmean(row[name] for row in figures) for name in figures[0]})
        for job, figures in found.items()
    ]


def bounds(rows: Sequence[Row]) -> dict[str, float]:
    """Return the worst ratios, of those whose runs were made."""
    wanted = {
        "eight_over_one_mean": over_one(rows, "mean", 8, exact=False),
        "eight_over_one_p99": over_one(rows, "p99", 8, exact=False),
        "thousand_over_one_mean": over_one(rows, "mean", THOUSAND_POOLS, exact=True),
    }
    if unequal := next((row.job.pools for row in rows if row.job.unequal), 0):
        wanted = {f"sizes_over_one_{name}": over_one(rows, name, unequal, exact=True) for name in ("mean", "p99")}
    return {name: round(max(ratios.values()), 4) for name, ratios in wanted.items() if ratios}


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a row for all seeds of a run; the number behind a slash is over one pool's."""
    cells = []
    for row in over_seeds(rows):
        job = row.job
        ratios = {name: over_one(rows, name, job.pools, exact=job.exact) for name in ("mean", "p99")}
        beside = [f"{row.figures[name]:.3f} / {ratios[name].get((job.case, job.load), 0):.3f}" for name in ratios]
        others = [f"{row.figures[name]:.3f}" for name in ("p50", "p90", "hit_ratio", "busy")]
        cells.append((job.case, f"{job.load:g}", f"{job.engines}", f"{job.pools}", *beside, *others))
    return markdown(("case", "load", "engines", "pools", "mean", "p99", "p50", "p90", "hit_ratio", "busy"), cells)


# ---------------------------------------------------------------- the command


def _names(text: str) -> list[str]:
    names = text.split(",")
    if strangers := set(names).difference(CASES_OF_POOLS):
        raise argparse.ArgumentTypeError(f"{min(strangers)!r} is none of {', '.join(CASES_OF_POOLS)}")
    return names


def _loads(text: str) -> list[float]:
    """Parse shares of time. Raises ValueError unless all are between 0 and 1."""
    loads = [float(value) for value in text.split(",")]
    if not 0 < min(loads) <= max(loads) < 1:
        raise ValueError(text)
    return loads


def _counts(text: str) -> list[int]:
    """Parse numbers of pools. Raises ValueError unless all divide the engines."""
    counts = [int(value) for value in text.split(",")]
    if any(count < 1 or ENGINES % count for count in counts):
        raise ValueError(text)
    return counts


def _sizes(text: str) -> tuple[int, ...]:
    """Parse engines of pools. Raises ValueError unless they are eight for each whole copy of the trace."""
    sizes = tuple(int(value) for value in text.split(","))
    if min(sizes) < 1 or sum(sizes) % 8:
        raise ValueError(text)
    return sizes


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=pools", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--case", type=_names, help=f"of {','.join(CASES_OF_POOLS)} (default: {','.join(PUBLIC)})")
    made.add_argument("--loads", type=_loads, help="shares of time (default: .5, .7 and .85; with --quick .7)")
    made.add_argument("--pools", type=_counts, help="numbers of pools (default: 1, 2, 4 and 8; with --quick 1 and 8)")
    made.add_argument("--sizes", type=_sizes, metavar="N,N,…", help="only pools of so many engines against one of all")
    rows = "first so many requests of a copy (default: all, of the second part 150; with --quick 300)"
    made.add_argument("--rows", type=int, help=rows)
    made.add_argument("--thousand", action=argparse.BooleanOptionalAction, default=True, help="also the second part")
    seeds = (
        f"runs of each, with other copies (default: {SEEDS} of one pool and of the most, 1 of the others and --quick)"
    )
    made.add_argument("--seeds", type=int, help=seeds)
    made.add_argument(
        "--rest", action=argparse.BooleanOptionalAction, default=True, help="also replicas at rest (bench `rest`)"
    )
    made.add_argument("--quick", action="store_true", help="one load, few requests, one pool and eight, nothing else")
    made.add_argument("--jobs", type=int, default=2, help="runs at a time (default %(default)s)")
    made.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png")
    return made


def every(args: argparse.Namespace) -> list[Job]:
    """Return the jobs of the command line."""
    first = _of_one_seed(args)
    if args.seeds or args.quick or args.sizes:
        return [replace(job, seed=seed) for seed in range(args.seeds or 1) for job in first]
    most = max(job.pools for job in first if not job.exact)
    again = [job for job in first if job.pools in (1, most) and not job.exact]
    return first + [replace(job, seed=seed) for seed in range(1, SEEDS) for job in again]


def _of_one_seed(args: argparse.Namespace) -> list[Job]:
    rows = args.rows or (300 if args.quick else None)
    loads = args.loads or ((0.7,) if args.quick else LOADS)
    if args.sizes:
        one = [Job(case, load, 1, rows, sum(args.sizes), True) for case in args.case or PUBLIC for load in loads]
        return [each for job in one for each in (job, replace(job, pools=len(args.sizes), unequal=args.sizes))]
    counts = args.pools or ((1, 8) if args.quick else POOLS)
    jobs = [Job(case, load, count, rows) for case in args.case or PUBLIC for load in loads for count in counts]
    if args.thousand and not args.quick:
        for case in args.case or OF_THOUSAND:
            first = args.rows or THOUSAND_ROWS
            jobs += [Job(case, load, count, first, THOUSAND, True) for load in loads for count in (1, THOUSAND_POOLS)]
    return jobs


def at_rest() -> dict[str, float]:
    """Return the share of a core that one replica takes at rest with 8 engines and with 1,024. Raises StackError."""
    told = bench_rest.measure(bench_rest.parser().parse_args(["--shapes", "1x8,16x64,64x16", "--replicas", "1"]))
    return {name: value for name, value in told.items() if name.startswith(("idle_core_share_", "idle_work_share_"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace, nothing to draw, or a script that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    if args.jobs < 1 or any(value is not None and value < 1 for value in (args.rows, args.seeds)):
        parser().error("--rows, --seeds and --jobs from 1 on")
    wanted = every(args)
    try:
        for job in wanted:
            job.trace()
    except (OSError, ValueError) as error:
        hint = ": add --case generated" if isinstance(error, FileNotFoundError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        return 1
    try:
        # First, while the machine does nothing else; and if it is too busy for that, no other run is lost.
        rest = at_rest() if args.rest and not args.quick and not args.sizes else {}
        rows = measured(wanted, args.jobs)
    except (OSError, ValueError, WarmfleetError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows), file=sys.stderr)
    told = [
        {**{name: getattr(row.job, name) for name in ("case", "load", "engines", "pools", "seed")}, **row.figures}
        for row in rows
    ]
    print(json.dumps({**bounds(rows), **rest, "rows": told}), flush=True)
    return _draw(args.plot, rows) if args.plot else 0


def _draw(path: Path, rows: Sequence[Row]) -> int:
    """Draw the ratios to one pool over the load, after the figures are printed, because drawing may fail."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for figure in ("mean", "p99"):
        for exact, engines in ((False, ENGINES), (True, THOUSAND)):
            for count in dict.fromkeys(row.job.pools for row in rows if row.job.exact == exact and row.job.pools > 1):
                for (case, load), ratio in over_one(rows, figure, count, exact=exact).items():
                    lines = panels.setdefault(f"{case}, {engines} engines: {figure}", {})
                    lines.setdefault(f"{count} pools", []).append((load, ratio))
    try:
        draw_panels(path, "TTFT over that with one pool", panels)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
