"""Thousands of streams at once on one replica: ``make -s bench NAME=proxy ARGS="--streams 5000"``.

Each stub engine puts the time into every chunk that it sends. ``kb_per_stream``: memory (RSS) of the replica while all
flow less memory before, for each stream, by round; from the second round on Python reuses what it had kept.
``gap_engine_...`` and ``gap_client_...``: between two chunks of a stream, when the engine sent them and when they came.
``late_...``: from an engine's write to the client's read. ``..._core_share``: of a core, while all flow. The replica
has one setting that differs from production, ``WARMFLEET_MAX_CONNECTIONS``. A process needs two open files for a
stream: the bench raises its limit, or says that it cannot.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil
import uvloop
from tests.bench.output import say
from tests.bench.proxy_client import AnswerError, request
from tests.bench.proxy_requests import body, small
from tests.bench.proxy_rounds import quantile
from tests.bench.proxy_routers import ENGINES, Cores, cpu_s, fleet_of
from tests.bench.proxy_streams_client import LATE_S, opened

from warmfleet_loadtest.stacks.processes import StackError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tests.bench.proxy_routers import Fleet, Router
    from tests.bench.proxy_streams_client import Stream

STREAMS_PER_S = 250.0  # opened; about a third of what a replica decides
WARM_STREAMS = 200  # before memory is measured for the first time
SPARE_FILES = 1_000  # open files of a process beside those of the streams
KIB, MIB = 1_024, 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """The extent of a measurement. hold_s: all streams flow. settled_s: from their ends to the last reading."""

    streams: int
    gap_ms: int = 1_000
    hold_s: float = 30.0
    rounds: int = 2
    settled_s: float = 2.0


def memory(router: Router) -> int:
    """Bytes of the replica's process that are in memory."""
    return int(psutil.Process(router.pids[0]).memory_info().rss)


def allow_files(count: int) -> None:
    """Let the process and its children have ``count`` open files. Raises StackError."""
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


@dataclass
class Held:
    """A round of streams. Bytes of memory: before, while all flowed, and after. ``share``: of a core."""

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
        (after - was) / lasted for after, was in zip(now, spent, strict=True)
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
    for stream in made:
        within = [(sent, came) for sent, came in zip(stream.sent, stream.came, strict=True) if begun <= sent < ended]
        found.late += [(came - sent) / 1e6 for sent, came in within]
        for (sent, came), (next_sent, next_came) in pairwise(within):
            found.engine_gaps.append((next_sent - sent) / 1e6)
            found.client_gaps.append((next_came - came) / 1e6)


async def streams(fleet: Fleet, plan: Plan) -> dict[str, Any]:
    """Return the figures of all rounds."""
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
        "gap_engine": [gap for held in rounds for gap in held.engine_gaps],
        "gap_client": [gap for held in rounds for gap in held.client_gaps],
        "late": [late for held in rounds for late in held.late],
    }
    return {
        "streams": min(held.most for held in rounds),
        "failed": sum(len(held.failures) for held in rounds),
        "chunks": len(gaps["late"]),
        "kb_per_stream": [round((held.held - held.before) / plan.streams / KIB, 1) for held in rounds],
        "mb_before": _mb(rounds[0].before),
        "mb_held": [_mb(held.held) for held in rounds],
        "mb_after": [_mb(held.after) for held in rounds],
        "replica_core_share": round(statistics.median(held.share for held in rounds), 3),
        "engines_core_share": round(statistics.median(held.stubs_share for held in rounds), 3),
        "client_core_share": round(statistics.median(held.client_share for held in rounds), 3),
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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises StackError or AnswerError."""
    plan = Plan(40, 100, 1.0, 1, 0.2) if options.quick else Plan(options.streams)
    allow_files(2 * plan.streams + SPARE_FILES)
    with fleet_of(Cores.of_this_machine(), ENGINES, options.python) as fleet:
        return uvloop.run(streams(fleet, plan))
