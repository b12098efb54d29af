"""A fleet with a reporting worker and requests without pause, which shows what a failover of Redis does to both."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tests.support.fleet.publishing import SCHEME, WORKER, config, equal
from tests.support.polling import poll
from tests.support.redis.topology import AGREED_S

from warmfleet.background.supervisor import stop
from warmfleet.errors import FleetUnavailable, WarmfleetError
from warmfleet.fleet import (
    Constants,
    Decision,
    Fleet,
    Proof,
    Question,
    RedisConnections,
    Renewal,
    Spans,
    Timeouts,
    connect,
    new_reservation,
)
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire
from warmfleet_worker.server_publisher import ServerConfig, ServerPublisher
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

HELD = 20
SPANS = Spans(lease_ms=6_000)  # short: if only the old master got a settle, that lease must expire


@dataclass
class BusyFleet:
    """A running fleet. url: the address of Redis. failures: time and reason of each decision that failed.

    connections: of a replica that has other pools, too; they are closed with those.
    """

    url: str
    model: str
    worker_url: str = ""  # only where workers have a Redis user of their own
    connections: RedisConnections | None = None
    tracker: Tracker = field(default_factory=Tracker)
    answered: list[float] = field(default_factory=list)
    failures: list[tuple[float, str]] = field(default_factory=list)
    unsettled: list[str] = field(default_factory=list)
    held: list[Renewal] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        url, model = self.url, self.model
        self.tracker.stored([os.urandom(8) for _ in range(2_000)])
        tag, timeouts = wire.model_tag(model), Timeouts(request_s=0.25, upkeep_s=2.0)
        client = self.connections.of(tag) if self.connections else connect(url, tag)
        self.fleet = Fleet(client, model, timeouts, constants=Constants(spans=SPANS))
        url = self.worker_url or url
        self.core = WorkerPublisher(config(url, model), self.tracker)
        self.half = ServerPublisher(ServerConfig(url, model, "w1", "http://127.0.0.1:9", (model,), "test"))
        self.core.start()
        self.half.start()
        self.tasks = [asyncio.create_task(self._for_ever(self._upkeep, 0.01))]
        await poll(self._prove, 20, "the worker is there")
        self.requests = asyncio.create_task(self._for_ever(self._request, 0.005))
        self.churn = asyncio.create_task(self._for_ever(self._churn, 0.01))
        self.tasks += [self.requests, self.churn, asyncio.create_task(self._for_ever(self._prove, 0.2))]
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop(self.tasks)
        for publisher in (self.core, self.half):
            await asyncio.to_thread(publisher.stop, 5)
        await self.fleet.close()

    async def _for_ever(self, work: Callable[[], Coroutine[Any, Any, object]], pause_s: float) -> None:
        while True:
            with suppress(FleetUnavailable):  # the tests take Redis away
                await work()
            await asyncio.sleep(pause_s)

    async def _upkeep(self) -> None:
        await self.fleet.upkeep.step()
        await self.fleet.bookings.renew(self.held)
        for reservation in list(self.unsettled):
            await self.fleet.bookings.settle(reservation, "cancelled")
            self.unsettled.remove(reservation)

    async def _prove(self) -> bool:
        with suppress(FleetUnavailable):
            for view in await self.fleet.workers.read():
                if view.server and view.proof == "pending":
                    await self.fleet.probes.prove(WORKER, view.record["nonce"], Proof("proven", ""))
                return view.routable
        return False

    async def _churn(self) -> None:
        self.tracker.removed(list(self.tracker.table)[:10])
        self.tracker.stored([os.urandom(8) for _ in range(10)])

    async def _request(self) -> None:
        one = new_reservation(1)
        try:
            await self.fleet.bookings.decide(self.ask(one))
            self.answered.append(time.monotonic())
        except WarmfleetError as error:
            self.failures.append((time.monotonic(), str(error)))
        finally:
            self.unsettled.append(one)  # a decision that seemed to fail may have been booked

    def ask(self, reservation: str) -> Question:
        return Question(reservation, (Chain(SCHEME.scheme_id, 16, next(iter(self.tracker.table))),), 320, 640)

    async def hold(self) -> None:
        """Take reservations that stay open and are renewed."""
        decisions = [await self._decided() for _ in range(HELD)]
        self.held = [
            Renewal(decision.reservation, WORKER, decision.prefill_tokens, decision.decode_tokens)
            for decision in decisions
        ]

    async def _decided(self) -> Decision:
        """Decide, again while a busy machine lets Redis answer too late."""
        while True:
            one = new_reservation(1)
            try:
                return await self.fleet.bookings.decide(self.ask(one))
            except FleetUnavailable:
                self.unsettled.append(one)

    async def struck(
        self, strike: Callable[[], None], agreed: Callable[[], bool] = lambda: True
    ) -> tuple[float, float]:
        """Call ``strike``; return the seconds until decisions work again and until the index equals the table.

        agreed: whether there is another master. The seconds count from then on.
        """
        await poll(lambda: len(self.answered) > 20)
        struck, failed = time.monotonic(), len(self.failures)
        strike()
        await poll(lambda: asyncio.to_thread(agreed), AGREED_S, "there is another master")
        begun = time.monotonic()
        await poll(lambda: len(self.failures) > failed, 10, "the failure is noticed")
        first = self.failures[failed][0]
        await poll(lambda: self.answered[-1] > first, 20, "decisions work again")
        decided_s = next(when for when in self.answered if when > first) - begun
        await stop([self.churn])
        await equal(self.fleet, self.tracker)
        indexed_s, since_s = time.monotonic() - begun, begun - struck
        print(f"after the strike: decisions {since_s + decided_s:.2f} s, index {since_s + indexed_s:.2f} s")
        return decided_s, indexed_s  # decisions may work before all Sentinels agree

    async def consistent(self) -> None:
        """Fail unless the load equals that of the held reservations, and is 0 once these have been settled."""
        await stop([self.requests])
        await poll(lambda: not self.unsettled, 10, "every outcome is told")
        renewed, rebuilt, refused = await self.fleet.bookings.renew(self.held)
        assert (renewed + rebuilt, refused) == (HELD, 0)
        total = [
            sum(renewal.prefill_tokens for renewal in self.held),
            sum(renewal.decode_tokens for renewal in self.held),
            HELD,
        ]
        await poll(lambda: self._load(total), 15, "only what is held is booked")
        self.unsettled += [renewal.reservation for renewal in self.held]
        self.held = []
        await poll(lambda: self._load([0, 0, 0]), 15, "nothing is booked")

    async def _load(self, expected: list[int]) -> bool:
        await self.fleet.bookings.reap()
        [view] = await self.fleet.workers.read()
        return [view.load.prefill_tokens, view.load.decode_tokens, view.load.in_flight] == expected
