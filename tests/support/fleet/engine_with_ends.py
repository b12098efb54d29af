"""An engine that reports the ends of requests, with its real publisher run by hand, and routers beside it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError
from tests.support.fleet.reporting_worker import SCHEME

from warmfleet.fleet import Fleet, Lease, LoadRow, Proof, Question, Renewal, Stage
from warmfleet.fleet.upkeep import Pace
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.config import PublisherConfig
from warmfleet_worker.protocol import wire
from warmfleet_worker.reservations import Reservations
from warmfleet_worker.stream import StreamGone
from warmfleet_worker.tracker import Tracker
from warmfleet_worker.worker_publisher import WorkerPublisher

WORKER = "w.0"
PROMPT, ANSWER = 160, 40  # tokens

if TYPE_CHECKING:
    import redis


def reservation(number: int, mark: str = "0") -> str:
    return f"wf-{mark}{number:02}{'x' * 19}"


def request_id(reserved: str, child: int | None = None) -> str:
    return f"{'' if child is None else f'{child}_'}cmpl-{reserved}.client-0"


class EngineWithEnds:
    """``store``: a client without asyncio, for the publisher. present: ids of the engine's requests -> reservation."""

    def __init__(self, store: redis.Redis, fleet: Fleet) -> None:
        self.store, self.fleet, self.keys = store, fleet, fleet.keys
        self.present: dict[str, str] = {}
        self.prefilled: set[str] = set()
        self.seen: set[str] = set()  # reservations that this process had
        self.now = time.monotonic()
        self.reservations: Reservations
        self.publisher: WorkerPublisher
        self.start()

    def start(self) -> None:
        """Start a process with no requests; one that ran before is gone without a word."""
        self.present, self.prefilled, self.seen = {}, set(), set()
        config = PublisherConfig("redis://unused", "m", WORKER, "w", 0, SCHEME, 1000, 4096, "1")
        self.reservations = Reservations(lambda: list(self.present))
        self.publisher = WorkerPublisher(config, Tracker(), reservations=self.reservations)
        self.publisher._stream = type(self.publisher._stream)(
            self.store, self.keys.events(WORKER), (self.keys.hello, f"events:{WORKER}"), 4096
        )
        self.publisher._command_key = self.keys.command(WORKER)

    # ------------------------------------------------ the engine

    def arrive(self, reserved: str, child: int | None = None) -> None:
        self.add(request_id(reserved, child), reserved)

    def add(self, engine_id: str, reserved: str) -> None:
        if engine_id not in self.present:  # as the hook does: else it is further input of the same request
            self.reservations.arrive(engine_id)
        self.present[engine_id] = reserved
        self.seen.add(reserved)

    def prefill(self, engine_id: str) -> None:
        if engine_id not in self.prefilled and wire.first_child(engine_id):
            self.publisher.progress(wire.first_child(engine_id), 0, PROMPT)
        self.prefilled.add(engine_id)

    def end(self, engine_id: str, *, told: bool = True) -> None:
        """The request ends; told: False if the report is lost, as where too many wait."""
        del self.present[engine_id]
        self.prefilled.discard(engine_id)
        self.reservations.end([(engine_id, ANSWER, "stop")])
        if not told:
            self.reservations._ended.pop()

    def round(self, *, beat: bool = False) -> None:
        """One round of the publisher's thread, which sends a heartbeat and reads its command."""
        self.now += wire.HEARTBEAT_SECONDS if beat else 0.0
        self.publisher._due.flush = 0.0
        if not beat:
            self.publisher._due.heartbeat = self.publisher._due.load = self.now + 1
        self.publisher._due.command = 0.0
        try:
            self.publisher.step(self.now)
        except StreamGone:
            self.publisher._update(joined=False, acknowledged=False)

    # ------------------------------------------------ routers

    async def apply(self) -> None:
        """Apply until the stream is empty."""
        for _ in range(200):
            if not (await self.fleet.upkeep.apply(WORKER)).more:
                return
        raise AssertionError("the stream never ends")

    async def routable(self) -> None:
        """Let the engine join, and routers know its server and its URL."""
        for _ in range(2):  # in the first it may notice that its stream is gone
            self.round(beat=True)
        told = {
            "schema": wire.SCHEMA,
            "server_id": "w",
            "url": "http://10.0.0.1:8000",
            "models": [self.keys.tag.replace("~", "/")],
        }
        told |= {"artifacts": {}, "facts": {}, "version": "1"}
        fields: Any = wire.entry("s1", 1, "join", wire.dumps(told))
        self.store.xadd(self.keys.server("w"), fields)
        await self.apply()
        await self.fleet.upkeep.apply_server("w")
        await self.proven()

    async def proven(self) -> None:
        await self.fleet.probes.prove(WORKER, self.publisher._stream.nonce, Proof("proven", ""))

    async def decide(self, reserved: str) -> None:
        chain = Chain(SCHEME.scheme_id, 16, bytes(range(80)))
        await self.fleet.bookings.decide(Question(reserved, (chain,), PROMPT, PROMPT + ANSWER))

    async def renew(self, reserved: str, *, started: bool = False) -> tuple[int, int, int]:
        return await self.fleet.bookings.renew([Renewal(reserved, WORKER, PROMPT, PROMPT + ANSWER, started=started)])

    async def reap(self, *reserved: str) -> None:
        """The leases of these reservations are due, and are reaped unless the engine has them."""
        for each in reserved:
            self.store.zadd(self.keys.leases, {each: 1}, xx=True)
        for _ in range(1 + len(reserved) // 8):
            await self.fleet.bookings.settle("nobody", "finished")

    # ------------------------------------------------ what Redis has

    def row(self) -> LoadRow:
        packed: Any = self.store.hget(self.keys.load, WORKER)
        return LoadRow.unpack(packed)

    def load(self) -> tuple[int, int, int]:
        row = self.row()
        return row.prefill_tokens, row.decode_tokens, row.in_flight

    def leases(self) -> dict[str, Lease]:
        packed: Any = self.store.hgetall(self.keys.lease)
        return {name.decode(): Lease.unpack(lease) for name, lease in packed.items()}

    def open(self) -> set[str]:
        """The reservations that have load on the worker's row."""
        epoch = self.row().epoch
        leases = self.leases().items()
        return {name for name, lease in leases if lease.stage <= Stage.STARTED and lease.epoch == epoch}

    def check(self) -> None:
        """The row is the sum of its open reservations."""
        leases, names = self.leases(), self.open()
        mine = [leases[name] for name in names]
        booked = sum(lease.prefill_tokens for lease in mine), sum(lease.decode_tokens for lease in mine), len(mine)
        assert self.load() == booked, "the load is not that of the open reservations"

    def told(self) -> list[str]:
        """The reservations that the plugin has reported as the engine's."""
        return self.reservations.running

    def running(self) -> set[str]:
        """The reservations that Redis takes for the engine's."""
        members: Any = self.store.zrange(self.keys.running(WORKER), 0, -1)
        return {member.decode() for member in members} - {""}

    async def second(self) -> None:
        """Let the part of tick run that looks at each worker, once a second; no time of grace is left."""
        self.fleet.upkeep.pace = Pace(min_gap_ms=0, rest_gap_ms=0)
        self.store.set(self.keys.tick, f"{int(time.time() * 1_000) - 1_000} 0 0")
        await self.fleet.upkeep.tick()

    def silent(self, seconds: float) -> None:
        """The last heartbeat and the last right tally are so old."""
        then = int(1_000 * (time.time() - seconds))
        self.store.zadd(self.keys.alive, {WORKER: then}, xx=True)
        self.store.zadd(self.keys.running(WORKER), {"": then}, xx=True)

    async def quiet(self) -> None:
        """Heartbeats until Redis knows what the engine has."""
        for _ in range(6):
            self.round(beat=True)
            await self.apply()

    def lose(self, which: int) -> None:
        """An entry that no router has read yet is lost."""
        with suppress(RedisError):
            entries: Any = self.store.xrange(self.keys.events(WORKER))
            if entries:
                self.store.xdel(self.keys.events(WORKER), entries[which % len(entries)][0])
