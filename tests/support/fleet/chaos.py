"""Real publishers, real scripts and a private Redis, and steps in each of which something goes wrong between them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from redis.exceptions import RedisError
from tests.support.fleet.reporting_worker import SCHEME, block
from tests.support.fleet.stepped_publisher import SteppedPublisher

from warmfleet.errors import CancelledReservation, NoWorker
from warmfleet.fleet import Fleet, Proof, Question, Renewal
from warmfleet.fleet.upkeep import Pace
from warmfleet.prompt.block_hashes import Chain
from warmfleet_worker.protocol import wire
from warmfleet_worker.worker_publisher import SnapshotRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES = ("a.0", "b.0", "c.0")
NUMBERS = 61  # blocks that exist: workers' tables overlap
FOREIGN_SLOT = 999_999_999  # somebody else's entries, on the same blocks
RESERVATIONS = 6
HOUR_MS = 3_600_000
PACE = Pace(min_gap_ms=0, max_entries=3, max_blocks=24, applies=12, collects=2)


class ChaosFleet:
    """A store, two appliers, three workers. Each method without ``_`` is a step with a worker and two numbers."""

    def __init__(self, store: Any, fleets: list[Fleet], queue: int) -> None:
        self.store, self.fleets, self.queue = store, fleets, queue
        self.keys = fleets[0].keys
        self.processes: dict[str, list[SteppedPublisher]] = {name: [] for name in NAMES}
        self.dead: dict[str, SteppedPublisher] = {}
        self.saved: list[tuple[bytes, bytes]] | None = None
        self.cancelled: set[str] = set()
        self.commands: dict[str, dict[str, Any]] = {}  # lost commands
        self.turn = 0
        self._reset()

    def _reset(self) -> None:
        """Empty the server but for the data of another model."""
        self.store.flushall()
        self.cancelled.clear()
        pipe = self.store.pipeline(transaction=False)
        for number in range(0, NUMBERS, 3):
            pipe.sadd(self.keys.block(block(number)), FOREIGN_SLOT)
            pipe.sadd(self.keys.slot(FOREIGN_SLOT), block(number))
        pipe.execute()

    def _now_ms(self) -> int:
        seconds, micros = self.store.time()
        return int(seconds * 1000 + micros // 1000)

    def _one(self, name: str, which: int) -> SteppedPublisher | None:
        """The newest process with the worker's name, or, one time in four, the oldest."""
        living = self.processes[name]
        return living[0 if which % 4 == 3 else -1] if living else None

    def _start(self, name: str, table: Iterable[bytes] = ()) -> None:
        process = SteppedPublisher(self.store, name, self.queue)
        process.tracker.stored(table)
        for further in process.further.values():
            further.stored(table)
        self.processes[name].append(process)
        process.round()

    async def step(self, action: str, who: int, a: int, b: int) -> None:
        await getattr(self, action)(NAMES[who % 3], a, b)

    # ------------------------------------------------ what engines do

    async def stored(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):
            process.tracker.stored(_span(a, b))

    async def removed(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):
            process.tracker.removed(_span(a, b))

    async def cleared(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):
            process.tracker.cleared()

    async def further(self, name: str, a: int, b: int) -> None:
        """A further set of blocks changes: it gains or loses some, or all at once."""
        if (process := self._one(name, b)) and process.further:
            changed = list(process.further.values())[a % len(process.further)]
            (changed.stored if a % 3 else changed.removed)(_span(a, b))
            if a % 16 == 0:
                changed.cleared()

    async def round(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):
            process.round()

    async def beat(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):
            process.round(beat=True)

    async def listen(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):
            process.round(listen=True)

    async def snapshot(self, name: str, a: int, b: int) -> None:
        """The worker begins a snapshot that was not commanded; another may be under way."""
        if process := self._one(name, b):
            process.publisher._snapshot_request = SnapshotRequest()
            process.publisher._snapshot = None
            process.round()

    async def server(self, name: str, a: int, b: int) -> None:
        """The API server of the worker sends a heartbeat."""
        stream, told = self.keys.server(name[:-2]), {"schema": wire.SCHEMA, "server_id": name[:-2]}
        told |= {"url": "http://10.0.0.1:8000", "models": ["m"], "artifacts": {}, "facts": {}, "version": "1"}
        self.store.xadd(stream, wire.entry("s1", 1, "join", wire.dumps(told)))
        self.store.xadd(self.keys.hello, {"s": f"server:{name[:-2]}"})
        await self.fleets[1].upkeep.apply_server(name[:-2])
        if process := self._one(name, 0):
            await self.fleets[1].probes.prove(name, process.stream.nonce, Proof("proven", ""))

    # ------------------------------------------------ what routers do

    async def apply(self, name: str, a: int, b: int) -> None:
        for _ in range(a % 3 + 1):
            self.turn += 1
            await self.fleets[self.turn % 2].upkeep.apply(name)

    async def upkeep(self, name: str, a: int, b: int) -> None:
        await self.fleets[a % 2].upkeep.step()

    async def collect(self, name: str, a: int, b: int) -> None:
        await self.fleets[1].upkeep.collect(a + 1)

    async def forget(self, name: str, a: int, b: int) -> None:
        await self.fleets[0].upkeep.forget(name, HOUR_MS if b % 2 else 0)

    async def decide(self, name: str, a: int, b: int) -> None:
        reservation, hashes = f"wf-{b % RESERVATIONS}", b"".join(block(number) for number in range(a))
        ask = Question(reservation, (Chain(SCHEME.scheme_id, 16, hashes),), len(hashes) * 2 + 1, 100)
        try:
            await self.fleets[a % 2].bookings.decide(ask)
        except CancelledReservation:
            assert reservation in self.cancelled
        except NoWorker:
            assert reservation not in self.cancelled
        else:
            assert reservation not in self.cancelled, "it was cancelled before it was booked"

    async def settle(self, name: str, a: int, b: int) -> None:
        outcome = ("started", "finished", "failed", "cancelled")[a % 4]
        reservation = f"wf-{b % RESERVATIONS}"
        told = await self.fleets[1].bookings.settle(reservation, cast("Any", outcome))
        if told == "UNKNOWN" and outcome in ("failed", "cancelled"):
            self.cancelled.add(reservation)

    async def renew(self, name: str, a: int, b: int) -> None:
        reservation = f"wf-{b % RESERVATIONS}"
        answer = await self.fleets[0].bookings.renew([Renewal(reservation, name, 30, 40, started=a % 2 == 1)])
        assert reservation not in self.cancelled or answer == (0, 0, 1)

    async def expire(self, name: str, a: int, b: int) -> None:
        if self.store.zadd(self.keys.leases, {f"wf-{b % RESERVATIONS}": 1}, xx=True, ch=True):
            self.cancelled.discard(f"wf-{b % RESERVATIONS}")
            await self.fleets[0].bookings.settle("nobody", "finished")

    # ------------------------------------------------ processes come and go

    async def restart(self, name: str, a: int, b: int) -> None:
        """The process is killed and another starts with an empty cache; if odd, with blocks from its disk."""
        self._kill(name)
        self._start(name, _span(a, b) if b % 2 else ())

    async def vanish(self, name: str, a: int, b: int) -> None:
        self._kill(name)

    async def leave(self, name: str, a: int, b: int) -> None:
        for process in self.processes[name]:
            process.publisher._stopping.set()
            process.round()
        self._kill(name)

    async def twin(self, name: str, a: int, b: int) -> None:
        """A second process takes the name while the first still runs."""
        if len(self.processes[name]) < 3:
            self._start(name, _span(a, b))

    async def late(self, name: str, a: int, b: int) -> None:
        """Entries of a dead process arrive after its successor's entries, with its join or without."""
        if name in self.dead:
            self._resend(name, self.dead[name].sent, a)

    def _kill(self, name: str) -> None:
        for process in self.processes[name]:
            self.dead[name] = process
        self.processes[name].clear()

    # ------------------------------------------------ what happens to streams

    async def repeated(self, name: str, a: int, b: int) -> None:
        if process := self._one(name, b):  # its join again would be an empty slot
            self._resend(name, (fields for fields in process.sent if fields[b"o"] != b"join"), a)

    def _resend(self, name: str, sent: Iterable[dict[bytes, bytes]], count: int) -> None:
        with suppress(RedisError):
            for fields in list(sent)[-(count % 8 + 1) :]:
                self.store.xadd(self.keys.events(name), fields, nomkstream=True)

    def _unread(self, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        stream = self.keys.events(name)
        return list(self.store.xrange(stream)) if self.store.type(stream) == b"stream" else []

    async def lost(self, name: str, a: int, b: int) -> None:
        if entries := self._unread(name):
            self.store.xdel(self.keys.events(name), entries[a % len(entries)][0])

    async def swapped(self, name: str, a: int, b: int) -> None:
        last = self._unread(name)[-(a % 3 + 2) :]
        with suppress(RedisError):
            for entry_id, _ in last:
                self.store.xdel(self.keys.events(name), entry_id)
            for _, fields in reversed(last):
                self.store.xadd(self.keys.events(name), fields)

    async def trimmed(self, name: str, a: int, b: int) -> None:
        if entries := self._unread(name):
            self.store.xtrim(self.keys.events(name), maxlen=a % len(entries), approximate=False)

    async def deleted(self, name: str, a: int, b: int) -> None:
        self.store.delete(self.keys.events(name))

    async def recreated(self, name: str, a: int, b: int) -> None:
        """The stream begins anew, with lower ids than those that were applied."""
        if entries := self._unread(name):
            self.store.delete(self.keys.events(name))
            for number, (_, fields) in enumerate(entries):
                self.store.xadd(self.keys.events(name), fields, id=f"{a + 1}-{number + 1}")

    async def forged(self, name: str, a: int, b: int) -> None:
        """A worker breaks the rules: a wrong type of key, ids near the end of time, another's name in its join."""
        stream, process, now = self.keys.events(name), self._one(name, 0), self._now_ms()
        if a % 6 == 0:
            self.store.set(stream, "no stream")
            return
        ids = ["*", f"{now + 600_000}-0", f"{now + 2 * HOUR_MS}-0", f"{now}-{2**64 - 2}", f"{2**64 - 1}-{2**64 - 1}"]
        if process:
            process.forged = process.stream.nonce
        nonce, number = (process.stream.nonce, process.stream.number + 1) if process else ("nobody", 1)
        fields = wire.entry(nonce or "n", number, "stored", b"".join(_span(a, b)))
        with suppress(RedisError):
            self.store.xadd(stream, fields, id=ids[a % 6 - 1])

    async def command(self, name: str, a: int, b: int) -> None:
        """A command to send a snapshot is lost, or comes again."""
        key = self.keys.command(name)
        current, old = json.loads(self.store.get(key) or "{}"), self.commands.get(name)
        if current.get("do") == "resync":
            self.commands[name] = current
            self.store.set(key, json.dumps({field: current[field] for field in current if field not in ("id", "do")}))
        elif old and current and "do" not in current:
            self.store.set(key, json.dumps(current | {"id": old["id"], "do": "resync"}))

    # ------------------------------------------------ what happens to the server

    async def save(self, name: str, a: int, b: int) -> None:
        """Remember the present state as that of a replica of Redis that lags behind."""
        keys = self.store.keys("*")
        pipe = self.store.pipeline(transaction=False)
        for key in keys:
            pipe.dump(key)
        self.saved = list(zip(keys, pipe.execute(), strict=True))

    async def failover(self, name: str, a: int, b: int) -> None:
        """The replica of Redis takes over: the state is the one of the last ``save``, or empty without one."""
        if self.saved is None:
            self._reset()
            return
        self.store.flushall()
        pipe = self.store.pipeline(transaction=False)
        for key, value in self.saved:
            pipe.restore(key, 0, value)
        pipe.execute()
        leases = self.store.hgetall(self.keys.lease)
        self.cancelled = {name.decode() for name, lease in leases.items() if name[-1:] != b"+" and lease[24] == 3}

    async def emptied(self, name: str, a: int, b: int) -> None:
        self._reset()

    async def clock(self, name: str, a: int, b: int) -> None:
        """The server's clock has stepped, or no replica has ticked for long: the time in ``tick`` is wrong."""
        now = self._now_ms()
        last = (now - 600_000, now + 600_000, now - 900, 1)[a % 4]
        self.store.set(self.keys.tick, f"{last} {last + 15_000 if b % 2 else 0} 0 {b}")

    async def aged(self, name: str, a: int, b: int) -> None:
        """The worker was silent for a while."""
        self.store.zadd(self.keys.alive, {name: self._now_ms() - (20_000 if a % 2 else 700_000)}, xx=True)


def _span(a: int, b: int) -> list[bytes]:
    """Up to 20 blocks from number ``a`` on, next to each other or some apart."""
    return [block((a + i * (b % 3 + 1)) % NUMBERS) for i in range(b + 1)]
