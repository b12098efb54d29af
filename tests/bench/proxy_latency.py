"""Measures the latency that routers add between a client and an engine: ``make -s bench NAME=proxy ARGS="--latency"``.

Four replicas get 200 requests a second at random times (an open loop). Their engines are stubs that answer at once, so
the time to the first byte through a replica, less that of the same requests sent to the stubs, is the replica's.
Requests are streamed chats: 200 bytes, 500 new tokens, and turns of 10,000 tokens whose beginning is known; `mix` has
four, four and two of ten. `added_p50_ms` and `added_p99_ms` are those of the mix, as medians over rounds, `rounds` has
each. Of a request's mean `added_ms`, `decision_ms` is the wait for Redis and `cpu_ms` the time that the replica
computes; the rest is waiting for a core, for other requests, and sockets. Figures count on an idle machine only:
`others_core_share` is the use of a core by other programs meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench.output import say
from tests.bench.proxy_client import at_rate
from tests.bench.proxy_requests import KNOWN, STREAMED
from tests.bench.proxy_rounds import Plan, Rounds, quantile
from tests.bench.proxy_routers import ENGINES, Cores, OtherWork, cpu_s, fleet_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tests.bench.proxy_routers import Fleet, Router

KINDS = {kind.key.removesuffix("_stream"): kind for kind in STREAMED}
MIX = ("200b",) * 4 + ("500t",) * 4 + ("10kt_warm",) * 2
PARTS = ("200b", "500t", "10kt_warm", "mix")
WARM_UP = 0.1  # share of the first requests, which find every cache of the processor cold


@dataclass(frozen=True, slots=True)
class Load:
    """rate: requests per second, of all replicas together. seconds: of each part of a round."""

    rate: float = 200.0
    seconds: float = 5.0
    replicas: int = 4
    rounds: int = 3
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
        await Rounds(self.fleet, self.replicas, plan).make_known()
        found: dict[str, list[dict[str, float]]] = {part: [] for part in PARTS}
        for number in range(self.load.rounds):
            say(f"round {number + 1} of {self.load.rounds} ...")
            for part in PARTS:
                found[part].append(await self.round(part, number))
            self.fleet.check()
        told = {part: _medians(rounds) for part, rounds in found.items()}
        return {**told["mix"], **{part: told[part] for part in PARTS}, "rounds": found["mix"]}

    async def round(self, part: str, number: int) -> dict[str, float]:
        """Send the requests through the replicas, then to the engines; returns the added latency in ms."""
        requests = self.load.requests(part, number)
        pids = tuple(pid for replica in self.replicas for pid in replica.pids)
        mine = (*pids, *self.fleet.store, *self.fleet.engine_pids, os.getpid())
        before, spent = self.decisions(), cpu_s(pids)
        with OtherWork(mine) as others:
            through = await self.send([replica.port for replica in self.replicas], requests, number)
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
    return {name: round(statistics.median(found[name] for found in rounds), 3) for name in rounds[0]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Raises StackError or AnswerError."""
    load = Load(40.0, 0.5, 2, 1, known=8) if options.quick else Load()
    with fleet_of(Cores.of_this_machine(), ENGINES, options.python) as fleet:
        say(f"starting {load.replicas} replicas ...")
        replicas = [fleet.replica(f"replica-{number}", {}) for number in range(load.replicas)]
        return uvloop.run(Latency(fleet, replicas, load).run())
