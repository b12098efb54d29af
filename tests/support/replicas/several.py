"""Several router replicas over one store, driven step by step by a test.

In a step commands get lost, replicas are killed, workers come and go, or the store forgets. ``_check`` asserts what
must hold after every step, ``_rest`` what must hold once every command has arrived.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from tests.support.fleet.keyspace import READY
from tests.support.fleet.reporting_worker import SCHEME, ReportingWorker
from tests.support.redis.servers import PATIENT
from tests.support.replicas.lossy import FATES, HOUR_MS, SPANS, Late, LossyReplica, order_of

from warmfleet.errors import NoWorker
from warmfleet.fleet import Check, Constants, Fleet, Lease, LoadRow, Question, Stage
from warmfleet.prompt.block_hashes import Chain
from warmfleet.routing.booking import BookingState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

WORKERS = ("w1.0", "w2.0", "w3.0", "10.0.0.4-8000")  # the last has no plugin
APPROXIMATE = WORKERS[-1]
RECORD = {"scheme_id": SCHEME.scheme_id, "url": "http://10.0.0.4:8000", "models": ["m"]}


class SeveralReplicas:
    """A store, four workers, ``count`` replicas. Every method without ``_`` that takes three numbers is a step."""

    def __init__(self, clients: Sequence[aioredis.Redis], model: str, policy: str) -> None:
        self.clients, self.model, self.policy = clients, model, policy
        self.store = clients[0]
        self.plain = Fleet(self.store, model, timeouts=PATIENT, constants=Constants(spans=SPANS))
        self.keys, self.rng = self.plain.keys, random.Random(1)
        self.late: Late = []
        self.replicas = [LossyReplica(client, model, policy, self.late) for client in clients]
        self.number, self.saved = 0, False
        head = self.rng.randbytes(160)
        self.chains = [head, head + self.rng.randbytes(160), head + self.rng.randbytes(400), self.rng.randbytes(24)]

    # ------------------------------------------------ requests

    def _ask(self, a: int, b: int) -> Question:
        self.number += 1
        hashes = self.chains[a % 4]
        exclude = (WORKERS[b % 4],) if b % 7 == 0 else ()
        chains = (Chain(SCHEME.scheme_id, 16, hashes),)
        order = WORKERS[b % 4 :] + WORKERS[: b % 4]  # a ring of workers, for the policies that use one
        return Question(
            f"wf-0{self.number}", chains, len(hashes) * 2 + 1 + a, 100 + b, self.policy, exclude, order=order
        )

    def _fated(self, who: int, *fates: int) -> LossyReplica:
        """The replica, whose next commands will have these fates."""
        one = self.replicas[who % len(self.replicas)]
        one.scripts.fates = deque(FATES[fate % len(FATES)] for fate in fates)
        return one

    async def decide(self, who: int, a: int, b: int) -> None:
        """Decide for a new request. The choice must be the one that ``explain`` gave for the same state."""
        await self._reaped()
        one, ask = self._fated(who, b, a), self._ask(a, b)
        attempt = await one.decide(ask)
        one.scripts.fates.clear()
        lease = await self._lease(ask.reservation)
        decision, booked = attempt.chosen.decision, attempt.chosen.state is BookingState.BOOKED
        if decision is not None and not booked:
            lost = {FATES[a % len(FATES)], FATES[b % len(FATES)]} - {"well", "twice"}
            assert lost or ask.reservation not in one.queue.foretold, "else nobody falls back"
        elif decision is not None:
            assert lease
            foretold = one.queue.foretold[ask.reservation]
            assert (lease.worker_id, lease.prefill_tokens) == (foretold, decision.prefill_tokens)

    async def start(self, who: int, a: int, b: int) -> None:
        await self._fated(who, b).start(a)

    async def end(self, who: int, a: int, b: int) -> None:
        outcome = ("finished", "finished", "failed", "cancelled")[b % 4]
        await self._fated(who, b // 4).end(a, outcome)

    async def end_cancelled(self, who: int, a: int, b: int) -> None:
        one = self._fated(who)
        if one.attempts:
            lease = await self._lease(await one.end_cancelled(a))
            assert lease is None or lease.stage == Stage.TOMBSTONE, "settled, not left to expire"

    async def renew(self, who: int, a: int, b: int) -> None:
        await self._fated(who, b).renew()

    async def renew_meanwhile(self, who: int, a: int, b: int) -> None:
        """A request ends while it is renewed."""
        one = self._fated(who)
        await asyncio.gather(one.renew(), one.end(a, "finished"))

    async def clear(self, who: int, a: int, b: int) -> None:
        await self._fated(who, b).clear()

    async def arrive(self, who: int, a: int, b: int) -> None:
        await self._fated(who).scripts.arrive(a)

    async def kill(self, who: int, a: int, b: int) -> None:
        """SIGKILL: the replica's memory is gone; commands that it had sent may still arrive."""
        at = who % len(self.replicas)
        self.replicas[at] = LossyReplica(self.clients[at], self.model, self.policy, self.late)

    async def pass_time(self, who: int, a: int, b: int) -> None:
        """A lease without an owner, or a tombstone, expires; it need not have been reaped yet."""
        kept = self._open()
        names = [name for name, _ in await self._leases() if name not in kept]
        if names:
            await self.store.zadd(self.keys.leases, {names[a % len(names)]: 1})

    # ------------------------------------------------ workers and the store

    async def join(self, who: int, a: int, b: int) -> None:
        """A new process under the name gets a new slot; bookings stay."""
        name = WORKERS[who % 4]
        if name == APPROXIMATE:
            if b % 2:
                await self.plain.workers.register(name, RECORD, 9, Check("FAILED"))
            await self.plain.workers.register(name, RECORD, 9)
        else:
            self.number += 1
            reporter = ReportingWorker(self.store, self.plain, name[:-2])
            await reporter.join(f"n{self.number}")
            await reporter.applied()
            row = replace(await reporter.row(), flags=READY, speed_tps=(5_000, 10_000, 20_000)[b % 3])
            await cast("Any", self.store.hset(self.keys.load, name, row.pack(name)))
            if b % 2:
                held = [self.chains[a % 4][at : at + 8] for at in range(0, 8 * (b % 12), 8)]
                await reporter.send("stored", b"".join(held))
                await reporter.applied()

    async def forget(self, who: int, a: int, b: int) -> None:
        await self.plain.upkeep.forget(WORKERS[who % 4])

    async def collect(self, who: int, a: int, b: int) -> None:
        await self.plain.upkeep.collect(a + 1)

    async def emptied(self, who: int, a: int, b: int) -> None:
        """The store comes back with nothing; some workers have joined again."""
        await self._drop(self.keys.prefix)
        await self._tick()
        for number in range(b % 4):
            await self.join(number, a, b)

    async def save(self, who: int, a: int, b: int) -> None:
        """Remember what a replica of the store has received so far."""
        await self._copy(self.keys.prefix, self._saved)
        self.saved = True

    async def failover(self, who: int, a: int, b: int) -> None:
        """The state of the last ``save`` is back: later changes are lost, and leases that ended since are open."""
        if self.saved:
            await self._drop(self.keys.prefix)
            await self._copy(self._saved, self.keys.prefix)

    @property
    def _saved(self) -> str:
        return self.keys.prefix.replace("{", "{saved-")

    async def _tick(self) -> None:
        now = (await self.store.time())[0] * 1000
        await self.store.set(self.keys.tick, f"{now} {now + HOUR_MS} 10000 0")

    async def _named(self, prefix: str) -> list[bytes]:
        pattern = prefix.replace("[", "\\[") + "*"
        return [key async for key in self.store.scan_iter(match=pattern, count=1_000)]

    async def _drop(self, prefix: str) -> None:
        if keys := await self._named(prefix):
            await self.store.delete(*keys)

    async def _copy(self, prefix: str, to: str) -> None:
        await self._drop(to)
        pipe = self.store.pipeline(transaction=False)
        for key in await self._named(prefix):
            pipe.copy(cast("Any", key), cast("Any", to.encode() + key[len(prefix) :]), replace=True)
        await pipe.execute()

    # ------------------------------------------------ several at once

    async def burst(self, who: int, a: int, b: int) -> None:
        """Requests of all replicas at the same time: chosen as if they had come one after another."""
        asks = [self._ask(a + (b + number) % 2, b + number) for number in range(2 + b % 5)]
        await self._reaped()
        twin = Fleet(self.store, f"twin/{self.model}", timeouts=PATIENT, constants=Constants(spans=SPANS))
        await self._copy(self.keys.prefix, twin.keys.prefix)
        # A prefill's computed part and the share of time follow the clock, which a twin cannot turn back: both cost 0.
        weights, free = twin.constants.weights, replace(twin.constants.weights, wait_price=0.0, place=0.0)
        twin.use(weights=free)
        for replica in self.replicas:
            replica.scripts.fates.clear()
            replica.queue.foretells = False
            replica.fleet.use(weights=free)
        async with self.store.monitor() as monitor:
            at = [self.replicas[(who + number) % len(self.replicas)] for number in range(len(asks))]
            attempts = await asyncio.gather(*(replica.decide(ask) for replica, ask in zip(at, asks, strict=True)))
            order = await order_of(monitor, len(asks))
        made = {
            attempt.reservation: attempt.chosen.decision if attempt.chosen.state is BookingState.BOOKED else None
            for attempt in attempts
        }
        asked: dict[str, Question] = {}
        for replica in self.replicas:
            replica.queue.foretells = True
            replica.fleet.use(weights=weights)
            asked |= replica.queue.asked
        for name in order:
            try:
                alone = await twin.bookings.decide(asked[name])
            except NoWorker:
                alone = None
            assert alone == made[name], f"{order}"
        assert await self._leases() == await self._leases(twin)
        ours, theirs = await self._rows(), await self._rows(twin)
        for name, row in theirs.items():
            ours[name] = replace(ours[name], since_ms=row.since_ms, busy_share=row.busy_share)
        assert ours == theirs
        await self._drop(twin.keys.prefix)

    # ------------------------------------------------ what is there

    def _open(self) -> dict[str, Any]:
        return {
            renewal.reservation: renewal
            for replica in self.replicas
            for renewal in replica.pool.reservations.renewals()
        }

    async def _leases(self, of: Fleet | None = None) -> list[tuple[str, Lease]]:
        packed = await cast("Any", self.store.hgetall((of or self.plain).keys.lease))
        return sorted((name.decode(), Lease.unpack(lease)) for name, lease in packed.items())

    async def _lease(self, name: str) -> Lease | None:
        packed = await cast("Any", self.store.hget(self.keys.lease, name))
        return Lease.unpack(packed) if packed else None

    async def _rows(self, of: Fleet | None = None) -> dict[str, LoadRow]:
        packed = await cast("Any", self.store.hgetall((of or self.plain).keys.load))
        return {name.decode(): LoadRow.unpack(row) for name, row in packed.items()}

    async def _reaped(self) -> None:
        """Reap expired leases, eight at a call."""
        while await self.store.zcount(self.keys.leases, "-inf", 1):
            await self.plain.bookings.settle("wf-nobody", "finished")

    async def _check(self) -> None:
        """At any time: a row's sums are those of its open leases, and speculation is what leases and mirrors name."""
        rows, made = await self._rows(), Counter[tuple[bytes, bytes]]()
        sums = dict.fromkeys(rows, (0, 0, 0))
        for _, lease in await self._leases():
            made.update((block, b"%d" % lease.slot) for block in lease.checkpoints)
            row = rows.get(lease.worker_id)
            if row and lease.stage <= Stage.STARTED and lease.epoch == row.epoch:
                prefill, decodes, count = sums[lease.worker_id]
                sums[lease.worker_id] = (prefill + lease.prefill_tokens, decodes + lease.decode_tokens, count + 1)
        assert {name: (row.prefill_tokens, row.decode_tokens, row.in_flight) for name, row in rows.items()} == sums
        prefix, found = self.keys.prefix.encode(), dict[tuple[bytes, bytes], int]()
        for key in await self._named(self.keys.prefix):
            if key.startswith(prefix + b"lru:"):
                slot = key[len(prefix) + 4 :]
                made.update((block, slot) for block in cast("list[bytes]", await self.store.zrange(key, 0, -1)))
            elif key.startswith(prefix + b"x:"):
                counts = await cast("Any", self.store.hgetall(key))
                found |= {(key[len(prefix) + 2 :], slot): int(n) for slot, n in counts.items() if slot.isdigit()}
        assert found == dict(made)

    async def _rest(self) -> None:
        """Let every command and outcome arrive and the lease time pass; then only open requests are booked."""
        while self.late:
            await self._fated(0).scripts.arrive(0)
        for who, replica in enumerate(self.replicas):
            await self._fated(who).clear()
            await replica.renew()
            assert not replica.pool.reservations.outcomes()
        kept = self._open()
        over = {name: 1 for name, _ in await self._leases() if name not in kept}
        if over:
            await self.store.zadd(self.keys.leases, cast("Any", over))
        await self._reaped()
        await self._check()
        rows, leases = await self._rows(), dict(await self._leases())
        for name, renewal in kept.items():
            lease = leases.pop(name, None)
            if lease is None:
                assert renewal.worker_id not in rows, "what is open is booked, where its worker is known"
                continue
            told = (renewal.worker_id, renewal.prefill_tokens, renewal.decode_tokens, renewal.started)
            assert (lease.worker_id, lease.prefill_tokens, lease.decode_tokens, lease.stage == Stage.STARTED) == told
        assert not leases, "nothing else is"

    async def _over(self) -> None:
        """End all requests: then nothing is booked, and nothing of them is left."""
        for who, replica in enumerate(self.replicas):
            while replica.attempts:
                await self._fated(who).end(0, "finished")
        await self._rest()
        rows, left = await self._rows(), await self._named(self.keys.prefix)
        assert all((row.prefill_tokens, row.decode_tokens, row.in_flight) == (0, 0, 0) for row in rows.values())
        kinds = {key[len(self.keys.prefix) :].split(b":")[0] for key in left}
        assert not kinds & {b"lease", b"leases", b"c"}
