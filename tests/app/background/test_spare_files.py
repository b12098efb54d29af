"""Routers keep a few copies of equal files, and no server's files depend on another server's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from warmfleet.background import spare_files
from warmfleet.background.announced import MAX_SERVERS
from warmfleet.background.spare_files import KEPT, SpareFiles
from warmfleet.fleet import LoadRow, WorkerState, WorkerView
from warmfleet_worker.protocol import artifacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

ENTRY, PIECES = artifacts.split(b"a tokenizer")
(SHA256,) = PIECES


class Servers:
    """Servers of one pool, each with its own copy of the tokenizer in Redis, and a router that removes spare copies."""

    def __init__(self, fleet: Fleet, store: aioredis.Redis, count: int) -> None:
        self.fleet = fleet
        self.store = store
        self.names = [f"s{number:02}" for number in range(count)]
        self.pool = SimpleNamespace(tag="m", fleet=fleet)
        pools = SimpleNamespace(all=[self.pool], each=lambda work: work(cast("Pool", self.pool)))
        self.files = SpareFiles(cast("Pools", pools))

    def key(self, name: str) -> str:
        return self.fleet.keys.artifact(name, SHA256)

    async def write(self, names: Sequence[str], *, expires: bool = True) -> None:
        """Write the servers' copies as the plugin does, without replacing copies that exist."""
        for name in names:
            await self.store.set(self.key(name), PIECES[SHA256], nx=True, ex=1_000 if expires else None)

    async def look(self) -> list[str]:
        """Let the router clean up, and return the servers that still have a whole copy."""
        workers = tuple(map(self.worker, self.names))
        self.pool.view = SimpleNamespace(workers=workers)
        await self.files.look()
        return [name for name in self.names if await self.store.strlen(self.key(name))]

    def worker(self, name: str) -> WorkerView:
        server = {"nonce": name, "artifacts": {"tokenizer.json": ENTRY}, "facts": {}}
        record = {"server_id": name}
        proven = WorkerState.PROVEN
        return WorkerView(f"{name}.0", record, server, LoadRow(), 0.0, proven, "proven", f"http://{name}", ["m"])


@pytest.fixture
async def servers(fleet: Fleet, store: aioredis.Redis) -> Servers:
    made = Servers(fleet, store, KEPT + 4)
    await made.write(made.names)
    return made


async def test_copies_that_no_router_reads_are_emptied_and_come_back_when_they_are_read(servers: Servers) -> None:
    assert KEPT >= MAX_SERVERS, "routers of the last version ask so many servers, and none behind them"
    names = servers.names
    assert await servers.look() == names[:KEPT]
    assert await servers.store.get(servers.key(names[-1])) == b"", "the key stays: its server need not store it again"
    assert await servers.store.ttl(servers.key(names[-1])) > 1_000, "and it expires, as any file of a server"
    await servers.write(names)
    assert await servers.look() == names[:KEPT]
    servers.names = names[2:]
    assert await servers.look() == names[2:KEPT]
    assert [name for name in names if not await servers.store.exists(servers.key(name))] == names[KEPT:]
    await servers.write(names)
    assert await servers.look() == names[2 : KEPT + 2]


async def test_nothing_is_emptied_while_fewer_are_whole_than_routers_ask(servers: Servers) -> None:
    for name in servers.names[:6]:
        await servers.store.delete(servers.key(name))
    assert await servers.look() == servers.names[6:]
    newest = [f"t{number}" for number in range(4)]
    servers.names += newest
    await servers.write(newest)
    assert await servers.look() == servers.names[6 : 6 + KEPT], "a server that stores nothing keeps nobody from it"


async def test_what_a_server_does_not_look_after_stays(fleet: Fleet, store: aioredis.Redis) -> None:
    servers = Servers(fleet, store, KEPT + 2)
    await servers.write(servers.names, expires=False)
    assert await servers.look() == servers.names, "older plugins, and older rights: they would never store it again"


async def test_few_that_are_left_store_their_files_again_whichever_replica_emptied_them(servers: Servers) -> None:
    await servers.look()
    servers.names, gone = servers.names[KEPT:], servers.names[:KEPT]
    another = Servers(servers.fleet, servers.store, 0)
    another.names = servers.names
    for replica in (servers, another):
        assert await replica.look() == []
        assert not await servers.store.exists(*map(servers.key, servers.names)), "their servers notice that"
    await servers.write(servers.names)
    assert await another.look() == servers.names
    assert await servers.store.exists(*map(servers.key, gone)) == KEPT, "`forget` deletes theirs"


async def test_what_was_looked_at_is_not_looked_at_again_for_a_while(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    sizes = servers.fleet.artifacts.sizes

    async def counted(server_id: str, digests: Sequence[str]) -> list[int]:
        asked.append(server_id)
        return await sizes(server_id, digests)

    monkeypatch.setattr(servers.fleet.artifacts, "sizes", counted)
    for _ in range(3):
        await servers.look()
    assert asked == servers.names
    monkeypatch.setattr(spare_files, "FORGET_S", 0.0)
    servers.files._forgets_at = 0.0
    await servers.look()
    assert asked == servers.names * 2, "another replica may have changed something"
