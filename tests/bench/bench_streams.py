"""Many clients at once on one replica: ``make -s bench NAME=streams``.

First thousands of streams: the memory of a stream, and the gaps between chunks at the client beside those at the
engine. Then plain requests, in turn without and with slow readers and slow writers beside them: memory, and P99. The
processes and the stub engines are those of the bench ``proxy``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import psutil
import uvloop
from tests.bench.bench_proxy import ENGINES, SATURATING, fleet_of, quantile, report, say
from tests.bench.proxy_client import AnswerError, at_rate, request
from tests.bench.proxy_requests import body, small
from tests.bench.proxy_routers import Cores, cpu_s
from tests.bench.streams_client import LATE_S, opened

from warmfleet_loadtest.stacks.processes import StackError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.proxy_routers import Fleet, Router
    from tests.bench.streams_client import Stream

STREAMS_PER_S = 250.0  # opened; about a third of what a replica decides
WARM_STREAMS = 200  # before memory is measured for the first time
SPARE_FILES = 1_000  # open files of a process beside those of the streams
KIB, MIB = 1_024, 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. hold_s: how long all streams flow. pairs: of phases without and with hostile clients.

    settled_s: after clients have come or gone, until memory is measured.
    """

    streams: int
    gap_ms: int
    hold_s: float
    rounds: int
    readers: int
    writers: int
    rate: float
    phase_s: float
    pairs: int
    settled_s: float = 2.0


def memory(router: Router) -> int:
    """Bytes of the replica's process that are in memory."""
    return int(psutil.Process(router.pids[0]).memory_info().rss)


def allow_files(count: int) -> None:
    """Let this process and its children have so many open files. Raises StackError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= count:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(hard, count)))
    except (ValueError, OSError) as error:
        raise StackError(
            f"a process needs {count} open files, and only {hard} are allowed here: raise the hard limit "
            "(`ulimit -Hn` tells it), or take fewer streams (--streams)"
        ) from error


# ---------------------------------------------------------------- streams


@dataclass
class Held:
    """One round of streams. Bytes of memory: before, while all flowed, and after. ``share``: of a core."""

    before: int = 0
    held: int = 0
    after: int = 0
    most: int = 0
    share: float = 0.0
    stubs_share: float = 0.0
    client_share: float = 0.0
    failures: list[str] = field(default_factory=list)
    client_gaps: list[float] = field(default_factory=list)
    engine_gaps: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)


def requests(seed: str, count: int, chunks: int, gap_ms: int) -> list[bytes]:
    return [request(body(small(f"{seed} {number}"), chunks, gap_ms, stamped=True)) for number in range(count)]


async def hold(fleet: Fleet, router: Router, plan: Plan, number: int) -> Held:
    """Open all streams, let them flow together for ``hold_s``, and wait for their ends."""
    found, count = Held(before=memory(router)), plan.streams
    chunks = int((count / STREAMS_PER_S + plan.hold_s) * 1e3 / plan.gap_ms) + 2
    streams, made = await opened(router.port, requests(f"round {number}", count, chunks, plan.gap_ms), STREAMS_PER_S)
    begun, spent = time.monotonic_ns(), _spent(fleet, router)
    await asyncio.sleep(plan.hold_s * 0.9)
    found.held = memory(router)
    lasted, now = (time.monotonic_ns() - begun) / 1e9, _spent(fleet, router)
    found.share, found.stubs_share, found.client_share = (
        (one - was) / lasted for one, was in zip(now, spent, strict=True)
    )
    fleet.check()
    with suppress(TimeoutError):
        async with asyncio.timeout(count / STREAMS_PER_S + plan.hold_s + LATE_S):
            await streams.over.wait()
    found.failures = streams.failures + ["no end"] * streams.left
    found.most = streams.most
    _gaps(found, made, begun, streams.first_end_ns)
    await asyncio.sleep(plan.settled_s)
    found.after = memory(router)
    return found


def _spent(fleet: Fleet, router: Router) -> tuple[float, float, float]:
    return cpu_s(router.pids), cpu_s(fleet.engine_pids), time.process_time()


def _gaps(found: Held, made: Sequence[Stream], begun: int, ended: int) -> None:
    """Keep the chunks that the engines sent while all streams flowed."""
    for one in made:
        within = [(sent, came) for sent, came in zip(one.sent, one.came, strict=True) if begun <= sent < ended]
        found.late += [(came - sent) / 1e6 for sent, came in within]
        for (sent, came), (next_sent, next_came) in pairwise(within):
            found.engine_gaps.append((next_sent - sent) / 1e6)
            found.client_gaps.append((next_came - came) / 1e6)


async def streams(fleet: Fleet, plan: Plan) -> dict[str, Any]:
    """The figures of streams: see tests/bench/README.md."""
    router = fleet.replica("streams", {"WARMFLEET_MAX_CONNECTIONS": str(plan.streams + SPARE_FILES)})
    warm = await hold(fleet, router, _few(plan), 0)
    if warm.failures:
        raise AnswerError(warm.failures[0])
    rounds = list[Held]()
    for number in range(1, plan.rounds + 1):
        say(f"{plan.streams} streams, round {number} of {plan.rounds} ...")
        rounds.append(await hold(fleet, router, plan, number))
        for failure in rounds[-1].failures[:3]:
            say(f"failed: {failure}")
    gaps = {
        "gap_engine": [one for each in rounds for one in each.engine_gaps],
        "gap_client": [one for each in rounds for one in each.client_gaps],
        "late": [one for each in rounds for one in each.late],
    }
    return {
        "streams": min(one.most for one in rounds),
        "failed": sum(len(one.failures) for one in rounds),
        "chunks": len(gaps["late"]),
        "kb_per_stream": [round((one.held - one.before) / plan.streams / KIB, 1) for one in rounds],
        "mb_before": _mb(rounds[0].before),
        "mb_held": [_mb(one.held) for one in rounds],
        "mb_after": [_mb(one.after) for one in rounds],
        "replica_core_share": round(statistics.median(one.share for one in rounds), 3),
        "engines_core_share": round(statistics.median(one.stubs_share for one in rounds), 3),
        "client_core_share": round(statistics.median(one.client_share for one in rounds), 3),
        **{
            f"{name}_p{percent}_ms": round(quantile(values, percent / 100), 2)
            for name, values in gaps.items()
            for percent in (50, 95, 99)
        },
    }


def _mb(size: int) -> float:
    return round(size / MIB, 1)


def _few(plan: Plan) -> Plan:
    return replace(plan, streams=min(WARM_STREAMS, plan.streams), hold_s=2 * plan.gap_ms / 1e3)


# ---------------------------------------------------------------- hostile clients


async def phase(router: Router, plan: Plan, seed: str, number: int) -> list[float]:
    """Plain requests at random times; returns the ms that each took. Raises AnswerError if one fails."""
    made = SATURATING.requests(f"{seed} {number}", int(plan.rate * plan.phase_s))
    return [(answered - sent) * 1e3 for sent, answered in await at_rate(router.port, made, plan.rate, number)]


@dataclass
class Beside:
    """What the phases gave: ms of requests without and with hostile clients; bytes of memory; shares of a core."""

    calm: list[list[float]] = field(default_factory=list)
    beside: list[list[float]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    client_shares: list[float] = field(default_factory=list)
    replica_shares: list[float] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)

    def pair(self, share: float) -> list[tuple[float, float]]:
        """This quantile of each pair of phases, in ms."""
        phases = zip(self.calm, self.beside, strict=True)
        return [(quantile(one, share), quantile(other, share)) for one, other in phases]

    def pooled(self, share: float) -> tuple[float, float]:
        """This quantile of all phases together, in ms."""
        return quantile([*chain(*self.calm)], share), quantile([*chain(*self.beside)], share)


async def hostile(fleet: Fleet, plan: Plan) -> dict[str, Any]:
    """The figures beside hostile clients: see tests/bench/README.md."""
    router, found = fleet.replica("hostile", {}), Beside()
    await phase(router, plan, "warm", 0)
    before = memory(router)
    for number in range(plan.pairs):
        say(f"plain requests, then the same beside hostile clients, {number + 1} of {plan.pairs} ...")
        found.calm.append(await phase(router, plan, "calm", number))
        await _beside(fleet, router, plan, number, found)
    pairs = found.pair(0.99)
    return {
        "readers": plan.readers,
        "writers": plan.writers,
        **found.told,
        "rate": plan.rate,
        "p50_ms": [round(one, 2) for one in found.pooled(0.5)],
        "p99_ms": [round(one, 2) for one in found.pooled(0.99)],
        "p99_ratios": [round(other / one, 2) for one, other in pairs],
        "p99_ratio": round(statistics.median(other / one for one, other in pairs), 2),
        "mb_before": _mb(before),
        "mb_begin": [_mb(one) for one in found.begins],
        "mb_end": [_mb(one) for one in found.ends],
        "mb_after": _mb(memory(router)),
        "replica_core_share": round(statistics.median(found.replica_shares), 3),
        "clients_core_share": round(statistics.median(found.client_shares), 3),
    }


async def _beside(fleet: Fleet, router: Router, plan: Plan, number: int, found: Beside) -> None:
    """One phase beside hostile clients, which are a process of their own."""
    argv = [sys.executable, "-m", "tests.bench.hostile_clients", "--port", str(router.port)]
    argv += ["--readers", str(plan.readers), "--writers", str(plan.writers)]
    name = f"hostile-clients-{number}"
    clients = fleet.processes.spawn("clients", name, argv)
    pid = clients.pid
    await asyncio.to_thread(fleet.processes.wait, name, lambda: "ready" in fleet.processes.log(name))
    await asyncio.sleep(plan.settled_s)
    found.begins.append(memory(router))
    begun, spent = time.monotonic(), (cpu_s((pid,)), cpu_s(router.pids))
    found.beside.append(await phase(router, plan, "beside", number))
    lasted = time.monotonic() - begun
    found.client_shares.append((cpu_s((pid,)) - spent[0]) / lasted)
    found.replica_shares.append((cpu_s(router.pids) - spent[1]) / lasted)
    found.ends.append(memory(router))
    clients.terminate()
    await asyncio.to_thread(clients.wait)  # with a line that tells how many connections it made
    for key, value in json.loads(fleet.processes.log(name).splitlines()[-1]).items():
        found.told[key] = found.told.get(key, 0) + value
    fleet.processes.kill(name)
    fleet.check()
    await asyncio.sleep(plan.settled_s)


# ---------------------------------------------------------------- the bench


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the options ask for, as the JSON object has it. Raises StackError or AnswerError."""
    plan = Plan(
        options.streams, options.gap_ms, options.hold, options.rounds, options.hostile, options.hostile,
        options.rate, options.phase, options.pairs,
    )  # fmt: skip
    if options.quick:
        plan = Plan(40, 100, 1.0, 1, 10, 10, 20.0, 1.0, 1, settled_s=0.2)
    allow_files(2 * max(plan.streams, plan.readers + plan.writers) + SPARE_FILES)
    found: dict[str, Any] = {}
    with fleet_of(Cores.of_this_machine(), ENGINES, options.python) as fleet:
        if "streams" in options.only:
            found["streams"] = uvloop.run(streams(fleet, plan))
        if "hostile" in options.only:
            found["hostile"] = uvloop.run(hostile(fleet, plan))
    return found | {"load_average": round(os.getloadavg()[1], 1)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--streams", type=int, default=5_000, help="at once (default %(default)s)")
    made.add_argument("--gap-ms", type=int, default=1_000, help="between two chunks (default %(default)s)")
    made.add_argument("--hold", type=float, default=30.0, metavar="S", help="that all flow (default %(default)s)")
    made.add_argument("--rounds", type=int, default=2, help="of streams (default %(default)s)")
    made.add_argument("--hostile", type=int, default=1_000, help="slow readers, and as many slow writers (%(default)s)")
    made.add_argument("--rate", type=float, default=100.0, help="plain requests a second (default %(default)s)")
    made.add_argument("--phase", type=float, default=20.0, metavar="S", help="of plain requests (default %(default)s)")
    made.add_argument("--pairs", type=int, default=5, help="of phases, without and with hostile clients (%(default)s)")
    parts = ("streams", "hostile")
    made.add_argument("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=f"of {', '.join(parts)}")
    made.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the replicas")
    made.add_argument("--quick", action="store_true", help="a few clients: shows that the bench works, no figures")
    return made


def main() -> int:
    """Exit codes: 0 measured, 1 a process broke or a request failed, 2 wrong arguments."""
    return report(measure, parser().parse_args())


if __name__ == "__main__":
    sys.exit(main())
