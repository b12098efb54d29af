"""A reading of possible changes only equals a reading of everything, after any events in between."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.reporting_server import ReportingServer
from tests.support.fleet.reporting_worker import ReportingWorker, digest_of

from warmfleet.fleet import Fleet, Proof, connect, workers
from warmfleet.fleet.upkeep import Pace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import redis.asyncio as aioredis

    from warmfleet.fleet import WorkerView

NAMES = ("a", "b", "c", "d")
STEPS = 300
KEPT = ("workers", "servers", "load", "alive", "alive_servers", "cursor", "batch", "next_slot")


@pytest.fixture
def redis_url(valkey_url: str) -> str:
    """A single kind of Redis server is enough, because readings do not depend on the server."""
    return valkey_url


@pytest.fixture
async def reader(redis_url: str, model: str) -> AsyncIterator[Fleet]:
    """A replica that only reads, many times."""
    async with connect(redis_url) as client:
        yield Fleet(client, model)


class Named(ReportingServer):
    """An API server with a name, one of several."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet, name: str) -> None:
        super().__init__(store, fleet)
        self.name, self.stream = name, self.keys.server(name)

    def announcement(self, **changes: Any) -> dict[str, Any]:
        return super().announcement(server_id=self.name, **changes)

    async def join(self, nonce: str = "m1", **changes: Any) -> None:
        await super().join(nonce, **changes)
        await self.store.xadd(self.keys.hello, {"s": f"server:{self.name}"})


class Story:
    """Random events in the life of four engines."""

    def __init__(self, store: aioredis.Redis, fleet: Fleet, seed: int) -> None:
        self.store, self.fleet, self.keys = store, fleet, fleet.keys
        self.rng = random.Random(seed)
        self.cores = {name: ReportingWorker(store, fleet, name) for name in NAMES}
        self.servers = {name: Named(store, fleet, name) for name in NAMES}
        self.dump: dict[str, bytes] = {}
        self.joins = 0
        fleet.upkeep.pace = Pace(min_gap_ms=0)

    async def go_on(self) -> str:
        """Let one random event happen and apply it; return the event's name."""
        events = (
            *(
                self.joined,
                self.joined,
                self.joined,
                self.proved,
                self.beat,
                self.beat,
                self.core_joined,
                self.beat,
                self.proved,
                self.drained,
                self.undrained,
                self.left,
            ),
            *(self.silent, self.vouched, self.forgotten, self.damaged, self.lost, self.saved, self.went_back),
        )
        name, event = self.rng.choice(NAMES), self.rng.choice(events)
        await event(name)
        for _ in range(3):
            await self.fleet.upkeep.step()
        return f"{event.__name__} {name}"

    async def joined(self, name: str) -> None:
        await self.core_joined(name)
        self.joins += 1
        await self.servers[name].join(f"s{self.joins}", url=f"http://10.0.0.1:{8_000 + self.joins}")

    async def core_joined(self, name: str) -> None:
        self.joins += 1
        await self.cores[name].join(f"n{self.joins}")

    async def beat(self, name: str) -> None:
        await self.cores[name].heartbeat(digest_of(), speed_tps=self.rng.randrange(9_000))

    async def proved(self, name: str) -> None:
        nonce = (await self.cores[name].record()).get("nonce", "")
        await self.fleet.probes.prove(
            f"{name}.0", nonce, Proof(self.rng.choice(["proven", "identity", "url"]), "as it is told")
        )

    async def drained(self, name: str) -> None:
        await self.fleet.workers.drain(f"{name}.0", draining=True)

    async def undrained(self, name: str) -> None:
        await self.fleet.workers.drain(f"{name}.0", draining=False)

    async def left(self, name: str) -> None:
        await self.servers[name].send("leave")

    async def silent(self, name: str) -> None:
        await self.store.zadd(self.keys.alive, {f"{name}.0": 1.0}, xx=True)

    async def vouched(self, name: str) -> None:
        await self.fleet.workers.vouch(f"{name}.0", (await self.cores[name].record()).get("nonce", ""))

    async def forgotten(self, name: str) -> None:
        await self.fleet.upkeep.forget(f"{name}.0")

    async def damaged(self, name: str) -> None:
        """Write a record that the scripts accept and that no reader can parse."""
        if record := await self.cores[name].record():
            await self._hset(self.keys.workers, f"{name}.0", json.dumps(record | {"models": 5}))

    async def lost(self, _: str) -> None:
        await self.store.unlink(getattr(self.keys, self.rng.choice(KEPT)))

    async def saved(self, _: str) -> None:
        found = {key: await self.store.dump(getattr(self.keys, key)) for key in KEPT}
        self.dump = {key: packed for key, packed in found.items() if packed}

    async def went_back(self, _: str) -> None:
        """Restore saved keys, as if a replica of Redis without the last writes had become the master."""
        await self.store.unlink(*(getattr(self.keys, key) for key in KEPT))
        for key, packed in self.dump.items():
            await self.store.restore(getattr(self.keys, key), 0, packed)

    async def _hset(self, key: str, name: str, value: str) -> Any:
        return await self.store.execute_command("HSET", key, name, value)  # type: ignore[no-untyped-call]  # redis-py


def ageless(workers: list[WorkerView]) -> list[WorkerView]:
    """The workers without ages, because ages differ between two readings."""
    ages: dict[str, Any] = {"heartbeat_age_s": None, "probed_age_s": None, "server_age_s": None, "vouched_age_s": None}
    return [replace(worker, **ages) for worker in workers]


@pytest.mark.parametrize("seed", range(4))
async def test_every_look_equals_a_whole_reading(
    store: aioredis.Redis, fleet: Fleet, reader: Fleet, model: str, seed: int
) -> None:
    story, told, most = Story(store, fleet, seed), list[str](), 0
    for _ in range(STEPS):
        told.append(await story.go_on())
        looked, whole = (
            await reader.workers.look(await reader.workers.reading()),
            await Fleet(fleet.redis, model).workers.read(),
        )
        assert ageless(looked) == ageless(whole), told[-8:]
        most = max(most, len(whole))
    assert most >= len(NAMES) - 1, "the story is about some engines"


async def test_a_server_that_joins_again_is_seen_at_once_though_no_row_changes(
    store: aioredis.Redis, fleet: Fleet, reader: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server joins again before its worker is proved. Scripts of an older version count no announcements."""
    story = Story(store, fleet, 0)
    await story.joined("a")
    for _ in range(3):
        await fleet.upkeep.step()
    await reader.workers.look(await reader.workers.reading())
    await story.servers["a"].join("s-other", url="http://10.0.0.1:9999")
    for _ in range(3):
        await fleet.upkeep.step()
    [after] = await reader.workers.look(await reader.workers.reading())
    assert after.url == "http://10.0.0.1:9999"
    record = json.loads(await cast("Any", store.hget(fleet.keys.servers, "a")))
    await cast("Any", store.hset(fleet.keys.servers, "a", json.dumps(record | {"url": "http://10.0.0.1:7777"})))
    [same] = await reader.workers.look(await reader.workers.reading())
    assert same.url == after.url, "or this test shows nothing"
    [asked] = await reader.workers.read()
    assert asked.url == "http://10.0.0.1:7777", "who asks once gets all"
    monkeypatch.setattr(workers, "SERVERS_S", 0.0)
    reader.workers._servers_until = 0.0
    await cast("Any", store.hset(fleet.keys.servers, "a", json.dumps(record | {"url": "http://10.0.0.1:6666"})))
    [last] = await reader.workers.look(await reader.workers.reading())
    assert last.url == "http://10.0.0.1:6666"


async def test_a_look_reads_servers_seldom_while_nothing_changes(
    store: aioredis.Redis, fleet: Fleet, reader: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, asked = Story(store, fleet, 0), list[tuple[Any, ...]]()
    await story.joined("a")
    for _ in range(3):
        await fleet.upkeep.step()
    ask = reader.scripts.ask

    async def counted(*words: Any) -> Any:
        asked.append(words)
        return await ask(*words)

    monkeypatch.setattr(reader.scripts, "ask", counted)
    for _ in range(5):
        await story.beat("a")
        await fleet.upkeep.step()
        await reader.workers.look(await reader.workers.reading())
    assert asked == [("HGETALL", reader.keys.servers)]
    await fleet.workers.drain("a.0", draining=True)
    await reader.workers.look(await reader.workers.reading())
    assert len(asked) == 2
