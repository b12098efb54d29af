"""What routers add between a client and an engine: ``make -s bench NAME=latency``.

    make -s bench NAME=latency                                   # four replicas, 200 requests a second, one minute
    make -s bench NAME=latency ARGS="--rate 50 --replicas 1"
    make -s bench NAME=proxy ARGS="--profile --only 200b_stream 500t 10kt_warm"    # where the CPU time goes, by module

Requests come at random times (an open loop), each at one of the replicas. Their engines are stubs that answer at once,
so the time to the first byte through a replica, less that of the same requests sent to the stubs, is what the replica
adds. Requests are streamed chats: 200 bytes, 500 new tokens, and turns of 10,000 tokens whose beginning is known; `mix`
has four, four and two of ten. The last line is one JSON object. `added_p50_ms` and `added_p99_ms` are those of the mix,
as medians over rounds, `rounds` has each. Of a request's mean `added_ms` in the mix, `decision_ms` is the wait for
Redis and `cpu_ms` the time that the replica computes; the rest is waiting for a core, for other requests, and sockets.
Figures count on an idle machine only: `others_core_share` is what other programs used of a core meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench.bench_proxy import ENGINES, Bench, Plan, fleet_of, quantile, say
from tests.bench.proxy_client import AnswerError, at_rate
from tests.bench.proxy_requests import KNOWN, STREAMED
from tests.bench.proxy_routers import Cores, OtherWork, cpu_s

from warmfleet_loadtest.stacks.processes import StackError, end_on_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.proxy_routers import Fleet, Router

KINDS = {kind.key.removesuffix("_stream"): kind for kind in STREAMED}
MIX = ("200b",) * 4 + ("500t",) * 4 + ("10kt_warm",) * 2
PARTS = ("200b", "500t", "10kt_warm", "mix")
WARM_UP = 0.1  # of the requests, which find every cache of the processor cold


@dataclass(frozen=True, slots=True)
class Load:
    """rate: requests per second, of all replicas together."""

    rate: float
    seconds: float
    replicas: int
    rounds: int
    known: int = KNOWN

    def requests(self, part: str, number: int) -> list[bytes]:
        """The requests of one part in one round, in the order in which they come."""
        count = max(20, int(self.rate * self.seconds))
        names = MIX if part == "mix" else (part,)
        of = {name: iter(KINDS[name].requests(f"{number} {part} {name}", count)) for name in set(names)}
        return [next(of[names[index % len(names)]]) for index in range(count)]


class Latency:
    """The measurements over the replicas of one fleet."""

    def __init__(self, fleet: Fleet, replicas: Sequence[Router], load: Load) -> None:
        self.fleet, self.replicas, self.load = fleet, replicas, load

    async def run(self) -> dict[str, Any]:
        plan = Plan(self.load.rounds, 1, 1.0, ENGINES, 0, 0.0, self.load.known)
        await Bench(self.fleet, self.replicas, plan).make_known()
        found: dict[str, list[dict[str, float]]] = {part: [] for part in PARTS}
        for number in range(self.load.rounds):
            say(f"round {number + 1} of {self.load.rounds} ...")
            for part in PARTS:
                found[part].append(await self.round(part, number))
            self.fleet.check()
        told = {part: _medians(rounds) for part, rounds in found.items()}
        return {**told["mix"], **{part: told[part] for part in PARTS}, "rounds": found["mix"]}

    async def round(self, part: str, number: int) -> dict[str, float]:
        """Send the requests through the replicas, then to the engines; returns what the way through added, in ms."""
        requests = self.load.requests(part, number)
        pids = tuple(pid for one in self.replicas for pid in one.pids)
        mine = (*pids, *self.fleet.store, *self.fleet.engine_pids, os.getpid())
        before, spent = self.decisions(), cpu_s(pids)
        with OtherWork(mine) as others:
            through = await self.send([one.port for one in self.replicas], requests, number)
        spent, (waited_s, count) = cpu_s(pids) - spent, self.decisions()
        direct = await self.send(self.fleet.engines.stubs, requests, number)
        return {
            "added_p50_ms": 1e3 * (quantile(through, 0.5) - quantile(direct, 0.5)),
            "added_p99_ms": 1e3 * (quantile(through, 0.99) - quantile(direct, 0.99)),
            "added_ms": 1e3 * (statistics.fmean(through) - statistics.fmean(direct)),
            "decision_ms": 1e3 * (waited_s - before[0]) / max(1, count - before[1]),
            "cpu_ms": 1e3 * spent / len(requests),
            "others_core_share": others.core_share,
        }

    async def send(self, ports: Sequence[int], requests: Sequence[bytes], seed: int) -> list[float]:
        """Send each request to one of the ports; returns the seconds that they took, without those of the warm-up."""
        count, rate = len(ports), self.load.rate / len(ports)
        runs = [at_rate(port, requests[index::count], rate, 100 * seed + index) for index, port in enumerate(ports)]
        spans = sorted(span for run in await asyncio.gather(*runs) for span in run)
        return [end - sent for sent, end in spans[int(WARM_UP * len(spans)) :]]

    def decisions(self) -> tuple[float, float]:
        """(seconds that requests waited for their decisions, number of decisions) of all replicas so far."""
        sums = [0.0, 0.0]
        for replica in self.replicas:
            with urllib.request.urlopen(f"http://127.0.0.1:{replica.port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            for index, name in enumerate(("sum", "count")):
                values = re.findall(rf"^warmfleet_decision_seconds_{name}{{.*}} (\S+)$", text, re.MULTILINE)
                sums[index] += sum(map(float, values))
        return sums[0], sums[1]


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 3) for name in rounds[0]}


def measure(load: Load) -> dict[str, Any]:
    """Everything that the JSON object has. Raises StackError or AnswerError."""
    with fleet_of(Cores.of_this_machine(), ENGINES, sys.executable) as fleet:
        say(f"starting {load.replicas} replicas ...")
        replicas = [fleet.replica(f"replica-{number}", {}) for number in range(load.replicas)]
        found = uvloop.run(Latency(fleet, replicas, load).run())
    about = {"rate": load.rate, "replicas": load.replicas, "load_average": round(os.getloadavg()[0], 1)}
    return found | about


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="make -s bench NAME=latency", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rate", type=float, default=200.0, help="requests per second in all (default %(default)s)")
    made.add_argument("--replicas", type=int, default=4)
    made.add_argument("--seconds", type=float, default=5.0, help="of each part of a round (default %(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="whose medians are reported (default %(default)s)")
    made.add_argument("--quick", action="store_true", help="one small round: shows that the bench works, no figures")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured, 1 a process broke or a replica answered wrongly, 2 wrong arguments."""
    options = parser().parse_args(argv)
    if min(options.rate, options.replicas, options.seconds, options.rounds) <= 0:
        parser().error("--rate, --replicas, --seconds and --rounds above 0")
    end_on_signals()
    load = Load(options.rate, options.seconds, options.replicas, options.rounds)
    try:
        found = measure(Load(40.0, 0.5, 2, 1, known=8) if options.quick else load)
    except (StackError, AnswerError) as error:
        say(f"error: {error}")
        return 1
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
