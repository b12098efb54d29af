"""Names of engines: how often they are looked up, and what a request waits for."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.polling import poll

from warmfleet.errors import NoWorker
from warmfleet.routing.engine_addresses import EngineAddresses

if TYPE_CHECKING:
    from warmfleet.pools.pool import Pool

URL = "http://engine-a:8000"


class Names:
    """A name server. ``asked``: the names; ``alive``: it answers. ``gate``: answers come once it is set."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.alive = True
        self.gate = asyncio.Event()
        self.gate.set()

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked.append(host)
        await self.gate.wait()
        if not self.alive:
            raise socket.gaierror(socket.EAI_AGAIN, "no server")
        return [(2, 1, 6, "", ("10.0.0.1", port))]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", made.getaddrinfo)
    return made


def expire(addresses: EngineAddresses) -> None:
    addresses._known[URL] = addresses._known[URL]._replace(until=0.0)


async def test_one_look_up_for_all_that_wait(names: Names) -> None:
    addresses = EngineAddresses()
    names.gate.clear()
    waiting = [asyncio.create_task(addresses.of(URL)) for _ in range(40)]
    await asyncio.sleep(0)
    waiting.pop(0).cancel()  # its client left: the others still get the address
    await asyncio.sleep(0)
    names.gate.set()
    assert {*await asyncio.gather(*waiting)} == {"10.0.0.1:8000"}
    assert names.asked == ["engine-a"]


async def test_a_dead_name_server_costs_one_look_up(names: Names) -> None:
    """The address of before is kept as long as a new one would be."""
    addresses = EngineAddresses()
    await addresses.of(URL)
    names.alive = False
    expire(addresses)
    assert [await addresses.of(URL) for _ in range(3)] == ["10.0.0.1:8000"] * 3
    assert names.asked == ["engine-a"] * 2
    with pytest.raises(NoWorker):
        await addresses.of("http://engine-b:8000")


async def test_workers_of_a_list_are_looked_up_together(names: Names) -> None:
    names.gate.clear()
    hosts = ["engine-a", "engine-b", "engine-c"]
    workers = [SimpleNamespace(worker_id=host, url=f"http://{host}:8000", routable=True) for host in hosts]
    workers.append(SimpleNamespace(worker_id="literal", url="http://10.0.0.1:80", routable=True))
    workers.append(SimpleNamespace(worker_id="asleep", url="http://10.0.0.1:81", routable=False))
    pool = cast("Pool", SimpleNamespace(tag="m", view=SimpleNamespace(workers=workers)))
    listed = asyncio.create_task(EngineAddresses().listed(pool, frozenset({"10.0.0.1"})))
    await poll(lambda: len(names.asked) == len(hosts), 10, "all names are asked for at once")
    names.gate.set()
    assert await listed == (*hosts, "literal")
