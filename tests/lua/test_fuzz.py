"""100,000 malformed entries: no stream stops, no other worker's entries change, memory stays bounded."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.exceptions import ResponseError
from tests.support.fleet.malformed_entries import BOMBS, NUMBERS, NUMBERS_TOO, WORDS, Malformed
from tests.support.fleet.reporting_worker import ReportingWorker, blocks, held
from tests.support.redis.servers import PATIENT, redis7_binary, server, valkey_binary

from warmfleet.fleet import Fleet, Proof, Question, connect
from warmfleet.fleet.upkeep import Pace
from warmfleet_worker.command import Command

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUND = 2_500  # entries written between two applications
SHARE = {"events:s.0": 0.65, "events:u.0": 0.1, "server:s": 0.2, "hello": 0.05}  # u.0 never joins properly
TYPES = (("SET", "x"), ("HSET", "a", "b"), ("SADD", "x"), ("ZADD", 1, "x"), ("RPUSH", "x"))
KINDS = {
    *("malformed", "nonce", "gap", "duplicate", "stale", "spoilt", "interleaved", "mismatch"),
    *("late", "foreign", "hostile", "regress"),
}  # fmt: skip


@pytest.fixture(params=[valkey_binary, redis7_binary], ids=["valkey", "redis7"])
def own_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that nothing else uses: its memory is measured."""
    with server(request.param()) as url:
        yield url


async def victim(fleet: Fleet) -> ReportingWorker:
    """A worker with blocks, a server and an open reservation."""
    reporter = ReportingWorker(fleet.redis, fleet, "v")
    await reporter.join("honest")
    await reporter.send("stored", blocks(*range(0, 300, 2)))
    await reporter.applied()
    told = {"schema": 1, "server_id": "v", "url": "http://10.0.0.9:1", "artifacts": {}, "facts": {}, "version": "1"}
    told["models"] = [fleet.keys.tag.replace("~", "/")]
    entry: Any = {"n": "v1", "b": "1", "o": "join", "d": json.dumps(told)}
    await fleet.redis.xadd(fleet.keys.server("v"), entry)
    await fleet.upkeep.apply_server("v")
    await fleet.probes.prove("v.0", "honest", Proof("proven", ""))
    await fleet.bookings.decide(Question("wf-victim", (), prompt_tokens=500, decode_tokens=600))
    for key, name in ((fleet.keys.alive, "v.0"), (fleet.keys.alive_servers, "v")):
        await fleet.redis.zadd(key, {name: time.time() * 1000 + 3_600_000})  # silent for an hour
    return reporter


def all_of(store: Any, prefix: str, name: str, slot: int) -> dict[str, Any]:
    """Everything in Redis that belongs to the victim."""
    found: dict[str, Any] = {"s": store.smembers(f"{prefix}s:{slot}"), "command": store.get(f"{prefix}command:{name}")}
    for key in ("workers", "load", "batch", "digest"):
        found[key] = store.hget(prefix + key, name)
    found["server"] = store.hget(prefix + "servers", name[:-2])
    found["lease"] = store.hget(prefix + "lease", "wf-victim")
    found["alive"] = (store.zscore(prefix + "alive", name), store.zscore(prefix + "alive_servers", name[:-2]))
    head = f"{prefix}b:".encode()
    forward = [key for key in store.keys("*") if key.startswith(head)]
    pipe = store.pipeline(transaction=False)
    for key in forward:
        pipe.sismember(key, slot)
    found["b"] = {key[len(head) :] for key, here in zip(forward, pipe.execute(), strict=True) if here}
    return found


def write(store: Any, prefix: str, stream: str, bent: Malformed, count: int) -> None:
    """``count`` entries, in one pipeline; what Redis itself refuses (an id too small) was written again with ``*``."""
    now, key, pipe = int(time.time() * 1000), prefix + stream, store.pipeline(transaction=False)
    made = {"hello": bent.hello}.get(stream, bent.server_entry if stream.startswith("server") else bent.entry)
    for _ in range(count):
        fields, entry_id = made(), bent.entry_id(now)
        pipe.execute_command("XADD", key, entry_id, *fields)
    answers = pipe.execute(raise_on_error=False)
    refused = [answer for answer in answers if isinstance(answer, ResponseError)]
    assert all("XADD" in str(error) or "exhausted" in str(error) or "WRONGTYPE" in str(error) for error in refused), (
        refused[0]
    )


async def consume(fleet: Fleet, worker_id: str) -> int:
    """Apply one whole stream; returns the number of calls. Raises FleetUnavailable for an error in a script."""
    calls = 0
    while (await fleet.upkeep.apply(worker_id)).more:
        calls += 1
        assert calls < ROUND * 2, "the stream never ends"
    return calls


class Siege:
    """Writes malformed entries round by round and has them applied as routers do."""

    def __init__(self, store: Any, fleet: Fleet, seed: int) -> None:
        self.store, self.fleet, self.prefix = store, fleet, fleet.keys.prefix
        self.rng = random.Random(seed)
        self.bent = {stream: Malformed(seed + n, self._worker(stream), "v.0") for n, stream in enumerate(SHARE)}
        self.entries = 0

    def _worker(self, stream: str) -> str:
        return "u.0" if "u.0" in stream else "s.0"

    async def round(self) -> None:
        if self.rng.random() < 0.2:  # not even a stream
            verb, *rest = self.rng.choice(TYPES)
            stream = self.rng.choice(list(SHARE))
            self.store.delete(self.prefix + stream)
            self.store.execute_command(verb, self.prefix + stream, *rest)
            await self.applied()
        if self.rng.random() < 0.2:  # began anew, with ids from long ago
            self.store.delete(self.prefix + "events:s.0")
            self.store.xadd(self.prefix + "events:s.0", {"n": "n1"}, id="5-1")
        for stream, share in SHARE.items():
            self.bent[stream].nonce = self._nonce(stream)
            self.bent[stream].batch = int(self.store.hget(self.prefix + "batch", self._worker(stream)) or 0)
            write(self.store, self.prefix, stream, self.bent[stream], int(ROUND * share))
            self.entries += int(ROUND * share)
        await self.applied()

    def _nonce(self, stream: str) -> str:
        raw = self.store.hget(self.prefix + "workers", self._worker(stream))
        return str(json.loads(raw)["nonce"]) if raw else "n1"

    async def applied(self) -> None:
        await self.fleet.upkeep.tick()
        for worker_id in ("s.0", "u.0"):
            await consume(self.fleet, worker_id)
        while (await self.fleet.upkeep.apply_server("s")).more:
            pass
        for _ in range(40):
            await self.fleet.upkeep.tick()
            if not (await self.fleet.upkeep.collect(500))[1] and not self.store.exists(self.prefix + "hello"):
                break
        await self.fleet.workers.read()

    async def still_listens(self) -> None:
        """Entries of an honest process of the same name are applied at once after all malformed entries."""
        reporter = ReportingWorker(self.fleet.redis, self.fleet, "s")
        await reporter.join(f"fresh{self.entries}")
        await reporter.send("stored", blocks(1, 2, 3))
        await reporter.applied()
        assert (await reporter.record())["nonce"] == reporter.nonce
        assert self.store.smembers(f"{self.prefix}s:{(await reporter.row()).slot}") == held(1, 2, 3)


async def besiege(url: str, entries: int, seed: int) -> None:
    with redis.Redis.from_url(url) as store:
        async with connect(url, timeout_s=5) as client:
            fleet = Fleet(client, "fuzz", timeouts=PATIENT)
            fleet.upkeep.pace = Pace(min_gap_ms=0)
            await _besiege(store, fleet, entries, seed)


async def _besiege(store: Any, fleet: Fleet, entries: int, seed: int) -> None:
    reporter, siege = await victim(fleet), Siege(store, fleet, seed)
    slot = (await reporter.row()).slot
    before = all_of(store, fleet.keys.prefix, "v.0", slot)
    await siege.still_listens()
    while siege.entries < entries:
        await siege.round()
        assert all_of(store, fleet.keys.prefix, "v.0", slot) == before, "another worker's entries changed"
        memory = store.info("memory")["used_memory"]
        assert memory < 12 * 2**20, f"{memory} bytes after {siege.entries} entries"
        assert store.dbsize() < 2_000  # at most what two slots of that capacity may hold
        await siege.still_listens()
    counts = await fleet.index.counts()
    assert counts.keys() >= KINDS, "not every way to be wrong was tried"
    assert sum(counts.values()) > entries / 2, "most were never looked at"
    assert len(counts) < 40
    assert store.hlen(fleet.keys.cursor) < 8


@pytest.mark.in_turn
@pytest.mark.parametrize("seed", [1])
async def test_malformed_entries_stop_no_stream(own_url: str, seed: int) -> None:
    await besiege(own_url, 50_000, seed)  # on each of two servers


@pytest.mark.long(minutes=15, shows="2,000,000 malformed entries of streams stop no stream")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 12))
async def test_many_more_malformed_entries_stop_no_stream(own_url: str, seed: int) -> None:
    await besiege(own_url, 200_000, seed)


def test_a_malformed_command_is_a_value_error() -> None:
    """The plugin's reader gets 20,000 malformed commands, and each bomb."""
    rng, good = random.Random(7), b'{"applied":5,"do":"resync","id":"c1","joined":"17-0","nonce":"n1"}'
    odd = [number.encode() for number in (*NUMBERS, *NUMBERS_TOO)] + list(WORDS)
    pieces = (b"5", b'"17-0"', b'"n1"', b'"c1"', b'"resync"')
    made = [good.replace(rng.choice(pieces), rng.choice(odd)) for _ in range(10_000)]
    made += [good[: rng.randrange(len(good))] + rng.randbytes(rng.randrange(9)) for _ in range(10_000)]
    for raw in (*made, *BOMBS):
        try:
            command = Command.parse(raw)
        except ValueError:
            continue
        assert isinstance(command.applied, int)
        assert isinstance(command.joined, tuple)
