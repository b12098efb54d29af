"""Prefill and decode apart: what is one decision over engines alone and pairs worth? On the virtual clock.

    make -s bench NAME=disaggregation                     # all bounds: hours of two cores
    make -s bench NAME=disaggregation ARGS="--quick"      # one seed, two loads, 300 requests, three splits
    make -s bench NAME=disaggregation ARGS="--cases agents --loads .5 --splits 4:4 --arms ours,always --seeds 5"
    make -s bench NAME=disaggregation ARGS="--loads .5,.7,.85,.95 --seeds 1 --plot tests/bench/disaggregation.svg"

Eight engines, an 8B model on an H100 with 400,000 tokens of cache (150,000 for agents), with the real scripts and
publishers and links of 100 Gbit/s. A split P:D has P engines that compute prompts for the D others. Arms:

    always      each request is split, over the cheapest pair of our rule
    llm-d       it is split if the best decode engine lacks 2,048 tokens of the prompt or more
    dynamo      … unless it lacks less than 2,048 tokens and less than .7 of the prompt
    ours        the rule of decide/joint; engines of the role `prefill` never serve alone
    ours-alone  the same, but the P engines may serve alone, too
    both        every engine has both roles; no split
    agg-CHUNK   engines without roles, whose steps have CHUNK tokens

Engines that make answers have steps of 512 tokens, those that only compute prompts for others of 2,048.
`chats` plays the conversation trace, `agents` the agents' trace in a closed loop, `long` the conversation's prompts of
8,000 tokens and more. A load is the share of the rate at which eight engines without roles are always busy.

Tables go to standard error. The last line of standard output is one JSON object: `rows` has all figures, as means over
seeds: ttft and gap (time between tokens), each mean and p99 in seconds; good: share of requests with the first token
within 2 s and 99 % of its gaps within 50 ms; strict: the same within 25 ms; paired: share of split requests. Bounds:
  goodput_over_best_rule  `good` of ours-alone over the best of always, llm-d and dynamo: the worst of all splits at .5
                          and .7 of chats and long (>= 1.0)
  ttft_mean_over_always   `ttft` of ours-alone over always: the worst of the same (<= 1.0)
  worst_split_goodput     `good` of ours at .5 of the same: the worst split (>= .73)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench import jobs
from tests.bench.bench_tiers import chats
from tests.bench.jobs import means
from tests.bench.virtual_fleet import play
from tests.bench.virtual_pairs import BOTH, GIVES, TAKES, PairCluster, PairConfig, PairPlan, within
from tests.bench.virtual_plots import Cells, draw_cells
from tests.bench.virtual_rivals import rotated
from tests.bench.virtual_sessions import ENGINE, ENGINE_BLOCK, coming
from tests.bench.virtual_store import private_server

from warmfleet_loadtest.measuring.figures import quantile
from warmfleet_loadtest.stacks.processes import end_on_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from warmfleet.fleet import Role
    from warmfleet_loadtest.traces.trace import Trace

ENGINES, SKIP = 8, 0.1
PARTS = 5  # of the conversation trace; each seed plays another part
FIRST_S, GAP_S, STRICT_S = 2.0, 0.05, 0.025
MOST_LACKED, MOST_SHARE = 2_048, 0.7
LONG_TOKENS = 8_000
PREFILL_CHUNK, DECODE_CHUNK = 2_048, 512
SPLITS = ("2:6", "3:5", "4:4", "5:3", "6:2")
BOUNDED = ("chats", "long")  # cases of the bounds
CHUNKS = (256, 512, 2_048, 8_192)
RULES: dict[str, Callable[[int, int], bool] | None] = {
    "always": None,
    "llm-d": lambda _prompt, lacks: lacks >= MOST_LACKED,
    "dynamo": lambda prompt, lacks: lacks >= MOST_LACKED or lacks >= MOST_SHARE * prompt,
}
SPLIT_ARMS = (*RULES, "ours", "ours-alone")
WHOLE_ARMS = ("both", *(f"agg-{chunk}" for chunk in CHUNKS))


@dataclass(frozen=True, slots=True)
class Case:
    """most_per_s: requests or sessions a second at which engines without roles would always be busy."""

    cache_tokens: int
    most_per_s: float
    sessions: int = 0


CASES = {
    "chats": Case(400_000, 9.2),
    "agents": Case(150_000, 1.4, sessions=240),
    "long": Case(400_000, 5.0),
}


@cache
def long_prompts() -> Trace:
    found = chats(None)
    return replace(found, arrivals=tuple(each for each in found.arrivals if len(each.prompt) >= LONG_TOKENS))


@dataclass(frozen=True, slots=True)
class Job:
    """A run, as plain values that another process can read. split: empty for engines of one kind."""

    case: str
    load: float
    split: str
    arm: str
    seed: int
    rows: int | None = None
    speed: float = 0.0

    @property
    def place(self) -> tuple[str, float, int]:
        return self.case, self.load, self.seed

    def find_speed(self) -> float:
        """Return the factor of the trace's times; known beforehand, without a run."""
        case = CASES[self.case]
        if case.sessions:
            return 1.0
        came = self.trace().arrivals
        return self.load * case.most_per_s * came[-1].at_s / len(came)

    def trace(self) -> Trace:
        case = CASES[self.case]
        if not case.sessions:
            found = chats(None) if self.case == "chats" else long_prompts()
            part = rotated(found, self.seed / PARTS).arrivals[: len(found.arrivals) // PARTS]
            return replace(found, arrivals=part[: self.rows])
        return coming(min(case.sessions, self.rows or case.sessions), self.load * case.most_per_s, self.seed)

    def roles(self) -> tuple[Role, ...]:
        if self.split:
            gives = int(self.split.split(":")[0])
            first = GIVES._replace(alone=self.arm == "ours-alone")
            return (first,) * gives + (TAKES,) * (ENGINES - gives)
        return (BOTH,) * ENGINES if self.arm == "both" else ()

    def plan(self) -> PairPlan:
        case, roles = CASES[self.case], self.roles()
        blocks = 1 + case.cache_tokens // ENGINE_BLOCK
        longest = min(ENGINE.limits.max_model_len, (blocks - 1) * ENGINE_BLOCK)
        if self.arm.startswith("agg-"):
            chunks = [int(self.arm.removeprefix("agg-"))] * ENGINES
        else:
            chunks = [DECODE_CHUNK if role.alone else PREFILL_CHUNK for role in roles]
        configs = tuple(
            PairConfig(
                ENGINE.scheme,
                replace(ENGINE.limits, max_model_len=longest, step_tokens=chunk),
                blocks,
                ENGINE.costs,
            )
            for chunk in chunks
        )
        made = PairPlan(configs, speed=self.speed, seed=self.seed)
        return replace(made, roles=roles, ours=self.arm not in RULES, splits=RULES.get(self.arm))

    def run(self) -> dict[str, float]:
        with private_server() as url:
            played = uvloop.run(play(url, self.trace(), self.plan(), PairCluster))  # type: ignore[arg-type]
        cluster: Any = played.cluster
        own = sorted(played.served, key=lambda request: request.at_s)
        own = own[int(SKIP * len(own)) :]
        ttft = sorted(request.ttft_s for request in own)
        every = sorted(gap for gaps in cluster.pairs.gaps.values() for gap in gaps) or [0.0]
        return {
            "ttft": statistics.fmean(ttft),
            "ttft_p99": quantile(ttft, 0.99),
            "gap": statistics.fmean(every),
            "gap_p99": quantile(every, 0.99),
            **{name: self._good(cluster, own, limit_s) for name, limit_s in (("good", GAP_S), ("strict", STRICT_S))},
            "paired": cluster.split / len(played.served),
            "busy": statistics.fmean(worker.engine.busy_s for worker in cluster.workers) / max(1e-9, own[-1].at_s),
        }

    @staticmethod
    def _good(cluster: Any, own: Sequence[Any], limit_s: float) -> float:
        gaps = cluster.pairs.gaps_of
        return statistics.fmean(each.ttft_s <= FIRST_S and within(gaps(each), limit_s) for each in own)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of an arm, as means over seeds."""

    case: str
    load: float
    split: str
    arm: str
    figures: Mapping[str, float]


def measured(wanted: Sequence[Job], processes: int, kept: Path | None = None) -> list[Row]:
    found = means(wanted, processes, lambda job: (job.case, job.load, job.split, job.arm), kept)
    return [Row(*place, figures) for place, figures in found]


def bounds(rows: Sequence[Row]) -> dict[str, float]:
    """Return the bounds, of what was played."""
    cells: dict[tuple[str, float, str], dict[str, Mapping[str, float]]] = {}
    for row in rows:
        if row.split and row.case in BOUNDED and row.load in (0.5, 0.7):
            cells.setdefault((row.case, row.load, row.split), {})[row.arm] = row.figures
    whole = [arms for arms in cells.values() if arms.keys() >= {"ours-alone", *RULES}]
    fixed = [arms["ours"]["good"] for (_, load, _), arms in cells.items() if load == 0.5 and "ours" in arms]
    told: dict[str, float] = {}
    if whole:
        best = [max(arms[rule]["good"] for rule in RULES) for arms in whole]
        ratios = zip(whole, best, strict=True)
        told["goodput_over_best_rule"] = min(arms["ours-alone"]["good"] / max(most, 1e-3) for arms, most in ratios)
        told["ttft_mean_over_always"] = max(arms["ours-alone"]["ttft"] / arms["always"]["ttft"] for arms in whole)
    if fixed:
        told["worst_split_goodput"] = min(fixed)
    return {name: round(value, 4) for name, value in told.items()}


def table(rows: Sequence[Row]) -> str:
    names = ("ttft", "ttft_p99", "gap", "gap_p99", "good", "strict", "paired", "busy")
    places = [(row.case, f"{row.load:g}", row.split or "-", row.arm) for row in rows]
    return jobs.table(("case", "load", "split", "arm"), names, zip(places, (row.figures for row in rows), strict=True))


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw both shares of requests in time, and the mean TTFT, of all rows. Raises OSError, ValueError."""
    figures = {
        "good": (f"share in time, gaps within {1e3 * GAP_S:.0f} ms", 1.0, 0.0),
        "strict": (f"share in time, gaps within {1e3 * STRICT_S:.0f} ms", 1.0, 0.0),
        "ttft": ("mean TTFT in seconds", 0.0, 5.0),
    }
    lines = [
        [
            Cells(
                f"{case}: {words}",
                {((f"{row.load:g}", row.split), row.arm): row.figures[name] for row in rows if row.case == case},
                *ends,
            )
            for case in dict.fromkeys(row.case for row in rows)
        ]
        for name, (words, *ends) in figures.items()
    ]
    draw_cells(path, f"By load and split; in time: the first token within {FIRST_S:g} s", lines)


def told(rows: Sequence[Row]) -> dict[str, Any]:
    every = [{"case": row.case, "load": row.load, "split": row.split, "arm": row.arm, **row.figures} for row in rows]
    return {**bounds(rows), "rows": every}


def _list(text: str) -> list[str]:
    return text.split(",")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=disaggregation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--cases", type=_list, help=f"joined by commas, of {','.join(CASES)} (default: all)")
    made.add_argument("--loads", type=_list, help="(default: .5,.7,.85,.95)")
    made.add_argument("--splits", type=_list, help=f"of {','.join(SPLITS)} (default: all)")
    made.add_argument("--arms", type=_list, help=f"of {','.join((*SPLIT_ARMS, *WHOLE_ARMS))} (default: all)")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--rows", type=int, help="first so many requests of the trace, or sessions of agents")
    made.add_argument("--quick", action="store_true", help="one seed, two loads, 300 requests, three splits of chats")
    made.add_argument("--kept", type=Path, help="file of runs: those that it has are not made again, others are added")
    made.add_argument("--plot", type=Path, metavar="FILE", help="shares in time and TTFT of each cell, .svg or .png")
    made.add_argument("--jobs", type=int, default=2, help="runs at a time (default %(default)s)")
    return made


def every(args: argparse.Namespace) -> list[Job]:
    """Return the jobs, all of one seed before those of the next."""
    quick, places = args.quick, []
    bounded = not (args.cases or args.loads or args.arms)
    arms = args.arms or [*SPLIT_ARMS, *(() if bounded else WHOLE_ARMS)]
    loads = ["0.5", "0.7"] if bounded else args.loads or ["0.5", "0.7", "0.85", "0.95"]
    for case in args.cases or (["chats"] if quick else BOUNDED if bounded else CASES):
        for load in map(float, loads):
            for split in args.splits or (["2:6", "4:4", "6:2"] if quick else SPLITS):
                places += [(case, load, split, arm) for arm in arms if arm in SPLIT_ARMS]
            places += [(case, load, "", arm) for arm in arms if arm in WHOLE_ARMS]
    seeds, rows = 1 if quick else args.seeds, args.rows or (300 if quick else None)
    return [Job(*place, seed, rows) for seed in range(seeds) for place in places]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace, nothing to draw, or a script that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    wanted = every(args)
    unknown = {job.arm for job in wanted} - {*SPLIT_ARMS, *WHOLE_ARMS} or {job.case for job in wanted} - CASES.keys()
    if unknown or not wanted or {job.split for job in wanted} - {"", *SPLITS} or min(args.seeds, args.jobs) < 1:
        parser().error("wrong cases, splits or arms; or --seeds or --jobs below 1")
    plot = partial(draw, args.plot) if args.plot else None
    return jobs.report(lambda: measured(wanted, args.jobs, args.kept), table, told, plot)


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
