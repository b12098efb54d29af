"""CPU of a replica and of Envoy per request that a gateway places by the picker: ``make -s bench NAME=picker``.

    make -s bench NAME=picker                                # every mode of a gateway, beside the own data plane
    make -s bench NAME=picker ARGS="--only duplex buffered"

Two replicas serve the same requests of 200 bytes, behind a real Envoy, as pickers: one stays with each call until the
answer ends, the other ends its calls behind the request, because the engines report the ends (``…_ended``). The second
also serves them by its own port for clients. In each round every way gets the same bursts; the figures are medians over
rounds of the CPU time per request, of Envoy or of both replicas (both read the engines' reports), less what they use at
rest. The replicas run on a core of their own where there are two; Envoy, store, engines and client share the other.

``us_plain``: a plain answer. ``us_stream``: an answer of 18 chunks that come one by one, 5 ms apart. ``us_at_once``:
the same chunks in one piece. ``us_chunk``: a further chunk. ``envoy_us_...``: the same of Envoy, whose way without a
picker is ``envoy_alone``. ``added_ms``: median latency of a plain answer, one request at a time, less that of Envoy
alone. ``over_own_streamed``, ``over_own_at_once``, ``over_own_plain``: of the mode `duplex`, the medians of the ratios
to the replica's own data plane within a round; ``over_own_ended``: the same of streams that pass the picker by.
``us_route``: ``/route`` and ``/settle`` for a plain answer. Trust ratios more than µs where other programs run
(``load_average``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import uvloop
from tests.bench.envoy_gateway import started
from tests.bench.output import report, say
from tests.bench.proxy_client import AnswerError, burst_of, connected, in_turn, request
from tests.bench.proxy_requests import GAP_MS, STREAM_CHUNKS, body, small
from tests.bench.proxy_routers import BOOKED, ENGINES, Cores, cpu_s, fleet_of
from tests.bench.route_calls import us_a_request
from tests.envoy.gateway_config import MODES

from warmfleet_loadtest.stacks.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN, ALONE = "own", "envoy_alone"
AT_ONCE = 16
LONG_CHUNKS = 118
DUPLEX, ENDED = "duplex", "_ended"
#: Name of a kind of request -> chunks of its answer (0: plain), and ms between them.
KINDS = {
    "plain": (0, 0),
    "at_once": (STREAM_CHUNKS, 0),
    "stream": (STREAM_CHUNKS, GAP_MS),
    "long": (LONG_CHUNKS, GAP_MS),
}
BOOKING = [
    mode for mode in MODES if mode.request in ("FULL_DUPLEX_STREAMED", "BUFFERED") and mode.name != "buffered_told"
]


@dataclass
class Way:
    """A way of requests to engines. ``told``: each answer tells that its request was booked. ``spent``: by kind, CPU µs
    of the replicas and of Envoy per request, by round.
    """

    name: str
    port: int
    told: bool
    spent: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    latency_ms: list[float] = field(default_factory=list)

    def us(self, kind: str) -> tuple[float, float]:
        replica, gateway = zip(*self.spent[kind], strict=True)
        return statistics.median(replica), statistics.median(gateway)


@dataclass
class Bench:
    """The processes of a run. ``idle``: shares of a core that replicas and Envoy use at rest."""

    replicas: tuple[int, ...]
    envoy: tuple[int, ...]
    requests: int
    idle: tuple[float, float] = (0.0, 0.0)
    numbers: int = 0

    def spent(self) -> tuple[float, float]:
        return cpu_s(self.replicas), cpu_s(self.envoy)

    async def rest(self, seconds: float) -> None:
        before = self.spent()
        await asyncio.sleep(seconds)
        after = self.spent()
        self.idle = (after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds

    def made(self, kind: str, count: int) -> list[bytes]:
        chunks, gap_ms = KINDS[kind]
        self.numbers += count
        return [request(body(small(f"{self.numbers - at}"), chunks, gap_ms)) for at in range(count)]

    async def burst(self, way: Way, kind: str) -> None:
        """Send a burst by this way, and keep the CPU time of each request."""
        count = self.requests // 4 if kind == "long" else self.requests
        burst = burst_of(self.made(kind, count))
        idle = await connected(way.port, burst, AT_ONCE)
        before, began = self.spent(), time.perf_counter()
        await in_turn(burst, idle)
        took_s, after = time.perf_counter() - began, self.spent()
        if way.told and not all(BOOKED in head for head in burst.heads):
            raise AnswerError(f"{way.name}: a request was not booked")
        replica, gateway = (
            1e6 * (now - then - share * took_s) / count
            for now, then, share in zip(after, before, self.idle, strict=True)
        )
        way.spent.setdefault(kind, []).append((replica, gateway))

    async def latency(self, way: Way) -> None:
        burst = burst_of(self.made("plain", 40))
        await in_turn(burst, await connected(way.port, burst, 1))
        way.latency_ms.append(1e3 * statistics.median(end - start for start, end in burst.spans))

    async def run(self, ways: Sequence[Way], rounds: int) -> None:
        for way in ways:  # connections, code paths
            await self.burst(way, "plain")
            way.spent.clear()
        await self.rest(1.0)
        for number in range(rounds):
            for way in [*ways[number % len(ways) :], *ways[: number % len(ways)]]:
                for kind in KINDS:
                    await self.burst(way, kind)
                await self.latency(way)


def figures(ways: Sequence[Way]) -> dict[str, Any]:
    """Return all figures by way, and the ratios of `duplex` to the replica's own data plane."""
    found: dict[str, Any] = {}
    alone = next(way for way in ways if way.name == ALONE)
    for way in ways:
        of: dict[str, float] = {}
        for kind in ("plain", "at_once", "stream"):
            replica, gateway = way.us(kind)
            of |= {f"us_{kind}": round(replica)} if way is not alone else {}
            of |= {f"envoy_us_{kind}": round(gateway)} if way.name != OWN else {}
        further = LONG_CHUNKS - STREAM_CHUNKS
        (long_us, long_gateway), (us, gateway) = way.us("long"), way.us("stream")
        of |= {"us_chunk": round((long_us - us) / further, 1)} if way is not alone else {}
        of |= {"envoy_us_chunk": round((long_gateway - gateway) / further, 1)} if way.name != OWN else {}
        if way.name not in (OWN, ALONE):
            of["added_ms"] = round(statistics.median(way.latency_ms) - statistics.median(alone.latency_ms), 2)
        found[way.name] = of
    own, duplex = (next(way for way in ways if way.name == name) for name in (OWN, DUPLEX))
    for key, kind in ("over_own_plain", "plain"), ("over_own_at_once", "at_once"), ("over_own_streamed", "stream"):
        pairs = zip(duplex.spent[kind], own.spent[kind], strict=True)
        found[key] = round(statistics.median(theirs[0] / ours[0] for theirs, ours in pairs), 2)
    ended = next(way for way in ways if way.name == DUPLEX + ENDED)
    pairs = zip(ended.spent["stream"], own.spent["stream"], strict=True)
    found["over_own_ended"] = round(statistics.median(theirs[0] / ours[0] for theirs, ours in pairs), 2)
    found["us_chunk"] = found[DUPLEX]["us_chunk"]
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything as the JSON object has it. Raises StackError or AnswerError."""
    modes = [mode for mode in BOOKING if not options.only or mode.name in options.only or mode.name == DUPLEX]
    with fleet_of(Cores.of_this_machine(), ENGINES, sys.executable, reports=True) as fleet:
        stay, leave = free_ports(2)
        say("starting two replicas, each with an Envoy ...")
        stays = fleet.replica("stays", {"WARMFLEET_EPP_PORT": str(stay), "WARMFLEET_EPP_LEAVES": "0"})
        leaves = fleet.replica("leaves", {"WARMFLEET_EPP_PORT": str(leave)})
        ports = started(fleet.processes, [stay], fleet.engines.stubs, modes)
        ended = started(fleet.processes, [leave], fleet.engines.stubs, modes, "envoy-ended")
        ways = [Way(OWN, leaves.port, told=True), Way(ALONE, ports["plain"], told=False)]
        ways += [Way(mode.name, ports[mode.name], told=True) for mode in modes]
        ways += [Way(mode.name + ENDED, ended[mode.name], told=False) for mode in modes]
        envoys = fleet.processes.pid("envoy"), fleet.processes.pid("envoy-ended")
        bench = Bench((*stays.pids, *leaves.pids), envoys, options.requests)
        uvloop.run(bench.run(ways, options.rounds))
        url, (idle, _) = f"http://127.0.0.1:{leaves.port}", bench.idle
        us_route = uvloop.run(us_a_request(url, bench.replicas, options.requests, options.rounds, idle))
    return figures(ways) | {"us_route": round(us_route), "load_average": round(os.getloadavg()[1], 1)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=5, help="whose medians are reported (default %(default)s)")
    made.add_argument("--requests", type=int, default=400, help="in a burst (default %(default)s)")
    names = [mode.name for mode in BOOKING]
    made.add_argument("--only", nargs="+", choices=names, default=(), metavar="MODE", help=f"of {', '.join(names)}")
    return made


if __name__ == "__main__":
    sys.exit(report(measure, parser().parse_args()))
