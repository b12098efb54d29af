"""What is it worth to know what engines have in CPU memory, and how is it priced? On the virtual clock.

    make -s bench NAME=tiers                      # all bounds: an hour of two cores
    make -s bench NAME=tiers ARGS="--quick"       # one seed, fewer requests
    make -s bench NAME=tiers ARGS="--case chats --times 2,4,10 --links 25,5 --seeds 5"
    make -s bench NAME=tiers ARGS="--engines 4 --rows 600 …"  # a quarter of the time: as much per engine of half of all

Eight engines, an 8B model on an H100, with the real scripts and publishers; each has a tier (``virtual_tiers``) of so
many times its GPU's cache, behind a link of so many GB/s. In the cases `mixed` every other engine's link is the slow
one. Arms:

    ignored      routers know nothing of tiers; an engine loads what a request that lands there finds
    weight-W     a token in a tier counts as W tokens on the GPU (rules of other routers; not a setting here)
    seconds      the rule of `cost`: twice the seconds of the load, once while the engine computes booked prefills, at
                 most those of computing

`chats` plays the conversation trace, `agents` the agents' trace in a closed loop, with smaller caches. `mixed` is
`chats` and `mixed-agents` is `agents` on links of two kinds. To load a token of the 8B model takes 5 us at 25 GB/s and
26 us at 5 GB/s, to compute it 30 to 45 us; `mixed-3b` is `mixed` with a model of 3B, which computes a token in 11 to
17 us and loads it in 5 and 23 us. A load is the share of time that engines compute in the arm `ignored`
with tiers of 4 times and 25 GB/s, as measured before.

Tables go to standard error. The last line of standard output is one JSON object: `rows` has all figures (means over
seeds): mean, p50, p90 and p99 of the time to the first token in seconds, hit_ratio (cached of all prompt tokens),
recomputed (computed tokens over those that an endless cache would have left), loaded (of all prompt tokens), busy. Its
bounds are
  seconds_over_today_mean  `seconds` over `ignored`: chats, tiers of 4 times, 25 GB/s, mean of the loads (<= .92)
  worst_case_over_today    the same for agents at 5 GB/s (<= 1.05)
  mixed_over_best_weight   `seconds` over the best weight where links differ (<= 1.03); mixed_3b_over_best_weight and
                           mixed_agents_over_best_weight the same of these cases
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench import jobs
from tests.bench.bench_order import figures
from tests.bench.jobs import means
from tests.bench.virtual_fleet import Plan, play
from tests.bench.virtual_plans import QUEUE, arrivals
from tests.bench.virtual_rivals import rotated
from tests.bench.virtual_sessions import ENGINE, ENGINE_BLOCK, coming, scaled
from tests.bench.virtual_store import private_server
from tests.bench.virtual_tiers import TOKEN_BYTES, TieredConfig, counted_at, tiers_of

from warmfleet_loadtest.stacks.processes import end_on_signals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from warmfleet_loadtest.traces.trace import Trace

ENGINES, REPLICAS = 8, 4
DISPATCH_S = 0.003
FAST, SLOW = 25.0, 5.0  # GB/s
SMALL, SMALL_BYTES = 3 / 8, 114_688  # a model of 3B: 28 layers, 8 heads of 128 numbers
TIMES = 4.0  # the tier's blocks over the GPU's
WEIGHTS = (0.25, 0.75, 1.0)
ARMS: dict[str, float | None] = {
    "ignored": None,
    **{f"weight-{weight:g}": weight for weight in WEIGHTS},
    "seconds": None,
}


@dataclass(frozen=True, slots=True)
class Case:
    """cache_tokens: of a GPU. most_per_s: requests or sessions a second at which engines would always compute.

    size: of the model over that of the 8B model, by which its steps take longer. mixed: links are of two kinds.
    """

    cache_tokens: int
    loads: tuple[float, ...]
    most_per_s: float
    sessions: int = 0
    size: float = 1.0
    token_bytes: int = TOKEN_BYTES
    mixed: bool = False


CASES = {
    "chats": Case(400_000, (0.7, 0.85), 9.2),
    "agents": Case(150_000, (0.7,), 1.0, sessions=240),
    "mixed": Case(400_000, (0.7, 0.85), 9.2, mixed=True),
    "mixed-3b": Case(400_000, (0.7, 0.85), 9.2 / SMALL, size=SMALL, token_bytes=SMALL_BYTES, mixed=True),
    "mixed-agents": Case(150_000, (0.7,), 1.0, sessions=240, mixed=True),
}


@cache
def chats(rows: int | None) -> Trace:
    found = arrivals("conversation", rows)
    return replace(found, arrivals=tuple(scaled(arrival, found.scale) for arrival in found.arrivals))


@dataclass(frozen=True, slots=True)
class Job:
    """A run, as plain values that another process can read. link: GB/s; of a mixed fleet that of every other engine."""

    case: str
    load: float
    times: float
    link: float
    arm: str
    seed: int
    seeds: int
    rows: int | None = None
    engines: int = ENGINES
    speed: float = 0.0

    @property
    def most_per_s(self) -> float:
        return CASES[self.case].most_per_s * self.engines / ENGINES

    @property
    def place(self) -> tuple[str, float, int]:
        return self.case, self.load, self.seed

    def find_speed(self) -> float:
        """Return the factor of the trace's times; known beforehand, without a run."""
        case = CASES[self.case]
        if case.sessions:
            return 1.0
        came = self.trace().arrivals
        return self.load * self.most_per_s * came[-1].at_s / len(came)

    def trace(self) -> Trace:
        case = CASES[self.case]
        if not case.sessions:
            return rotated(chats(self.rows), self.seed / self.seeds)
        return coming(min(case.sessions, self.rows or case.sessions), self.load * self.most_per_s, self.seed)

    def configs(self) -> tuple[TieredConfig, ...]:
        case = CASES[self.case]
        blocks = 1 + case.cache_tokens // ENGINE_BLOCK
        limits = replace(ENGINE.limits, max_model_len=min(ENGINE.limits.max_model_len, (blocks - 1) * ENGINE_BLOCK))
        links = [FAST, self.link] * ENGINES if case.mixed else [self.link] * ENGINES
        return tuple(
            TieredConfig(
                ENGINE.scheme, limits, blocks, ENGINE.costs.scaled(case.size),
                tier_times=self.times, token_bytes=case.token_bytes, bytes_per_s=1e9 * links[number],
                told=self.arm != "ignored",
            )
            for number in range(self.engines)
        )  # fmt: skip

    def run(self) -> dict[str, float]:
        trace = self.trace()
        plan = Plan(self.configs(), replicas=REPLICAS, speed=self.speed, seed=self.seed, queue=QUEUE)
        with private_server() as url, counted_at(ARMS[self.arm]):
            played = uvloop.run(play(url, trace, replace(plan, dispatch_s=DISPATCH_S)))
        engines = [worker.engine for worker in played.cluster.workers]
        told = figures(played.served, [engine.busy_s for engine in engines], 1.0)
        prompts = sum(request.prompt_tokens for request in played.served)
        known: set[bytes] = set()
        necessary = 0
        for _, _, request in played.cluster.routed:
            hashes = request.hashes[: request.prompt_tokens // ENGINE_BLOCK]
            fresh = [one for one in hashes if one not in known]
            necessary += len(fresh) * ENGINE_BLOCK + request.prompt_tokens % ENGINE_BLOCK
            known.update(fresh)
        computed = sum(engine.work_tokens for engine in engines)
        loaded = sum(tier.loaded for tier in tiers_of(engine.scheduler for engine in engines)) * ENGINE_BLOCK
        return told | {"recomputed": computed / necessary - 1, "loaded": loaded / prompts}


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of an arm, as means over seeds."""

    case: str
    load: float
    times: float
    link: float
    arm: str
    figures: Mapping[str, float]


def measured(wanted: Sequence[Job], processes: int) -> list[Row]:
    found = means(wanted, processes, lambda job: (job.case, job.load, job.times, job.link, job.arm))
    return [Row(*place, figures) for place, figures in found]


def ratios(rows: Sequence[Row], case: str, times: float, link: float, rivals: Sequence[str]) -> list[float]:
    """Return the mean of ``seconds`` over that of the best rival, for each load at which all were played."""
    found: dict[float, dict[str, float]] = {}
    for row in rows:
        if (row.case, row.times, row.link) == (case, times, link):
            found.setdefault(row.load, {})[row.arm] = row.figures["mean"]
    return [
        means["seconds"] / min(means[rival] for rival in rivals)
        for means in found.values()
        if means.keys() >= {"seconds", *rivals}
    ]


def bounds(rows: Sequence[Row]) -> dict[str, float]:
    """Return the ratios that are bounded, of what was played."""
    weights = [arm for arm in ARMS if arm.startswith("weight")]
    told = {
        "seconds_over_today_mean": ratios(rows, "chats", TIMES, FAST, ["ignored"]),
        "worst_case_over_today": ratios(rows, "agents", TIMES, SLOW, ["ignored"]),
    } | {
        f"{name.replace('-', '_')}_over_best_weight": ratios(rows, name, TIMES, SLOW, weights)
        for name, case in CASES.items()
        if case.mixed
    }
    return {name: round(statistics.fmean(found), 4) for name, found in told.items() if found}


def table(rows: Sequence[Row]) -> str:
    heads = ("case", "load", "times", "GB/s", "arm")
    names = ("mean", "p50", "p90", "p99", "hit_ratio", "recomputed", "loaded", "busy")
    places = [(row.case, f"{row.load:g}", f"{row.times:g}", f"{row.link:g}", row.arm) for row in rows]
    return jobs.table(heads, names, zip(places, (row.figures for row in rows), strict=True))


def _numbers(text: str) -> list[float]:
    return [float(value) for value in text.split(",")]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--case", default="", help=f"joined by commas, of {','.join(CASES)} (default: the bounds' runs)")
    made.add_argument("--loads", type=_numbers, help="default: each case's own")
    made.add_argument("--times", type=_numbers, default=[TIMES], help="tier over GPU (default %(default)s)")
    made.add_argument("--links", type=_numbers, help=f"GB/s (default: {FAST:g} for chats, {SLOW:g} for the others)")
    made.add_argument("--arms", help=f"of {','.join(ARMS)} (default: all that the bounds need)")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--engines", type=int, default=ENGINES, help="(default %(default)s)")
    made.add_argument("--rows", type=int, help="first so many requests of the trace, or sessions of agents")
    made.add_argument("--quick", action="store_true", help="one seed, 600 requests, 60 sessions")
    made.add_argument("--jobs", type=int, default=2, help="runs at a time (default %(default)s)")
    return made


def every(args: argparse.Namespace) -> list[Job]:
    found = []
    for name in args.case.split(",") if args.case else CASES:
        case, seeds = CASES[name], 1 if args.quick else args.seeds
        rows = args.rows or ((60 if case.sessions else 600) if args.quick else None)
        usual = (
            ["seconds", *[arm for arm in ARMS if arm.startswith("weight")]] if case.mixed else ["ignored", "seconds"]
        )
        for load in args.loads or case.loads:
            for times in args.times:
                for link in args.links or [FAST if name == "chats" else SLOW]:
                    for arm in args.arms.split(",") if args.arms else usual:
                        found += [
                            Job(name, load, times, link, arm, seed, seeds, rows, args.engines) for seed in range(seeds)
                        ]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no trace or a script that fails, 2 wrong arguments."""
    args = parser().parse_args(argv)
    try:
        wanted = every(args)
        unknown = {job.arm for job in wanted} - ARMS.keys()
    except KeyError as error:
        parser().error(f"no case {error}")
    if unknown or min(args.seeds, args.jobs, args.engines) < 1:
        parser().error(f"arms are {', '.join(ARMS)}; --seeds, --jobs and --engines from 1 on")
    return jobs.report(lambda: measured(wanted, args.jobs), table, told)


def told(rows: Sequence[Row]) -> dict[str, Any]:
    every = [
        {"case": row.case, "load": row.load, "times": row.times, "link": row.link, "arm": row.arm, **row.figures}
        for row in rows
    ]
    return {**bounds(rows), "rows": every}


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
