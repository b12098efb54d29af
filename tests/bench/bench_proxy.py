"""CPU of a replica per request beside routers of other projects: ``make -s bench NAME=proxy``.

    make -s bench NAME=proxy                                                # all kinds of requests, with all peers
    make -s bench NAME=proxy ARGS="--only 200b chunk --peers smg"           # two parts beside one peer: a minute
    make -s bench NAME=proxy ARGS="--only 200b chunk --beside ../old"       # beside a replica of another checkout
    make -s bench NAME=proxy ARGS="--profile --only 500t"                   # where the CPU time goes, by module
    make -s bench NAME=proxy ARGS="--latency"                               # what replicas add (``proxy_latency``)
    make -s bench NAME=proxy ARGS="--streams"                               # 5,000 at once (``proxy_streams``)

One store, four stub engines that joined the fleet as proven workers, and one client serve all routers in turn: in each
round every router gets the same burst of requests of each kind. The figures are medians over rounds of the CPU time of
the router's process (all threads) per request, less what it uses at rest. Routers run on a core of their own where
there are two, one after the other; store, engines and client share the other core.

``us_200b``, ``us_500t``: a plain chat of 200 bytes; of 500 tokens that no router has seen. ``us_40kb_...``,
``us_10kt_...``: of 40 kB and of 10,000 tokens, ``_cold`` if never seen; ``_warm``: one of 64 that were sent before, and
the next turn of one of 64 conversations, 650 tokens of it new. ``_stream``: the same with an answer of 18 chunks that
come at once. ``us_chunk``: one chunk of streams with 5 ms between chunks. ``least``: the least value over the rounds in
place of the median. ``ours_over_theirs``: beneath each other router, the median of the ratios within a round; trust it
more than µs where other programs run (``load_average``). ``max_rps``, ``max_rps_busy``: requests of 200 B a second, and
the share of its core that the router used: below .9 the other core was the limit. ``p50_ms``, ``p99_ms``: latency at
half of that rate, less that of the stubs alone. ``idle_core_share``: without requests, eight engines. ``redis_us``: CPU
of the store for a request.

Two settings of replicas differ from production: a long timeout of decisions, because the store shares its core with the
client, and no limit to booked prefill, because stubs report none as done. Peers run with one worker thread and their
default policies. An answer without a booked decision ends the run.

Peers are optional. One that is not installed is named on standard error with the command that installs it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench import proxy_latency, proxy_streams
from tests.bench.output import report, say
from tests.bench.proxy_profile import profile
from tests.bench.proxy_requests import KNOWN, PLAIN, STREAMED
from tests.bench.proxy_rounds import CHUNK, SATURATING, Plan, Rounds, key_of
from tests.bench.proxy_routers import ENGINES, Cores, Fleet, Router, fleet_of, sources

from warmfleet_loadtest.stacks import peers

if TYPE_CHECKING:
    from collections.abc import Callable

OURS, NO_HANDOFF = "warmfleet", "no_handoff"
IDLE_ENGINES = 8
IDLE = "idle"  # a part of a run beside the kinds


def starters(options: argparse.Namespace) -> dict[str, Callable[[Fleet], Router]]:
    """Functions that start each router that takes part, by name, ours first."""
    made: dict[str, Callable[[Fleet], Router]] = {OURS: partial(Fleet.replica, name=OURS, more={})}
    if not options.quick:
        made[NO_HANDOFF] = partial(Fleet.replica, name=NO_HANDOFF, more={"WARMFLEET_TOKEN_HANDOFF": "0"})
    for folder in options.beside:
        made[folder.name] = partial(Fleet.replica, name=folder.name, more=sources(folder))
    if options.traces:
        sampled = {"OTEL_EXPORTER_OTLP_ENDPOINT": options.traces, "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
        for name, share in ("traced", "1"), ("traced_1_percent", "0.01"):
            made[name] = partial(Fleet.replica, name=name, more=sampled | {"OTEL_TRACES_SAMPLER_ARG": share})
    wanted = [name for name in options.peers.split(",") if name]
    missing = peers.missing(wanted, options.peers_folder)
    if missing:
        command = f"{sys.executable} -m warmfleet_loadtest.stacks.peers"
        say(f"not installed, and left out: {', '.join(missing)}; `{command}` installs them")
    for name in wanted:
        if name not in missing:
            made[name] = partial(Fleet.peer, name=name, folder=options.peers_folder / "bin")
    return made


def idle_shares(cores: Cores, plan: Plan, made: dict[str, Callable[[Fleet], Router]], python: str) -> dict[str, float]:
    """Shares of a core that routers use at rest with eight engines, by key."""
    say(f"at rest, with {plan.idle_engines} engines ...")
    with fleet_of(cores, plan.idle_engines, python) as fleet:
        routers = [start(fleet) for name, start in made.items() if name != NO_HANDOFF]
        rounds, shares = Rounds(fleet, routers, plan), {key_of(router): list[float]() for router in routers}
        time.sleep(plan.rest_s)  # until the work of the start has ended
        for _ in range(plan.bursts):
            asyncio.run(rounds.rest())
            for router in routers:
                shares[key_of(router)].append(router.idle)
    return {key: round(statistics.median(values), 4) for key, values in shares.items()}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the options ask for, as the JSON object has it. Raises StackError or AnswerError."""
    if options.latency or options.streams:
        told = proxy_latency.measure(options) if options.latency else proxy_streams.measure(options)
        return told | {"load_average": round(os.getloadavg()[1], 1)}
    only = frozenset(options.only)
    at_rest = IDLE_ENGINES if not only or IDLE in only else 0
    plan = Plan(options.bursts, options.requests, 5.0, ENGINES, at_rest, 4.0, KNOWN, only)
    if options.quick:
        plan = Plan(1, 8, 0.5, 2, 0, 0.1, 8)
    made = starters(options)
    cores = Cores.of_this_machine()
    idle = idle_shares(cores, plan, made, options.python) if plan.idle_engines else {}
    with fleet_of(cores, plan.engines, options.python) as fleet:
        say(f"starting {', '.join(made)} ...")
        rounds = Rounds(fleet, [start(fleet) for start in made.values()], plan)
        uvloop.run(rounds.run())
        found = rounds.result()
        if options.quick:
            idle = {key_of(router): round(router.idle, 4) for router in rounds.routers}
        for key, share in idle.items():
            (found if key == OURS else found[key])["idle_core_share"] = share
        if options.profile:
            found["profile"] = uvloop.run(profile(rounds, plan.profile_s))
    return found | {"load_average": round(os.getloadavg()[1], 1)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--bursts", type=int, default=9, help="rounds, whose medians are reported (default %(default)s)")
    made.add_argument("--requests", type=int, default=200, help="in a burst of 200 B; others have fewer (%(default)s)")
    names = ",".join(name for name in peers.PEERS if not name.startswith("vllm-router-"))
    made.add_argument("--peers", default=names, metavar="A,B", help="routers of other projects (default %(default)s)")
    made.add_argument(
        "--peers-folder", type=Path, default=peers.FOLDER, help="environment with the peers (default %(default)s)"
    )
    parts = (*(kind.key for kind in (*PLAIN, *STREAMED, SATURATING)), CHUNK, IDLE)
    made.add_argument("--only", nargs="+", choices=parts, default=(), metavar="PART", help=f"of {', '.join(parts)}")
    made.add_argument(
        "--beside", nargs="+", type=Path, default=(), metavar="FOLDER", help="checkouts: a replica of each takes part"
    )
    made.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter of the replicas, with app/requirements.lock installed; one built with profile-guided "
        "optimisation, as the image's is, is about a fifth faster (default: the bench's own)",
    )
    made.add_argument(
        "--traces", metavar="URL", help="of an OTLP collector: replicas that trace every request, and 1 %%, take part"
    )
    made.add_argument("--profile", action="store_true", help="tell where each µs goes, by module")
    made.add_argument("--latency", action="store_true", help="measure what four replicas add to a request instead")
    made.add_argument(
        "--streams", type=int, nargs="?", const=5_000, default=0, help="hold so many at once instead (%(const)s)"
    )
    made.add_argument("--quick", action="store_true", help="one small round: shows that the bench works, no figures")
    return made


def main() -> int:
    """Exit codes: 0 measured, 1 a process broke or a router answered wrongly, 2 wrong arguments."""
    return report(measure, parser().parse_args())


if __name__ == "__main__":
    sys.exit(main())
