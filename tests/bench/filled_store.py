"""A store filled with a model's index and workers, whose CPU time is measured: for the bench ``decide``.

Tenants share the first tenth of the blocks, which half of the workers hold. Tails are on 1, 2 or 4 workers (50, 30,
20 %) to a random depth. Of ten queries the index knows nine.
"""

from __future__ import annotations

import json
import random
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from tests.bench.output import say
from tests.support.redis.packed_commands import arguments_of

from warmfleet.fleet import Constants, Fleet, Question, QueueLimits, Weights
from warmfleet.fleet.client import connect
from warmfleet.fleet.rows import Flag, LoadRow
from warmfleet.fleet.script_loader import SCRIPT_KEYS, script_text
from warmfleet.prompt.block_hashes import Chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Text = Callable[[str], str]  # of a script, by its name
    Fit = Callable[[list[Any]], list[Any]]  # decide's arguments as that script takes them

SCHEME, BLOCK_TOKENS, TENANTS = 7, 16, 20
TIER_SLOTS = 10_000  # added to a worker's slot, that of its tier
SCRIPTS = ("decide", "settle", "drain")
OF_TIERED = Flag.SETS | Flag.CLOSED  # an engine with a connector does not promise closed sets
FLAGS = Flag.SERVER | Flag.URL | Flag.PROVEN | Flag.CLOSED


@dataclass
class Data:
    """The chains of one index, and how many blocks of each every worker holds.

    tiered: number of workers with a tier, which holds what the GPU does and a part of what is behind that.
    """

    workers: int
    blocks: int
    pairs: int
    rng: random.Random
    tiered: int = 0
    chains: list[bytes] = field(default_factory=list)

    def load(self, client: Any, prefix: bytes) -> int:
        """Fill the index; return the number of (block, worker) pairs."""
        shared, written = self.blocks // 10, 0
        heads = [self.rng.randbytes(8 * shared) for _ in range(TENANTS)]
        half = range(1, self.workers + 1)
        for head in heads:
            written += self._write(
                client, prefix, head, [(slot, shared) for slot in self.rng.sample(half, len(half) // 2)]
            )
        while written < self.pairs:
            chain = heads[len(self.chains) % TENANTS] + self.rng.randbytes(8 * (self.blocks - shared))
            count = self.rng.choices([1, 2, 4], [50, 30, 20])[0]
            holders = [(slot, self.rng.randint(shared, self.blocks)) for slot in self.rng.sample(half, count)]
            self._write(client, prefix, chain, holders)
            written += sum(depth - shared for _, depth in holders)
            self.chains.append(chain)
        return int(sum(client.scard(prefix + b"s:%d" % slot) for slot in half))

    def _write(self, client: Any, prefix: bytes, chain: bytes, holders: list[tuple[int, int]]) -> int:
        tiers = [
            (TIER_SLOTS + slot, min(len(chain) // 8, depth + slot * 7 % 50))
            for slot, depth in holders
            if slot <= self.tiered
        ]
        pipe, both = client.pipeline(transaction=False), [*holders, *tiers]
        for at in range(max(depth for _, depth in both)):
            pipe.sadd(prefix + b"b:" + chain[8 * at : 8 * at + 8], *(slot for slot, depth in both if depth > at))
        for slot, depth in both:
            for start in range(0, depth, 1000):
                hashes = (chain[8 * at : 8 * at + 8] for at in range(start, min(depth, start + 1000)))
                pipe.sadd(prefix + b"s:%d" % slot, *hashes)
        pipe.execute()
        return sum(depth for _, depth in holders)

    def load_distinct(self, client: Any, prefix: bytes) -> None:
        """Load one chain that each worker holds to another depth, which is the worst case of the bisection."""
        chain = self.rng.randbytes(8 * self.blocks)
        step = self.blocks // self.workers
        self._write(client, prefix, chain, [(slot, slot * step) for slot in range(1, self.workers + 1)])
        self.chains.append(chain)

    def query(self) -> bytes:
        if self.rng.random() < 0.1:
            return self.rng.randbytes(8 * self.blocks)
        return self.rng.choice(self.chains)


class FilledStore:
    """A server with one model; counts the CPU time of the server's main thread."""

    def __init__(
        self,
        url: str,
        workers: int,
        model: str = "bench",
        *,
        db: int = 0,
        text: Text = script_text,
        fit: Fit = list,
        weights: Weights | None = None,
        tiered: int = 0,
    ) -> None:
        self.client: Any = redis.Redis.from_url(url, db=db)
        self.pid = int(self.client.info("server")["process_id"])
        limits = QueueLimits(3_600.0)  # no call of a batch waits: the queue has a bench of its own
        constants = Constants(weights or Weights(), limits=limits, block_tokens={SCHEME: BLOCK_TOKENS})
        self.packing = Fleet(connect(url), model, constants=constants)  # no call is sent by it
        self.keys = self.packing.keys
        self.shas = {name: str(self.client.script_load(text(name))) for name in SCRIPTS}
        self.fit = fit
        self.serial = 0
        self.session = b""  # of each question
        self.workers, self.tiered = workers, tiered

    def fleet(self, rng: random.Random) -> None:
        """Write the rows of all workers, which stay alive for an hour, with foreign load and unequal speeds."""
        now = int(time.time() * 1000)
        for slot in range(1, self.workers + 1):
            row = LoadRow(
                epoch=1, slot=slot, flags=FLAGS ^ OF_TIERED if slot <= self.tiered else FLAGS, scheme=SCHEME,
                speed_tps=rng.randint(8000, 12000), blocks=15_000, capacity_blocks=20_000,
                foreign_prefill_tokens=rng.randint(0, 2000), evicted=rng.randint(0, 50),
            )  # fmt: skip
            name = f"worker-{slot:03d}.0"
            self.write(name, row)
            if slot <= self.tiered:
                tier, price = TIER_SLOTS + slot, 1e-6
                self.client.hset(self.keys.sets, f"{name}:cpu", struct.pack(">IIdB", tier, slot, price, 1))
                self.client.hset(self.keys.tiers, str(tier), struct.pack(">IdBI", slot, price, 1, 100_000))
            self.client.zadd(self.keys.alive, {name: now + 3_600_000})
            self.client.hset(
                self.keys.servers, name[:-2], json.dumps({"nonce": "n", "url": f"http://10.0.0.{slot}:8000"})
            )
        self.client.set(self.keys.tick, f"{now + 10**9} 0 10000")

    def write(self, name: str, row: LoadRow) -> None:
        """Write a worker's row as a script leaves it, with the numbers that scripts derive."""
        self.client.hset(self.keys.load, name, row.pack(name))
        self.client.execute_command("EVALSHA", *self.call("drain", name, 0))

    def decide_args(self, chain: bytes) -> tuple[str, list[Any]]:
        self.serial += 1
        name = f"wf-{self.serial:022d}"
        prompt = len(chain) // 8 * BLOCK_TOKENS + 5
        ask = Question(name, (Chain(SCHEME, BLOCK_TOKENS, chain),), prompt, prompt + 300, session=self.session)
        return name, self.call("decide", *self.fit(arguments_of(self.packing.bookings.decide_command(ask))))

    def call(self, script: str, *args: Any) -> list[Any]:
        keys = [getattr(self.keys, key) for key in SCRIPT_KEYS[script]]
        return [self.shas[script], len(keys), *keys, *args]

    def settle_args(self, name: str, outcome: str = "finished") -> list[Any]:
        return self.call("settle", self.keys.prefix, name, outcome, 60_000, 0)

    def cpu_us(self) -> float:
        info: Any = self.client.info("cpu")
        return (float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])) * 1e6

    def burn(self, calls: list[list[Any]]) -> float:
        """Run calls back to back; return the server's CPU time of one call in µs."""
        before = self.cpu_us()
        for start in range(0, len(calls), 25):
            pipe = self.client.pipeline(transaction=False)
            for call in calls[start : start + 25]:
                pipe.execute_command("EVALSHA", *call)
            pipe.execute()
        return (self.cpu_us() - before) / len(calls)

    def hot(self, query: Callable[[], bytes], rounds: int, batch: int) -> tuple[float, float]:
        """Return the µs of decide and of settle (finished), each the best of ``rounds``, with one batch in flight."""
        best = (float("inf"), float("inf"))
        for _ in range(rounds):
            asked = [self.decide_args(query()) for _ in range(batch)]
            decide = self.burn([args for _, args in asked])
            settle = self.burn([self.settle_args(name) for name, _ in asked])
            best = min(best, (decide, settle))
        return best

    def in_ledger(self, hint: int, query: Callable[[], bytes], rounds: int, batch: int) -> float:
        """Return the µs of decide as in ``hot`` while the ledger of sessions binds and knows none of them."""
        tick, self.session, best = self.client.get(self.keys.tick), bytes((hint,)), float("inf")
        self.client.set(self.keys.tick, tick + b" 0 0 0 1")
        for _ in range(rounds):
            best = min(best, self.hot(query, 1, batch)[0])
            self.client.delete(self.keys.sessions, self.keys.places, self.keys.session_line)
        self.client.set(self.keys.tick, tick)
        self.session = b""
        return best

    def cold(self, query: Callable[[], bytes], calls: int) -> Iterator[float]:
        """Return the CPU time of single calls in µs, with 2 ms and a copy of 48 MB between them, for cold caches."""
        rubbish = bytearray(48 * 2**20)
        schedstat = Path(f"/proc/{self.pid}/task/{self.pid}/schedstat")
        for _ in range(calls):
            name, args = self.decide_args(query())
            bytes(rubbish)
            time.sleep(0.002)
            before = int(schedstat.read_text().split()[0])
            self.client.execute_command("EVALSHA", *args)
            yield (int(schedstat.read_text().split()[0]) - before) / 1000
            self.client.execute_command("EVALSHA", *self.settle_args(name))

    def prepare(self, blocks: int, pairs: int) -> tuple[Data, float]:
        """Empty the server and fill it; return the data and the bytes per pair."""
        rng = random.Random(11)
        self.client.flushdb()
        self.fleet(rng)
        before = int(self.client.info("memory")["used_memory"])
        data = Data(self.workers, blocks, pairs, rng, tiered=self.tiered)
        written = data.load(self.client, self.keys.prefix.encode())
        used = int(self.client.info("memory")["used_memory"]) - before
        say(f"{blocks} blocks: {written} pairs, {len(data.chains)} chains, {used / written:.1f} bytes per pair")
        return data, used / written
