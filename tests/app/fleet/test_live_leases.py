"""Several replicas hold live leases while Redis fails over or comes back empty. Within one slow-path period and one
renewal the sum of load is that of these leases again. The default run has 200 leases and short periods. The long run
has 2,000 leases and the periods of production:
``python -m pytest -m long tests/app/fleet/test_live_leases.py -s``.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fleet.publishing import SCHEME
from tests.support.polling import poll, until
from tests.support.redis.topology import QUIET, Servers, free_ports, sentinels
from tests.support.replicas.lossy import LossyReplica

from warmfleet.background import upkeep
from warmfleet.background.clock import Clock
from warmfleet.background.supervisor import stop, supervise
from warmfleet.errors import FleetUnavailable
from warmfleet.fleet import Fleet, Proof, Question, Spans, connect
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

WORKERS, REPLICAS = 4, 4


@dataclass(frozen=True, slots=True)
class Size:
    """The live leases, the slow-path period and the time between renewals. ``slack_s``: for a busy machine."""

    leases: int
    heartbeat_s: float
    renewal_s: float
    slack_s: float

    @property
    def limit_s(self) -> float:
        return self.heartbeat_s + self.renewal_s + self.slack_s


SMALL, FULL = Size(200, 0.3, 0.4, 5.0), Size(2_000, wire.HEARTBEAT_SECONDS, 10.0, 0.0)


@contextmanager
def workers(url: str, model: str) -> Iterator[None]:
    """Run the publishers of both halves (engine core and API server) of every worker."""
    with ExitStack() as stack:
        for number in range(1, WORKERS + 1):
            name = f"w{number}"
            config = PublisherConfig(url, model, f"{name}.0", name, 0, SCHEME, 99_999, 32_768, "test")
            both = (
                WorkerPublisher(config, Tracker()),
                ServerPublisher(ServerConfig(url, model, name, "http://127.0.0.1:9", (model,), "test")),
            )
            for half in both:
                half.start()
                stack.callback(half.stop, 5)
        yield


class Living:
    """Replicas with a router's background tasks for reservations."""

    def __init__(self, url: str, model: str, size: Size) -> None:
        self.size = size
        tag = wire.model_tag(model)
        self.replicas = [LossyReplica(connect(url, tag), model, "cost", [], Spans()) for _ in range(REPLICAS)]
        self.fleet = Fleet(connect(url, tag), model)
        self.number = 0
        clock = Clock()
        self.tasks = [asyncio.create_task(supervise("apply", 0.02, self._step, self.replicas[0].metrics, clock))]
        for replica in self.replicas:
            renew = partial(upkeep.renew, replica.pools, replica.metrics)
            outcomes, clear = partial(upkeep.tell_again, replica.pools), partial(upkeep.clear, replica.pools)
            rounds = ("renew", size.renewal_s, renew), ("outcomes", 1.0, outcomes), ("clear", 1.0, clear)
            for name, seconds, work in rounds:
                self.tasks.append(asyncio.create_task(supervise(name, seconds, work, replica.metrics, clock)))
        self.load = asyncio.create_task(asyncio.sleep(0))

    async def _step(self) -> None:
        await self.fleet.upkeep.step()
        for view in await self.fleet.workers.read():
            if view.server and view.proof == "pending":
                await self.fleet.probes.prove(view.worker_id, view.record["nonce"], Proof("proven", ""))

    async def routable(self) -> bool:
        with suppress(FleetUnavailable):
            return [view.routable for view in await self.fleet.workers.read()] == [True] * WORKERS
        return False

    async def ask(self, one: LossyReplica) -> None:
        self.number += 1
        chains = (Chain(SCHEME.scheme_id, 16, os.urandom(8 * 20)),)
        await one.decide(Question(f"wf-0{self.number}", chains, 321, 500))

    async def hold(self) -> None:
        """Every replica books half of its share of leases; every second request begins to answer."""
        before = len(self.replicas[0].attempts)

        async def share(one: LossyReplica) -> None:
            for _ in range(self.size.leases // REPLICAS // 2):
                await self.ask(one)
            for number in range(before // 2, len(one.attempts), 2):
                await one.start(number)

        await asyncio.gather(*map(share, self.replicas))
        assert len({len(replica.pool.reservations) for replica in self.replicas}) == 1

    def begin(self) -> None:
        """Let other requests begin and end from now on."""
        assert sum(len(replica.pool.reservations) for replica in self.replicas) == self.size.leases
        self.load = asyncio.create_task(self._requests())

    async def _requests(self) -> None:
        while True:
            await asyncio.sleep(0.002)  # without the store no other call waits
            for replica in self.replicas:
                held = len(replica.attempts)
                await self.ask(replica)
                if len(replica.attempts) > held:
                    await replica.end(held, "finished")

    async def equal(self) -> bool:
        """Whether the sums of the load rows equal those of the live leases, to the token."""
        renewals = [renewal for replica in self.replicas for renewal in replica.pool.reservations.renewals()]
        live = (
            sum(lease.prefill_tokens for lease in renewals),
            sum(lease.decode_tokens for lease in renewals),
            len(renewals),
        )
        with suppress(FleetUnavailable):
            rows = [view.load for view in await self.fleet.workers.read()]
            prefill, decode = sum(row.prefill_tokens for row in rows), sum(row.decode_tokens for row in rows)
            return (prefill, decode, sum(row.in_flight for row in rows)) == live
        return False

    async def counted(self, result: str) -> int:
        found = [
            replica.metrics.registry.get_sample_value("warmfleet_renewed_reservations_total", {"result": result})
            for replica in self.replicas
        ]
        return int(sum(value or 0 for value in found))

    async def over(self) -> None:
        """End all requests, and assert that nothing is booked."""
        for replica in self.replicas:
            while replica.attempts:
                await replica.end(0, "finished")
        assert sum(len(replica.pool.reservations) for replica in self.replicas) == 0
        await poll(self.equal, 10, "nothing is booked")

    async def close(self) -> None:
        await stop([*self.tasks, self.load])
        for replica in self.replicas:
            await replica.fleet.close()
        await self.fleet.close()


@asynccontextmanager
async def living(url: str, model: str, size: Size, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Living]:
    """A fleet with half of its leases booked."""
    monkeypatch.setattr(wire, "HEARTBEAT_SECONDS", size.heartbeat_s)
    made = Living(url, model, size)
    try:
        with workers(url, model):
            await poll(made.routable, 30, "the workers are there")
            await made.hold()
            yield made
    finally:
        await made.close()


async def struck(fleet: Living, strike: Callable[[], Any], what: str) -> None:
    """Stop the store under load; print the time until the load is right again, and the leases that were booked anew."""
    fleet.begin()
    await asyncio.sleep(0.2)
    await asyncio.to_thread(strike)
    begun = time.monotonic()
    await stop([fleet.load])
    await poll(fleet.equal, fleet.size.limit_s + 10, "the sum of load is that of the live leases")
    took_s = time.monotonic() - begun
    assert took_s <= fleet.size.limit_s
    await fleet.over()
    print(f"{what}: equal again after {took_s:.2f} s, {await fleet.counted('rebuilt')} booked anew")


# tests/app/fleet/test_sentinel.py tests a failover with a few leases in the default run.
@pytest.mark.long(
    minutes=1,
    shows=(
        "failover of Redis with 2,000 live leases of four replicas: the load is right again within 5 s and one renewal"
    ),
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("behind", [True, False], ids=["behind", "in step"])
@pytest.mark.parametrize("size", [SMALL, FULL], ids=["200", "2000"])
async def test_a_failover(model: str, monkeypatch: pytest.MonkeyPatch, size: Size, behind: bool) -> None:
    """behind: the new master lacks half of the leases, and the beginnings of some other requests."""
    with sentinels() as watched:
        async with living(watched.url, model, size, monkeypatch) as fleet:
            if behind:
                await asyncio.to_thread(watched.cut)
            await fleet.hold()
            await struck(fleet, watched.master.kill, f"failover with {size.leases} live leases")
            assert watched.promoted()
            assert (await fleet.counted("rebuilt") >= size.leases // 2) == behind


EMPTY = pytest.mark.long(
    minutes=1,
    shows=(
        "Redis comes back empty under 2,000 live leases of four replicas: the load is right again within 5 "
        "s and one renewal"
    ),
)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SMALL, id="200"),
        pytest.param(FULL, id="2000", marks=[EMPTY, pytest.mark.timeout(300)]),
    ],
)
async def test_a_store_that_comes_back_empty(model: str, monkeypatch: pytest.MonkeyPatch, size: Size) -> None:
    [port] = free_ports(1)
    with Servers() as servers:
        run = [*QUIET, "--port", str(port), "--dir", str(servers.folder)]
        first = servers.run(port, run)
        until(first.client().ping, "the store answers")

        def restart() -> None:
            first.kill()
            until(servers.run(port, run).client().ping, "the store is back")

        async with living(f"redis://127.0.0.1:{port}", model, size, monkeypatch) as fleet:
            await fleet.hold()
            await struck(fleet, restart, f"restarted empty with {size.leases} live leases")
            assert await fleet.counted("rebuilt") >= size.leases
