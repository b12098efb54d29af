"""Agents whose contexts overfill the caches, on the virtual clock: how many sessions does a fleet serve an hour?

    make -s bench NAME=sessions                                        # all of it: half an hour of two cores
    make -s bench NAME=sessions ARGS="--quick"                         # a first look, needs no trace: half a minute
    make -s bench NAME=sessions ARGS="--cells 'agents-x1-*' --seeds 3"
    make -s bench NAME=sessions ARGS="--cells burst --plot burst.svg"

Replicas use the real scripts (as in `order`); four engines have a cache of 400,000 tokens each, and the steps of an 8B
model on an H100. Agents run in a closed loop: a step comes some time (the gap) after the answer to the step before, and
when a session ends another begins. A cell is named by its sessions (`agents`: of the SWE-agent trace, `generated`), the
factor of its gaps, and the overcommit: the contexts of the sessions that run at a time, over all caches. `-chats`: 1.2
chats a second come, too. `-one`: there is one replica in place of four. `chats` has no agents. In `burst` sessions
begin at their own times, .5 a second, and 60 more at 200 s.

Variants: `before` has no ledger; the others have. In `bare` nobody helps: clients name no session, declare no tools and
mark no end, all answers end in `stop`, and engines evict in vLLM's order. In `on` clients name sessions, declare tools
and mark ends, answers end in tool calls, and engines evict ended and paused sessions first. In `humans` clients name
sessions and answers end in `stop`; it is played with gaps of 20 times those of agents. `tier` is `on` with engines that
have a tier of 4 times their GPU, behind 25 GB/s; in `tier-no-room` the ledger counts the GPU alone as room.

A table goes to standard error. The last line of standard output is one JSON object. Its `rows` have the figures of
every cell and variant, as means over seeds: `sessions_per_hour`, the time of a session from its first step to its last
answer, the time to first token (TTFT) of steps, `recomputed` (tokens computed again, over the necessary ones: a step
needs those that complete blocks of the session's last prompt do not have), `held` (share of steps that waited for a
place), and holds beside the wait that was told. `burst` has the median TTFT of the steps that came in each 100 s.

Ratios, with their bounds: `sessions_per_hour_over_before` (>= 1.8) and `sessions_per_hour_bare` (>= 1.6) at overcommit
1.5, `p95_over_before` of a session there (<= .6), `before_at_07` (the worst variant at .7 over before; >= .96),
`humans_over_before` (the worst of 1.5 and 3; >= .9), `four_over_one_replica` (.95 to 1.05), `chats_p50_over_alone`
(<= 2). A ratio whose cells were not played is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import ChainMap
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench.virtual_plots import drawn
from tests.bench.virtual_sessions import Features, Load, SessionCluster, agents, burst, chats, figures, run
from tests.bench.virtual_store import private_server

from warmfleet.errors import WarmfleetError
from warmfleet_loadtest.measuring.figures import markdown
from warmfleet_loadtest.measuring.plots import line_figure, save_figure
from warmfleet_loadtest.measuring.progress import Progress
from warmfleet_loadtest.stacks.processes import end_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ENGINES, REPLICAS = 4, 4
KNOWN = 275  # sessions of which the mean context is taken: those of the trace
LEAST_ENDS = 150  # sessions that end while figures are taken; more if more than these run at a time
QUICK_ENDS = 30
HUMAN_GAPS = 20.0
CHATS_ALONE_S = 500.0
BIN_S = 100.0
BURST_SESSIONS = 700  # more than begin

TIER_TIMES = 4.0
ON = Features(ledger=True, header=True, ended=True, tools=True, forgets=True)
VARIANTS: Mapping[str, Features] = {
    "before": Features(),
    "bare": Features(ledger=True),
    "on": ON,
    "humans": Features(ledger=True, header=True, forgets=True),
    "tier": replace(ON, tier_times=TIER_TIMES),
    "tier-no-room": replace(ON, tier_times=TIER_TIMES, room=False),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A load. overcommit: 0 for none but chats; gaps: factor."""

    source: str = "agents"
    gaps: float = 1.0
    overcommit: float = 1.5
    chats: bool = False
    replicas: int = REPLICAS
    engines: int = ENGINES

    @property
    def name(self) -> str:
        if not self.overcommit:
            return "chats"
        more = ("-chats" if self.chats else "") + ("-one" if self.replicas == 1 else "")
        return f"{self.source}-x{self.gaps:g}-{self.overcommit:g}{more}"

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants that it is usually played with."""
        if not self.overcommit:
            return ("before",)
        if self.gaps >= HUMAN_GAPS:
            return ("before", "humans")
        return ("on",) if self.replicas == 1 else ("before", "bare", "on")

    def load(self, seed: int, counted: int) -> Load:
        """Return the load of a run. counted: sessions that end while figures are taken; 0: the usual number."""
        beside = chats() if self.chats else ()
        if not self.overcommit:
            return Load((), beside=tuple(chat for chat in beside if chat.at_s < CHATS_ALONE_S))
        number = agents(self.source, KNOWN, seed).at_once(self.overcommit, self.engines)
        ends = number + (counted or max(LEAST_ENDS, number))
        return Load(agents(self.source, number + ends, seed).sessions, number, number, ends, self.gaps, beside)


CELLS = {
    cell.name: cell
    for cell in (
        *(Cell(overcommit=value) for value in (0.7, 0.85, 1.0, 1.5, 2.0, 3.0)),
        *(Cell(gaps=gaps, overcommit=value) for gaps in (4.0, HUMAN_GAPS) for value in (1.5, 3.0)),
        *(Cell("generated", overcommit=value) for value in (0.7, 1.5)),
        *(Cell("generated", gaps) for gaps in (4.0, HUMAN_GAPS)),
        *(Cell(overcommit=value, chats=True) for value in (0.0, 0.6, 1.5)),
        Cell(replicas=1),
    )
}
BURST = "burst"


@dataclass(frozen=True, slots=True)
class Job:
    """A run, as plain values that another process can read. cell: None for the burst."""

    cell: Cell | None
    variant: str
    seed: int
    counted: int

    def run(self) -> dict[str, Any]:
        features = VARIANTS[self.variant]
        with private_server() as url:
            if self.cell is None:
                load = burst(agents("agents", BURST_SESSIONS, self.seed))
                cluster = uvloop.run(run(url, load, features, engines=ENGINES, replicas=REPLICAS, seed=self.seed))
                return {**figures(cluster, load), "medians": medians(cluster)}
            load, size = self.cell.load(self.seed, self.counted), (self.cell.engines, self.cell.replicas)
            cluster = uvloop.run(run(url, load, features, engines=size[0], replicas=size[1], seed=self.seed))
            return figures(cluster, load)


def medians(cluster: SessionCluster) -> list[float]:
    """Return the median TTFT of the steps that came in each BIN_S."""
    bins: list[list[float]] = [[] for _ in range(1 + int(max(step.at_s for step in cluster.steps) / BIN_S))]
    for step in cluster.steps:
        bins[int(step.at_s / BIN_S)].append(step.ttft_s)
    return [round(statistics.median(ttft), 3) if ttft else 0.0 for ttft in bins]


# ---------------------------------------------------------------- all runs


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a cell with a variant, as means over seeds."""

    cell: str
    variant: str
    figures: Mapping[str, float]


def measured(jobs: Sequence[Job], processes: int) -> tuple[list[Row], dict[str, list[float]]]:
    """Run the jobs; return a row for each cell and variant, and the burst's medians by variant, of the first seed."""
    progress, found = Progress("runs", len(jobs)), dict[tuple[str, str], list[dict[str, float]]]()
    lines: dict[str, list[float]] = {}
    with ProcessPoolExecutor(processes) as pool:
        spread: Callable[..., Iterable[dict[str, Any]]] = map if processes == 1 else pool.map
        for job, told in zip(jobs, spread(Job.run, jobs), strict=True):
            progress.tick(failed=False)
            if job.cell is None:
                lines.setdefault(job.variant, told.pop("medians"))
            name = BURST if job.cell is None else job.cell.name
            found.setdefault((name, job.variant), []).append(told)
    mean = {  # of a seed in which nobody was held, the figures of holds are missing
        key: {name: round(statistics.fmean(run.get(name, 0.0) for run in runs), 4) for name in dict(ChainMap(*runs))}
        for key, runs in found.items()
    }
    return [Row(*key, told) for key, told in mean.items()], lines


def ratios(rows: Iterable[Row]) -> dict[str, float]:
    """Return the ratios of the bench, of those whose cells were played."""
    found = {(row.cell, row.variant): row.figures for row in rows}
    told: dict[str, float] = {}

    def ratio(name: str, figure: str, over: Iterable[tuple[str, str]], under: Iterable[tuple[str, str]]) -> None:
        """Add the least ratio of pairs of runs, if all were played."""
        pairs = list(zip(over, under, strict=True))
        if all(found.keys() >= set(pair) for pair in pairs):
            told[name] = round(min(found[one][figure] / found[other][figure] for one, other in pairs), 4)

    rate, tight, roomy = "sessions_per_hour", "agents-x1-1.5", "agents-x1-0.7"
    before = [(tight, "before")]
    ratio("sessions_per_hour_over_before", rate, [(tight, "on")], before)
    ratio("sessions_per_hour_bare", rate, [(tight, "bare")], before)
    ratio("p95_over_before", "session_p95_s", [(tight, "on")], before)
    ratio("before_at_07", rate, [(roomy, "on"), (roomy, "bare")], [(roomy, "before")] * 2)
    ratio("sessions_per_hour_tier", rate, [(tight, "tier")], [(tight, "on")])
    ratio("sessions_per_hour_tier_room", rate, [(tight, "tier")], [(tight, "tier-no-room")])
    people = ("agents-x20-1.5", "agents-x20-3")
    ratio("humans_over_before", rate, [(name, "humans") for name in people], [(name, "before") for name in people])
    ratio("four_over_one_replica", rate, [(tight, "on")], [(f"{tight}-one", "on")])
    ratio("chats_p50_over_alone", "chats_ttft_p50_s", [(f"{tight}-chats", "on")], [("chats", "before")])
    return told


def table(rows: Iterable[Row]) -> str:
    names = ("sessions_per_hour", "session_p50_s", "session_p95_s", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s",
             "ttft_below_2s", "recomputed", "held", "longest_hold_s", "longest_pause_s", "hold_over_told_p50",
             "hold_over_told_p90", "over_limit",
             "chats_ttft_mean_s", "chats_ttft_p50_s", "busy")  # fmt: skip
    cells = [(row.cell, row.variant, *(f"{row.figures[name]:.4g}" if name in row.figures else "" for name in names))
             for row in rows]  # fmt: skip
    return markdown(("cell", "variant", *names), cells)


# ---------------------------------------------------------------- the command


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if strangers := set(names).difference(VARIANTS):
        raise argparse.ArgumentTypeError(f"{min(strangers)!r} is none of {', '.join(VARIANTS)}")
    return names


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--cells", default="*", help=f"names or patterns, joined by commas, of {', '.join((*CELLS, BURST))}")
    add("--variants", type=_variants, help=f"of {','.join(VARIANTS)}, joined by commas")
    add("--seeds", type=int, default=1, help="orders of the sessions (default %(default)s)")
    add("--ends", type=int, default=0, help=f"sessions that end while figures are taken (at least {LEAST_ENDS})")
    add("--quick", action="store_true", help="generated sessions at .7 and 1.5, one engine")
    add("--jobs", type=int, default=2, help="runs at a time (default %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="the burst's median TTFT over time, an .svg or .png")
    return made


def every(args: argparse.Namespace) -> list[Job]:
    """Return the jobs of the command line. Raises ValueError if it names no cell."""
    patterns = args.cells.split(",")
    wanted: list[Cell | None] = [
        cell for name, cell in CELLS.items() if any(fnmatch(name, pattern) for pattern in patterns)
    ]
    if args.quick:
        wanted = [Cell("generated", overcommit=value, engines=1) for value in (0.7, 1.5)]
    elif any(fnmatch(BURST, pattern) for pattern in patterns):
        wanted.append(None)
    if not wanted:
        raise ValueError(f"no cell is named {args.cells}")
    ends = args.ends or (QUICK_ENDS if args.quick else 0)
    jobs = []
    for cell in wanted:
        usual = ("before", "on") if cell is None else cell.variants
        for variant in args.variants or usual:
            jobs += [Job(cell, variant, seed, ends) for seed in range(args.seeds)]
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace, nothing to draw, or a script that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    if min(args.seeds, args.jobs) < 1 or args.ends < 0:
        parser().error("--seeds and --jobs from 1 on, --ends from 0 on")
    try:
        rows, lines = measured(every(args), args.jobs)
    except (OSError, ValueError, WarmfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows), file=sys.stderr, flush=True)
    told = [{"cell": row.cell, "variant": row.variant, **row.figures} for row in rows]
    print(json.dumps({**ratios(rows), "burst": lines, "rows": told}), flush=True)
    return drawn(partial(_draw, args.plot, lines)) if args.plot else 0


def _draw(path: Path, lines: Mapping[str, Sequence[float]]) -> None:
    """Draw the burst's medians. Raises OSError, ValueError."""
    if not lines:
        raise ValueError("there is nothing to draw: the burst was not played")
    points = {name: ([BIN_S * at for at in range(len(ttft))], ttft) for name, ttft in lines.items()}
    marks = [(200.0, "60 sessions more")]
    save_figure(line_figure("One session each 2 s, and 60 at once", "seconds", "median TTFT, s", points, marks), path)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
