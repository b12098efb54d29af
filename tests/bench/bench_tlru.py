"""T-LRU against LRU: the paper's conversation model, traces through one engine, and T-LRU together with routing.

    make -s bench NAME=tlru                                   # all parts; the traces are found beside the checkout
    make -s bench NAME=tlru ARGS="--part conversations --seeds 20"
    make -s bench NAME=tlru ARGS="--plots tests/bench"        # also writes tlru_*.svg into this folder
    make -s bench NAME=tlru ARGS="--quick"                    # seconds, for a test: few runs of a generated trace

TRACE may name the folder of the traces. A progress bar goes to standard error, tables go to standard output. The last
line is one JSON object: ``p90_change_pct``, ``p95_change_pct`` and ``misses_change_pct`` (change against LRU in the
paper's setting, objective 200 ms, cache of HEADLINE_TOKENS), ``adaptive_worst_mean_change_pct`` (the largest change of
the mean TTFT by the adaptive objective, over all capacities of the conversation model and of the traces), and every
cell by part.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.tail_plots import draw
from tests.bench.tail_runs import AUTO, OBJECTIVE_MS, ConversationRun, FleetRun, TraceRun, changes, mean_of
from tests.bench.virtual_plans import arrivals

from warmfleet.errors import WarmfleetError
from warmfleet_loadtest.measuring.figures import markdown
from warmfleet_loadtest.measuring.progress import Progress
from warmfleet_loadtest.stacks.processes import end_on_signals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.bench.tail_runs import Cells

    Run = ConversationRun | TraceRun | FleetRun

PARTS = ("conversations", "traces", "fleet")
PAPER_TOKENS = (1_000, 2_000, 4_000, 6_000, 8_000, 10_000)  # the capacities of the paper's tables
ROOMY_TOKENS = (16_000, 32_000, 64_000)
HEADLINE_TOKENS = 10_000
PAPER_GAP_S, SHORT_GAP_S = 180.0, 60.0  # mean time between two turns of a conversation
CONVERSATION_BLOCKS = (500, 1_000, 2_000, 3_000, 4_000, 6_000, 8_000, 12_000, 16_000, 24_000, 32_000)
AGENT_BLOCKS = (512, 768, 1_024, 1_536, 2_048, 4_096, 8_192)
TARGETS = ("", "0.2", "0.4", "0.8", AUTO)  # seconds
FLEET = (("conversation", 6.0, None, (500, 1_000, 1_953)), ("agents", 4.0, 600, (256, 512)))
COLUMNS = ("mean", "p50", "p90", "p95", "p99")


def conversation_runs(seeds: int, turns: int, quick: bool) -> list[Run]:
    sizes = (4_000, HEADLINE_TOKENS) if quick else (*PAPER_TOKENS, *ROOMY_TOKENS)
    gaps = (PAPER_GAP_S,) if quick else (PAPER_GAP_S, SHORT_GAP_S)
    return [ConversationRun(gap, size, seed, turns) for gap in gaps for size in sizes for seed in range(seeds)]


def trace_runs(quick: bool) -> list[Run]:
    """Return one engine with an eighth of the traffic that eight engines get in the other benches."""
    if quick:
        return [TraceRun("generated", 400, 1.0, 120, ("", AUTO))]
    plain: list[Run] = [TraceRun("conversation", blocks, 0.6, None, TARGETS) for blocks in CONVERSATION_BLOCKS]
    return plain + [TraceRun("agents", blocks, 0.5, 1_000, TARGETS) for blocks in AGENT_BLOCKS]


def fleet_runs(seeds: int, quick: bool) -> list[Run]:
    policies = ("least_loaded", "cost")
    if quick:
        return [FleetRun("generated", 256, 4.0, 40, policies, 0, engines=2)]
    return [
        FleetRun(workload, blocks, speed, rows, policies, seed)
        for workload, speed, rows, sizes in FLEET
        for blocks in sizes
        for seed in range(seeds)
    ]


def gather(runs: Sequence[Run], jobs: int) -> dict[str, list[Cells]]:
    """Run all; return the cells of every setting, one for each seed."""
    made: dict[str, list[Cells]] = {}
    progress = Progress("tlru", len(runs))
    with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:
        for run, cells in zip(runs, pool.map(_run, runs) if pool else map(_run, runs), strict=True):
            made.setdefault(_name(run), []).append(cells)
            progress.tick(failed=False)
    return made


def _run(run: Run) -> Cells:
    return run.run()


def _name(run: Run) -> str:
    if isinstance(run, ConversationRun):
        return f"conversations, gap {run.gap_s:g} s, {run.capacity} tokens"
    where = "one engine" if isinstance(run, TraceRun) else "each engine"
    return f"{run.workload}, {where} {run.blocks} blocks"


def compared(found: Mapping[str, Sequence[Cells]]) -> dict[str, Any]:
    """Return for each setting the figures of the first policy, and the changes against it, in %, of all others."""
    made = {}
    for name, runs in found.items():
        base = next(iter(runs[0]))
        figures = {figure: round(value, 4) for figure, value in mean_of(runs)[base].items()}
        made[name] = {"base": base, "figures": figures, "change_pct": changes(runs, base)}
    return made


def table(rows: Mapping[str, Any]) -> str:
    """Return a Markdown table with the base of each setting, and below it the changes in %. misses: turns too late."""
    lines: list[Sequence[object]] = []
    for name, row in rows.items():
        columns = (*COLUMNS, "misses" if "misses" in row["figures"] else "hit_ratio")
        lines.append((f"**{name}**: {row['base']}", *(f"{row['figures'][column]:.4g}" for column in columns)))
        for policy, change in row["change_pct"].items():
            if policy != row["base"]:
                lines.append((policy, *(f"{change[column]:+.1f} %" for column in columns)))
    return markdown(("", *COLUMNS, "misses, or hit ratio"), lines)


def headline(rows: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of the JSON object's head; None for parts that did not run."""
    paper = rows.get(f"conversations, gap {PAPER_GAP_S:g} s, {HEADLINE_TOKENS} tokens")
    fixed = paper["change_pct"][f"T-LRU {OBJECTIVE_MS:g} ms"] if paper else {}
    adaptive = [row["change_pct"][AUTO]["mean"] for row in rows.values() if AUTO in row["change_pct"]]
    return {
        **{f"{figure}_change_pct": fixed.get(figure) for figure in ("p90", "p95", "misses")},
        "adaptive_worst_mean_change_pct": max(adaptive, default=None),
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=tlru", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--part", choices=PARTS, action="append", help="may be repeated (default: all)")
    made.add_argument("--seeds", type=int, default=10, help="runs of the conversation model (default %(default)s)")
    made.add_argument("--fleet-seeds", type=int, default=2, help="runs of the fleet (default %(default)s)")
    made.add_argument("--turns", type=int, default=2_000, help="of such a run, as in the paper (default %(default)s)")
    made.add_argument("--jobs", type=int, default=2, help="runs at a time (default %(default)s)")
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="write tlru_*.svg into this folder")
    made.add_argument("--quick", action="store_true", help="few small runs of a generated trace")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace, or a script or a plot that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    parts = args.part or PARTS
    if args.quick:
        args.seeds, args.fleet_seeds, args.turns = 2, 1, 200
    runs: list[Run] = []
    if "conversations" in parts:
        runs += conversation_runs(args.seeds, args.turns, args.quick)
    if "traces" in parts:
        runs += trace_runs(args.quick)
    if "fleet" in parts:
        runs += fleet_runs(args.fleet_seeds, args.quick)
    try:
        _check_traces(runs)
        rows = compared(gather(runs, args.jobs))
        print(table(rows))
        if args.plots:
            draw(args.plots, rows)
    except (OSError, ValueError, WarmfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(headline(rows) | {"rows": rows}), flush=True)
    return 0


def _check_traces(runs: Iterable[Run]) -> None:
    """Raise FileNotFoundError before the first run if a trace is missing."""
    for workload in {run.workload for run in runs if not isinstance(run, ConversationRun)}:
        arrivals(workload, 1)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
