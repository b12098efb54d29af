"""Play a trace through whole fleets over HTTP: every policy, any number of replicas, and routers of other projects.

    make -s bench NAME=trace                                                    # cost, one replica: 2.5 minutes
    make -s bench NAME=trace TRACE=agents POLICY=cost,session REPLICAS=1,4      # four fleets, 6 minutes each
    make -s bench NAME=trace POLICY=all SEEDS=3 ARGS="--engine-mode step"       # all policies, three seeds
    make -s bench NAME=trace FLEET=bridge:4,approximate:4,mixed:4               # and cost x 4 beside them
    make -s bench NAME=trace FLEET=vllm-router-kv:1,vllm-router-kv:4,smg:1,session-sticky,session-affinity:4
    make -s bench NAME=trace FLEET=oracle,central,session-sticky ARGS="--speed 9.5"    # choosers that look into engines
    make -s bench NAME=trace FLEET=picker:2 ARGS="--rows 600"                   # behind an Envoy; and cost x 2
    make -s bench NAME=trace ARGS="--rows 300 --policy cost,least_loaded"       # a first look: 30 s
    make -s bench NAME=trace FLEET=no-ledger:4,smg:4 SEEDS=3 ARGS="--overcommit 1.5" # agents: 2 minutes each
    make -s bench NAME=trace FLEET=no-ledger:4 ARGS="--burst 40"                # agents, and more of them at once

Requests arrive at the trace's own times, divided by --speed, whether or not earlier ones are answered (TRACE=agents:
a session's next request waits for its previous answer). TTFT is in trace seconds (wall seconds x --speed), from when a
request was due; the first tenth of the requests warms up. The last line of standard output is one JSON object. For one
fleet it has `mean_ttft`, `p50_ttft`, `p90_ttft`, `p99_ttft`, `hit_ratio`, `imbalance` (computed tokens of the busiest
engine over the mean), `failed` and others; for several fleets each has these under `runs`. With several seeds `ci95`
holds the half widths of 95 % intervals. Each seed has other tokens and session keys, hence other hashes; the arrivals
are always those of the trace. Plots and all figures go to --out.

With FLEET=picker:N one replica is killed and started again when half of the requests are answered (not with
--no-kill). `cut` of the
`failed` answers had begun; `booked` is the load that was left after the run; `over_own` has the mean TTFT over that of
the replicas' own data plane, by seed, and the mean.

With --overcommit or --burst agents' sessions are chats that declare tools (see `warmfleet_loadtest.agents`), at four
engines in mode step. So many run at a time that their contexts are --overcommit times as large as all caches; or they
begin at random times, and --burst more of them together. The figures are `sessions_per_hour`, `session_p50`,
`session_p95`, TTFT and `recomputed`, in trace seconds; the first 30 % of the time warms up. `ratios` has the figures
over those of the fleet `no-ledger`, by seed, and their mean. Exit codes: 0 every request was answered, 1 a request
failed (of a picker: before its answer began), load was left or a fleet did not start, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvloop

from warmfleet_loadtest.agents import BINS, Load, Player, medians, open_closed, speller
from warmfleet_loadtest.agents import figures as agents_figures
from warmfleet_loadtest.measuring.figures import (
    after_warm_up,
    due_ttft,
    figures,
    health,
    markdown,
    over_seeds,
)
from warmfleet_loadtest.measuring.plots import line_figure, save_figure, save_plots
from warmfleet_loadtest.measuring.progress import Progress
from warmfleet_loadtest.measuring.sampling import Sample, sampled, spent
from warmfleet_loadtest.replay import Target, replay
from warmfleet_loadtest.simulator.step_costs import load_costs
from warmfleet_loadtest.stacks.fleets import PICKER, WITHOUT_LEDGER, Setup, others, ours, running
from warmfleet_loadtest.stacks.peers import MODEL
from warmfleet_loadtest.stacks.processes import POLL_S, StackError
from warmfleet_loadtest.traces.agents import chats
from warmfleet_loadtest.traces.trace import DECODE_S, PUBLIC, open_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warmfleet_loadtest.measuring.client import Reply
    from warmfleet_loadtest.stacks.fleets import Fleet, Gateway, Running
    from warmfleet_loadtest.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings that are the same for all fleets and seeds of one bench.

    setup: the engines. trace: a name in ``traces.trace.PUBLIC`` or the path of a file. rows: the number of requests
    that are played, from the first on. speed: trace seconds per wall second. skip: the first share (0 to 1) of the
    requests, which warms up the caches; of these only failures count. texts: prompts are sent as texts even to fleets
    that take token ids. load: of agents, in place of the trace's arrivals. named: agents name their sessions.
    kills: one replica of those that a gateway asks.
    """

    setup: Setup
    trace: str
    rows: int
    speed: float
    skip: float
    texts: bool
    load: Load | None = None
    named: bool = False
    kills: bool = True


LEASE_S = 45.0  # reservations of a killed replica live 30 s, and an idle fleet removes them some seconds later
AGENTS_BLOCKS, AGENTS_SPEED = 800, 5.0
LAG_MS = 100.0  # lateness of the agents' event loop at P99 from which other work was the limit
ENDING_S = 2.0  # longest time from a refused connection until the operating system reports that the process has ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a fleet's run with one seed. ttft: sorted, in trace seconds, without the warm-up."""

    figures: dict[str, Any]
    health: dict[str, Any]
    ttft: list[float]
    samples: list[Sample]
    medians: list[float] = field(default_factory=list)


def play(trace: Trace, fleet: Fleet, bench: Bench, seed: int, label: str) -> Outcome:
    """Play the trace through a fresh fleet. Raises StackError if the fleet does not start or a process of it ends."""
    with running(fleet, bench.setup) as up:
        if bench.load is not None:
            return _agents(trace, fleet, bench, bench.load, seed, up)
        half = len(trace.arrivals) // 2 if fleet.asked and bench.kills else -1
        progress = Progress(label, len(trace.arrivals), {half: up.restart})
        before, began = _cpu_s(up), time.monotonic()
        spell = speller() if bench.texts or not fleet.takes_ids else list
        target = Target(up.urls, MODEL, bench.speed, seed, balance=up.balance, spell=spell)
        try:
            replies, watch, samples = uvloop.run(_drive(trace, target, up.engines, progress))
        except StackError:
            up.processes.check(within_s=ENDING_S)  # raises a better error if a process has ended
            raise
        wall_s = time.monotonic() - began
        cpu_s = {kind: seconds - before.get(kind, 0.0) for kind, seconds in _cpu_s(up).items()}
        up.processes.check()
        booked = _left(up)
    counted = after_warm_up(replies, bench.skip)
    return Outcome(
        figures(replies, samples, bench.speed, bench.skip) | {"booked": booked},
        health(counted, watch, bench.speed, cpu_s, wall_s),
        due_ttft(counted, bench.speed),
        samples,
    )


def _left(up: Running) -> int:
    """Wait until no load is booked, for no longer than reservations live; return what is booked then."""
    until = time.monotonic() + LEASE_S
    while up.replicas and (booked := up.booked()):
        if time.monotonic() > until:
            return booked
        time.sleep(POLL_S)
    return 0


def _agents(trace: Trace, fleet: Fleet, bench: Bench, load: Load, seed: int, up: Running) -> Outcome:
    """Play a load of agents through a fleet that runs. Raises StackError if a process of it ends."""
    target = Target(up.urls, MODEL, bench.speed, seed, balance=up.balance)
    player = Player(chats(trace, speller()), load, target, named=bench.named or fleet.needs_names)

    async def drive() -> tuple[dict[str, float], list[Sample]]:
        async with sampled(up.engines) as samples:
            watch = await player.run()
        return watch, samples

    before, began = _cpu_s(up), time.monotonic()
    watch, samples = uvloop.run(drive())
    cpu_s = {kind: seconds - before.get(kind, 0.0) for kind, seconds in _cpu_s(up).items()}
    up.processes.check()
    replies = [sent.reply for sent in player.played.steps if sent.reply is not None]
    found = agents_figures(player.played, load, load.skip * load.seconds, load.seconds)
    found["requests"] = len(replies)
    found["undecided"] = sum(reply.reservation not in ("", "booked") for reply in replies)
    found["busy"] = statistics.fmean(spent(samples, "busy_s")) / samples[-1].at_s
    told = health(replies, watch, bench.speed, cpu_s, time.monotonic() - began)
    told["client_was_the_bottleneck"] |= watch["lag_p99_ms"] > LAG_MS
    ttft = sorted(sent.waited_s for sent in player.played.steps)
    return Outcome(found, told, ttft, samples, medians(player.played, load.seconds))


async def _drive(
    trace: Trace, target: Target, engines: Sequence[str], progress: Progress
) -> tuple[list[Reply], dict[str, float], list[Sample]]:
    async with sampled(engines) as samples:
        replies, watch = await replay(trace, target, lambda reply: progress.tick(failed=reply.error is not None))
    return replies, watch, samples


def _cpu_s(up: Running) -> dict[str, float]:
    own = psutil.Process().cpu_times()
    return {**up.processes.cpu_s(), "client": own.user + own.system}


def run(fleets: Sequence[Fleet], bench: Bench, seeds: int, out: Path) -> dict[str, Any]:
    """Play all fleets with the first seed, then all with the next: a slow hour of the machine hits all fleets alike."""
    outcomes: dict[str, list[Outcome]] = {fleet.name: [] for fleet in fleets}
    broken: dict[str, str] = {}
    for seed in range(seeds):
        trace = open_trace(bench.trace, bench.rows, seed) if bench.load is None else open_closed(bench.trace, seed)
        for fleet in fleets:
            if fleet.name in broken:
                continue
            label = f"{fleet.name}, seed {seed + 1}/{seeds}"
            try:
                outcomes[fleet.name].append(play(trace, fleet, bench, seed, label))
            except StackError as error:
                broken[fleet.name] = str(error)
                print(f"error: {label}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"{label}: {json.dumps(outcomes[fleet.name][-1].figures)}", file=sys.stderr, flush=True)
            try:
                _save(out, fleets, outcomes, bench)
            except OSError as error:  # go on: the figures of the other fleets matter more than plots
                print(f"error: not saved: {error}", file=sys.stderr, flush=True)
    runs = [_entry(fleet, outcomes[fleet.name], broken.get(fleet.name)) for fleet in fleets]
    about = {"trace": trace.name, "rows": len(trace.arrivals), "speed": bench.speed, "mode": bench.setup.mode}
    about |= {"engines": bench.setup.engines, "blocks": bench.setup.blocks, "step_time": bench.setup.step_time}
    if len(runs) == 1:
        return {**runs[0], **about}
    if any(fleet.asked for fleet in fleets):
        about["over_own"] = over_own({name: [each.figures for each in found] for name, found in outcomes.items()})
    if bench.load is not None:
        about["ratios"] = ratios({name: [each.figures for each in found] for name, found in outcomes.items()})
    return {**about, "runs": runs, "failed": sum(entry.get("failed", 0) for entry in runs)}


def _entry(fleet: Fleet, outcomes: Sequence[Outcome], error: str | None) -> dict[str, Any]:
    head: dict[str, Any] = {"fleet": fleet.name, "policy": fleet.policy, "replicas": fleet.replicas}
    if error is not None:
        head["error"] = error
    if not outcomes:
        return head
    examples = [text for outcome in outcomes for text in outcome.figures["error_examples"]]
    last = {"error_examples": examples[:3], "seeds": len(outcomes), **outcomes[-1].health}
    last["client_was_the_bottleneck"] = any(outcome.health["client_was_the_bottleneck"] for outcome in outcomes)
    return {**head, **over_seeds([outcome.figures for outcome in outcomes]), **last}


def ratios(found: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each fleet over those of the first without a ledger: for each seed, and last their mean."""
    base = next((runs for name, runs in found.items() if name.startswith(WITHOUT_LEDGER)), [])
    told: dict[str, dict[str, list[float]]] = {}
    for name, runs in found.items():
        for figure in RATIOS if runs is not base else ():
            each = [
                round(run[figure] / other[figure], 3) for run, other in zip(runs, base, strict=False) if other[figure]
            ]
            if each:
                told.setdefault(name, {})[figure] = [*each, round(statistics.fmean(each), 3)]
    return told


def over_own(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Return the mean TTFT of each fleet behind a gateway over that of as many replicas that forward requests: for each
    seed, and last their mean."""
    told = {}
    for name, runs in found.items():
        base = found.get(name.replace(PICKER, "cost"), [])
        if name.startswith(PICKER) and runs and base:
            each = [run["mean_ttft"] / own["mean_ttft"] for run, own in zip(runs, base, strict=False)]
            told[name] = [round(ratio, 4) for ratio in (*each, statistics.fmean(each))]
    return told


def _save(folder: Path, fleets: Sequence[Fleet], outcomes: dict[str, list[Outcome]], bench: Bench) -> None:
    """Write all figures so far, and plots of the first seed. Raises OSError."""
    speed = bench.speed
    first = {fleet.name: outcomes[fleet.name][0] for fleet in fleets if outcomes[fleet.name]}
    if bench.load is not None:
        times = [at * bench.load.seconds / BINS for at in range(BINS)]
        lines = {name: (times, outcome.medians) for name, outcome in first.items()}
        marks = [(bench.load.burst_at_s, f"{bench.load.burst} sessions more")] if bench.load.burst else []
        drawn = line_figure("Steps of agents", "trace seconds", "median TTFT, trace seconds", lines, marks)
        save_figure(drawn, folder / "agents_ttft.svg")
    save_plots(
        folder,
        {name: outcome.ttft for name, outcome in first.items()},
        {name: outcome.samples for name, outcome in first.items()},
        speed,
    )
    seeds = {
        name: [{**outcome.figures, **outcome.health, "medians": outcome.medians} for outcome in found]
        for name, found in outcomes.items()
    }
    (folder / "figures.json").write_text(json.dumps(seeds, indent=1))


COLUMNS = ("mean_ttft", "p50_ttft", "p90_ttft", "p99_ttft", "hit_ratio", "imbalance", "failed")
RATIOS = ("sessions_per_hour", "session_p50", "session_p95", "p50_ttft", "p99_ttft", "recomputed")


def table(runs: Sequence[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
    """Return a Markdown table with one line per fleet; with several seeds each mean has its ± (95 %)."""
    rows = []
    for entry in runs:
        margins = entry.get("ci95", {})
        cells = [
            f"{entry.get(name, '-')}" + (f" ± {margins[name]}" if name in margins and name != "failed" else "")
            for name in columns
        ]
        rows.append([entry["fleet"], *cells])
    return markdown(("fleet", *columns), rows)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env, add = os.environ.get, made.add_argument
    add("--trace", default=env("TRACE") or "conversation", help="conversation, agents or a file ($TRACE)")
    add("--policy", default=env("POLICY"), help="policies joined by commas, or all ($POLICY; cost)")
    add("--replicas", default=env("REPLICAS") or "1", help="numbers joined by commas ($REPLICAS; 1)")
    add("--fleet", default=env("FLEET") or "", help="other fleets, such as smg:4,session-sticky ($FLEET)")
    add("--seeds", type=int, default=env("SEEDS") or "1", help="runs of each fleet ($SEEDS; 1)")
    add("--rows", type=int, help="play only the first requests (2400; agents: 2955)")
    add("--speed", type=float, help="trace seconds per second: the load (6; agents: 4)")
    add("--skip", type=float, default=0.1, help="share of the requests that warms up (default %(default)s)")
    add("--engines", type=int, help="8; agents: 4")
    add("--blocks", type=int, help="of 16 tokens, per engine (1953; agents: 1024)")
    add("--engine-mode", choices=("fcfs", "step"), default="fcfs", help="default %(default)s")
    add("--step-time", help="preset, factor or file of calibrate (by trace and mode)")
    add("--prompts", choices=("ids", "text"), default="ids", help="smg always gets texts")
    add("--no-kill", action="store_true", help="of picker:N no replica is killed")
    add("--no-haproxy", action="store_true", help="the client chooses a router at random")
    add = made.add_argument_group("agents, with times in trace seconds").add_argument
    add("--overcommit", type=float, help="contexts of the sessions that run at a time, over all caches")
    add("--burst", type=int, help="sessions that begin together at a fifth of the time")
    add("--rate", type=float, help="sessions that begin in a second beside a burst (default %(default)s)", default=0.45)
    add("--seconds", type=float, default=600.0, help="of a run (default %(default)s)")
    add("--gaps", type=float, default=1.0, help="factor of the times of tools (default %(default)s)")
    add("--named", action="store_true", help="clients name sessions and say which end; vllm-router-programs needs it")
    made.add_argument("--out", type=Path, default=Path("out/trace"), help="plots, figures.json (default %(default)s)")
    return made


def bench_of(args: argparse.Namespace) -> Bench:
    """Return the bench of the command line. Each public trace has its defaults; a file has the conversation trace's.

    Reads the whole trace, so that a fault near its end is found before the first run. Raises ValueError, OSError.
    """
    if args.overcommit is not None or args.burst is not None:
        return agents_bench_of(args)
    usual = PUBLIC.get(args.trace, PUBLIC["conversation"])
    rows = usual.rows if args.rows is None else args.rows
    engines = 8 if args.engines is None else args.engines
    speed = usual.speed if args.speed is None else args.speed
    blocks = usual.blocks if args.blocks is None else args.blocks
    if min(args.seeds, engines, rows, blocks - 1) < 1 or speed <= 0 or not 0 <= args.skip < 1:
        raise ValueError(
            "--seeds, --engines and --rows from 1 on, --blocks from 2, --speed above 0, --skip from 0 to below 1"
        )
    step_time = args.step_time or usual.step_time + ("-fcfs" if args.engine_mode == "fcfs" else "")
    load_costs(step_time)
    decode_s = DECODE_S * open_trace(args.trace, rows).scale / speed
    setup = Setup(engines, blocks, args.engine_mode, step_time, decode_s, haproxy=not args.no_haproxy)
    return Bench(setup, args.trace, rows, speed, args.skip, args.prompts == "text")


def agents_bench_of(args: argparse.Namespace) -> Bench:
    """Return the bench of agents of the command line. Raises ValueError, OSError."""
    blocks, speed, name = args.blocks or AGENTS_BLOCKS, args.speed or AGENTS_SPEED, os.environ.get("TRACE") or "agents"
    name = args.trace if args.trace != "conversation" else name
    step_time = args.step_time or "agents-8b"
    setup = Setup(args.engines or 4, blocks, "step", step_time, 0.0, haproxy=not args.no_haproxy)
    setup = replace(setup, time_scale=1 / speed, step_tokens=512)
    load_costs(step_time)
    trace = open_closed(name)
    if args.overcommit is not None:
        number = chats(trace, str).at_once(args.overcommit, setup.engines, blocks)
        load = Load(args.seconds, at_once=number, gaps=args.gaps)
    else:
        load = Load(args.seconds, rate=args.rate, burst=args.burst, burst_at_s=args.seconds / 5, gaps=args.gaps)
    return Bench(setup, name, len(trace.arrivals), speed, 0.0, texts=True, load=load, named=args.named)


def main(policies: Sequence[str], argv: Sequence[str] | None = None, gateway: Gateway | None = None) -> int:
    """Run the command; return an exit code (see the module's docstring).

    policies: names of all policies. gateway: starts the gateway of picker:N.
    """
    args = parser().parse_args(argv)
    try:
        fleets = others(args.fleet)
        beside = {str(fleet.replicas) for fleet in fleets if fleet.asked or fleet.connection != "plugin"}
        if args.policy or beside or not fleets:
            fleets = ours(args.policy or "cost", ",".join(sorted(beside)) or args.replicas, policies) + fleets
        bench = bench_of(args)
        bench = replace(bench, setup=replace(bench.setup, gateway=gateway), kills=not args.no_kill)
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = run(fleets, bench, args.seeds, args.out)
    runs = result.get("runs", [result])
    columns = (*RATIOS, "failed") if bench.load else COLUMNS
    print(f"{table(runs, columns)}\n\nplots and figures: {args.out}\n")
    print(json.dumps(result))
    return int(any(faulty(entry) for entry in runs))


def faulty(entry: dict[str, Any]) -> bool:
    """Return whether a fleet's run went wrong. A picker that is killed cuts the answers of its open calls."""
    expected = entry.get("cut", 0) if entry["fleet"].startswith(PICKER) else 0
    return bool("error" in entry or entry.get("failed", 0) > expected or entry.get("booked", 0))
